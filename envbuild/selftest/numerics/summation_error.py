"""Bounds the error of a sum, in the precision in which kernels accumulate terms of a dtype."""

from __future__ import annotations

import math

import torch

from envbuild.selftest.numerics import tolerances


def summation_in(n: int, dtype: torch.dtype) -> float:
    """Return the tolerance of a sum of n terms and of a few further operations, relative to the sum of absolute values.

    The formula is that of tolerances.summation, but with the unit roundoff of float64 if the terms are float64. Terms
    of smaller dtypes are accumulated in float32.
    """
    u = min(tolerances.ROUNDED, tolerances.unit_roundoff(dtype))
    return tolerances.gamma(math.ceil(n / 32) + 16, u)
