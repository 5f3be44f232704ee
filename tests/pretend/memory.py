"""The memory of the simulated GPU: how much of it tensors use, and the error when it is exhausted."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from .ledger import FOLDER, Ledger

_NORESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python's mmap does not name
_host_empty = torch.empty  # the original: seeds replace it
_LARGE = 1 << 28  # bytes: more is mapped and not reserved, as the host may have less


class Memory:
    """Counts the bytes of tensors, as CUDA's caching allocator would without its rounding.

    `peak` is the most in use at once by any one process of a probe: forked processes share it. With a ledger all
    processes share the GPU's memory too.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._sizes: dict[int, int] = {}
        self._peak = memoryview(mmap.mmap(-1, 8)).cast("Q")
        self._ledger = Ledger(Path(os.environ[FOLDER])) if FOLDER in os.environ else None

    def start(self) -> None:
        """Count the memory that CUDA uses for a process."""
        if self._ledger:
            self._ledger.note(self.used)

    @property
    def free(self) -> int:
        self.start()
        return max(0, self.size - self._ledger.total()) if self._ledger else self.size - self.used

    @property
    def peak(self) -> int:
        return int(self._peak[0])

    def reset_peak(self) -> None:
        self._peak[0] = self.used

    def count(self, held: torch.Tensor) -> None:
        """Count the storage of a new tensor on the GPU once, until it is freed."""
        storage = held.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._sizes or not size:
            return
        self.check(size)
        self._sizes[address] = size
        self.used += size
        self.start()
        self._peak[0] = max(self._peak[0], self.used)
        weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self.used -= self._sizes.pop(address)
        self.start()

    def check(self, size: int) -> None:
        """Raises torch's own error where so many bytes are not free; other processes count for large tensors only."""
        free_bytes = self.free if size >= _LARGE else self.size - self.used
        if size > free_bytes:
            total, free = self.size / 2**30, free_bytes / 2**30
            raise torch.cuda.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a total capacity of "
                f"{total:.2f} GiB of which {free:.2f} GiB is free."
            )

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory for a new tensor on the GPU."""
        size = math.prod(shape) * dtype.itemsize
        self.check(size)
        if size < _LARGE:
            return _host_empty(tuple(shape), dtype=dtype)
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        return torch.frombuffer(pages, dtype=dtype).reshape(tuple(shape))
