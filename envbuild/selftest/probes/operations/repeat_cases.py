"""The operations of the probe repeat, their inputs (different values of the same shapes for each call), and exact
results."""

from __future__ import annotations

import functools
import importlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, cast

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import short_name
from envbuild.selftest.numerics import float64_operations, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_operations import Arithmetic, Exact
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.probes.convolution import conv_sampled_shapes
from envbuild.selftest.probes.convolution.conv_sampled_cases import NEAREST, paired, sum_windows

Run = Callable[..., torch.Tensor]
Exactly = Callable[..., Exact]
Shape = tuple[int, ...]
Given = Sequence[tuple[Callable[[Shape, int], torch.Tensor], Shape]]  # how each input is made from its shape and a seed

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16
VARIANTS, VARIANTS_LARGE = 3, 2  # inputs of an operation
RARE = 8  # rounds from one call of a large tensor to the next
KEYS = 97  # rows of a table
HOW = Arithmetic(SINGLE)
# A convolution of images from 8 to 12 channels in two groups.
IMAGES = conv_sampled_shapes.ConvShape(
    images=2,
    groups=2,
    channels=4,
    filters=6,
    large=(13, 11),
    small=(13, 11),
    kernel=(3, 3),
    stride=(1, 1),
    padding=((1, 1), (1, 1)),
    dilation=(1, 1),
    transposed=False,
    extra=(0, 0),
    same=False,
)


@dataclass(frozen=True)
class Repeated:
    """An operation with inputs of the same shapes. `whole`: results are exact in any order of summation, so they have
    the same bits in each mode. `narrow`: that is true in half precision too. `every`: rounds from one call to the
    next."""

    name: str
    cases: tuple[Case, ...]
    whole: bool = True
    narrow: bool = False
    every: int = 1


@functools.cache
def repeated_operations() -> tuple[Repeated, ...]:
    """The operations. The sizes of each exceed vectors, tiles or blocks, with a remainder."""
    ones, many = functools.partial(hashed_inputs.whole, most=1), functools.partial(hashed_inputs.whole, most=99)
    signed, shifted = hashed_inputs.signed, lambda shape, seed: 1 + hashed_inputs.uniform(shape, seed)
    turned = lambda shape, seed: many(shape[::-1], seed).t()  # noqa: E731
    places = lambda shape, seed: hashed_inputs.hashes(shape[0], seed) % KEYS  # noqa: E731
    rows, wide, large = (65, 257), (131, 257), (1031, 1021)
    factors, batches = ((ones, (129, 300)), (ones, (300, 67))), ((ones, (5, 17, 33)), (ones, (5, 33, 65)))
    layer = ((ones, (45, 67)), (ones, (95, 67)), (many, (95,)))
    images, filters, grad = (ones, (2, 8, 13, 11)), (ones, IMAGES.weights), (ones, (2, 12, 13, 11))
    heads, table = ((signed, (1, 2, 33, 16)),) * 3, ((places, (601,)), (many, (KEYS, 33)))
    softmax, gelu, attention = (
        functools.partial(function, HOW)
        for function in (float64_operations.softmax, float64_operations.gelu, float64_operations.attention)
    )
    return (
        _repeated("linear 45x67x95", SINGLE, _linear, _linear_exactly, layer, narrow=True),
        _repeated("linear 45x67x95", BRAIN, _linear, _linear_exactly, layer),
        _repeated("mm 129x300x67", SINGLE, lambda a, b: torch.mm(a, b), _product, factors),
        _repeated("bmm 5x17x33x65", SINGLE, lambda a, b: torch.bmm(a, b), _products, batches),
        _repeated("conv2d", SINGLE, _conv, _conv_exactly, (images, filters, (many, (12,))), whole=False),
        _repeated("conv2d weight gradient", SINGLE, _conv_weights, _conv_weights_exactly, (images, grad), whole=False),
        _repeated("sum of 100003", SINGLE, lambda x: x.sum(), _sum, ((many, (100003,)),)),
        _repeated("cumsum 9x1025", SINGLE, lambda x: torch.cumsum(x, dim=1), _cumsum, ((many, (9, 1025)),)),
        _repeated("x y + x 65x257", SINGLE, _mixed, _mixed_exactly, ((many, rows), (many, rows))),
        _repeated("x / y 65x257", SINGLE, lambda x, y: x / y, _quotient, ((many, rows), (shifted, rows)), whole=False),
        _repeated(
            "softmax 64x257", SINGLE, lambda x: torch.softmax(x, dim=-1), softmax, ((signed, (64, 257)),), whole=False
        ),
        _repeated("gelu 4099", SINGLE, lambda x: F.gelu(x), gelu, ((signed, (4099,)),), whole=False),
        _norms(((signed, (33, 96)), (shifted, (96,)), (signed, (96,)))),
        _repeated("scaled_dot_product_attention 1x2x33x16", SINGLE, _attention, attention, heads, whole=False),
        _repeated("rows by index 601 of 97x33", HALF, lambda places, rows: rows[places], _rows, table),
        _repeated("sums by index 97x33", SINGLE, _sums, _sums_exactly, ((places, (601,)), (ones, (601, 33)))),
        _repeated("sort 9x1025", SINGLE, lambda x: torch.sort(x)[0], _sorted, ((signed, (9, 1025)),)),
        _repeated("transposed copy 131x257", BRAIN, _contiguous, without_rounding, ((turned, wide),)),
        _repeated("to bf16 131x257", SINGLE, lambda x: x.to(BRAIN), without_rounding, ((many, wide),)),
        _repeated("x y + x 1031x1021", SINGLE, _mixed, _mixed_exactly, ((many, large), (many, large)), every=RARE),
        _repeated("transposed copy 1031x1021", SINGLE, _contiguous, without_rounding, ((turned, large),), every=RARE),
    )


