"""Bounds the error of rounding an exact result once. The bound is 0 for a number that the dtype represents exactly."""

from __future__ import annotations

import torch

from envbuild.selftest.numerics import tolerances


def lost_in_rounding(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the largest possible error of rounding each float64 element to `dtype`.

    The bound is 0 for elements that `dtype` represents exactly, and for integer dtypes.
    """
    if not dtype.is_floating_point:
        return torch.zeros_like(value)
    return torch.where(value.to(dtype).to(torch.float64) == value, 0.0, tolerances.rounding(value, dtype))
