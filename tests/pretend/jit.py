"""Replaces Triton and torch.compile: a kernel's source runs program by program on the host, and nothing is compiled.

Only those functions of Triton's language exist that the self-test's kernel uses.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .tensors import GpuTensor

_CUBIN = "simulated.cubin"  # what a compiler would leave in its cache


@dataclass(frozen=True)
class _Pointer:
    """A pointer to the elements of a tensor; `at` counts elements."""

    tensor: torch.Tensor
    at: Any = 0

    def __add__(self, more: Any) -> _Pointer:
        return _Pointer(self.tensor, self.at + more)


class _Kernel:
    """A jitted function: `kernel[grid](arguments)` runs the function once for each program of the grid."""

    program = 0

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            given = [_Pointer(arg.held.view(-1)) if isinstance(arg, GpuTensor) else arg for arg in args]
            _leave_code("TRITON_CACHE_DIR")
            for _Kernel.program in range(grid[0]):
                self._function(*given)

        return launch


def _load(pointer: _Pointer, mask: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(mask.shape, dtype=pointer.tensor.dtype)
    found[mask] = pointer.tensor[pointer.at[mask]]
    return found


def _store(pointer: _Pointer, values: torch.Tensor, mask: torch.Tensor) -> None:
    pointer.tensor[pointer.at[mask]] = values[mask].to(pointer.tensor.dtype)


def _leave_code(folder: str) -> None:
    if os.environ.get(folder):
        Path(os.environ[folder], f"{folder}.{_CUBIN}").touch()


def _compile(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
    """Replaces torch.compile: returns the function itself."""
    _leave_code("TORCHINDUCTOR_CACHE_DIR")
    return function


def install() -> None:
    package, language = ModuleType("triton"), ModuleType("triton.language")
    package.__spec__, package.__version__ = ModuleSpec("triton", None), "0"  # type: ignore[attr-defined]
    package.__path__ = []
    package.jit, package.language = _Kernel, language  # type: ignore[attr-defined]
    for name, value in {
        "constexpr": int,
        "program_id": lambda axis: _Kernel.program,
        "arange": torch.arange,
        "load": _load,
        "store": _store,
    }.items():
        setattr(language, name, value)
    sys.modules.update({"triton": package, "triton.language": language})
    torch.compile = _compile  # type: ignore[assignment]
