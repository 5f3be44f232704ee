"""Pooling and resizing of images, forward and backward, of sampled sizes, layouts and dtypes.

All except the maximum are linear in rows and columns: an output is A x B^T with a matrix for each dimension, and a
gradient A^T g B, in float64 on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances, torch_fault_exclusions
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_nan_gaps import with_nan_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.reference_products import patches

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (4, 5, 7, 8, 9, 15, 17, 31)
MOST = 256  # elements of an image: bfloat16 has so many different consecutive integers
MARGIN = 1000.0  # above the padding, which is 0


@dataclass(frozen=True)
class Resize:
    """`call(x, kernel, stride, padding)` for images, and `matrix(n, kernel, stride, padding)` of (outputs, n)."""

    call: Callable[[torch.Tensor, int, int, int], torch.Tensor]
    matrix: Callable[[int, int, int, int], torch.Tensor]


def _averages(n: int, kernel: int, stride: int, padding: int) -> torch.Tensor:
    """Windows of a fixed size, in which the padding counts too."""
    first = torch.arange((n + 2 * padding - kernel) // stride + 1)[:, None] * stride - padding
    place = torch.arange(n)
    return ((place >= first) & (place < first + kernel)).to(torch.float64) / kernel


def _parts(n: int, kernel: int, stride: int, padding: int) -> torch.Tensor:
    """Window number i of `kernel` + 1 windows: from floor(i n / (kernel + 1)) to ceil((i + 1) n / (kernel + 1))."""
    numbers, place = torch.arange(kernel + 1)[:, None], torch.arange(n)
    first, end = numbers * n // (kernel + 1), -(-(numbers + 1) * n // (kernel + 1))
    inside = ((place >= first) & (place < end)).to(torch.float64)
    return inside / inside.sum(1, keepdim=True)


def _resized(n: int, stride: int, padding: int) -> int:
    return n * stride + padding


def _nearest(n: int, kernel: int, stride: int, padding: int) -> torch.Tensor:
    out = _resized(n, stride, padding)
    return ((torch.arange(out) * n // out)[:, None] == torch.arange(n)).to(torch.float64)


def _linear(n: int, kernel: int, stride: int, padding: int, aligned: bool) -> torch.Tensor:
    """If `aligned`, the centres of the first and last elements coincide, else the edges of the images."""
    out = _resized(n, stride, padding)
    number = torch.arange(out, dtype=torch.float64)
    place = number * (n - 1) / max(1, out - 1) if aligned else ((number + 0.5) * n / out - 0.5).clamp(min=0)
    return (1 - (place.clamp(max=n - 1)[:, None] - torch.arange(n)).abs()).clamp(min=0)


def _interpolate(x: torch.Tensor, kernel: int, stride: int, padding: int, **how: object) -> torch.Tensor:
    size = tuple(_resized(n, stride, padding) for n in x.shape[2:])
    return F.interpolate(x, size, **how)  # type: ignore[arg-type]


RESIZES = {
    "avg_pool2d": Resize(lambda x, kernel, stride, padding: F.avg_pool2d(x, kernel, stride, padding), _averages),
    "adaptive_avg_pool2d": Resize(lambda x, kernel, stride, padding: F.adaptive_avg_pool2d(x, kernel + 1), _parts),
    "nearest": Resize(functools.partial(_interpolate, mode="nearest"), _nearest),
    "bilinear": Resize(
        functools.partial(_interpolate, mode="bilinear", align_corners=False),
        functools.partial(_linear, aligned=False),
    ),
    "bilinear aligned": Resize(
        functools.partial(_interpolate, mode="bilinear", align_corners=True), functools.partial(_linear, aligned=True)
    ),
}


def case(point: Point, seed: int) -> Case:
    """Images of distinct integers, so that each maximum is at one position."""
    function, dtype, h, w = point["function"], point["dtype"], point["height"], point["width"]
    images, channels = point["images"], point["channels"]
    order = hashed_inputs.hashes(images * channels * h * w, seed).view(images, channels, h * w).argsort(-1)
    x = (order - h * w // 2).view(images, channels, h, w).to(dtype)
    places = _exactly(function, x.double(), x.double(), point, None)["output"].value.shape
    grad = hashed_inputs.whole(places, seed + 1, 3).to(dtype)
    name = (
        f"images resized by {function} of {images}x{channels}x{h}x{w}, kernel {point['kernel']} stride "
        f"{point['stride']} padding {point['padding']}, {point['layout']}, gradient {point['gradient layout']}"
    )
    run = functools.partial(_run, point=point)
    return Case(name, dtype, (x, grad), run, functools.partial(_both, point=point))


def _run(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Results:
    leaf = with_nan_gaps(x, point["layout"]).detach().requires_grad_()
    arguments = point["kernel"], point["stride"], point["padding"]
    call = F.max_pool2d if point["function"] == "max_pool2d" else RESIZES[point["function"]].call
    output = call(leaf, *arguments)
    found = {"output": output.detach()}
    if torch_fault_exclusions.uncomputed_results("resized images", x.device.type, point):
        leaf = leaf.detach().contiguous().requires_grad_()
        output = call(leaf, *arguments)
    (found["gradient"],) = backward_pass.gradients(output, (leaf,), with_nan_gaps(grad, point["gradient layout"]))
    return found


def _both(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    return _exactly(point["function"], x, grad, point, point["dtype"])


def _exactly(function: str, x: torch.Tensor, grad: torch.Tensor, point: Point, dtype: torch.dtype | None) -> Expected:
    """The output and the gradient; without a dtype, only the output."""
    arguments = point["kernel"], point["stride"], point["padding"]
    if function == "max_pool2d":
        return _maxima(x, grad if dtype else None, *arguments)
    a, b = (RESIZES[function].matrix(n, *arguments) for n in x.shape[2:])
    if dtype is None:
        return {"output": without_rounding(a @ x @ b.mT)}
    return {"output": _within(a, x, b, dtype), "gradient": _within(a.mT, grad, b.mT, dtype)}


def _within(a: torch.Tensor, x: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Exact:
    """Sums of few terms, each of which may be rounded to the dtype, as additions to memory are. The position between
    two elements is accurate to a few roundings of the length, and a weight of 0 may have an error of that size."""
    value, size = a @ x @ b.mT, a.abs() @ x.abs() @ b.abs().mT
    terms = int((a != 0).sum(1).max() * (b != 0).sum(1).max())
    whole = bool((value == value.round()).all()) and bool((a == a.round()).all()) and bool((b == b.round()).all())
    if whole:
        return without_rounding(value)
    moved = 8 * tolerances.ROUNDED * max(*a.shape, *b.shape) * (terms * x.abs().max())
    return Exact(value, tolerances.rounding(value, dtype) + terms * tolerances.unit_roundoff(dtype) * size + moved)


def _maxima(x: torch.Tensor, grad: torch.Tensor | None, kernel: int, stride: int, padding: int) -> Expected:
    images, channels, h, w = x.shape
    single = x.reshape(-1, 1, h, w) + MARGIN
    windows, places = patches(single, (kernel, kernel), (stride, stride), (padding, padding))
    largest, tap = windows.max(0)
    found = {"output": without_rounding((largest - MARGIN).view(images, channels, *places))}
    if grad is not None:
        numbers = torch.arange(x.numel(), dtype=torch.float64).view(single.shape)
        source = patches(numbers, (kernel, kernel), (stride, stride), (padding, padding))[0].gather(0, tap[None])[0]
        summed = torch.zeros(x.numel(), dtype=torch.float64).index_add_(0, source.long(), grad.reshape(-1))
        found["gradient"] = without_rounding(summed.view(x.shape))
    return found


OPERATIONS = (
    Operation(
        "resized images",
        {
            "function": ("max_pool2d", *RESIZES),
            "dtype": DTYPES,
            "images": (1, 2, 3),
            "channels": (1, 3, 4, 8, 17, 33),
            "height": SIZES,
            "width": SIZES,
            "kernel": (2, 3),
            "stride": (1, 2, 3),
            "padding": (0, 1),
            "layout": ("contiguous", "channels last", "rows apart", "shifted by 1"),
            "gradient layout": ("contiguous", "channels last", "rows apart"),
        },
        case,
        {"quick": 20, "standard": 120, "full": 1200},
        lambda point: point["height"] * point["width"] <= MOST and math.prod((point["images"], point["channels"])) < 60,
    ),
)
