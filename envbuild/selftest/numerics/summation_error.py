"""The error of a sum in the precision in which kernels add up a dtype."""

from __future__ import annotations

import math

import torch

from envbuild.selftest.numerics import tolerances


def summation_in(n: int, dtype: torch.dtype) -> float:
    """Relative error of a sum of n terms and of a few operations around it: tolerances.summation, whose gamma_m has the
    unit roundoff of float64 where the terms are float64. Smaller dtypes are added up in float32."""
    u = min(tolerances.ROUNDED, tolerances.unit_roundoff(dtype))
    return tolerances.gamma(math.ceil(n / 32) + 16, u)
