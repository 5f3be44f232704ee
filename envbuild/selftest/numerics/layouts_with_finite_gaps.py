"""Copies of tensors with other strides. Gaps hold large numbers, so that a kernel that adds them gives a wrong result.

The numbers are finite because oneDNN's product of bfloat16 matrices on AMX reads beyond the rows of a matrix with gaps,
and multiplies what it reads by 0 (torch 2.13; 40 x 136 by 136 x 40). With NaN in the gaps its result was NaN.
"""

from __future__ import annotations

import torch

# Layouts of the last two dimensions. "shifted" begins one element late, so that nothing is aligned to more than an
# element.
MATRICES = ("contiguous", "transposed", "rows apart", "columns apart", "elements apart", "shifted")
BATCHES = (*MATRICES, "matrices apart", "batch inside")  # layouts of the last three dimensions
VECTORS = ("contiguous", "shifted", "elements apart")

GAP = 8192.0
_APART = 3  # elements or rows


def with_large_gaps(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Copy a tensor to a different layout. Raises ValueError for an unknown layout."""
    if layout == "contiguous":
        return x.contiguous()
    if layout in ("transposed", "columns apart"):
        return with_large_gaps(x.mT, "contiguous" if layout == "transposed" else "rows apart").mT
    if layout == "batch inside":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    shape = list(x.shape)
    if layout == "shifted":
        return _between(x, 1 + x.numel())[1:].view(shape).copy_(x)
    if layout == "rows apart":
        return _between(x, *shape[:-1], shape[-1] + _APART)[..., : shape[-1]].copy_(x)
    if layout == "elements apart":
        return _between(x, *shape[:-1], 2 * shape[-1])[..., ::2].copy_(x)
    if layout == "matrices apart":
        return _between(x, *shape[:-2], shape[-2] + _APART, shape[-1])[..., : shape[-2], :].copy_(x)
    raise ValueError(f"unknown layout: {layout}")


def _between(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """A buffer filled with a value that kernels must not read."""
    return x.new_full(shape, GAP if x.is_floating_point() else 77)