def small_operations() -> list[Repeated]:
    return [each for each in repeated_operations() if each.every == 1]


def _repeated(name: str, dtype: torch.dtype, run: Run, exact: Exactly, given: Given, **traits: Any) -> Repeated:
    title = f"{short_name(dtype)} {name}"
    numbers = range(VARIANTS_LARGE if "every" in traits else VARIANTS)
    cases = tuple(_case(f"{title}, input {number}", dtype, run, exact, given, number) for number in numbers)
    return Repeated(title, cases, **traits)


def _case(name: str, dtype: torch.dtype, run: Run, exact: Exactly, given: Given, variant: int) -> Case:
    values = [make(shape, 800 + 10 * variant + number) for number, (make, shape) in enumerate(given)]
    return Case(
        name,
        dtype,
        tuple(part.to(dtype) if part.is_floating_point() else part for part in values),
        lambda *parts: {"output": run(*parts)},
        lambda *parts: {"output": exact(*parts)},
    )


def _norms(given: Given) -> Repeated:
    """Each input has a different epsilon."""
    cases = []
    for variant, epsilon in enumerate((1e-5, 0.5, 2.0)):
        run = functools.partial(_norm, epsilon=epsilon)
        exact = functools.partial(float64_operations.layer_norm, HOW, epsilon=epsilon)
        cases.append(_case(f"fp32 layer_norm 33x96 eps {epsilon:g}", SINGLE, run, exact, given, variant))
    return Repeated("layer_norm", tuple(cases), whole=False)


def _norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b, epsilon)


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w, b)


def _linear_exactly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Exact:
    return without_rounding(product(x, w.t()) + b)


def _product(a: torch.Tensor, b: torch.Tensor) -> Exact:
    return without_rounding(product(a, b))


def _products(a: torch.Tensor, b: torch.Tensor) -> Exact:
    return without_rounding(torch.stack([product(*pair) for pair in zip(a, b)]))


def _conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, b, padding=1, groups=IMAGES.groups)


def _conv_exactly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Exact:
    return Exact(sum_windows(IMAGES, x, w) + b.view(-1, 1, 1), torch.tensor(NEAREST, dtype=torch.float64))


def _conv_weights(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    by_library: Any = importlib.import_module("torch.nn.grad").conv2d_weight
    return cast(torch.Tensor, by_library(x, IMAGES.weights, grad, padding=1, groups=IMAGES.groups))


def _conv_weights_exactly(x: torch.Tensor, grad: torch.Tensor) -> Exact:
    return Exact(paired(IMAGES, grad, x), torch.tensor(NEAREST, dtype=torch.float64))


def _sum(x: torch.Tensor) -> Exact:
    return without_rounding(torch.tensor(math.fsum(x.tolist()), dtype=torch.float64))


def _cumsum(x: torch.Tensor) -> Exact:
    return _listed([list(itertools.accumulate(row)) for row in x.tolist()])


def _listed(values: Any) -> Exact:
    return without_rounding(torch.tensor(values, dtype=torch.float64))


def _mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * y + x


def _mixed_exactly(x: torch.Tensor, y: torch.Tensor) -> Exact:
    return without_rounding(x * y + x)


def _quotient(x: torch.Tensor, y: torch.Tensor) -> Exact:
    return Exact(x / y, tolerances.rounding(x / y, SINGLE))


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def _rows(places: torch.Tensor, table: torch.Tensor) -> Exact:
    rows = table.tolist()
    return _listed([rows[place] for place in places.tolist()])


def _sums(places: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return rows.new_zeros(KEYS, rows.shape[1]).index_add_(0, places, rows)


def _sums_exactly(places: torch.Tensor, rows: torch.Tensor) -> Exact:
    return without_rounding(product((torch.arange(KEYS)[:, None] == places).to(torch.float64), rows))


def _sorted(x: torch.Tensor) -> Exact:
    return _listed([sorted(row) for row in x.tolist()])


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous()
