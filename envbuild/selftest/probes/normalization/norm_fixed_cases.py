"""The norms, fixed cases for all of them, and the expected results in float64.

Each case has four kinds of rows. The first kind is around 0. The second is around 1, where the variance cancels if it
is computed as E[x^2] - E[x]^2. The third is 512 times as large, so that squares exceed float16's range. The fourth is
2^-6 times as large: there epsilon matters, and 1 / sigma^3, which the backward pass needs, exceeds float16's range.
Cases with `extreme` False do not scale the third and fourth kinds.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import short_name
from envbuild.selftest.numerics import hashed_inputs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTHS = (256, 1023, 4096, 8192)  # number of elements that are normalised together; 1023 is odd
AUTOCAST_WIDTHS = WIDTHS[1:3]
ROWS = 8
GROUPS, CHANNELS = 4, 8  # groups of a GroupNorm, and channels per group
EPSILON = 1e-5
MANY_ROWS, NARROW = 4096, 32  # half precision cannot accumulate a sum over this many rows

Pair = tuple[torch.dtype, torch.dtype]


def inputs_dtype(x: torch.dtype, weight: torch.dtype) -> tuple[torch.dtype, ...]:
    return (x,)


@dataclass(frozen=True)
class Norm:
    """One implementation of a norm.

    `call(x, weight, bias)`: x has the shape (rows, n), or (rows, channels, length) with groups. `centred`: the norm
    subtracts the mean. `groups`: the number of groups of channels that are normalised separately. `outputs`: returns
    the dtypes that the result may have, from the dtypes of input and weight. `declared`: the pairs of dtypes (input,
    weight) that the norm must support. `roundings`: how often it may round intermediate results; they may be rounded to
    the less precise of the input's and the result's dtype. `upcasts`: the norm must compute in float32. If False, rows
    whose intermediate results exceed float16's range are tested separately and only reported. `autocast`: the dtype to
    which the norm casts all inputs under autocast, so that it supports every pair there. None leaves autocast to torch.
    """

    name: str
    call: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    centred: bool = True
    groups: int = 1
    outputs: Callable[[torch.dtype, torch.dtype], tuple[torch.dtype, ...]] = inputs_dtype
    declared: frozenset[Pair] = frozenset({(torch.float32, torch.float32)})
    roundings: int = 0
    upcasts: bool = True
    autocast: torch.dtype | None = None

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        if self.groups == 1:
            return (rows, width)
        return (rows // self.groups, self.groups * CHANNELS, width // CHANNELS)


@dataclass(frozen=True)
class NormCase:
    """One call of one norm. `number`: the index among all cases; it shifts the values, so that no two cases have the
    same."""

    norm: Norm
    x: torch.dtype
    weight: torch.dtype
    rows: int
    width: int
    autocast: bool
    number: int
    extreme: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return self.norm.shape(self.rows, self.width)

    @property
    def pair(self) -> str:
        return f"{short_name(self.x)} x {short_name(self.weight)}{' autocast' if self.autocast else ''}"

    @property
    def outputs(self) -> tuple[torch.dtype, ...]:
        """The dtypes that the result may have. torch's autocast may compute a norm in float32."""
        if self.cast is not None:
            return (self.cast,)
        return (*self.norm.outputs(self.x, self.weight), *((torch.float32,) if self.autocast else ()))

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype to which the norm casts all inputs in this case; None if it does not."""
        return self.norm.autocast if self.autocast else None

    @property
    def is_declared(self) -> bool:
        return self.cast is not None or (self.x, self.weight) in self.norm.declared

    @property
    def label(self) -> str:
        return f"{self.norm.name} {self.pair}"

    @property
    def name(self) -> str:
        return f"{self.label} {'x'.join(map(str, self.shape))}"


@dataclass(frozen=True)
class NormInputs:
    """The inputs of a norm; `grad` is the gradient of its result."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad: torch.Tensor

    def to(self, dtype: torch.dtype) -> NormInputs:
        return NormInputs(*(values.to(dtype) for values in (self.x, self.weight, self.bias, self.grad)))


@dataclass(frozen=True)
class Results:
    """The result y, and the gradients with respect to x, weight and bias."""

    y: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


