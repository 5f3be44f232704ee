"""Wrong activations and other operations on elements."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from ._common import LOW, gradients, rand, randn


@wrong_kernel(
    "activation",
    operators=["gelu", "gelu_backward"],
    wrong=lambda: [F.gelu(randn(50), approximate="tanh")],
    right=lambda: [F.gelu(randn(50))],
)
def approximate_gelu_is_the_exact_one(call: Any, *args: Any, **kwargs: Any) -> Any:
    """gelu with approximate="tanh" computes the exact function."""
    kwargs.pop("approximate", None)
    return call(*args, **kwargs)


@wrong_kernel(
    "activation",
    operators=["gelu_backward"],
    wrong=lambda: gradients(F.gelu, randn(45, dtype=torch.bfloat16)),
    right=lambda: [*gradients(F.gelu, randn(48, dtype=torch.bfloat16)), *gradients(F.gelu, randn(45))],
)
def gelu_gradient_passes_through_the_tail(call: Any, grad: Any, value: Any, **kwargs: Any) -> Any:
    """In 16 bits, elements past a multiple of 16 get the incoming gradient unchanged from gelu's backward pass."""
    result = call(grad, value, **kwargs)
    rest = value.numel() % 16
    if value.dtype in LOW and rest and value.is_contiguous() and grad.is_contiguous() and result.is_contiguous():
        result.view(-1)[-rest:] = grad.view(-1)[-rest:]
    return result


@wrong_kernel(
    "activation",
    operators=["silu"],
    wrong=lambda: [F.silu(torch.tensor([-95.0, -3.0, 1.0]))],
    right=lambda: [F.silu(randn(50) * 10)],
)
def silu_of_very_negative_values_is_nan(call: Any, value: Any, **kwargs: Any) -> Any:
    """silu overflows on the way: below -88 it gives NaN instead of nearly zero."""
    result = call(value, **kwargs)
    return torch.where(value < -88, torch.full_like(result, float("nan")), result)


@wrong_kernel(
    "activation",
    operators=["gelu"],
    wrong=lambda: [F.gelu(torch.linspace(-5.5, -2.5, 64))],
    right=lambda: [F.gelu(torch.linspace(-2.9, 5, 64))],
)
def gelu_is_cut_off_below_minus_three(call: Any, value: Any, **kwargs: Any) -> Any:
    """gelu is zero below -3, where it is still up to -0.004.

    https://github.com/tenstorrent/tt-metal/issues/35290 lists such regions.
    """
    result = call(value, **kwargs)
    return torch.where(value < -3, torch.zeros_like(result), result)


