"""Pooling and resizing of images, forward and backward, of sampled sizes, layouts and dtypes.

All functions except the maximum are linear in rows and columns. With one float64 matrix per dimension, the output is A
x B^T and the gradient is A^T g B. The reference computes both on the host.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, torch_fault_exclusions
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_nan_gaps import with_nan_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.reference_products import patches
from envbuild.selftest.probes.images import resize_matrices
from envbuild.selftest.probes.images.resize_matrices import Side, weighted

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SIZES = (4, 5, 7, 8, 9, 15, 17, 31)
MOST = 256  # elements of an image: bfloat16 represents this many consecutive integers
MARGIN = 1000.0  # added to the values, so that they are greater than the padding, which is 0


@dataclass(frozen=True)
class Resize:
    """A function that changes the size of images.

    `call(x, kernel, stride, padding)` runs the function on images; `side(n, kernel, stride, padding)` returns the
    matrix for a dimension of n elements.
    """

    call: Callable[[torch.Tensor, int, int, int], torch.Tensor]
    side: Callable[[int, int, int, int], Side]


def _averages(n: int, kernel: int, stride: int, padding: int) -> Side:
    """Return the matrix of averages over windows of a fixed size. Padding counts as zeros."""
    first = torch.arange((n + 2 * padding - kernel) // stride + 1)[:, None] * stride - padding
    place = torch.arange(n)
    return Side(((place >= first) & (place < first + kernel)).to(torch.float64) / kernel)


def _parts(n: int, kernel: int, stride: int, padding: int) -> Side:
    return resize_matrices.area_side(n, kernel + 1)


def _resized(n: int, stride: int, padding: int) -> int:
    return n * stride + padding


def _nearest(n: int, kernel: int, stride: int, padding: int) -> Side:
    out = _resized(n, stride, padding)
    return resize_matrices.nearest_side(n, out, resize_matrices.scale_of(n, out, is_aligned=False))


def _linear(n: int, kernel: int, stride: int, padding: int, is_aligned: bool) -> Side:
    out = _resized(n, stride, padding)
    return resize_matrices.linear_side(n, out, resize_matrices.scale_of(n, out, is_aligned), is_aligned)


def _interpolate(x: torch.Tensor, kernel: int, stride: int, padding: int, **how: object) -> torch.Tensor:
    size = tuple(_resized(n, stride, padding) for n in x.shape[2:])
    return F.interpolate(x, size, **how)  # type: ignore[arg-type]


RESIZES = {
    "avg_pool2d": Resize(lambda x, kernel, stride, padding: F.avg_pool2d(x, kernel, stride, padding), _averages),
    "adaptive_avg_pool2d": Resize(lambda x, kernel, stride, padding: F.adaptive_avg_pool2d(x, kernel + 1), _parts),
    "nearest": Resize(functools.partial(_interpolate, mode="nearest"), _nearest),
    "bilinear": Resize(
        functools.partial(_interpolate, mode="bilinear", align_corners=False),
        functools.partial(_linear, is_aligned=False),
    ),
    "bilinear aligned": Resize(
        functools.partial(_interpolate, mode="bilinear", align_corners=True),
        functools.partial(_linear, is_aligned=True),
    ),
}


def case(point: Point, seed: int) -> Case:
    """Build a case whose images consist of distinct integers, so that each maximum is at one position."""
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
    """Return the expected output and gradient; without a dtype, return only the output."""
    arguments = point["kernel"], point["stride"], point["padding"]
    if function == "max_pool2d":
        return _maxima(x, grad if dtype else None, *arguments)
    sides = [RESIZES[function].side(n, *arguments) for n in x.shape[2:]]
    output = weighted(x, sides, point["dtype"])
    if dtype is None:
        return {"output": output}
    return {"output": output, "gradient": weighted(grad, [side.transposed() for side in sides], dtype)}


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
