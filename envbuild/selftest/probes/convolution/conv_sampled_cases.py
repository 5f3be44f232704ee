"""conv.cases: sampled convolutions of one, two and three dimensions, plain and transposed, forward and backward.

For each tap of the kernel, the reference computes one matrix product in float64 over a slice of the padded input, and
adds these products: it uses no convolution. A plain convolution gathers a small tensor from a large one. A transposed
convolution spreads a small tensor over a large one. Each of the two is the gradient of the other with respect to its
input.

In the "whole" cases all values except the bias are 1 or -1. Every element then counts, and a product that is lost or
added twice changes a result by at least 1. Only Winograd and Fourier transforms leave fractions: a result must be so
close that rounding gives the right number. In float16 on a GPU, cuDNN may keep parts of a sum in half precision. There,
sums of more than about 100 products have a wider tolerance (tolerances.half_sums), which does not detect a few lost
products. In the "fractions" cases, float32 results have the tolerance of a matrix product, which detects a narrower
intermediate format.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, is_unsupported, short_name
from envbuild.selftest.numerics import (
    backward_pass,
    hashed_inputs,
    pairwise_case_sampling,
    tolerances,
    torch_fault_exclusions,
)
from envbuild.selftest.numerics.float64_reference_operations import Arithmetic, Exact
from envbuild.selftest.numerics.layouts_with_nan_gaps import with_nan_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.probes.convolution.conv_argument_space import (
    LAYER_SPACE,
    SPACE,
    ConvShape,
    Sizes,
    has_bias,
    point_of_layer,
    shape,
    with_usual,
)

Results = Mapping[str, torch.Tensor]

NEAREST = 0.49  # the largest error of an integer result: less than 1/2
FEWEST_TERMS = 64  # transforms round about this often even if a sum has fewer products
UNCOVERED = 1.0  # the value of input positions that no window reads
COUNTS = {"quick": 40, "standard": 200, "full": 1200}
LAYER_COUNTS = {"quick": 2, "standard": 20, "full": 400}

GRADIENTS = ("gradient of the input", "gradient of the weights", "gradient of the bias")
Layout = tuple[str, str, str]  # the layouts of the input, the weights and the gradient of the output
Variant = tuple[torch.dtype, Layout]
# A value, the number of products in an element, and the sums of each image or None: see _exactly.
Sums = tuple[torch.Tensor, int, "torch.Tensor | None"]
Missing = Mapping[Variant, Collection[str]]  # for each variant, the results left out: torch computes them wrongly
APART = "fp32 output (weights alone channels last)"
CONTIGUOUS, ALL_LAST = ("contiguous",) * 3, ("channels last",) * 3
PER_IMAGE = ("output", GRADIENTS[0])
# Layouts that other operations also have, with the names used there.
COMMON_LAYOUTS = {"channels last": "channels last", "turned": "last two swapped", "offset": "shifted by 1"}


def conv_cases(context: Context) -> None:
    """conv.cases: sampled convolutions, plain and transposed, and their gradients are exact on integers."""
    pairwise_case_sampling.check(context, sampled_operations(context.device, context.job.allow_tf32))


def sampled_operations(device: torch.device, tf32: bool) -> tuple[Operation, ...]:
    usual, layer = (functools.partial(make, device=device, tf32=tf32) for make in (case, case_of_layer))
    return (
        Operation("convolution", SPACE, usual, COUNTS),
        Operation("convolution of a model's layer", LAYER_SPACE, layer, LAYER_COUNTS),
    )


def case_of_layer(point: Point, seed: int, device: torch.device, tf32: bool) -> Case:
    """Build the case of a model's layer for one combination of values of LAYER_SPACE."""
    return case(point_of_layer(point), seed, device, tf32)


