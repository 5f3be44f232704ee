"""Operations, inputs and exact results of the probe `repeat`. The calls of an operation have different values of the
same shapes."""

from __future__ import annotations

import dataclasses
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
from envbuild.selftest.numerics import backward_pass, float64_reference_operations, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Arithmetic, Exact
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.probes.convolution import conv_argument_space
from envbuild.selftest.probes.convolution.conv_sampled_cases import NEAREST, paired, sum_windows

Run = Callable[..., torch.Tensor]
Exactly = Callable[..., Exact]
Shape = tuple[int, ...]
# for each input, the function that makes it from a shape and a seed, and the shape
Given = Sequence[tuple[Callable[[Shape, int], torch.Tensor], Shape]]

SINGLE, HALF, BRAIN, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
VARIANTS, VARIANTS_LARGE = 3, 2  # number of different inputs of an operation
RARE = 8  # a large tensor is used only in every 8th round
LESS_OFTEN = 3  # every 3rd round, for the many operations that share the time
RARER = 25  # every 25th round, for operations that take longer
GROUPS = 4  # groups of channels
KEYS = 97  # rows of a table
HOW = Arithmetic(SINGLE)
# A convolution of images from 8 to 12 channels, in two groups.
IMAGES = conv_argument_space.ConvShape(
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
    """An operation with several inputs of the same shapes.

    `whole`: results are exact in any order of summation, so they have the same bits in each mode. `narrow`: this is
    true in half precision too. `every`: N if the operation runs only in every N-th round.
    """

    name: str
    cases: tuple[Case, ...]
    whole: bool = True
    narrow: bool = False
    every: int = 1


@functools.cache
def repeated_operations() -> tuple[Repeated, ...]:
    """Return the operations. Most of their sizes exceed vectors, tiles or blocks, with a remainder."""
    ones, many = functools.partial(hashed_inputs.whole, most=1), functools.partial(hashed_inputs.whole, most=99)
    signed, shifted = hashed_inputs.signed, lambda shape, seed: 1 + hashed_inputs.uniform(shape, seed)
    turned = lambda shape, seed: many(shape[::-1], seed).t()  # noqa: E731
    places = lambda shape, seed: hashed_inputs.hashes(shape[0], seed) % KEYS  # noqa: E731
    rows, wide, large = (65, 257), (131, 257), (1031, 1021)
    factors, batches = ((ones, (129, 300)), (ones, (300, 67))), ((ones, (5, 17, 33)), (ones, (5, 33, 65)))
    layer = ((ones, (45, 67)), (ones, (95, 67)), (many, (95,)))
    images, filters, grad = (ones, (2, 8, 13, 11)), (ones, IMAGES.weights), (ones, (2, 12, 13, 11))
    heads, table = ((signed, (1, 2, 33, 16)),) * 3, ((places, (601,)), (many, (KEYS, 33)))
    turned_factors, products = ((ones, (131, 67)), (ones, (33, 131))), ((ones, (45, 67)), (ones, (67, 95)))
    small_layer, lines = ((ones, (9, 33)), (ones, (31, 33)), (many, (31,))), ((ones, (3, 4, 37)), (ones, (5, 4, 3)))
    grad_filters = (ones, IMAGES.weights)
    softmax, gelu, attention = (
        functools.partial(function, HOW)
        for function in (
            float64_reference_operations.softmax,
            float64_reference_operations.gelu,
            float64_reference_operations.attention,
        )
    )
    return (
        _repeated("linear 45x67x95", SINGLE, _linear, _linear_exactly, layer, narrow=True),
        _repeated("linear 45x67x95", BRAIN, _linear, _linear_exactly, layer),
        _repeated("mm 129x300x67", SINGLE, lambda a, b: torch.mm(a, b), _product, factors),
        _repeated("bmm 5x17x33x65", SINGLE, lambda a, b: torch.bmm(a, b), _products, batches),
        # The same operations in other dtypes and sizes. This detects a plan that was kept for one of them and is used
        # for another.
        _repeated("mm 33x65x17", SINGLE, lambda a, b: torch.mm(a, b), _product, ((ones, (33, 65)), (ones, (65, 17)))),
        _repeated("mm 129x300x67", BRAIN, lambda a, b: torch.mm(a, b), _product_rounded, factors),
        _repeated("mm 65x33x129", HALF, lambda a, b: torch.mm(a, b), _product, ((ones, (65, 33)), (ones, (33, 129)))),
        _repeated("mm 33x65x17", DOUBLE, lambda a, b: torch.mm(a, b), _product, ((ones, (33, 65)), (ones, (65, 17)))),
        _repeated("mm of turned 67x131x33", SINGLE, _turned_product, _turned_product_exactly, turned_factors),
        _repeated("mv 131x257", SINGLE, lambda a, b: torch.mv(a, b), _vector_product, ((ones, wide), (ones, (257,)))),
        _repeated("addmm 45x67x95", SINGLE, _addmm, _addmm_exactly, ((many, (45, 95)), *products)),
        _repeated("bmm 5x17x33x65", BRAIN, lambda a, b: torch.bmm(a, b), _products, batches),
        _repeated("baddbmm 5x17x33x65", SINGLE, _baddbmm, _baddbmm_exactly, ((many, (5, 17, 65)), *batches)),
        _repeated("linear 9x33x31", SINGLE, _linear, _linear_exactly, small_layer, narrow=True),
        _repeated("sum over columns 131x257", SINGLE, lambda x: x.sum(0), _column_sums, ((many, wide),)),
        _repeated("sum over rows 131x257", HALF, lambda x: x.sum(1), _row_sums, ((ones, wide),)),
        _repeated("mean over rows 64x256", SINGLE, lambda x: x.mean(1), _row_means, ((many, (64, 256)),)),
        _repeated("max over rows 131x257", SINGLE, lambda x: x.amax(1), _row_maxima, ((signed, wide),)),
        _repeated("argmax over rows 131x257", SINGLE, lambda x: x.argmax(1), _row_places, ((signed, wide),)),
        _repeated("cumsum over columns 257x9", SINGLE, lambda x: torch.cumsum(x, 0), _column_scan, ((many, (257, 9)),)),
        _repeated("conv1d", SINGLE, _conv_line, _conv_line_exactly, lines, whole=False),
        _repeated("conv1d", BRAIN, _conv_line, _conv_line_exactly, lines, whole=False),
        _repeated(
            "conv2d input gradient", SINGLE, _conv_inputs, _conv_inputs_exactly, (grad_filters, grad), whole=False
        ),
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
        *_models_operations(),
    )


def _models_operations() -> tuple[Repeated, ...]:
    """Return further operations of models, gradients among them."""
    ones, many = functools.partial(hashed_inputs.whole, most=1), functools.partial(hashed_inputs.whole, most=99)
    signed, shifted = hashed_inputs.signed, lambda shape, seed: 1 + hashed_inputs.uniform(shape, seed)
    places = lambda shape, seed: hashed_inputs.hashes(shape[0], seed) % KEYS  # noqa: E731
    rows, image, logits, heads = (65, 257), (2, 8, 13, 11), (64, 257), (1, 2, 65, 16)
    layer = ((ones, (45, 67)), (ones, (95, 67)), (many, (95,)), (ones, (45, 95)))
    channels = ((signed, (6, 8, 37)), (shifted, (8,)), (signed, (8,)))
    targets, table = (places, (logits[0],)), ((places, (601,)), (many, (KEYS, 33)))
    factors, places_large = ((ones, (1031, 17)), (ones, (17, 1021))), ((places, (4099,)), (many, (KEYS, 257)))
    attention = functools.partial(float64_reference_operations.attention, Arithmetic(BRAIN))
    silu = functools.partial(float64_reference_operations.silu, HOW)
    often = (
        _repeated("linear gradients 45x67x95", SINGLE, _linear_gradients, _linear_gradients_exactly, layer),
        _repeated("linear gradients 45x67x95", HALF, _linear_gradients, _linear_gradients_exactly, layer),
        _repeated(
            "softmax gradient 64x257",
            SINGLE,
            _softmax_gradient,
            _softmax_gradient_exactly,
            ((signed, logits),) * 2,
            whole=False,
        ),
        _repeated(
            "scaled_dot_product_attention 1x2x65x16", BRAIN, _attention, attention, ((signed, heads),) * 3, whole=False
        ),
        _repeated("causal attention 1x2x65x16", SINGLE, _causal, _causal_exactly, ((signed, heads),) * 3, whole=False),
        _repeated(
            "attention gradient 1x2x65x16",
            SINGLE,
            _values_gradient,
            _values_gradient_exactly,
            ((signed, heads),) * 4,
            whole=False,
        ),
        _repeated("embedding 601 of 97x33", SINGLE, lambda places, rows: F.embedding(places, rows), _rows, table),
        _repeated("embedding gradient 97x33", SINGLE, _table, _sums_exactly, ((places, (601,)), (ones, (601, 33)))),
        _repeated("cross_entropy 64x257", SINGLE, _losses, _losses_exactly, (targets, (signed, logits)), whole=False),
        _repeated("group_norm 6x8x37", SINGLE, _group_norm, _group_norm_exactly, channels, whole=False),
        _repeated("batch_norm 6x8x37", SINGLE, _batch_norm, _batch_norm_exactly, channels, whole=False),
        _repeated("silu 4099", SINGLE, lambda x: F.silu(x), silu, ((signed, (4099,)),), whole=False),
        _repeated("max_pool2d 2x8x13x11", SINGLE, _pool, _pool_exactly, ((signed, image),)),
        _repeated("cat 65x257", HALF, lambda x, y: torch.cat((x, y), 1), _both, ((many, rows), (many, rows))),
        _repeated("where 65x257", BRAIN, _larger, _larger_exactly, ((many, rows), (many, rows))),
        _repeated("topk 9x1025", SINGLE, lambda x: torch.topk(x, 7)[0], _seven, ((signed, (9, 1025)),)),
        _repeated("list of tensors added", SINGLE, _lists, _lists_exactly, ((many, (4099,)), (many, (4099,)))),
    )
    return (
        *(dataclasses.replace(each, cases=each.cases[:VARIANTS_LARGE], every=LESS_OFTEN) for each in often),
        _repeated("mm 1031x17x1021", SINGLE, lambda a, b: torch.mm(a, b), _product, factors, every=RARER),
        _repeated(
            "embedding 4099 of 97x257", BRAIN, lambda places, rows: F.embedding(places, rows), _rows, places_large,
            every=RARER,
        ),
    )  # fmt: skip


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
    """Return a layer norm whose cases have different epsilons."""
    cases = []
    for variant, epsilon in enumerate((1e-5, 0.5, 2.0)):
        run = functools.partial(_norm, epsilon=epsilon)
        exact = functools.partial(float64_reference_operations.layer_norm, HOW, epsilon=epsilon)
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


def _product_rounded(a: torch.Tensor, b: torch.Tensor) -> Exact:
    """Return the exact product. It needs no rounding: bfloat16 represents integers up to 256, and sums of 300 random
    signs stay below that."""
    return without_rounding(product(a, b))


def _turned_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a.t(), b.t())


