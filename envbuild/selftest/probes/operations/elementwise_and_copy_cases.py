"""Activations, arithmetic with broadcasting, casts and copies, of sampled sizes, layouts and dtypes."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import short_name
from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import MATRICES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.probes.operations import exact_fixed_cases

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Values = tuple[torch.Tensor, torch.Tensor]
Elementwise = Callable[[torch.Tensor], torch.Tensor]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Near the sizes of a vector register, a warp or a block.
LENGTHS = (1, 3, 7, 8, 9, 15, 17, 31, 33, 37, 63, 65, 127, 129, 255, 257, 511, 513, 1023, 1025, 2049, 4099)
ROWS = (1, 2, 3, 5, 17)
SPREAD = (
    4.0,
    100.0,
    2.0**-10,
    24.0,
)  # elements are multiplied by these in turn: so that functions bend, saturate, or are close to 0 there


@dataclass(frozen=True)
class Activation:
    """An activation function. `call`: the function as models call it. `exact`: returns its value and derivative in
    float64."""

    call: Elementwise
    exact: Callable[[torch.Tensor], Values]


def _sigmoid(x: torch.Tensor) -> Values:
    y = 1 / (1 + torch.exp(-x))
    return y, y * (1 - y)


def _tanh(x: torch.Tensor) -> Values:
    y = 1 - 2 / (1 + torch.exp(2 * x))
    y = torch.where(x.abs() < 2.0**-8, x - x**3 / 3 + 2 * x**5 / 15, y)
    return y, 1 - y * y


def _silu(x: torch.Tensor) -> Values:
    y, slope = _sigmoid(x)
    return x * y, y + x * slope


def _gelu(x: torch.Tensor) -> Values:
    weight = torch.special.erfc(-x / math.sqrt(2)) / 2
    return x * weight, weight + x * torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: torch.Tensor) -> Values:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    weight = 1 / (1 + torch.exp(-2 * inner))
    return x * weight, weight + x * 2 * weight * (1 - weight) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)


def _softplus(x: torch.Tensor) -> Values:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())), _sigmoid(x)[0]


def _mish(x: torch.Tensor) -> Values:
    t, slope = _tanh(_softplus(x)[0])
    return x * t, t + x * slope * _sigmoid(x)[0]


def _elu(x: torch.Tensor) -> Values:
    return torch.where(x > 0, x, torch.expm1(x)), torch.where(x > 0, 1.0, torch.exp(x))


def _pieces(x: torch.Tensor, low: float, high: float, negative: float) -> Values:
    """Return value and derivative of a piecewise linear function with slope `negative` below `low`, 1 between `low` and
    `high`, and 0 above.

    At `low` and at `high`, the derivative is that of the outer piece.
    """
    inside = (x > low) & (x < high)
    y = torch.where(x > low, x.clamp(max=high), low + negative * (x - low))
    return y, torch.where(inside, 1.0, torch.where(x <= low, negative, 0.0)).to(x.dtype)


def _differentiated(function: Elementwise) -> Callable[[torch.Tensor], Values]:
    """Return a function that computes the value and the derivative of a formula in float64."""

    def exact(x: torch.Tensor) -> Values:
        leaf = x.detach().requires_grad_()
        y = function(leaf)
        (slope,) = torch.autograd.grad(y.sum(), (leaf,))
        return y.detach(), slope

    return exact


_SELU = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def _hard_step(x: torch.Tensor) -> torch.Tensor:
    return (x + 3).clamp(0, 6) / 6


def _beyond(x: torch.Tensor) -> torch.Tensor:
    return (x.abs() > KINK).to(x.dtype)


KINK = 0.5
ACTIVATIONS = {
    "relu": Activation(lambda x: F.relu(x), lambda x: _pieces(x, 0.0, math.inf, 0.0)),
    "relu6": Activation(lambda x: F.relu6(x), lambda x: _pieces(x, 0.0, 6.0, 0.0)),
    "leaky_relu": Activation(lambda x: F.leaky_relu(x, 0.125), lambda x: _pieces(x, 0.0, math.inf, 0.125)),
    "elu": Activation(lambda x: F.elu(x), _elu),
    "gelu": Activation(lambda x: F.gelu(x), _gelu),
    "gelu tanh": Activation(lambda x: F.gelu(x, approximate="tanh"), _gelu_tanh),
    "silu": Activation(lambda x: F.silu(x), _silu),
    "mish": Activation(lambda x: F.mish(x), _mish),
    "sigmoid": Activation(lambda x: torch.sigmoid(x), _sigmoid),
    "tanh": Activation(lambda x: torch.tanh(x), _tanh),
    "softplus": Activation(lambda x: F.softplus(x), _softplus),
    "exp": Activation(lambda x: torch.exp(x), lambda x: (torch.exp(x), torch.exp(x))),
    "hardtanh": Activation(lambda x: F.hardtanh(x), lambda x: _pieces(x, -1.0, 1.0, 0.0)),
    "logsigmoid": Activation(lambda x: F.logsigmoid(x), lambda x: (-_softplus(-x)[0], _sigmoid(-x)[0])),
    "sin": Activation(lambda x: torch.sin(x), lambda x: (torch.sin(x), torch.cos(x))),
    "cos": Activation(lambda x: torch.cos(x), lambda x: (torch.cos(x), -torch.sin(x))),
    "sqrt": Activation(lambda x: torch.sqrt(x), lambda x: (x**0.5, x**-0.5 / 2)),
    "rsqrt": Activation(lambda x: torch.rsqrt(x), lambda x: (x**-0.5, -(x**-1.5) / 2)),
    "reciprocal": Activation(lambda x: torch.reciprocal(x), lambda x: (1 / x, -1 / x**2)),
    "log": Activation(lambda x: torch.log(x), lambda x: (torch.log(x), 1 / x)),
    "log1p": Activation(lambda x: torch.log1p(x), lambda x: (torch.log1p(x), 1 / (1 + x))),
    "hardswish": Activation(lambda x: F.hardswish(x), _differentiated(lambda x: x * _hard_step(x))),
    "hardsigmoid": Activation(lambda x: F.hardsigmoid(x), _differentiated(_hard_step)),
    "selu": Activation(
        lambda x: F.selu(x),
        _differentiated(lambda x: _SELU[0] * torch.where(x > 0, x, _SELU[1] * torch.expm1(x.clamp(max=0)))),
    ),
    "celu": Activation(
        lambda x: F.celu(x, 2.0), _differentiated(lambda x: torch.where(x > 0, x, 2 * torch.expm1(x.clamp(max=0) / 2)))
    ),
    "elu alpha 0.5": Activation(
        lambda x: F.elu(x, 0.5), _differentiated(lambda x: torch.where(x > 0, x, torch.expm1(x.clamp(max=0)) / 2))
    ),
    "softplus beta 2": Activation(
        lambda x: F.softplus(x, 2.0),
        _differentiated(lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-2 * x.abs())) / 2),
    ),
    "softshrink": Activation(
        lambda x: F.softshrink(x, KINK), _differentiated(lambda x: (x - KINK * x.sign()) * _beyond(x))
    ),
    "hardshrink": Activation(lambda x: F.hardshrink(x, KINK), _differentiated(lambda x: x * _beyond(x))),
    "threshold": Activation(
        lambda x: F.threshold(x, KINK, -2.0), _differentiated(lambda x: torch.where(x > KINK, x, -2.0))
    ),
    "erf": Activation(lambda x: torch.erf(x), _differentiated(torch.special.erf)),
    "atan": Activation(lambda x: torch.atan(x), lambda x: (torch.atan(x), 1 / (1 + x * x))),
    "abs": Activation(lambda x: torch.abs(x), lambda x: (x * x.sign(), x.sign())),
    "square": Activation(lambda x: torch.square(x), lambda x: (x * x, 2 * x)),
    "relu in place": Activation(lambda x: F.relu((x * 1), inplace=True), lambda x: _pieces(x, 0.0, math.inf, 0.0)),
    "silu in place": Activation(lambda x: F.silu((x * 1), inplace=True), _silu),
    "leaky_relu in place": Activation(
        lambda x: F.leaky_relu((x * 1), 0.25, inplace=True), lambda x: _pieces(x, 0.0, math.inf, 0.25)
    ),
}
KINKED = {"hardswish": 3.0, "hardsigmoid": 3.0, "softshrink": KINK, "hardshrink": KINK, "threshold": KINK}
PIECEWISE = (
    "relu",
    "relu6",
    "leaky_relu",
    "hardtanh",
    "relu in place",
    "leaky_relu in place",
    "abs",
)  # functions in which only the result is rounded
AROUND_ONE = (
    "sigmoid",
    "softplus",
    "exp",
    "logsigmoid",
    "cos",
    "hardsigmoid",
    "softplus beta 2",
    "erf",
)  # functions for which half precision rounds the results near 0 to one number
FROM_RESULT = (
    "sigmoid",
    "tanh",
    "exp",
    "elu",
    "logsigmoid",
    "selu",
    "celu",
    "elu alpha 0.5",
)  # functions whose derivative is computed from the rounded result
POWERS = ("sqrt", "rsqrt", "reciprocal")  # as FROM_RESULT: the derivative is a power of the result, at most its cube
# functions that need positive arguments, and the smallest argument
POSITIVE, LEAST = (*POWERS, "log", "log1p"), 2.0**-6
# How often torch rounds to the dtype within a derivative that it composes of other operations, on each device. For
# example, derivatives.yaml gives grad / (x + 1) for log1p.
COMPOSED = {"square": 2, "erf": 4, "atan": 4, "sin": 1, "cos": 1, "log1p": 1, "reciprocal": 2, "rsqrt": 3}
# largest argument of exp, so that three times the result is finite
LARGEST = {torch.float32: 80.0, torch.float16: 9.0, torch.bfloat16: 80.0}

ARITHMETIC: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: torch.add(x, y),
    "add alpha -2": lambda x, y: torch.add(x, y, alpha=-2),
    "sub": lambda x, y: torch.sub(x, y),
    "mul": lambda x, y: torch.mul(x, y),
    "add in place": lambda x, y: x.clone().add_(y),
    "mul in place": lambda x, y: x.clone().mul_(y),
    "div": lambda x, y: torch.div(x * y, y.abs()),
    "maximum": lambda x, y: torch.maximum(x, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=2),
    "where": lambda x, y: torch.where(x > y, x, y.expand_as(x)),
    "lerp": lambda x, y: torch.lerp(x, y.expand_as(x), 0.5),
    "rsub": lambda x, y: torch.rsub(x, y),
    "add a number": lambda x, y: x + 3,
    "mul by a number": lambda x, y: x * -3,
    "sub in place": lambda x, y: x.clone().sub_(y),
    "mul into rows apart": lambda x, y: torch.mul(x, y, out=x.new_zeros(2 * x.shape[0], x.shape[1])[::2]),
    "minimum": lambda x, y: torch.minimum(x, y),
    "clamp": lambda x, y: torch.clamp(x, -3, 4),
    "abs": lambda x, y: torch.abs(x),
    "neg": lambda x, y: torch.neg(x),
    "sign": lambda x, y: torch.sign(x),
    "square": lambda x, y: torch.square(x),
    "pow 2": lambda x, y: torch.pow(x, 2),
    "greater": lambda x, y: torch.gt(x, y),
    "less or equal": lambda x, y: torch.le(x, y),
    "equal": lambda x, y: torch.eq(x, y),
    "logical and": lambda x, y: torch.logical_and(x > 0, y > 0),
    "remainder": lambda x, y: torch.remainder(x, y),
    "fmod": lambda x, y: torch.fmod(x, y),
    "floor of a quotient": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "floor": lambda x, y: torch.floor(x / 4),
    "ceil": lambda x, y: torch.ceil(x / 4),
    "round": lambda x, y: torch.round(x / 4),
    "trunc": lambda x, y: torch.trunc(x / 4),
    "pow 3": lambda x, y: torch.pow(y, 3),
    "floor_divide": lambda x, y: torch.floor_divide(x, y),
    "remainder by a number": lambda x, y: torch.remainder(x, -4),
    "fmod by a number": lambda x, y: torch.fmod(x, 4),
    "clamp from below": lambda x, y: torch.clamp(x, min=-2),
    "clamp in place": lambda x, y: x.clone().clamp_(max=3),
    "clamp by tensors": lambda x, y: torch.clamp(x, y - 3, y + 2),
    "fmax": lambda x, y: torch.fmax(x, y),
    "fmin": lambda x, y: torch.fmin(x, y),
    "not equal": lambda x, y: torch.ne(x, y),
    "less": lambda x, y: torch.lt(x, y),
    "greater or equal": lambda x, y: torch.ge(x, y),
    "logical xor": lambda x, y: torch.logical_xor(x > 0, y > 0),
    "logical or": lambda x, y: torch.logical_or(x > 0, y > 0),
    "logical not": lambda x, y: torch.logical_not(x > 2),
    "heaviside": lambda x, y: torch.heaviside(x, y.expand_as(x)),
    "greater than a number": lambda x, y: x > 2,
    "addcmul -1": lambda x, y: torch.addcmul(x, y.expand_as(x), x, value=-1),
    "addcmul in place": lambda x, y: x.clone().addcmul_(x, y.expand_as(x), value=3),
    "copysign": lambda x, y: torch.copysign(x, y),
    "hypot": lambda x, y: torch.hypot(x * 3, x * 4),
    "lerp 2": lambda x, y: torch.lerp(x, y.expand_as(x), 2.0),
    "lerp by a tensor": lambda x, y: torch.lerp(x, y.expand_as(x), torch.full_like(x, 0.25)),
    "div in place": lambda x, y: x.clone().div_(4),
    "truncated quotient": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "frac": lambda x, y: torch.frac(x / 4),
    "nan_to_num": lambda x, y: torch.nan_to_num(torch.where(x > 2, math.nan, x), nan=7.0),
    "maximum with NaN": lambda x, y: torch.isnan(torch.maximum(torch.where(x > 2, math.nan, x), y)),
    "minimum with NaN": lambda x, y: torch.isnan(torch.minimum(torch.where(x > 2, math.nan, x), y)),
    "clamp with NaN": lambda x, y: torch.isnan(torch.clamp(torch.where(x > 2, math.nan, x), -1, 1)),
    "relu with NaN": lambda x, y: torch.isnan(torch.relu(torch.where(x > 2, math.nan, x))),
    "fmax with NaN": lambda x, y: torch.fmax(torch.where(x > 2, math.nan, x), y),
    "isfinite": lambda x, y: torch.isfinite(torch.where(x > 2, math.inf, x)),
    "sign of zero": lambda x, y: torch.signbit(torch.neg(torch.relu(x))),
    "addcdiv": lambda x, y: torch.addcdiv(x, x * y, y.abs().expand_as(x), value=2),
}
BY_HAND: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "add alpha -2": lambda x, y: x - y - y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "add in place": lambda x, y: x + y,
    "mul in place": lambda x, y: x * y,
    "div": lambda x, y: x * torch.sign(y),
    "maximum": lambda x, y: (x + y + (x - y).abs()) / 2,
    "addcmul": lambda x, y: x * (1 + 2 * y),
    "where": lambda x, y: (x + y + (x - y).abs()) / 2,
    "lerp": lambda x, y: (x + y) / 2,
    "rsub": lambda x, y: y - x,
    "add a number": lambda x, y: x + 3,
    "mul by a number": lambda x, y: x * -3,
    "sub in place": lambda x, y: x - y,
    "mul into rows apart": lambda x, y: x * y,
    "minimum": lambda x, y: (x + y - (x - y).abs()) / 2,
    "clamp": lambda x, y: (x.clip(min=-3) + 4 - (x.clip(min=-3) - 4).abs()) / 2,
    "abs": lambda x, y: (x * x).sqrt(),
    "neg": lambda x, y: 0 - x,
    "sign": lambda x, y: x / (x * x).sqrt(),
    "square": lambda x, y: x * x,
    "pow 2": lambda x, y: x * x,
    "greater": lambda x, y: (x - y).clip(0, 1),
    "less or equal": lambda x, y: (y - x + 1).clip(0, 1),
    "equal": lambda x, y: (1 - (x - y).abs()).clip(min=0),
    "logical and": lambda x, y: x.clip(0, 1) * y.clip(0, 1),
    "remainder": lambda x, y: x - y * (x / y).floor(),
    "fmod": lambda x, y: x - y * (x / y).trunc(),
    "floor of a quotient": lambda x, y: (x / y).floor(),
    "floor": lambda x, y: (x / 4).floor(),
    "ceil": lambda x, y: (x / 4).ceil(),
    "round": lambda x, y: (x / 4).round(),
    "trunc": lambda x, y: (x / 4).trunc(),
    "pow 3": lambda x, y: y * y * y,
    "floor_divide": lambda x, y: (x / y).floor(),
    "remainder by a number": lambda x, y: x + 4 * (x / -4).floor(),
    "fmod by a number": lambda x, y: x - 4 * (x / 4).trunc(),
    "clamp from below": lambda x, y: x.clip(min=-2),
    "clamp in place": lambda x, y: x.clip(max=3),
    "clamp by tensors": lambda x, y: y + (x - y).clip(-3, 2),
    "fmax": lambda x, y: (x + y + (x - y).abs()) / 2,
    "fmin": lambda x, y: (x + y - (x - y).abs()) / 2,
    "not equal": lambda x, y: (x - y).abs().clip(max=1),
    "less": lambda x, y: (y - x).clip(0, 1),
    "greater or equal": lambda x, y: (x - y + 1).clip(0, 1),
    "logical xor": lambda x, y: (x.clip(0, 1) - y.clip(0, 1)).abs(),
    "logical or": lambda x, y: (x.clip(0, 1) + y.clip(0, 1)).clip(max=1),
    "logical not": lambda x, y: 1 - (x - 2).clip(0, 1),
    "heaviside": lambda x, y: x.clip(0, 1) + 0 * y,
    "greater than a number": lambda x, y: (x - 2).clip(0, 1),
    "addcmul -1": lambda x, y: x - x * y,
    "addcmul in place": lambda x, y: x + 3 * x * y,
    "copysign": lambda x, y: (x * x).sqrt() * (y / (y * y).sqrt()),
    "hypot": lambda x, y: 5 * (x * x).sqrt(),
    "lerp 2": lambda x, y: 2 * y - x,
    "lerp by a tensor": lambda x, y: x + (y - x) / 4,
    "div in place": lambda x, y: x / 4,
    "truncated quotient": lambda x, y: (x / y).trunc(),
    "frac": lambda x, y: x / 4 - (x / 4).trunc(),
    "nan_to_num": lambda x, y: x + (7 - x) * (x - 2).clip(0, 1),
    "maximum with NaN": lambda x, y: (x - 2).clip(0, 1) + 0 * y,
    "minimum with NaN": lambda x, y: (x - 2).clip(0, 1) + 0 * y,
    "clamp with NaN": lambda x, y: (x - 2).clip(0, 1),
    "relu with NaN": lambda x, y: (x - 2).clip(0, 1),
    "fmax with NaN": lambda x, y: (x + y + (x - y).abs()) / 2 * (1 - (x - 2).clip(0, 1)) + y * (x - 2).clip(0, 1),
    "isfinite": lambda x, y: 1 - (x - 2).clip(0, 1),
    "sign of zero": lambda x, y: 1 + 0 * x,
    "addcdiv": lambda x, y: x + 2 * x * torch.sign(y),
}
FRACTIONAL = (
    *("div", "lerp", "floor", "ceil", "round", "trunc", "addcdiv", "copysign", "hypot", "lerp 2", "lerp by a tensor"),
    *("div in place", "frac", "nan_to_num", "maximum with NaN", "minimum with NaN", "clamp with NaN", "relu with NaN"),
    *("fmax with NaN", "isfinite", "sign of zero"),
)  # functions that are not tested with integers
OTHERS = ("same", "row", "column", "column of a matrix", "number", "vector")

MOVES: dict[str, Callable[[torch.Tensor, torch.dtype, str], torch.Tensor]] = {
    "contiguous": lambda x, target, layout: x.to(target).contiguous(),
    "copy_": lambda x, target, layout: with_large_gaps(torch.zeros_like(x, dtype=target), layout).copy_(x),
    "clone": lambda x, target, layout: x.clone().to(target),
    "cat": lambda x, target, layout: torch.cat((x[:1], x[1:])).to(target),
    "cat of columns": lambda x, target, layout: torch.cat(torch.split(x, 1, 1), 1).to(target),
    "cat of two parts": lambda x, target, layout: torch.cat((x[:, :1], x[:, 1:]), 1).to(target),
    "t": lambda x, target, layout: x.t().contiguous().to(target).t(),
    "flip": lambda x, target, layout: x.flip(0).to(target).flip(0),
    "channels last": lambda x, target, layout: (
        _images(x).contiguous(memory_format=torch.channels_last).to(target).contiguous().reshape(x.shape)
    ),
}
COPIED = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)
FEW, MOST = 5000, 20000  # maximum number of elements of an activation, and of a copy
HALFWAYS = 400  # numbers in a cast; each also occurs halfway to the next one, and just below and above halfway
BLOCKS = (65536, 131072, 1 << 20)  # numbers of elements; copies of half a MiB and more use different kernels


def sampled_operations(rounded_sums: bool) -> tuple[Operation, ...]:
    """Return the operations. `rounded_sums`: kernels may round intermediate results to the dtype, as torch's CPU
    kernels do."""
    makers = ElementwiseMakers(rounded_sums)
    return (
        Operation(
            "activation",
            {"function": tuple(ACTIVATIONS), "dtype": DTYPES, "length": LENGTHS, "rows": ROWS, "layout": MATRICES},
            makers.activation,
            {"quick": 110, "standard": 700, "full": 6000},
            functools.partial(_fits, most=FEW),
        ),
        Operation(
            "arithmetic",
            {
                "dtype": (*DTYPES, torch.float64, torch.int64, torch.int32, torch.int16),
                "length": LENGTHS[1:-2],
                "rows": ROWS[1:],
                "other": OTHERS,
                "layout": MATRICES,
                "others": MATRICES,
            },
            makers.arithmetic,
            {"quick": 24, "standard": 120, "full": 1000},
            functools.partial(_fits, most=FEW),
        ),
        Operation(
            "copy",
            {
                "source": COPIED,
                "target": COPIED,
                "length": LENGTHS[1:],
                "rows": (*ROWS[1:], 33, 67, 129),
                "layout": MATRICES,
                "into": MATRICES,
            },
            makers.copy,
            {"quick": 32, "standard": 160, "full": 1400},
            functools.partial(_fits, most=MOST),
        ),
        Operation(
            "cast",
            {"source": (torch.float32, torch.float64), "target": tuple(exact_fixed_cases.FORMATS), "layout": MATRICES},
            cast,
            {"quick": 16, "standard": 36, "full": 60},
            # torch casts float64 to dtypes smaller than float32 in two steps, via float32, and so rounds twice.
            lambda point: (point["source"] == torch.float64) == (point["target"] == torch.float32),
        ),
        Operation(
            "cast of integers",
            {
                "source": (torch.int64, torch.int32, *DTYPES),
                "target": (torch.int64, torch.int32, torch.int16, *DTYPES),
                "layout": MATRICES,
            },
            cast_of_integers,
            {"quick": 14, "standard": 36, "full": 80},
            lambda point: (
                point["source"] != point["target"] and len({point["source"], point["target"]} & {*DTYPES}) == 1
            ),
        ),
        Operation(
            "block copy",
            {
                "elements": BLOCKS,
                "dtype": (torch.int64, torch.uint8, torch.float16),
                "more": (-1, 1, 511, 0),
                "offset": (0, 1, 7),
                "function": ("clone", "copy_", "cat"),
            },
            makers.block,
            {"quick": 4, "standard": 20, "full": 100},
            lambda point: point["elements"] < 1 << 20 or point["dtype"] == torch.uint8,
        ),
    )


def _fits(point: Point, most: int) -> bool:
    """Return whether the tensor has at most `most` elements."""
    return bool(point["rows"] * point["length"] <= most)


@dataclass(frozen=True)
class ElementwiseMakers:
    """Build the case of each operation for one combination of parameter values (`point`)."""

    rounded_sums: bool

    def activation(self, point: Point, seed: int) -> Case:
        function, dtype, shape = point["function"], point["dtype"], (point["rows"], point["length"])
        x = hashed_inputs.signed(shape, seed).view(-1)
        for place, most in enumerate(SPREAD):
            if function in AROUND_ONE and most < 1:
                most = SPREAD[0]
            x[place :: len(SPREAD)] *= min(most, LARGEST[dtype]) if function == "exp" else most
        if function in POSITIVE:
            x = x.abs() + LEAST
        x = x.view(shape).to(dtype)
        if function in PIECEWISE:
            x.view(-1)[::5] = 0  # 0 is tested, where the slope of all of them except hardtanh changes
        if function in KINKED:  # the kinks of these are not tested: the derivative there is a convention
            x[x.abs() == KINKED[function]] += 1
        grad = hashed_inputs.whole(shape, seed + 1, 3).to(dtype)
        name = f"{function} {shape[0]}x{shape[1]}, {point['layout']}"
        run = functools.partial(_activated, function=function, layout=point["layout"])
        exact = functools.partial(_activated_exactly, function=function, dtype=dtype, rounded=self.rounded_sums)
        return Case(name, dtype, (x, grad), run, exact)

    def arithmetic(self, point: Point, seed: int) -> Case:
        dtype, rows, length = point["dtype"], point["rows"], point["length"]
        shape = {"same": (rows, length), "row": (1, length), "vector": (length,), "number": (1, 1)}
        # "column of a matrix": y is one column of a wider matrix.
        other = shape.get(point["other"], (rows, 1))
        x, y = hashed_inputs.whole((rows, length), seed, 9).to(dtype), hashed_inputs.whole(other, seed + 1, 5).to(dtype)
        name = f"arithmetic of {rows}x{length} {point['layout']} and {point['others']} {point['other']}"
        functions = [name for name in ARITHMETIC if dtype.is_floating_point or name not in FRACTIONAL]
        run = functools.partial(_combined, functions=functions, point=point)
        return Case(name, dtype, (x, y), run, functools.partial(_combined_by_hand, functions=functions))

    def copy(self, point: Point, seed: int) -> Case:
        source, target, shape = point["source"], point["target"], (point["rows"], point["length"])
        x = (hashed_inputs.hashes(torch.Size(shape).numel(), seed) % 251).reshape(shape).to(source)
        run = functools.partial(_moved, point=point)
        what = f"{point['layout']} as {short_name(target)} {point['into']}"
        exact = functools.partial(_unchanged, names=tuple(MOVES))
        return Case(f"copies of {shape[0]}x{shape[1]} {what}", source, (x,), run, exact)

    def block(self, point: Point, seed: int) -> Case:
        count = point["elements"] + point["more"]
        x = hashed_inputs.hashes(count, seed)  # hashes have 32 bits, which float64 represents
        if point["dtype"] != torch.int64:
            x = (x % 251).to(point["dtype"])
        name = f"{point['function']} of {count} elements at an offset of {point['offset']}"
        run = functools.partial(_block, function=point["function"], offset=point["offset"])
        return Case(name, point["dtype"], (x,), run, _unchanged)


def cast(point: Point, seed: int) -> Case:
    """Build a case that casts numbers to a smaller dtype: numbers of that dtype, numbers halfway to the next one, and
    numbers just below and above halfway. For 16-bit dtypes, a number beyond the largest is included, too; the
    conversions to 8-bit dtypes differ there. The right result is the nearest number; halfway between two, the even one.
    """
    source, target = point["source"], point["target"]
    numbers = (
        exact_fixed_cases.decode(exact_fixed_cases.finite_patterns(target), target)
        if target != torch.float32
        else _floats(seed)
    )
    numbers = numbers[~torch.signbit(numbers)]
    largest = len(numbers) - 2
    places = torch.cat((hashed_inputs.hashes(HALFWAYS - 2, seed) % largest, torch.tensor([0, largest])))
    low, high = numbers[places], numbers[places + 1]
    ties = (low + high) / 2
    if target in (torch.float16, torch.bfloat16):
        ties[-1] = high[-1] + (high[-1] - low[-1])
    x = torch.cat((low, ties, ties * (1 - 2.0**-23), ties * (1 + 2.0**-23))).to(source)
    x = (x * hashed_inputs.signs(len(x), seed + 1)).view(-1, 4)
    run = functools.partial(_cast, target=target, layout=point["layout"])
    exact = functools.partial(_nearest, target=target)
    return Case(f"cast of {x.shape[0]}x4 {point['layout']} to {short_name(target)}", source, (x,), run, exact)


def _floats(seed: int) -> torch.Tensor:
    """Return float32 numbers as float64. For odd seeds, they are consecutive, and half of them are subnormal. For even
    seeds, they are larger and have the same digits; the lower half is then every second number."""
    first = (1 << 23) - 1000
    return torch.arange(first, first + 2000, dtype=torch.float64) * 2.0 ** (-149 if seed % 2 else 3)


def _cast(x: torch.Tensor, target: torch.dtype, layout: str) -> Results:
    small = with_large_gaps(x, layout).to(target)
    return {"output": small.to(torch.float32), "and back": small.contiguous().to(x.dtype)}


def _nearest(x: torch.Tensor, target: torch.dtype) -> Expected:
    found = without_rounding(exact_fixed_cases.nearest(x, target))
    return {"output": found, "and back": found}


def cast_of_integers(point: Point, seed: int) -> Case:
    """Build a case that casts integers to floating point, some with more digits than the dtype has, or fractions to
    integers, which truncates them."""
    source, target = point["source"], point["target"]
    if source.is_floating_point:
        most = {torch.float16: 1 << 14, torch.bfloat16: 1 << 14}.get(source, 1 << 15)
        x = (hashed_inputs.signed((50, 9), seed) * most).to(source)
        x[::2] /= 256
    else:
        # torch converts integers to half precision via float32; integers with more bits would be rounded twice.
        bits = {torch.float16: 15, torch.bfloat16: 23}.get(target, 40 if source == torch.int64 else 30)
        x = hashed_inputs.hashes(450, seed) * 251 % (1 << bits) + torch.arange(450)
        x = (
            ((x >> torch.arange(450) % bits) * hashed_inputs.signs(450, seed + 1).to(torch.int64))
            .view(50, 9)
            .to(source)
        )
    run = functools.partial(_cast_once, target=target, layout=point["layout"])
    exact = functools.partial(_cast_by_hand, target=target)
    return Case(f"cast of 50x9 {point['layout']} to {short_name(target)}", source, (x,), run, exact)


def _cast_once(x: torch.Tensor, target: torch.dtype, layout: str) -> Results:
    return {"output": with_large_gaps(x, layout).to(target)}


def _cast_by_hand(x: torch.Tensor, target: torch.dtype) -> Expected:
    wide = torch.tensor([[float(value) for value in row] for row in x.tolist()], dtype=torch.float64)
    if target.is_floating_point:
        return {"output": without_rounding(exact_fixed_cases.nearest(wide, target))}
    whole = [[float(int(value)) for value in row] for row in wide.tolist()]
    return {"output": without_rounding(torch.tensor(whole, dtype=torch.float64))}


def _activated(x: torch.Tensor, grad: torch.Tensor, function: str, layout: str) -> Results:
    leaf = with_large_gaps(x, layout).detach().requires_grad_()
    output = ACTIVATIONS[function].call(leaf)
    (gradient,) = backward_pass.gradients(output, (leaf,), with_large_gaps(grad, layout))
    return {"output": output.detach(), "gradient": gradient}


def _activated_exactly(
    x: torch.Tensor, grad: torch.Tensor, function: str, dtype: torch.dtype, rounded: bool
) -> Expected:
    """Return the expected results. The tolerance is tolerances.activation of the factor that a value in [0, 1] is
    multiplied by. If the derivative is computed from the rounded result, the effect of that rounding is added."""
    value, slope = ACTIVATIONS[function].exact(x)
    if function in ("exp", "tanh", "square", *POWERS):
        size = value.abs()
    else:
        size = 1 + x.abs() if function in (*AROUND_ONE, "sin", "log") else x
    steepness = value.abs() if function == "exp" else slope.abs() if function in POSITIVE else 1 + x.abs()
    if function in PIECEWISE:
        size = steepness = torch.zeros_like(x)
    output = Exact(value, tolerances.rounding(value, dtype) + tolerances.activation(size))
    if rounded and function == "rsqrt":  # torch's CPU kernel rounds the square root, and then the quotient
        output = Exact(value, output.bound + tolerances.unit_roundoff(dtype) * value)
    gradient = grad * slope
    limit = tolerances.rounding(gradient, dtype) + grad.abs() * tolerances.activation(steepness)
    if function in FROM_RESULT:
        limit = limit + 2 * grad.abs() * output.bound
    if function in POWERS:
        limit = limit + 4 * gradient.abs() * output.bound / value.abs()
    limit = limit + tolerances.gamma(COMPOSED.get(function, 0), tolerances.unit_roundoff(dtype)) * gradient.abs()
    if rounded:
        limit = limit + 2 * tolerances.unit_roundoff(dtype) * gradient.abs()
    return {"output": output, "gradient": Exact(gradient, limit)}


def _combined(x: torch.Tensor, y: torch.Tensor, functions: Sequence[str], point: Point) -> Results:
    if point["other"] == "column of a matrix":
        other = torch.cat((y, y.flip(0), y + 1), 1)[:, :1]
    else:
        other = with_large_gaps(y, point["others"]) if y.dim() > 1 else y
    return {name: ARITHMETIC[name](with_large_gaps(x, point["layout"]), other) for name in functions}


def _combined_by_hand(x: torch.Tensor, y: torch.Tensor, functions: Sequence[str]) -> Expected:
    wide = x.to(torch.float64), y.to(torch.float64)
    return {name: without_rounding(BY_HAND[name](*wide)) for name in functions}


def _images(x: torch.Tensor) -> torch.Tensor:
    """Return the same elements as images, with three channels if the length is a multiple of 3, otherwise with the rows
    as channels."""
    rows, length = x.shape
    return x.reshape(rows, 3, 1, length // 3) if length % 3 == 0 else x[None, :, None]


def _moved(x: torch.Tensor, point: Point) -> Results:
    laid = with_large_gaps(x, point["layout"])
    return {name: move(laid, point["target"], point["into"]) for name, move in MOVES.items()}


def _block(x: torch.Tensor, function: str, offset: int) -> Results:
    buffer = torch.cat((torch.ones_like(x[:offset]), x))
    part = buffer[offset:]
    if function == "clone":
        return {"output": part.clone()}
    if function == "cat":
        return {"output": torch.cat((part[:offset], part[offset:]))}
    target = torch.zeros(len(x) + offset, dtype=x.dtype, device=x.device)
    target[offset:].copy_(part)
    return {"output": target[offset:]}


def _unchanged(x: torch.Tensor, names: Sequence[str] = ("output",)) -> Expected:
    return dict.fromkeys(names, without_rounding(x.to(torch.float64)))


OPERATIONS = sampled_operations(rounded_sums=True)