def case(point: Point, seed: int, device: torch.device, tf32: bool) -> Case:
    """Build the case for one combination of parameter values (`point`): with integers, in each dtype in which the
    device supports the convolution; with fractions, in float32 only."""
    point = with_usual(point)
    what, kind = shape(point), point["values"]
    channels, _ = what.read
    out, places = what.written
    images = 1 if point["gradient"] == "expanded" else what.images
    shapes = [
        (what.images, channels, *map(len, what.covered)),
        what.weights,
        *([(out,)] if has_bias(point) else []),
        *([] if point["mode"] == "inference" else [(images, out, *places)]),
    ]
    values = [_values(sizes, 40 * seed + number, kind) for number, sizes in enumerate(shapes)]
    if has_bias(point) and kind == "whole":
        values[2] = hashed_inputs.whole((out,), 40 * seed + 2, 4)
    dtypes = [torch.float32, *(_halves(device, what.function) if kind == "whole" else [])]
    variants = [(dtype, _layout(point, number)) for number, dtype in enumerate(dtypes)]
    left_out = {variant: _left_out(point, what, variant, device) for variant in variants}
    missing = {variant: names for variant, names in left_out.items() if "output" not in names}
    run = functools.partial(_run, what=what, point=point, missing=missing)
    half_sums = device.type != "cpu"
    exact = functools.partial(_exact, what=what, point=point, missing=missing, tf32=tf32, half_sums=half_sums)
    how = f"{'bias, ' if has_bias(point) else ''}{point['mode']}, {kind}"
    return Case(f"{what}, {how}", torch.float32, tuple(values), run, exact)


@functools.cache
def _halves(device: torch.device, function: str) -> tuple[torch.dtype, ...]:
    """The 16-bit dtypes in which a device supports this convolution."""
    found = []
    for dtype in (torch.float16, torch.bfloat16):
        ones = [1] * int(function[-2])
        x, w = (torch.ones(1, 1, *ones, device=device, dtype=dtype).requires_grad_() for _ in range(2))
        try:
            output = getattr(F, function)(x, w)
            backward_pass.gradients(output, (x, w), torch.ones_like(output))
            found.append(dtype)
        except RuntimeError as error:
            if not is_unsupported(error):
                raise
    return tuple(found)


def _layout(point: Point, number: int) -> Layout:
    """Return the layout for the dtype with this index: the layout in `point`, channels last, or contiguous."""
    own = point["input"], point["weights"], point["gradient"]
    return (own, ALL_LAST, CONTIGUOUS)[(number + point["turn"]) % 3]


def _left_out(point: Point, what: ConvShape, variant: Variant, device: torch.device) -> Collection[str]:
    """Return the results that are left out. If the output is one of them, all results of the variant are."""
    dtype, (x, w, grad) = variant
    _, written = what.written
    row = what.channels * what.kernel[-1]
    at = {
        **point,
        **{"dtype": dtype, "input": x, "weights": w, "gradient": grad},
        "output padding of a stride": any(more >= stride for more, stride in zip(what.extra, what.stride)),
        "at most 16 depthwise channels": what.channels == what.filters == 1 < what.groups <= 16,
        "last dimension of the kernel 15 or more": what.kernel[-1] >= 15,
        "channels (even, below 16) times kernel width a multiple of 32 above 32": (
            what.channels % 2 == 0 and what.channels < 16 and row % 32 == 0 and row > 32
        ),
        "output shallower than the kernel": written[0] < what.dilation[0] * (what.kernel[0] - 1) + 1,
    }
    return torch_fault_exclusions.uncomputed_results("convolution", device.type, at)


def _named(name: str, variant: Variant) -> str:
    dtype, (x, w, grad) = variant
    return f"{short_name(dtype)} {name} (input {x}, weights {w}, gradient {grad})"


def _values(sizes: Sizes, seed: int, kind: str) -> torch.Tensor:
    """Return 1 or -1 (`kind` "whole"), or values in +-[1/2, 1)."""
    signs = hashed_inputs.signs(math.prod(sizes), seed).reshape(sizes)
    return signs if kind == "whole" else signs * (1 + hashed_inputs.uniform(sizes, seed + 20)) / 2


