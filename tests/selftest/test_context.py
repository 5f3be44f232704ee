"""Context: steps on a device that works on by itself."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.context import Context
from envbuild.selftest.job import Job


@pytest.mark.parametrize(
    ("device", "started", "order"),
    [("cuda", True, ["waits", "mm"]), ("cuda", False, ["mm"]), ("cpu", True, ["mm"])],
)
def test_queued_work_ends_before_the_next_step_is_announced(
    monkeypatch: pytest.MonkeyPatch, device: str, started: bool, order: list[str]
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append("waits"))
    Context(Job("0" * 32, device=device), announce=done.append).step("mm")
    assert done == order
