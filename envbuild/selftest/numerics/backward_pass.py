"""Computes gradients for a given gradient of the output, whose strides may differ from those of the output.

If a gradient of the output is passed to torch.autograd.grad, torch imports sympy to check the gradient. This import
takes longer than all cases of a short probe. The functions here avoid the import.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


class _Begin(torch.autograd.Function):
    """Returns a scalar 0. In the backward pass, the scalar's gradient with respect to `output` is `gradient`."""

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
    """Return the gradients of the leaves. `gradient` is the gradient of the output.

    Raises ValueError if `gradient` and `output` differ in shape or dtype.
    """
    return torch.autograd.grad(_start(output, gradient), tuple(leaves), retain_graph=retain_graph)


def accumulate(output: torch.Tensor, gradient: torch.Tensor) -> None:
    """Add the gradients of the leaves to their `grad`, as `output.backward(gradient)` does."""
    _start(output, gradient).backward()  # type: ignore[no-untyped-call]


def _start(output: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if gradient.shape != output.shape or gradient.dtype != output.dtype:
        raise ValueError(f"{tuple(gradient.shape)} {gradient.dtype} for {tuple(output.shape)} {output.dtype}")
    start: torch.Tensor = _Begin.apply(output, gradient)  # type: ignore[no-untyped-call]
    return start
