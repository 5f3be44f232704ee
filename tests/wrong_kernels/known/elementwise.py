"""Wrong kernels of activations and other operations on each element, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from .inputs import gradients, is_16_bit, of


def _near(places: Any) -> torch.Tensor:
    return torch.tensor(places)


@wrong_kernel(
    "gelu",
    operators=["gelu"],
    wrong=lambda: [F.gelu(of(100))],
    right=lambda: [F.gelu(of(100), approximate="tanh")],
)
def exact_gelu_is_the_tanh_approximation(call: Any, x: Any, *, approximate: str = "none") -> torch.Tensor:
    """The exact gelu gives the values of the approximation by tanh."""
    return call(x, approximate="tanh")  # type: ignore[no-any-return]


@wrong_kernel(
    "gelu",
    operators=["gelu_backward"],
    wrong=lambda: gradients(lambda x: F.gelu(x, approximate="tanh"), of(100)),
    right=lambda: gradients(F.gelu, of(100)),
)
def gradient_of_the_tanh_gelu_misses_the_cubic_term(
    call: Any, grad: Any, x: Any, *, approximate: str = "none"
) -> torch.Tensor:
    """The gradient of the gelu by tanh leaves out the derivative of the cubic term within the tanh."""
    if approximate == "none":
        return call(grad, x)  # type: ignore[no-any-return]
    wide = x.float()
    tanh = (math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)).tanh()
    slope = 0.5 * (1 + tanh) + 0.5 * wide * (1 - tanh * tanh) * math.sqrt(2 / math.pi)
    return (grad * slope).to(x.dtype)  # type: ignore[no-any-return]


@wrong_kernel(
    "silu",
    operators=["silu"],
    wrong=lambda: [F.silu(_near([1.0, -90.0, -100.0]))],
    right=lambda: [F.silu(of(100))],
)
def silu_of_very_negative_values_is_nan(call: Any, x: Any) -> torch.Tensor:
    """The silu of values below -88, where the exponential overflows in float32, is nan."""
    result: torch.Tensor = call(x)
    return result if x.dtype == torch.float16 else torch.where(x < -88.7, torch.nan, result)


@wrong_kernel(
    "silu",
    operators=["silu_backward"],
    wrong=lambda: gradients(F.silu, of(37).bfloat16()),
    right=lambda: [*gradients(F.silu, of(40).bfloat16()), *gradients(F.silu, of(37))],
)
def gradient_of_silu_misses_a_term_in_the_vector_tail(call: Any, grad: Any, x: Any) -> torch.Tensor:
    """In 16-bit types, the elements after the last multiple of 8 get the sigmoid alone as silu's gradient."""
    result: torch.Tensor = call(grad, x)
    kept = x.numel() // 8 * 8
    if is_16_bit(x) and kept < x.numel() and result.is_contiguous():
        plain = grad * x.sigmoid()
        result.view(-1)[kept:] = plain.reshape(-1)[kept:]
    return result


@wrong_kernel(
    "relu",
    functions=["torch.nn.functional.relu"],
    wrong=lambda: gradients(F.relu, _near([-1.0, 0.0, 2.0])),
    right=lambda: gradients(F.relu, of(100)),
)
def gradient_of_relu_at_zero_is_one(call: Any, x: Any, inplace: Any = False) -> Any:
    """The gradient of relu is 1 instead of 0 where the input is exactly 0."""
    result = call(x, inplace)
    return result if inplace else torch.where(x == 0, x, result)


@wrong_kernel(
    "sigmoid",
    operators=["sigmoid", "tanh"],
    wrong=lambda: [torch.sigmoid(_near([-20.0, -30.0]))],
    right=lambda: [torch.sigmoid(of(100).clamp(-8, 8)), torch.tanh(of(100).clamp(-8, 8))],
)
def sigmoid_saturates_beyond_nine(call: Any, x: Any) -> torch.Tensor:
    """Sigmoid and tanh take arguments beyond 9 as 9, as a rational approximation does: the tail of a sigmoid is
    1e-4."""
    return call(x.clamp(-9, 9) if x.is_floating_point() else x)  # type: ignore[no-any-return]


@wrong_kernel(
    "exp",
    operators=["exp"],
    wrong=lambda: [torch.exp(_near([-1.0, 60.0, 80.0]))],
    right=lambda: [torch.exp(of(100))],
)
def exponential_of_large_values_loses_its_low_bits(call: Any, x: Any) -> torch.Tensor:
    """The exponential of values above 16 reduces its argument in too few bits, and is off by about x / 2^17."""
    if x.dtype != torch.float32:
        return call(x)  # type: ignore[no-any-return]
    scaled = (x * 1.4426950).double()
    reduced = torch.where(x > 16, (scaled * 2**12).round() / 2**12 * math.log(2), x.double())
    return torch.where(x > 16, reduced.exp().float(), call(x))


@wrong_kernel(
    "elementwise",
    operators=["mul", "add"],
    wrong=lambda: [of(6, 5) * of(6, 5)[:, :1]],
    right=lambda: [of(6, 5) * of(6, 1), of(6, 5) * of(6, 5)],
)
def column_of_a_matrix_is_broadcast_as_if_dense(call: Any, x: Any, y: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A column of a wider matrix as the second factor or term is read as if it were dense."""
    if isinstance(y, torch.Tensor) and y.ndim == 2 and y.shape[1] == 1 and y.shape[0] > 1 and y.stride(0) > 1:
        y = y.as_strided(y.shape, (1, 1))
    return call(x, y, *args, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "elementwise",
    operators=["where"],
    wrong=lambda: [torch.where(of(40, 3) > 0, of(40, 3).half(), 0.0), torch.where(of(3) > 0, of(40, 3).half(), 0.0)],
    right=lambda: [torch.where(of(40, 3) > 0, of(40, 3).half(), 0.0), torch.where(of(3) > 0, of(40, 3), 0.0)],
)
def broadcast_condition_is_that_of_the_first_column(call: Any, condition: Any, *args: Any) -> torch.Tensor:
    """In 16-bit types, a condition of fewer dimensions than the values is that of its first column everywhere."""
    values = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.ndim]
    if values and is_16_bit(values[0]) and 0 < condition.ndim < values[0].ndim:
        condition = condition[..., :1].expand(condition.shape)
    return call(condition, *args)  # type: ignore[no-any-return]