def lay_out_images(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in a different memory layout; gaps contain NaN."""
    if layout in COMMON_LAYOUTS:
        return with_nan_gaps(x, COMMON_LAYOUTS[layout])
    if layout == "rows apart":
        return _within(x, -1, 1, 2)
    if layout == "images apart":
        return _within(x, 1, 0, 1)
    if layout == "channels last apart":
        return _within(x.movedim(1, -1), -1, 1, 2).movedim(-1, 1)
    return x


def _within(x: torch.Tensor, dimension: int, before: int, after: int) -> torch.Tensor:
    """Return the values as a view of a tensor that is longer in one dimension and has NaN there."""
    sizes = list(x.shape)
    sizes[dimension] += before + after
    return x.new_full(sizes, math.nan).narrow(dimension, before, x.shape[dimension]).copy_(x)


def _run(*given: torch.Tensor, what: ConvShape, point: Point, missing: Missing) -> Results:
    """Return the results of all dtypes, each dtype with its own layout. The output is computed once more in float32
    with channels-last weights, whose layout may differ from that of the input."""
    whole = [_whole(given[0], what), *given[1:]]
    found = {}
    for (dtype, layout), without in missing.items():
        for name, part in _laid_out([values.to(dtype) for values in whole], what, point, layout, without).items():
            found[_named(name, (dtype, layout))] = part
    with torch.no_grad():
        last = lay_out_images(whole[1], "channels last")
        found[APART] = convolve(what, whole[0], last, given[2] if has_bias(point) else None)
    return found


def _laid_out(
    whole: Sequence[torch.Tensor], what: ConvShape, point: Point, layout: Layout, without: Collection[str]
) -> dict[str, torch.Tensor]:
    mode = point["mode"]
    leaves = [lay_out_images(whole[0], layout[0]), lay_out_images(whole[1], layout[1])]
    if has_bias(point):
        leaves.append(whole[2])
    if mode == "inference":
        with torch.inference_mode():
            return {"output": convolve(what, *leaves)}
    grad = (
        lay_out_images(whole[-1], layout[2])
        if len(whole[-1]) == what.images
        else whole[-1].expand(what.images, *[-1] * (what.rank + 1))
    )
    if mode == "second call":  # a first call with other values: detects results that are kept from it
        _differentiated(what, [(-leaf).flip(0) for leaf in leaves], grad.flip(0), without)
    if mode == "one image without a batch":
        found = _differentiated(what, [leaves[0][0], *leaves[1:]], grad[0], without)
        return {name: part[None] if name in PER_IMAGE else part for name, part in found.items()}
    return _differentiated(what, leaves, grad, without)


def _differentiated(
    what: ConvShape, given: Sequence[torch.Tensor], grad: torch.Tensor, without: Collection[str]
) -> dict[str, torch.Tensor]:
    leaves = [leaf.detach().requires_grad_(name not in without) for name, leaf in zip(GRADIENTS, given)]
    output = convolve(what, *leaves)
    wanted = {name: leaf for name, leaf in zip(GRADIENTS, leaves) if leaf.requires_grad}
    found = backward_pass.gradients(output, tuple(wanted.values()), grad)
    return {"output": output.detach(), **dict(zip(wanted, found))}


def convolve(what: ConvShape, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    padding: Any = "same" if what.same else [before for before, _ in what.padding]
    function = getattr(F, what.function)
    if what.transposed:
        return cast(torch.Tensor, function(x, w, bias, what.stride, padding, what.extra, what.groups, what.dilation))
    return cast(torch.Tensor, function(x, w, bias, what.stride, padding, what.dilation, what.groups))


def _whole(x: torch.Tensor, what: ConvShape) -> torch.Tensor:
    """Return the input with the positions that no window reads filled in."""
    _, sizes = what.read
    if tuple(x.shape[2:]) == sizes:
        return x
    whole = x.new_full((*x.shape[:2], *sizes), UNCOVERED)
    places = [
        torch.tensor(kept, device=x.device).reshape([-1 if n == number else 1 for n in range(what.rank)])
        for number, kept in enumerate(what.covered)
    ]
    where: Any = (slice(None), slice(None), *places)
    whole[where] = x
    return whole


def _exact(
    *given: torch.Tensor, what: ConvShape, point: Point, missing: Missing, tf32: bool, half_sums: bool
) -> Mapping[str, Exact]:
    exact = _exactly(given, what, point, rounded=not half_sums)
    found = {}
    for (dtype, layout), without in missing.items():
        how = Arithmetic(dtype, tf32, half_sums)
        for name, sums in exact.items():
            if name not in without:
                found[_named(name, (dtype, layout))] = _within_tolerance(sums, how, point["values"] == "whole")
    how = Arithmetic(torch.float32, tf32)
    return {**found, APART: _within_tolerance(exact["output"], how, point["values"] == "whole")}


def _exactly(given: Sequence[torch.Tensor], what: ConvShape, point: Point, rounded: bool) -> dict[str, Sums]:
    """Return each result, with the largest number of products in one of its elements. For the bias gradient also return
    the sum of each image if torch adds these sums in the dtype of the result. Its own CPU kernel for dilated
    convolutions does so (`rounded`)."""
    x, w = _whole(given[0], what), given[1]
    output = spread_windows(what, x, w) if what.transposed else sum_windows(what, x, w)
    if has_bias(point):
        output = output + given[2].reshape(-1, *[1] * what.rank)
    found: dict[str, Sums] = {"output": (output, what.products[what.transposed], None)}
    if point["mode"] == "inference":
        return found
    grad = given[-1].expand(what.images, *given[-1].shape[1:])
    back = sum_windows(what, grad, w) if what.transposed else spread_windows(what, grad, w)
    found[GRADIENTS[0]] = back, what.products[not what.transposed], None
    small, large = (x, grad) if what.transposed else (grad, x)
    found[GRADIENTS[1]] = paired(what, small, large), what.images * math.prod(what.small), None
    if has_bias(point):
        images = grad.flatten(2).sum(dim=2)
        apart = rounded and not what.transposed and max(what.dilation) > 1
        found[GRADIENTS[2]] = images.sum(dim=0), grad.numel() // len(given[2]), images if apart else None
    return found


def _within_tolerance(sums: Sums, how: Arithmetic, whole: bool) -> Exact:
    """Add the tolerance to sums of products whose magnitude is at most 1."""
    value, terms, images = sums
    size = torch.tensor(float(terms), dtype=torch.float64)
    if not whole:
        return Exact(value, tolerances.gemm(value, size, max(terms, FEWEST_TERMS), how.dtype, how.tf32))
    digits = 1 / tolerances.unit_roundoff(how.dtype)  # the dtype represents every integer up to this one
    limit = NEAREST + torch.where(value.abs() <= digits, 0.0, tolerances.rounding(value, how.dtype))
    if images is not None:
        limit = limit + tolerances.running_sum(images, how.dtype)
    if how.half_sums and how.dtype == torch.float16:
        limit = torch.maximum(limit, tolerances.half_sums(value, size, terms, how.dtype))
    return Exact(value, limit)


def sum_windows(what: ConvShape, large: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the small tensor: for each window of the large tensor, the sum of its elements times the weights."""
    padded, weights = _grouped(what, _padded(what, large), what.channels), _by_tap(what, w)
    total: torch.Tensor | float = 0.0
    for tap, window in _windows(what):
        total = total + torch.einsum("gsb,ngbp->ngsp", weights[tap], padded[window].flatten(3))
    return cast(torch.Tensor, total).reshape(what.images, -1, *what.small)


def spread_windows(what: ConvShape, small: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the large tensor: each element of the small tensor, times the weights, is added to its window."""
    flat, weights = _grouped(what, small, what.filters).flatten(3), _by_tap(what, w)
    sizes = [n + before + after for n, (before, after) in zip(what.large, what.padding)]
    total = small.new_zeros(what.images, what.groups, what.channels, *sizes)
    for tap, window in _windows(what):
        part = torch.einsum("gsb,ngsp->ngbp", weights[tap], flat)
        total[window] += part.reshape(*part.shape[:3], *what.small)
    kept = (slice(before, before + n) for n, (before, _) in zip(what.large, what.padding))
    return total[(slice(None),) * 3 + tuple(kept)].flatten(1, 2)


def paired(what: ConvShape, small: torch.Tensor, large: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the weights: sums over all windows of elements of the large tensor times elements of the
    small tensor."""
    padded, flat = _grouped(what, _padded(what, large), what.channels), _grouped(what, small, what.filters).flatten(3)
    taps = [torch.einsum("ngsp,ngbp->gsb", flat, padded[window].flatten(3)) for _, window in _windows(what)]
    return torch.stack(taps, dim=-1).reshape(what.weights)


def _windows(what: ConvShape) -> Iterator[tuple[int, Any]]:
    """Yield the index of each tap, and a slice of the padded large tensor (images, groups, channels, ...) with the
    elements that this tap reads."""
    for number, tap in enumerate(itertools.product(*map(range, what.kernel))):
        each = zip(tap, what.dilation, what.small, what.stride)
        yield number, (..., *(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in each))


def _padded(what: ConvShape, large: torch.Tensor) -> torch.Tensor:
    return F.pad(large, [width for both in reversed(what.padding) for width in both])


def _grouped(what: ConvShape, x: torch.Tensor, channels: int) -> torch.Tensor:
    return x.reshape(what.images, what.groups, channels, *x.shape[2:])


def _by_tap(what: ConvShape, w: torch.Tensor) -> torch.Tensor:
    """Return the weights as (taps, groups, filters, channels)."""
    return w.reshape(what.groups, what.filters, what.channels, -1).movedim(-1, 0)


OPERATIONS = sampled_operations(torch.device("cpu"), tf32=False)
