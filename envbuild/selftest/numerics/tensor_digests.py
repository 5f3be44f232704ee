"""Computes the sha256 of the contents of tensors."""

from __future__ import annotations

import ctypes
import hashlib

import torch


def digest(values: torch.Tensor) -> str:
    """Return the sha256 of integer values, converted to int16 in C order.

    It does not depend on the tensor's dtype and device.
    """
    return raw_digest(values.detach().to("cpu", torch.int16))


def raw_digest(*tensors: torch.Tensor) -> str:
    """Return the sha256 of the tensors' bytes in C order. The bytes are little-endian on every platform of torch."""
    whole = hashlib.sha256()
    for values in tensors:
        flat = values.detach().to("cpu").contiguous()
        if flat.numel():
            whole.update((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))
    return whole.hexdigest()
