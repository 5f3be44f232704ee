"""Converts complex tensors to pairs of real numbers, so that results can be compared as real numbers."""

from __future__ import annotations

import torch


def real_pairs(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor (..., 2) with the real and imaginary parts of complex values; return real values unchanged.

    A lazily conjugated view (torch's conjugate bit) is resolved first.
    """
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
