"""Cases for F.interpolate with all of its arguments, for sampling at given positions, and for moving elements between
channels and positions.

A resize is linear in each dimension: the expected output is the image times one float64 matrix per dimension. Sampling
at positions is computed by a formula in float64, whose derivatives autograd computes.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances, torch_fault_exclusions
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_nan_gaps import with_nan_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.probes.images import resize_matrices
from envbuild.selftest.probes.images.resize_matrices import SLOPE, Side, cubic_weight, weighted

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Sizes = tuple[int, ...]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "channels last", "rows apart", "shifted by 1")
MOST = 6000  # maximum number of elements of all channels, before or after the resize

# For each mode: the arguments of F.interpolate, and the numbers of spatial dimensions that the mode supports.
MODES: Mapping[str, tuple[Mapping[str, Any], Sequence[int]]] = {
    "nearest": ({"mode": "nearest"}, (1, 2, 3)),
    "nearest-exact": ({"mode": "nearest-exact"}, (1, 2, 3)),
    "area": ({"mode": "area"}, (1, 2, 3)),
    "linear": ({"mode": "linear", "align_corners": False}, (1, 2, 3)),
    "linear aligned": ({"mode": "linear", "align_corners": True}, (1, 2, 3)),
    "bicubic": ({"mode": "bicubic", "align_corners": False}, (2,)),
    "bicubic aligned": ({"mode": "bicubic", "align_corners": True}, (2,)),
    "linear antialias": ({"mode": "linear", "align_corners": False, "antialias": True}, (2,)),
    "bicubic antialias": ({"mode": "bicubic", "align_corners": False, "antialias": True}, (2,)),
}
# F.interpolate's name of the mode, by the number of spatial dimensions
LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
# Enlargements and reductions, by whole and fractional factors. All factors are exact in binary, and so are the sizes
# that torch computes.
FACTORS = (Fraction(2), Fraction(3), Fraction(1, 2), Fraction(1, 4), Fraction(3, 2), Fraction(5, 8), Fraction(11, 4))


def resize(point: Point, seed: int) -> Case:
    """Build a case with images of whole numbers. Its inputs are the images and the gradient of the output."""
    sizes, outputs = _sizes(point), _outputs(point)
    dtype, count = point["dtype"], (point["images"], point["channels"])
    x = hashed_inputs.whole((*count, *sizes), seed, 9).to(dtype)
    grad = hashed_inputs.whole((*count, *outputs), seed + 1, 3).to(dtype)
    name = (
        f"images resized by {point['mode']} {'x'.join(map(str, x.shape))} to {'x'.join(map(str, outputs))}, "
        f"{point['argument']}, {point['layout']}, gradient {point['gradient layout']}"
    )
    exact = functools.partial(_resized_exactly, point=point)
    return Case(name, dtype, (x, grad), functools.partial(_resized, point=point), exact)


def _sizes(point: Point) -> Sizes:
    return {1: (point["long"],), 2: (point["short"], point["long"]), 3: (point["short"], 5, point["long"])}[
        point["rank"]
    ]


def _factors(point: Point) -> tuple[Fraction, ...]:
    """Return a different scale factor for each dimension."""
    first = FACTORS.index(point["factor"])
    return tuple(FACTORS[(first + 2 * dim) % len(FACTORS)] for dim in range(point["rank"]))


def _outputs(point: Point) -> Sizes:
    """Return the output sizes. With the argument "size, one more", they are larger by 1 than the factors give, so that
    the ratios are not simple."""
    more = int(point["argument"] == "size, one more")
    return tuple(max(1, int(n * factor)) + more for n, factor in zip(_sizes(point), _factors(point)))


def _scales(point: Point) -> list[Fraction]:
    """Return the number of input elements per output element, for each dimension. If torch gets a factor and does not
    recompute it, torch uses this factor, except in the aligned and area modes. Otherwise torch uses the ratio of the
    sizes."""
    if point["argument"] == "factor" and not point["mode"].endswith("aligned") and point["mode"] != "area":
        return [1 / factor for factor in _factors(point)]
    is_aligned = point["mode"].endswith("aligned")
    return [resize_matrices.scale_of(n, out, is_aligned) for n, out in zip(_sizes(point), _outputs(point))]


def _is_resize(point: Point) -> bool:
    """Return whether the case can be tested. Excluded, among others: with nearest modes, positions exactly between two
    elements, where the rounding of the scale decides; and antialiasing of half precision, which torch supports only on
    GPUs."""
    if point["rank"] not in MODES[point["mode"]][1] or (point["rank"] == 1 and "channels last" in _layouts(point)):
        return False
    channels, outputs, sizes = point["images"] * point["channels"], _outputs(point), _sizes(point)
    if point["mode"].endswith("antialias") and point["dtype"] != torch.float32:
        return False
    if channels * max(math.prod(sizes), math.prod(outputs)) > MOST:
        return False
    if any(n * factor < 1 for n, factor in zip(sizes, _factors(point))):
        return False
    if not point["mode"].startswith("nearest"):
        return True
    shift = Fraction(1, 2) if point["mode"] == "nearest-exact" else Fraction(0)
    for out, scale in zip(outputs, _scales(point)):
        is_exact = scale.denominator & (scale.denominator - 1) == 0  # the scale is a binary fraction
        if not is_exact and any((place + shift) * scale % 1 == 0 for place in range(int(not shift), out)):
            return False
    return True


def _layouts(point: Point) -> Sequence[str]:
    return point["layout"], point["gradient layout"]


def _resized(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Results:
    leaf = with_nan_gaps(x, point["layout"]).detach().requires_grad_()
    options = dict(MODES[point["mode"]][0])
    if options["mode"] == "linear":
        options["mode"] = LINEAR[point["rank"]]
    if point["argument"].startswith("size"):
        options["size"] = _outputs(point)
    else:
        options["scale_factor"] = tuple(map(float, _factors(point)))
        if point["argument"] == "factor recomputed":
            options["recompute_scale_factor"] = True
    output = F.interpolate(leaf, **options)
    (gradient,) = backward_pass.gradients(output, (leaf,), with_nan_gaps(grad, point["gradient layout"]))
    if torch_fault_exclusions.uncomputed_results("interpolation", x.device.type, fault_values(point)):
        name = "size" if "size" in options else "scale_factor"
        turned = {**options, name: tuple(reversed(options[name]))}
        output = F.interpolate(leaf.detach().mT.contiguous(), **turned).mT
    return {"output": output.detach(), "gradient": gradient}


def fault_values(point: Point) -> Mapping[str, Any]:
    """Return the point with the values that the known torch faults depend on.

    "to one column": the output has one column and several rows, and the number of rows changes. "channels innermost":
    the channels are the innermost dimension in memory.
    """
    if point["rank"] != 2:
        return {**point, "to one column": False, "channels innermost": False}
    (height, _), (rows, columns) = _sizes(point), _outputs(point)
    is_innermost = point["layout"] == "channels last" and point["channels"] > 1
    return {**point, "to one column": columns == 1 < rows != height, "channels innermost": is_innermost}


def _resized_exactly(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    sizes = zip(_sizes(point), _outputs(point), _scales(point))
    sides = [_side(point["mode"], n, out, scale) for n, out, scale in sizes]
    return {
        "output": weighted(x, sides, point["dtype"]),
        "gradient": weighted(grad, [side.transposed() for side in sides], point["dtype"]),
    }


def _side(mode: str, n: int, out: int, scale: Fraction) -> Side:
    if mode == "area":
        return resize_matrices.area_side(n, out)
    if mode.startswith("nearest"):
        return resize_matrices.nearest_side(n, out, scale, is_centred=mode == "nearest-exact")
    if mode.endswith("antialias"):
        return resize_matrices.antialiased_side(n, out, scale, is_cubic=mode.startswith("bicubic"))
    build = resize_matrices.linear_side if mode.startswith("linear") else resize_matrices.cubic_side
    return build(n, out, scale, is_aligned=mode.endswith("aligned"))


def sampled(point: Point, seed: int) -> Case:
    """Build a case that samples images. Its inputs are the images, positions in and around them, and the gradient of
    the output. No position is at an element or in the middle between two elements, where a derivative changes."""
    rank, dtype, count = point["rank"], point["dtype"], (point["images"], point["channels"])
    sizes = _sampled_sizes(point)
    x = hashed_inputs.whole((*count, *sizes), seed, 5)
    places = math.prod(point["places"][:rank]) * count[0]
    coordinates = []
    for dim, n in enumerate(sizes):
        # In elements: a whole number, from 2 before the first element to 2 after the last, plus 1/8, 3/8, 5/8 or 7/8.
        drawn = hashed_inputs.hashes(places, seed + 2 + dim)
        place = drawn % (n + 4) - 2 + (2 * (drawn // 64 % 4) + 1) / 8.0
        spread = max(1, n - 1) if point["aligned"] else n
        coordinates.append((2 * place + (0 if point["aligned"] else 1)) / spread - 1)
    grid = torch.stack(coordinates[::-1], -1).view(count[0], *point["places"][:rank], rank)
    grad = hashed_inputs.whole((*count, *point["places"][:rank]), seed + 1, 3)
    name = (
        f"images sampled {point['mode']}, {point['padding']}, {'x'.join(map(str, x.shape))}, "
        f"{'aligned' if point['aligned'] else 'not aligned'}, {point['layout']}"
    )
    given = tuple(part.to(dtype) for part in (x, grid, grad))
    exact = functools.partial(_sampled_exactly, point=point)
    return Case(name, dtype, given, functools.partial(_sampled, point=point), exact)


def _sampled_sizes(point: Point) -> Sizes:
    sizes: Sizes = (point["height"], point["width"]) if point["rank"] == 2 else (3, point["height"], point["width"])
    return sizes


def _sampled(x: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor, point: Point) -> Results:
    leaves = with_nan_gaps(x, point["layout"]).detach().requires_grad_(), grid.detach().requires_grad_()
    output = F.grid_sample(*leaves, point["mode"], point["padding"], point["aligned"])
    upstream = with_nan_gaps(grad, point["gradient layout"])
    of_images, of_positions = backward_pass.gradients(output, leaves, upstream)
    return {"output": output.detach(), "gradient": of_images, "gradient of the positions": of_positions}


def _sampled_exactly(x: torch.Tensor, grid: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    """Return the exact results with their tolerances.

    The kernel computes a position of at most n + 2 in four operations. The error of the position, times SLOPE, changes
    each weight. Sums have at most as many terms as there are taps, channels or sampled positions. The derivatives of
    the positions are those of the weights times n / 2, and the derivatives of the weights are at most 4.
    """
    leaves = x.detach().requires_grad_(), grid.detach().requires_grad_()
    output = _sample(*leaves, point)
    slopes = torch.autograd.grad((output * grad).sum(), leaves)
    dtype, rank = point["dtype"], point["rank"]
    longest = max(_sampled_sizes(point)) + 2
    taps = (4 if point["mode"] == "bicubic" else 2) ** rank
    places, channels = grad[0, 0].numel(), grad.shape[1]
    u = tolerances.unit_roundoff(dtype)
    error = u * (8 * SLOPE * rank * longest + taps)
    bounds = (
        error * taps * x.abs().max(),
        (error + places * u) * grad.abs().max() * places,
        4 * (error + channels * taps * u) * longest / 2 * taps * channels * x.abs().max() * grad.abs().max(),
    )
    names = ("output", "gradient", "gradient of the positions")
    values = (output.detach(), *slopes)
    return {
        name: Exact(value, tolerances.rounding(value, dtype) + bound)
        for name, value, bound in zip(names, values, bounds)
    }


def _sample(x: torch.Tensor, grid: torch.Tensor, point: Point) -> torch.Tensor:
    """Return the output: the sum over all taps of an element of x times the product of its weights in each
    dimension."""
    rank, cubic = point["rank"], point["mode"] == "bicubic"
    dimensions = []
    for dim, n in enumerate(x.shape[2:]):
        g = grid[..., rank - 1 - dim]
        place = (g + 1) / 2 * (n - 1) if point["aligned"] else ((g + 1) * n - 1) / 2
        if not cubic:
            place = _inside(place, n, point)
        first = place.detach().floor()
        if point["mode"] == "nearest":
            taps = [(place.detach().round(), 1 + 0 * place)]  # the derivative of this weight is 0
        elif cubic:
            taps = [
                (_inside(first + tap, n, point), cubic_weight((place - first - tap).abs(), -0.75))
                for tap in range(-1, 3)
            ]
        else:
            taps = [(first + tap, 1 - (place - first - tap).abs()) for tap in range(2)]
        dimensions.append([(at, weight * ((at >= 0) & (at < n))) for at, weight in taps])
    flat = x.flatten(2)
    output = torch.zeros((*x.shape[:2], grid[0, ..., 0].numel()), dtype=torch.float64)
    for chosen in itertools.product(*dimensions):
        at = torch.zeros_like(grid[..., 0]).detach()
        weight = torch.ones_like(at)
        for n, (place, factor) in zip(x.shape[2:], chosen):
            at, weight = at * n + place.clamp(0, n - 1), weight * factor
        index = at.long().flatten(1)[:, None].expand(-1, x.shape[1], -1)
        output = output + flat.gather(2, index) * weight.flatten(1)[:, None]
    return output.view(*x.shape[:2], *grid.shape[1:-1])


def _inside(place: torch.Tensor, n: int, point: Point) -> torch.Tensor:
    """Apply the padding mode to a position: keep it ("zeros"), move it to the border, or reflect it at the border."""
    if point["padding"] == "reflection":
        low, span = (0.0, n - 1.0) if point["aligned"] else (-0.5, float(n))
        if span == 0:
            return place * 0
        beyond = (place - low).abs()
        turns = (beyond / span).detach().floor()
        rest = beyond - turns * span
        place = torch.where(turns % 2 == 0, rest, span - rest) + low
    return place if point["padding"] == "zeros" else place.clamp(0, n - 1)


def moved_channels(point: Point, seed: int) -> Case:
    """Build a case in which elements move between channels and positions, or to positions given by indices."""
    factor, function, dtype = point["by"], point["function"], point["dtype"]
    images, channels, height, width = point["images"], point["channels"], point["height"], point["width"]
    shape = (images, channels * factor * factor, height, width)
    if function == "pixel_unshuffle":
        shape = (images, channels, height * factor, width * factor)
    elif function == "max_unpool":
        shape = (images, channels, height, width)
    x = hashed_inputs.whole(shape, seed, 100).to(dtype)
    given = [x, hashed_inputs.whole(_target(function, shape, factor), seed + 1, 100).to(dtype)]
    if function == "max_unpool":
        places = factor * factor * height * width
        orders = hashed_inputs.hashes(images * channels * places, seed + 2).view(images, channels, places).argsort(-1)
        given.append(orders[..., : height * width].reshape(shape))
    name = f"channels moved by {function} {factor}, {'x'.join(map(str, shape))}, {point['layout']}"
    exact = functools.partial(_channels_exactly, point=point)
    return Case(name, dtype, tuple(given), functools.partial(_channels, point=point), exact)


def _target(function: str, shape: Sizes, factor: int) -> Sizes:
    images, channels, height, width = shape
    if function == "channel_shuffle":
        return shape
    if function == "pixel_unshuffle":
        return images, channels * factor * factor, height // factor, width // factor
    kept = channels if function == "max_unpool" else channels // factor // factor
    return images, kept, height * factor, width * factor


def _channels(x: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor, point: Point) -> Results:
    leaf = with_nan_gaps(x, point["layout"]).detach().requires_grad_()
    function, factor = point["function"], point["by"]
    if function == "max_unpool":
        output = F.max_unpool2d(leaf, rest[0], factor, output_size=grad.shape[2:])
    elif function == "channel_shuffle":
        output = torch.channel_shuffle(leaf, factor)
    else:
        output = getattr(F, function)(leaf, factor)
    (gradient,) = backward_pass.gradients(output, (leaf,), with_nan_gaps(grad, point["gradient layout"]))
    return {"output": output.detach(), "gradient": gradient}


def _channels_exactly(x: torch.Tensor, grad: torch.Tensor, *rest: torch.Tensor, point: Point) -> Expected:
    """Return the expected results, from the position in the output of each element of x."""
    factor, function = point["by"], point["function"]
    n, c, h, w = torch.meshgrid(*(torch.arange(size) for size in x.shape), indexing="ij")
    square = factor * factor
    if function == "max_unpool":
        at = (n, c, rest[0] // grad.shape[3], rest[0] % grad.shape[3])
    elif function == "channel_shuffle":
        at = (n, c % (x.shape[1] // factor) * factor + c // (x.shape[1] // factor), h, w)
    elif function == "pixel_shuffle":
        at = (n, c // square, h * factor + c % square // factor, w * factor + c % factor)
    else:
        at = (n, c * square + h % factor * factor + w % factor, h // factor, w // factor)
    output = torch.zeros_like(grad).index_put(at, x)
    return {"output": without_rounding(output), "gradient": without_rounding(grad[at])}


LENGTHS = (2, 3, 5, 8, 13, 17, 32, 33, 65)
OPERATIONS = (
    Operation(
        "interpolation",
        {
            "mode": tuple(MODES),
            "dtype": DTYPES,
            "rank": (1, 2, 2, 2, 3),
            "images": (1, 2, 3),
            "channels": (1, 3, 4, 8, 17),
            "long": LENGTHS,
            "short": (2, 3, 4, 7, 8),
            "factor": FACTORS,
            "argument": ("size, one more", "size", "factor", "factor recomputed"),
            "layout": LAYOUTS,
            "gradient layout": LAYOUTS[:3],
        },
        resize,
        {"quick": 12, "standard": 60, "full": 1000},
        _is_resize,
    ),
    Operation(
        "sampling at positions",
        {
            "mode": ("bilinear", "nearest", "bicubic"),
            "padding": ("zeros", "border", "reflection"),
            "aligned": (False, True),
            "dtype": (torch.float32, torch.float32, torch.float64),
            "rank": (2, 2, 3),
            "images": (1, 2, 3),
            "channels": (1, 3, 4, 9),
            "height": (2, 3, 8, 9),
            "width": (2, 5, 8, 17, 33),
            "places": ((1, 9, 2), (3, 5, 2), (4, 8, 3), (7, 33, 1)),
            "layout": LAYOUTS,
            "gradient layout": LAYOUTS[:3],
        },
        sampled,
        {"quick": 3, "standard": 18, "full": 300},
        lambda point: point["rank"] == 2 or point["mode"] != "bicubic",
    ),
    Operation(
        "moved channels",
        {
            "function": ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "max_unpool"),
            "dtype": DTYPES,
            "by": (2, 3),
            "images": (1, 2, 3),
            "channels": (1, 2, 3, 8),
            "height": (1, 3, 8),
            "width": (1, 2, 5, 17, 33),
            "layout": LAYOUTS,
            "gradient layout": LAYOUTS[:3],
        },
        moved_channels,
        {"quick": 2, "standard": 14, "full": 200},
    ),
)
