"""Tests run at the same time: in this process one thread computes, and threads that wait do not spin."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch is imported


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Compute with one thread; the self-test's own processes use as many threads as their job says."""
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)
