"""Every seeded fault for a GPU: those of the package, which also run on a CPU, and those in CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch

from . import PROBES as ANYWHERE
from .making import named, seeded


def stale_input(kernel: Any) -> Any:
    """Copying into a tensor has no effect, so that a graph reads the batch with which it was captured."""
    return lambda self, source: self


def lost_replay(kernel: Callable[[Any], None]) -> Any:
    """The third replay computes nothing."""
    count = iter(range(1 << 30))
    return lambda self: None if next(count) == 2 else kernel(self)


PROBES = (
    *ANYWHERE,
    seeded("graph.replay", torch.Tensor, "copy_", stale_input),
    seeded("graph.replay", torch.cuda.CUDAGraph, "replay", lost_replay),
    seeded("graph.replay", torch.cuda.CUDAGraph, "replay", named("right", lambda k: k)),
)