def torch_norms(on_cpu: bool = True) -> tuple[Norm, ...]:
    """Return torch's own norms. Their functions are looked up at each call.

    On a GPU they must support input and weight of the same dtype. On a CPU, half precision is not required, because
    only later releases of torch support it.
    """
    declared = frozenset((dtype, dtype) for dtype in DTYPES if dtype == torch.float32 or not on_cpu)

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, EPSILON)

    def rms(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if hasattr(F, "rms_norm"):  # since torch 2.4
            return F.rms_norm(x, tuple(weight.shape), weight, EPSILON)
        wide = x.to(torch.float32)
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON) * weight.to(torch.float32)).to(x.dtype)

    def group(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.group_norm(x, GROUPS, weight, bias, EPSILON)

    return (
        Norm("layer_norm", layer, declared=declared),
        # torch 2.4 and 2.5 compute rms_norm with single operations in the input's dtype. A weight of a wider dtype may
        # promote the result.
        Norm(
            "rms_norm",
            rms,
            centred=False,
            outputs=lambda x, weight: (x, torch.promote_types(x, weight)),
            declared=declared,
            roundings=5,
            upcasts=False,
        ),
        # On CUDA, mean and 1 / sigma are rounded to the input's dtype before they are used.
        Norm("group_norm", group, groups=GROUPS, declared=declared, roundings=2),
    )


def norm_case_groups(norms: Sequence[Norm]) -> Iterator[list[NormCase]]:
    """Yield a list of cases for each norm and pair of dtypes, without and with autocast. Each list has one case of each
    width in WIDTHS, or with autocast in AUTOCAST_WIDTHS."""
    number = itertools.count()
    for norm, x, weight, autocast in itertools.product(norms, DTYPES, DTYPES, (False, True)):
        extreme = norm.upcasts or x != torch.float16
        widths = AUTOCAST_WIDTHS if autocast else WIDTHS
        yield [NormCase(norm, x, weight, ROWS, width, autocast, next(number), extreme) for width in widths]


def norm_inputs(case: NormCase) -> NormInputs:
    """Return the inputs of a case, all except grad rounded to their dtypes: x in [-1, 1] with the kinds of rows
    applied, weight in [0.5, 1.5], bias and grad in [-1, 1]. All values are hashes of counters; x and grad are rolled by
    the case's number."""
    channels, count = case.shape[1], math.prod(case.shape)
    x, grad = (_values(case.rows, count // case.rows, seed).roll(case.number, dims=-1) for seed in (51, 54))
    x[1::4] += 1
    if case.extreme:
        x[2::4] *= 512
        x[3::4] *= 2.0**-6
    weight, bias = hashed_inputs.uniform((channels,), seed=52) + 0.5, hashed_inputs.signed((channels,), seed=53)
    return NormInputs(
        x.reshape(case.shape).to(case.x), weight.to(case.weight), bias.to(case.weight), grad.reshape(case.shape)
    )


@functools.cache
def _values(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return values in [-1, 1). Cached for each shape, because hashing takes longer than a norm."""
    return hashed_inputs.signed((rows, columns), seed)


def exact_norm(norm: Norm, given: NormInputs) -> tuple[Results, Results]:
    """Return the results in float64, and their magnitudes. A magnitude is the same formula with every term positive."""
    shape, wide = given.x.shape, torch.float64
    split = (shape[0], norm.groups, shape[1] // norm.groups, -1)
    over, summed = (2, 3), (0, 3)
    x, grad = (values.to(wide).reshape(split) for values in (given.x, given.grad))
    weight, bias = (values.to(wide).reshape(1, norm.groups, -1, 1) for values in (given.weight, given.bias))
    if not norm.centred:
        bias = torch.zeros_like(bias)

    def mean(values: torch.Tensor) -> torch.Tensor:
        return values.mean(over, keepdim=True)

    centre = float(norm.centred)
    shifted = x - centre * mean(x)
    sigma = (mean(shifted * shifted) + EPSILON).sqrt()
    unit, spread = shifted / sigma, (x.abs() + centre * mean(x.abs())) / sigma
    back, forth = grad * weight, (grad * weight).abs()
    results = Results(
        y=(unit * weight + bias).reshape(shape),
        x=((back - centre * mean(back) - unit * mean(back * unit)) / sigma).reshape(shape),
        weight=(grad * unit).sum(summed).reshape(-1),
        bias=grad.sum(summed).reshape(-1),
    )
    magnitudes = Results(
        y=(spread * weight.abs() + bias.abs()).reshape(shape),
        x=((forth + centre * mean(forth) + spread * mean(forth * spread)) / sigma).reshape(shape),
        weight=(grad.abs() * spread).sum(summed).reshape(-1),
        bias=grad.abs().sum(summed).reshape(-1),
    )
    return results, magnitudes


def long_sum(case: NormCase) -> NormInputs:
    """Return inputs for a case of MANY_ROWS. In the weights' gradients all terms of a sum have the same sign, because x
    keeps its sign in each channel."""
    count, channels = case.rows * case.width, case.shape[1]
    sign = 1 - 2 * (torch.arange(channels) % 2).to(torch.float32)
    length = count // channels // case.shape[0]
    x = (1 + hashed_inputs.uniform((count,), seed=55) / 2).reshape(case.shape[0], channels, length) * sign[:, None]
    grad = hashed_inputs.uniform((count,), seed=56).reshape(case.shape)
    ones = torch.ones(channels)
    return NormInputs(x.reshape(case.shape).to(case.x), ones.to(case.weight), ones.to(case.weight), grad)
