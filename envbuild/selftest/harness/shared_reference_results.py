"""Stores exact reference results that several probes need, in memory shared by all probe processes.

Thus each result is usually computed only once. The harness imports this module before it starts a probe, so that all
probes inherit the memory. A lock ensures that only one process at a time reads or appends results.
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

SIZE = 1 << 29  # bytes of address space; only pages that were written take memory
_NUMBER = struct.Struct("<Q")
_ALIGNMENT = 64
_ELEMENT = 8  # bytes of a float64


class SharedResults:
    """Results by key, for this process and all processes forked from it.

    The memory begins with the offset at which the last record ends. A record consists of the length of its description,
    the description (the key and the shapes, as JSON) and the tensors. The end offset is written last. Therefore an
    incomplete record of a process that died is ignored.

    If the system grants no memory, or if `size` bytes are too few, each process computes the result itself. If two
    processes need a new result at the same time, both compute it.
    """

    def __init__(self, size: int = SIZE) -> None:
        self._found: dict[str, Tensors] = {}
        self._next = _ALIGNMENT
        self._memory: mmap.mmap | None = None
        with contextlib.suppress(OSError, AttributeError):  # a Python built for an old glibc has no memfd_create
            self._file = os.memfd_create("envbuild-exact-results")
            os.ftruncate(self._file, size)
            self._memory = mmap.mmap(self._file, size)
            self._memory[: _NUMBER.size] = _NUMBER.pack(self._next)

    def get(self, key: str, compute: Callable[[], Tensors]) -> Tensors:
        """Return the result with this key; if it is missing, call `compute` and store what it returns.

        The tensors that `compute` returns must be float64, on the host and not empty. Callers must not write to the
        returned tensors.
        """
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
        """Hold the lock. If the process dies, the kernel releases the lock."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)

    def _read(self, memory: mmap.mmap) -> None:
        """Read the records that any process has written since the last call."""
        (end,) = _NUMBER.unpack_from(memory, 0)
        while self._next < end:
            (length,) = _NUMBER.unpack_from(memory, self._next)
            begin = self._next + _NUMBER.size
            key, shapes = json.loads(memory[begin : begin + length])
            *places, self._next = _places(begin + length, shapes)
            self._found[key] = tuple(_view(memory, *place) for place in zip(places, shapes))

    def _write(self, memory: mmap.mmap, key: str, tensors: Tensors) -> None:
        """Append a record. If the record does not fit into the memory, only this process keeps the result."""
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
        memory[: _NUMBER.size] = _NUMBER.pack(end)  # one write of all bytes: pack_into would write zeros first


def _places(after: int, shapes: Sequence[Shape]) -> list[int]:
    """Return the offset of each tensor if tensors of these shapes follow `after`, and then the offset after them."""
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