def _turned_product_exactly(a: torch.Tensor, b: torch.Tensor) -> Exact:
    return without_rounding(product(a.t(), b.t()))


def _vector_product(a: torch.Tensor, b: torch.Tensor) -> Exact:
    return without_rounding(product(a, b[:, None])[:, 0])


def _addmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.addmm(c, a, b, alpha=2, beta=-1)


def _addmm_exactly(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Exact:
    return without_rounding(2 * product(a, b) - c)


def _baddbmm(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.baddbmm(c, a, b, beta=-1)


def _baddbmm_exactly(c: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Exact:
    return without_rounding(torch.stack([product(*pair) for pair in zip(a, b)]) - c)


def _column_sums(x: torch.Tensor) -> Exact:
    return _listed([math.fsum(column) for column in zip(*x.tolist())])


def _row_sums(x: torch.Tensor) -> Exact:
    return _listed([math.fsum(row) for row in x.tolist()])


def _row_means(x: torch.Tensor) -> Exact:
    """Return the means of rows. The number of elements in a row is a power of two, so that the means of integers are
    exact."""
    return _listed([math.fsum(row) / len(row) for row in x.tolist()])


def _row_maxima(x: torch.Tensor) -> Exact:
    return _listed([max(row) for row in x.tolist()])


def _row_places(x: torch.Tensor) -> Exact:
    return _listed([row.index(max(row)) for row in x.tolist()])


def _column_scan(x: torch.Tensor) -> Exact:
    return _listed([*zip(*(itertools.accumulate(column) for column in zip(*x.tolist())))])


def _conv_line(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv1d(x, w, padding=1)


def _conv_line_exactly(x: torch.Tensor, w: torch.Tensor) -> Exact:
    padded, n = F.pad(x, (1, 1)), x.shape[2]
    taps = [torch.stack([product(w[..., tap], part[:, tap : tap + n]) for part in padded]) for tap in range(w.shape[2])]
    return Exact(sum(taps[1:], taps[0]), torch.tensor(NEAREST, dtype=torch.float64))


def _conv_inputs(w: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    by_library: Any = importlib.import_module("torch.nn.grad").conv2d_input
    return cast(torch.Tensor, by_library((2, 8, 13, 11), w, grad, padding=1, groups=IMAGES.groups))


def _conv_inputs_exactly(w: torch.Tensor, grad: torch.Tensor) -> Exact:
    """Return the gradient of a convolution's input. It is a convolution of the gradients with the kernels, which are
    rotated by 180 degrees and have input and output channels swapped."""
    groups, out = IMAGES.groups, w.shape[0] // IMAGES.groups
    parts = w.view(groups, out, *w.shape[1:]).transpose(1, 2).flip(3, 4).reshape(-1, out, *w.shape[2:])
    padded, (h, wide) = F.pad(grad, (1, 1, 1, 1)), grad.shape[2:]
    found = torch.zeros(len(grad), parts.shape[0], h, wide, dtype=torch.float64)
    each = parts.shape[0] // groups
    for image, group, i, j in itertools.product(range(len(grad)), range(groups), range(3), range(3)):
        window = padded[image, group * out : (group + 1) * out, i : i + h, j : j + wide].reshape(out, -1)
        rows = slice(group * each, (group + 1) * each)
        found[image, rows] += product(parts[rows, :, i, j], window).view(each, h, wide)
    return Exact(found, torch.tensor(NEAREST, dtype=torch.float64))


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


def _gradients(run: Run, leaves: Sequence[torch.Tensor], grad: torch.Tensor) -> torch.Tensor:
    """Return the gradients of the inputs in one vector, even if inference mode is on."""
    with torch.inference_mode(False), torch.enable_grad():
        leaves = [values.detach().requires_grad_() for values in leaves]
        found = backward_pass.gradients(run(*leaves), leaves, grad)
    return torch.cat([gradient.flatten() for gradient in found])


def _linear_gradients(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return _gradients(lambda x, w, b: torch.addmm(b, x, w.t()), (x, w, b), grad)


def _linear_gradients_exactly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, grad: torch.Tensor) -> Exact:
    ones = torch.ones(1, len(grad), dtype=torch.float64)
    parts = product(grad, w), product(grad.t().contiguous(), x), product(ones, grad)
    return without_rounding(torch.cat([part.flatten() for part in parts]))


def _softmax_gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return _gradients(lambda leaf: torch.softmax(leaf, dim=-1), (x,), grad)


def _softmax_gradient_exactly(x: torch.Tensor, grad: torch.Tensor) -> Exact:
    """Return the expected gradient. The tolerance of softmax counts twice: for y, and for the sum of y grad. That sum
    also has the error of a summation."""
    y = float64_reference_operations.probabilities(x)
    total, most = (y * grad).sum(-1, keepdim=True), (y * grad.abs()).sum(-1, keepdim=True)
    value, size = y * (grad - total), grad.abs() + most
    distance = float((x.amax(-1, keepdim=True) - x).max())
    relative = tolerances.summation(x.shape[-1]) * (8 * (1 + distance) + 2)
    return Exact(value.flatten(), (tolerances.rounding(value, SINGLE) + relative * y * size).flatten())


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _causal_exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exact:
    """Return causal attention, where each query is computed separately with the keys up to its position."""
    rows = [
        float64_reference_operations.attention(HOW, q[:, :, n : n + 1], k[:, :, : n + 1], v[:, :, : n + 1])
        for n in range(q.shape[2])
    ]
    return Exact(torch.cat([row.value for row in rows], 2), torch.cat([row.bound for row in rows], 2))


def _values_gradient(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the values; the gradients of queries and keys are computed too."""
    return _gradients(_attention, (q, k, v), grad)[-v.numel() :]


def _values_gradient_exactly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> Exact:
    depth, length = q.shape[-1], k.shape[-2]
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) / math.sqrt(depth)
    weights = float64_reference_operations.probabilities(scores)
    value = (weights[..., None] * grad[..., :, None, :]).sum(-3)
    spread = (weights[..., None] * grad[..., :, None, :]).square().sum(-3).sqrt()
    logit = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / math.sqrt(depth)
    bound = tolerances.attention_gradient_cap(SINGLE, logit, depth, length) * spread + tolerances.rounding(
        value, SINGLE
    )
    return Exact(value.flatten(), (bound + tolerances.ROUNDED * spread.max()).flatten())


def _table(places: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        table = grad.new_zeros(KEYS, grad.shape[1])
    return _gradients(lambda leaf: F.embedding(places, leaf), (table,), grad).view(table.shape)


def _losses(targets: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, targets, reduction="none")


def _losses_exactly(targets: torch.Tensor, x: torch.Tensor) -> Exact:
    value = torch.logsumexp(x, -1) - x[torch.arange(len(x)), targets]
    return Exact(value, tolerances.rounding(value, SINGLE) + tolerances.log_softmax(value, x.shape[-1]))


def _group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.group_norm(x, GROUPS, w, b)


def _group_norm_exactly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Exact:
    shape = (len(x), GROUPS, -1)
    w, b = (values[:, None].expand(x.shape).reshape(shape) for values in (w, b))
    return _reshaped(float64_reference_operations.layer_norm(HOW, x.reshape(shape), w, b, 1e-5), x.shape)


def _batch_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, None, None, w, b, training=True).transpose(0, 1)


def _batch_norm_exactly(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Exact:
    turned = x.transpose(0, 1)
    flat = turned.reshape(x.shape[1], -1)
    return _reshaped(float64_reference_operations.layer_norm(HOW, flat, w[:, None], b[:, None], 1e-5), turned.shape)


def _reshaped(exact: Exact, shape: Sequence[int]) -> Exact:
    return Exact(exact.value.reshape(tuple(shape)), exact.bound.reshape(tuple(shape)))


def _pool(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, stride=2, padding=1)


def _pool_exactly(x: torch.Tensor) -> Exact:
    padded = F.pad(x, (1, 1, 1, 1), value=-math.inf)
    return without_rounding(padded.unfold(2, 3, 2).unfold(3, 3, 2).flatten(4).amax(-1))


def _both(x: torch.Tensor, y: torch.Tensor) -> Exact:
    return _listed([[*one, *other] for one, other in zip(x.tolist(), y.tolist())])


def _larger(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(x > y, x, y)


def _larger_exactly(x: torch.Tensor, y: torch.Tensor) -> Exact:
    return without_rounding(torch.maximum(x, y))


def _seven(x: torch.Tensor) -> Exact:
    return _listed([sorted(row, reverse=True)[:7] for row in x.tolist()])


def _lists(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return x - y, computed with the functions for lists of tensors that optimizers use."""
    lists = [list(torch.split(values, [33, 4000, 1, 65])) for values in (x, y)]
    return torch.cat(torch._foreach_add(lists[0], lists[1], alpha=-1))


def _lists_exactly(x: torch.Tensor, y: torch.Tensor) -> Exact:
    return without_rounding(x - y)
