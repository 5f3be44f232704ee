"""Copies tensors to different memory layouts. The gaps between elements hold NaN, so that a result is NaN if a kernel
uses an element of a gap."""

from __future__ import annotations

import math
from typing import Callable

import torch


def with_nan_gaps(values: torch.Tensor, layout: str) -> torch.Tensor:
    """Return `values` in a layout of LAYOUTS, on the same device. Raises KeyError for an unknown layout.

    With a layout without gaps that `values` already has, the result shares its memory; otherwise it is a copy.
    """
    return LAYOUTS[layout](values)


def _last_swapped(values: torch.Tensor) -> torch.Tensor:
    return values.transpose(-1, -2).contiguous().transpose(-1, -2)


def _rows_apart(values: torch.Tensor) -> torch.Tensor:
    """Return the values as a slice of a tensor that is larger by 8 in each of the last two dimensions."""
    whole = values.new_full((*values.shape[:-2], values.shape[-2] + 8, values.shape[-1] + 8), math.nan)
    return whole[..., : values.shape[-2], : values.shape[-1]].copy_(values)


def _batch_apart(values: torch.Tensor) -> torch.Tensor:
    """Return the values as every second slice of a tensor that is twice as long in the first dimension."""
    return values.new_full((2 * len(values), *values.shape[1:]), math.nan)[::2].copy_(values)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    buffer = values.new_full((values.numel() + by,), math.nan)
    return buffer[by:].view(values.shape).copy_(values)


def _shifted_by_one(values: torch.Tensor) -> torch.Tensor:
    return _shifted(values, 1)


def _shifted_by_eight(values: torch.Tensor) -> torch.Tensor:
    """Shift by 8 elements. For 2-byte dtypes, these are 16 bytes: the alignment that kernels with vector loads need."""
    return _shifted(values, 8)


def _channels_last(values: torch.Tensor) -> torch.Tensor:
    """Store the second dimension (the channels) last in memory."""
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "last two swapped": _last_swapped,
    "rows apart": _rows_apart,
    "batch apart": _batch_apart,
    "shifted by 1": _shifted_by_one,
    "shifted by 8": _shifted_by_eight,
    "channels last": _channels_last,
}
