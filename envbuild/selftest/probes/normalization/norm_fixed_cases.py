"""Norms, the cases for all of them, and the expected results in float64.

Each case has rows of four kinds: around 0; around 1, where the variance cancels if it is computed as E[x^2] - E[x]^2;
512 times as large, where squares exceed float16's range; and 2^-6 times as large, where epsilon matters and
1 / sigma^3, which the backward pass needs, exceeds float16's range.
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
WIDTHS = (256, 1023, 4096, 8192)  # elements of one normalisation; the second is odd
AUTOCAST_WIDTHS = WIDTHS[1:3]
ROWS = 8
GROUPS, CHANNELS = 4, 8  # of a GroupNorm: the number of groups, and the channels of each group
EPSILON = 1e-5
MANY_ROWS, NARROW = 4096, 32  # half precision cannot hold sums over so many rows

Pair = tuple[torch.dtype, torch.dtype]


def inputs_dtype(x: torch.dtype, weight: torch.dtype) -> tuple[torch.dtype, ...]:
    return (x,)


@dataclass(frozen=True)
class Norm:
    """One implementation: `call(x, weight, bias)`, x being (rows, n), or (rows, channels, length) where it has groups.

    `centred`: it subtracts the mean. `groups`: the number of groups of channels that are normalised separately.
    `outputs`: the dtypes that its result may have. `declared`: the pairs of dtypes, input's and weight's, that it must
    support. `roundings`: how often it may round intermediate results, to the input's dtype or its result's, whichever
    is less precise. `upcasts`: it computes in float32; if it need not, rows that exceed float16's range in between are
    tested separately and only reported. `autocast`: the dtype to which it casts all inputs under autocast, so that it
    supports every pair there; None: it leaves autocast to torch.
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
    """One call of one norm. `number`: its index among all cases, so that no two have the same values."""

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
        """The dtypes that the result may have; torch's autocast may compute a norm in float32."""
        if self.cast is not None:
            return (self.cast,)
        return (*self.norm.outputs(self.x, self.weight), *((torch.float32,) if self.autocast else ()))

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype to which the norm casts all inputs, if it does."""
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
    """The result y, and the gradients of the inputs."""

    y: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor


def torch_norms(on_cpu: bool = True) -> tuple[Norm, ...]:
    """torch's own norms, looked up when they are called.

    On a GPU they must support input and weight of the same dtype. The CPU's norms support half types only in later
    releases of torch.
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
        # torch 2.4 and 2.5 compose it of single operations in the input's dtype, which the weight's may promote.
        Norm(
            "rms_norm",
            rms,
            centred=False,
            outputs=lambda x, weight: (x, torch.promote_types(x, weight)),
            declared=declared,
            roundings=5,
            upcasts=False,
        ),
        # On CUDA mean and 1 / sigma are kept in the input's dtype before they are used.
        Norm("group_norm", group, groups=GROUPS, declared=declared, roundings=2),
    )


def norm_case_groups(norms: Sequence[Norm]) -> Iterator[list[NormCase]]:
    """For each norm and pair of dtypes, without autocast and with it: one case of each width."""
    number = itertools.count()
    for norm, x, weight, autocast in itertools.product(norms, DTYPES, DTYPES, (False, True)):
        extreme = norm.upcasts or x != torch.float16
        widths = AUTOCAST_WIDTHS if autocast else WIDTHS
        yield [NormCase(norm, x, weight, ROWS, width, autocast, next(number), extreme) for width in widths]


def norm_inputs(case: NormCase) -> NormInputs:
    """x in [-1, 1) and the kinds of rows, weight in [0.5, 1.5), bias and grad in [-1, 1), quantised to their dtypes.
    All values come from counters, and are rolled by the case's number."""
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
    """Cached for each shape, because hashing takes longer than a norm."""
    return hashed_inputs.signed((rows, columns), seed)


def exact_norm(norm: Norm, given: NormInputs) -> tuple[Results, Results]:
    """The results in float64, and their magnitudes: the same with every term positive."""
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
    """Inputs for a case of MANY_ROWS: the sums of the weights' gradients only grow, as x keeps its sign in each
    channel."""
    count, channels = case.rows * case.width, case.shape[1]
    sign = 1 - 2 * (torch.arange(channels) % 2).to(torch.float32)
    length = count // channels // case.shape[0]
    x = (1 + hashed_inputs.uniform((count,), seed=55) / 2).reshape(case.shape[0], channels, length) * sign[:, None]
    grad = hashed_inputs.uniform((count,), seed=56).reshape(case.shape)
    ones = torch.ones(channels)
    return NormInputs(x.reshape(case.shape).to(case.x), ones.to(case.weight), ones.to(case.weight), grad)