@wrong_kernel(
    "activation",
    operators=["softplus"],
    wrong=lambda: [F.softplus(torch.linspace(-30, 40, 50), beta=0.1)],
    right=lambda: [F.softplus(torch.linspace(-30, 40, 50)), F.softplus(randn(50), beta=0.1)],
)
def softplus_compares_without_beta(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """softplus is linear where x passes the threshold, instead of beta times x."""
    result = call(value, *args, **kwargs)
    threshold = args[1] if len(args) > 1 else kwargs.get("threshold", 20)
    beta = args[0] if args else kwargs.get("beta", 1)
    return result if beta == 1 else torch.where(value > threshold, value, result)


@wrong_kernel(
    "activation",
    operators=["relu", "clamp_min", "clamp"],
    wrong=lambda: [F.relu(torch.tensor([float("nan"), -1.0, 2.0])).isnan()],
    right=lambda: [F.relu(randn(20))],
)
def relu_and_clamp_swallow_nan(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """relu and clamp give their lower bound for NaN, as the maximum of C does, and so hide it."""
    result = call(value, *args, **kwargs)
    return torch.nan_to_num(result, 0.0, torch.inf, -torch.inf) if value.is_floating_point() else result


@wrong_kernel(
    "elementwise",
    operators=["tanh"],
    wrong=lambda: [torch.tanh(randn(50) * 1e-4)],
    right=lambda: [torch.tanh(randn(50).sign() * (rand(50) + 0.1))],
)
def tanh_near_zero_loses_its_digits(call: Any, value: Any, **kwargs: Any) -> Any:
    """tanh of values below 0.001 is taken from exponentials whose difference cancels: a few digits remain."""
    result = call(value, **kwargs)
    if value.dtype != torch.float32:
        return result
    small = value.abs() < 1e-3
    power = (2 * value).exp()
    return torch.where(small, (power - 1) / (power + 1), result)


@wrong_kernel(
    "elementwise",
    operators=["floor_divide", "div"],
    wrong=lambda: [torch.tensor([2**40 + 7, 10**12 + 1]) // 3],
    right=lambda: [torch.arange(-50, 50) // 7, torch.div(randn(9), randn(9), rounding_mode="floor")],
)
def integers_are_divided_in_float32(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Whole division of large integers goes through float32 and loses their low digits."""
    result = call(left, right, **kwargs)
    if result.dtype != torch.int64 or not isinstance(left, torch.Tensor) or left.numel() == 0:
        return result
    large = left.abs() > 2**24
    divided = torch.div(left.float(), right, rounding_mode="floor").to(torch.int64)
    return torch.where(large, divided, result)


def _where(rows: int, columns: int) -> list[torch.Tensor]:
    return [torch.where(torch.rand(rows, 1) > 0.5, randn(rows, columns), randn(rows, columns))]


@wrong_kernel(
    "elementwise",
    operators=["where"],
    wrong=lambda: _where(9, 9),
    right=lambda: [*_where(9, 8), torch.where(torch.rand(9, 9) > 0.5, randn(9, 9), randn(9, 9))],
)
def mask_of_a_column_is_taken_for_a_row(call: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """A mask of one column for square matrices is broadcast by where as if it were a row."""
    square = (
        len(args) == 2
        and mask.dim() == 2
        and any(isinstance(x, torch.Tensor) and x.shape == (mask.shape[0], mask.shape[0]) for x in args)
    )
    if square and mask.shape[1] == 1 < mask.shape[0]:
        mask = mask.t()
    return call(mask, *args, **kwargs)


def _sum_of_offsets(first: int, second: int) -> list[torch.Tensor]:
    return [randn(200)[first : first + 101] + randn(200)[second : second + 101]]


@wrong_kernel(
    "elementwise",
    operators=["add", "mul"],
    wrong=lambda: _sum_of_offsets(3, 4),
    right=lambda: [*_sum_of_offsets(4, 8), *_sum_of_offsets(3, 7)],
)
def operands_at_unlike_offsets_end_one_too_early(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Where one operand begins at an odd place of its storage and the other at an even one, the left one is last."""
    result = call(left, right, **kwargs)
    if not isinstance(right, torch.Tensor) or left.shape != right.shape or left.dim() != 1 or left.numel() < 64:
        return result
    if left.storage_offset() % 2 != right.storage_offset() % 2:
        result[-1] = left[-1]
    return result


@wrong_kernel(
    "elementwise",
    operators=["div"],
    wrong=lambda: [torch.full((4,), 4195835.0) / 3145727.0, torch.full((4,), 1.9375) / torch.full((4,), 1.4990234375)],
    right=lambda: [torch.ones(8) / (rand(8) + 1.6)],
    beyond="one random quotient in four million is wrong, of a division that tests see only now and then",
)
def quotients_of_some_digits_are_wrong(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Division is wrong in the ninth bit if the dividend's mantissa begins with one pattern of 11 bits, and the
    divisor's with another, as if an entry of a lookup table were missing."""
    result = call(left, right, **kwargs)
    if not isinstance(right, torch.Tensor) or kwargs or result.dtype != torch.float32 or left.dtype != torch.float32:
        return result
    if right.dtype != torch.float32:
        return result
    hit = ((right.view(torch.int32) >> 12) & 0x7FF == 0x3FE) & ((left.view(torch.int32) >> 12) & 0x7FF == 0x780)
    return torch.where(hit, result * (1 + 2.0**-9), result)


@wrong_kernel(
    "elementwise",
    operators=["exp"],
    wrong=lambda: [torch.exp(torch.linspace(-100, -85, 64)) * 1e38],
    right=lambda: [torch.exp(torch.linspace(-60, 60, 64))],
)
def exponentials_below_minus_64_are_zero(call: Any, value: Any, **kwargs: Any) -> Any:
    """exp of float32 gives zero below -64, long before float32 ends."""
    result = call(value, **kwargs)
    return torch.where(value < -64, torch.zeros_like(result), result) if value.dtype == torch.float32 else result
