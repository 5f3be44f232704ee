"""Gradients for a given gradient of the output, which may have its own strides.

torch.autograd.grad imports sympy to check such a gradient, which takes longer than all cases of a short probe.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Begin(torch.autograd.Function):
    """A scalar whose gradient with respect to the output is the given one."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *ones: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.gradient, None


def gradients(
    output: torch.Tensor, leaves: Sequence[torch.Tensor], gradient: torch.Tensor, retain_graph: bool = False
) -> tuple[torch.Tensor, ...]:
    """The gradients of the leaves. `gradient`: that of the output; raises ValueError if its shape or dtype differs."""
    return torch.autograd.grad(_start(output, gradient), tuple(leaves), retain_graph=retain_graph)


def accumulate(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradients of the leaves to their present ones, as `output.backward(gradient)` does."""
    _start(output, gradient).backward()  # type: ignore[no-untyped-call]


def _start(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.shape != output.shape or gradient.dtype != output.dtype:
        raise ValueError(f"{tuple(gradient.shape)} {gradient.dtype} for {tuple(output.shape)} {output.dtype}")
    start: torch.Tensor = _Begin.apply(output, gradient)  # type: ignore[no-untyped-call]
    return start
