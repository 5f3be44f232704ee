"""Memory that is short or broken, a GPU that errs occasionally, and a library that differs from the recorded one."""

import ctypes
import importlib
import os
import sys
from typing import Any

import torch

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.environment import init_alloc
from envbuild.selftest.probes.probe_catalogue import PROBES as REAL

from .making import SINGLE, Kernel, named, seeded, wrong_element


def greedy(kernel: Kernel) -> Kernel:
    """A product that needs more memory than is left while the probe holds most of it, as creating a library's handle
    may."""

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        del b
        size = torch.cuda.mem_get_info()[1] // 2 if a.is_cuda else 2 * init_alloc.CPU_MEMORY
        torch.empty(size, dtype=torch.uint8, device=a.device)
        return kernel(a, a)

    return seeded


def no_handle(kernel: Kernel) -> Kernel:
    """A broken cuBLAS, with torch's error message."""

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")

    return seeded


def crowded(kernel: Kernel) -> Kernel:
    """Of eight processes that start at the same time, the second process that asks for a handle gets no handle; all
    others get one."""
    turn, come = os.pipe()
    for _ in range(2):  # one process runs alone before the eight
        os.write(come, b"+")
    os.write(come, b"-")
    os.write(come, b"+" * 20)

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kernel(a, b) if os.read(turn, 1) == b"+" else no_handle(kernel)(a, b)

    return seeded


def dies(kernel: Kernel) -> Kernel:
    """The library crashes when the handle is created."""
    return lambda a, b: torch.tensor(ctypes.string_at(0))


def now_and_then(kernel: Kernel) -> Kernel:
    """Right four times, then one element is off."""
    count = iter(range(1 << 30))
    wrong = wrong_element(kernel, None, (700, 3))
    return lambda a, b: kernel(a, b) if next(count) < 4 else wrong(a, b)


def forgets(kernel: Any) -> Any:
    """Memory that flips the lowest bit of one element of a stored product, once: in the first stored product, because
    on a busy machine the third product is not computed."""
    count = iter(range(1 << 30))

    def copy(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        kernel(self, source)
        if self.dtype == torch.float64 and self.dim() == 2 and next(count) == 0:
            self.view(torch.int64)[5, 7] ^= 1
        return self

    return copy


def stuck_bit(kernel: Any) -> Any:
    """Memory in which a bit of word 77 stays 1."""

    def copy(self: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        kernel(self, words)
        self[77] |= 1 << 20
        return self

    return copy


def lonely_bit(kernel: Any) -> Any:
    """Memory in which a bit of word 77 is lost if no other bit of the word is set."""

    def copy(self: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
        kernel(self, words)
        if self[77] == 1 << 20:
            self[77] = 0
        return self

    return copy


def aliases(kernel: Any) -> Any:
    """Memory whose cells answer to several addresses: every allocation is the same."""
    first: list[torch.Tensor] = []

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        first.append(first[0] if first else kernel(*args, **options))
        return first[0]

    return empty


def foreign_library(context: Context) -> None:
    """env.libs with a library mapped from a site-packages folder whose RECORD has other bytes."""
    sys.path.append(os.environ["ENVBUILD_TEST_SITE"])
    ctypes.CDLL(os.environ["ENVBUILD_TEST_LIBRARY"])
    importlib.invalidate_caches()
    next(item for item in REAL if item.name == "env.libs").function(context)


PROBES = (
    seeded("init.alloc", torch, "mm", greedy),
    seeded("init.alloc", torch, "mm", no_handle),
    seeded("init.alloc", torch, "mm", crowded, "standard"),
    seeded("init.alloc", torch, "mm", dies),
    seeded("init.alloc", torch, "mm", named("wrong", lambda k: wrong_element(k, SINGLE, (3, 4)))),
    seeded("init.alloc", torch, "mm", named("right", lambda k: k)),
    seeded("burn", torch, "mm", now_and_then),
    seeded("burn", torch, "mm", named("nan", lambda k: wrong_element(k, None, (0, 767), float("nan")))),
    seeded("burn", torch, "mm", named("last_bit", lambda k: wrong_element(k, torch.float64, (9, 7), 2.0**-40))),
    seeded("burn", torch.Tensor, "copy_", forgets),
    seeded("burn", torch, "mm", named("right", lambda k: k)),
    seeded("memory", torch.Tensor, "copy_", stuck_bit),
    seeded("memory", torch.Tensor, "copy_", lonely_bit),
    seeded("memory", torch, "empty", aliases),
    seeded("memory", torch.Tensor, "copy_", named("right", lambda k: k)),
    Probe("env.libs:foreign", "quick", "cpu", 60, foreign_library),
)
