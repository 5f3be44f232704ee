"""Complex tensors as pairs of real numbers, by which results are compared."""

from __future__ import annotations

import torch


def real_pairs(values: torch.Tensor) -> torch.Tensor:
    """(..., 2) with the real and imaginary parts of complex values, also of a view that is conjugated when it is read;
    real values as they are."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
