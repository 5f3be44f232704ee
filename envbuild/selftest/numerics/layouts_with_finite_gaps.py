"""Copies tensors to different memory layouts. The gaps between elements hold large numbers (77 in integer and complex
tensors), so that the result is wrong if a kernel adds an element of a gap.

The numbers are finite, because oneDNN's kernel for products of bfloat16 matrices on AMX (torch 2.13; seen with 40 x 136
by 136 x 40) reads beyond the rows of a matrix with gaps. The kernel multiplies what it reads there by 0, but 0 times
NaN is NaN.
"""

from __future__ import annotations

import torch

# Layouts of the last two dimensions. "shifted" begins one element after the start of its buffer, so that its address is
# a multiple of the element size, but of no larger power of two.
MATRICES = ("contiguous", "transposed", "rows apart", "columns apart", "elements apart", "shifted")
BATCHES = (*MATRICES, "matrices apart", "batch inside")  # layouts of the last three dimensions
VECTORS = ("contiguous", "shifted", "elements apart")

GAP = 8192.0
_APART = 3  # elements between two rows, or rows between two matrices


def with_large_gaps(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the tensor in this layout.

    With a layout without gaps that the tensor already has, the result shares its memory; otherwise it is a copy.
    Raises ValueError for an unknown layout.
    """
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
    """Return a buffer filled with a number that must not affect results."""
    return x.new_full(shape, GAP if x.is_floating_point() else 77)
