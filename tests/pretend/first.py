"""A simulated GPU for unmodified programs: with GPU_CHECK_FIRST=pretend.first:begin they call it first."""

from __future__ import annotations

import os
import sys

from . import sizes
from .gpus import GPU, GPUS
from .runtime import install

ABSENT = ("pytest", "click", "yaml", "requests")  # packages that a machine with a GPU need not have


def begin() -> None:
    """Simulate the GPU that the variable GPU names, on a machine that has torch and nothing of envbuild's."""
    for name in ABSENT:
        sys.modules[name] = None  # type: ignore[assignment] # an import of it then fails
    install(GPUS[os.environ[GPU]])
    sizes.reduce()
