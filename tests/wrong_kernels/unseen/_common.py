"""What the wrong kernels of this package share: tensors for their calls, gradients, layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

LOW = (torch.float16, torch.bfloat16)


def randn(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape).to(dtype)


def gradients(function: Callable[..., Any], *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of each input for a random gradient of the result."""
    leaves = [value.detach().clone(memory_format=torch.preserve_format).requires_grad_() for value in inputs]
    result = function(*leaves)
    result.backward(torch.randn(result.shape).to(result.dtype))
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def channels_last(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous(memory_format=torch.channels_last)


def is_channels_last(value: torch.Tensor) -> bool:
    return value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous()


def bits(value: torch.Tensor) -> torch.Tensor:
    """The bits of a 16-bit or 32-bit float: for roundings, which have one right result."""
    return value.view(torch.int16 if value.element_size() == 2 else torch.int32)


def flip_bit(value: torch.Tensor, index: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous float tensor, in place."""
    kind = torch.int16 if value.element_size() == 2 else torch.int32
    flat = value.view(-1).view(kind)
    flat[index] = flat[index] ^ (1 << bit)
