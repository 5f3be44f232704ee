"""A simulated GPU for the unmodified programs that gpu_plan.launch runs: with the environment variable
GPU_CHECK_FIRST=pretend.first:begin, launch calls `begin` first."""

from __future__ import annotations

import os
import sys

from . import sizes
from .gpus import GPU, GPUS
from .runtime import install

# packages that a machine with a GPU may lack: `begin` makes their import fail
ABSENT = ("pytest", "click", "yaml", "requests")


def begin() -> None:
    """Simulate the GPU that the environment variable PRETEND_GPU names, on a machine that has torch but not envbuild's
    other dependencies."""
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment] # an import of it then fails
    install(GPUS[os.environ[GPU]])
    sizes.reduce()
