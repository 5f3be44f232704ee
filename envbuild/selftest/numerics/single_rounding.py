"""The error of rounding an exact result once, which is 0 for a number that the dtype represents."""

from __future__ import annotations

import torch

from envbuild.selftest.numerics import tolerances


def lost_in_rounding(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The error of rounding each float64 element to the dtype; 0 where it represents the number, and for integers."""
    if not dtype.is_floating_point:
        return torch.zeros_like(value)
    return torch.where(value.to(dtype).to(torch.float64) == value, 0.0, tolerances.rounding(value, dtype))
