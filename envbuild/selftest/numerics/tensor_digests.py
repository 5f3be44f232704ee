"""sha256 of the contents of tensors."""

from __future__ import annotations

import ctypes
import hashlib

import torch


def digest(values: torch.Tensor) -> str:
    """sha256 of integer values as int16 in C order, independent of their dtype and device."""
    return raw_digest(values.detach().to("cpu", torch.int16))


def raw_digest(*tensors: torch.Tensor) -> str:
    """sha256 of the tensors' bytes in C order (little-endian, as every platform of torch is)."""
    whole = hashlib.sha256()
    for values in tensors:
        flat = values.detach().to("cpu").contiguous()
        if flat.numel():
            whole.update((ctypes.c_char * (flat.numel() * flat.element_size())).from_address(flat.data_ptr()))
    return whole.hexdigest()
