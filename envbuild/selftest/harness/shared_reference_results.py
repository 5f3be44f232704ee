"""Exact results needed by several probes, in memory shared by all probe processes, so that each is computed once.

The harness imports this before it starts a probe, so that all probes inherit the memory. A lock lets only one process
append at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from typing import Callable

import torch

Tensors = tuple[torch.Tensor, ...]
Shape = Sequence[int]

SIZE = 1 << 29  # bytes of address space; only written pages take memory
_NUMBER = struct.Struct("<Q")
_ALIGNMENT = 64
_ELEMENT = 8  # bytes of a float64


class SharedResults:
    """Results by key, for this process and all processes forked from it.

    The memory begins with the offset of the end of the last record. A record is the length of its description, the
    description (the key and the shapes, as JSON) and the tensors. The end offset is written last, so an incomplete
    record of a process that died does not count. If the system grants no memory, or `size` bytes are not enough, each
    process computes for itself; so do two processes that need a result at the same time.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._found: dict[str, Tensors] = {}
        self._next = _ALIGNMENT
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(OSError, AttributeError):  # a Python for an old glibc has no memfd_create
            self._file = os.memfd_create("envbuild-exact-results")
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
            self._memory[: _NUMBER.size] = _NUMBER.pack(self._next)

    def get(self, key: str, compute: Callable[[], Tensors]) -> Tensors:
        """The result with this key: not empty, float64, on the host. Callers must not write to it."""
        if self._memory is None:
            return compute()
        with self._locked():
            self._read(self._memory)
        if key not in self._found:
            tensors = compute()
            with self._locked():
                self._read(self._memory)
                if key not in self._found:
                    self._write(self._memory, key, tensors)
                    self._read(self._memory)
        return self._found[key]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, which the kernel releases if the process dies."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _read(self, memory: mmap.mmap) -> None:
        """Read the records written since the last call."""
        (end,) = _NUMBER.unpack_from(memory, 0)
        while self._next < end:
            (length,) = _NUMBER.unpack_from(memory, self._next)
            begin = self._next + _NUMBER.size
            key, shapes = json.loads(memory[begin : begin + length])
            *places, self._next = _places(begin + length, shapes)
            self._found[key] = tuple(_view(memory, *place) for place in zip(places, shapes))

    def _write(self, memory: mmap.mmap, key: str, tensors: Tensors) -> None:
        """Append a record; if it does not fit, only this process keeps the result."""
        shapes = [list(values.shape) for values in tensors]
        description = json.dumps([key, shapes]).encode("ascii")
        begin = self._next + _NUMBER.size
        *places, end = _places(begin + len(description), shapes)
        if end > len(memory):
            self._found[key] = tensors
            return
        _NUMBER.pack_into(memory, self._next, len(description))
        memory[begin : begin + len(description)] = description
        for place, values in zip(places, tensors):
            _view(memory, place, values.shape).copy_(values)
        memory[: _NUMBER.size] = _NUMBER.pack(end)  # in one write: pack_into writes zeros first


def _places(after: int, shapes: Sequence[Shape]) -> list[int]:
    """Offsets of consecutive tensors of these shapes, and of the next record."""
    places = [_aligned(after)]
    for shape in shapes:
        places.append(_aligned(places[-1] + _ELEMENT * math.prod(shape)))
    return places


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT


def _view(memory: mmap.mmap, place: int, shape: Shape) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=torch.float64, count=math.prod(shape), offset=place)
    return flat.view(tuple(shape))


EXACT = SharedResults()
