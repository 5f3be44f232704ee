"""CUDA graphs on the simulated GPU: the operations of a capture are recorded, and computed again at each replay."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import tensors
from .arithmetic import compute


class Graph:
    """Replaces torch.cuda.CUDAGraph. A replay reads the current values of the captured tensors, and writes its
    results."""

    def __init__(self) -> None:
        self._calls: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []
        self._made: dict[int, torch.UntypedStorage] = {}

    def keep(self, operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Record an operation over host tensors, and its result. Raises torch's error for an operation that a graph
        cannot contain, and NotImplementedError for an operation that writes to a tensor from before the capture."""
        if not all(part is None or isinstance(part, torch.Tensor) for part in tree_leaves(result)):
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        given = {part.untyped_storage().data_ptr() for part in _tensors((args, kwargs))}
        for part in _tensors(result):
            storage = part.untyped_storage()
            if storage.data_ptr() not in given:
                self._made[storage.data_ptr()] = storage
            elif operation._schema.is_mutable and storage.data_ptr() not in self._made:
                raise NotImplementedError("a capture that writes to tensors that were there before")
        self._calls.append((operation, args, kwargs, result))

    def forget_results(self) -> None:
        """Fill the results with 0xff bytes, which are NaN in every float: a capture computes nothing until the first
        replay."""
        for storage in self._made.values():
            storage.fill_(0xFF)

    def replay(self) -> None:
        with tensors.here.clock:
            for operation, args, kwargs, result in self._calls:
                again = compute(operation, args, kwargs, tensors.here.gpu.capability)
                for place, value in zip(_tensors(result), _tensors(again), strict=True):
                    if place.data_ptr() != value.data_ptr():  # otherwise it is a view, or was written in place
                        torch.ops.aten.copy_(place, value)  # not Tensor.copy_, which seeds replace


@contextlib.contextmanager
def capture(graph: Graph, **_: Any) -> Iterator[None]:
    """Replaces torch.cuda.graph."""
    tensors.here.graph = graph
    try:
        yield
    finally:
        tensors.here.graph = None
    graph.forget_results()


def _tensors(value: Any) -> list[torch.Tensor]:
    return [part for part in tree_leaves(value) if isinstance(part, torch.Tensor)]
