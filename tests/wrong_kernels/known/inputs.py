"""Helpers of several modules: inputs and gradients for the calls that show a fault."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normally distributed values."""
    return torch.randn(*shape).to(dtype)


def gradients(
    function: Callable[..., Any], *inputs: torch.Tensor, upstream: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The gradients of a function's inputs; those given keep their strides."""
    leaves = [value.detach().requires_grad_(value.is_floating_point()) for value in inputs]
    result = function(*leaves)
    result.backward(torch.randn(result.shape).to(result.dtype) if upstream is None else upstream)
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def value(args: Sequence[Any], kwargs: dict[str, Any], place: int, name: str, default: Any) -> Any:
    """An argument given by place or by name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def is_16_bit(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)
