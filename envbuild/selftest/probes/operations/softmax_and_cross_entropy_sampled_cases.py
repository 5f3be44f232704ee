"""softmax, log_softmax and cross-entropy, forward and backward, of sampled sizes, layouts, dtypes and arguments."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import MATRICES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.probes.operations import softmax_cross_entropy_and_gelu_fixed_cases
from envbuild.selftest.probes.operations.softmax_cross_entropy_and_gelu_fixed_cases import Rounding

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Near the sizes of a warp, a block or one pass of a kernel. For more than 1024 elements, CUDA has a different softmax.
WIDTHS = (2, 7, 31, 33, 64, 127, 129, 257, 509, 513, 777, 1000, 1023, 1025, 1031, 2049, 4099)
ROWS = (1, 2, 5, 17, 33)
VALUES = ("near 0", "near 96", "near -200", "late maximum")
MOST = 9000  # maximum number of elements of a case

CLASSES = (2, 5, 33, 127, 1000, 1031, 4099)
IGNORED = (None, -100, 1)
# the sum of this many log-probabilities is within float16's range; torch sums them before it weights them
SMOOTHED = 3000
REDUCTIONS = ("mean", "sum", "none")
PLACES = ((), (7,), (3, 5))  # the positions of each sample: one, a line, an image


def sampled_operations(rounded_sums: bool) -> tuple[Operation, ...]:
    """Return the operations; `rounded_sums` as in softmax_cross_entropy_and_gelu_fixed_cases.Rounding."""
    makers = LossMakers(rounded_sums)
    return (
        Operation(
            "softmax",
            {
                "function": ("softmax", "log_softmax"),
                "dtype": DTYPES,
                "width": WIDTHS,
                "rows": ROWS,
                "over": ("last", "first", "middle"),
                "layout": MATRICES,
                "values": VALUES,
            },
            makers.softmax,
            {"quick": 48, "standard": 240, "full": 2000},
            lambda point: point["width"] * point["rows"] <= MOST and (point["rows"] > 1 or point["over"] != "middle"),
        ),
        Operation(
            "cross_entropy",
            {
                "dtype": DTYPES,
                "classes": CLASSES,
                "rows": (2, 3, 6, 29),
                "places": PLACES,
                "ignored": IGNORED,
                "smoothing": (0.0, 0.125),
                "weights": (False, True),
                "reduction": REDUCTIONS,
            },
            makers.cross_entropy,
            {"quick": 30, "standard": 150, "full": 1400},
            _fits,
        ),
        Operation(
            "cross_entropy of a vocabulary",
            {
                "dtype": DTYPES,
                "classes": (32003, 50257),
                "rows": (2,),
                "places": PLACES[:1],
                "ignored": IGNORED[:2],
                "smoothing": (0.0,),
                "weights": (False,),
                "reduction": REDUCTIONS,
            },
            makers.cross_entropy,
            {"quick": 3, "standard": 6, "full": 40},
        ),
    )


def _fits(point: Point) -> bool:
    count = point["classes"] * point["rows"] * math.prod(point["places"])
    is_summed_in_half = point["smoothing"] and point["dtype"] == torch.float16
    return bool(count <= (SMOOTHED if is_summed_in_half else MOST))


@dataclass(frozen=True)
class LossMakers:
    """Build the case of each operation for one combination of parameter values (`point`)."""

    rounded_sums: bool

    def softmax(self, point: Point, seed: int) -> Case:
        dtype, rows, width = point["dtype"], point["rows"], point["width"]
        x = _logits(rows, width, point["values"], seed).to(dtype)
        # all of one sign, so that its sum affects the gradient
        grad = hashed_inputs.whole((rows, width), seed + 1, 3).abs().to(dtype)
        function = point["function"]
        exactly = (
            softmax_cross_entropy_and_gelu_fixed_cases.softmax_results
            if function == "softmax"
            else softmax_cross_entropy_and_gelu_fixed_cases.log_softmax_results
        )
        name = f"{function} over {width}, {point['over']} dimension, {rows} rows, {point['layout']}, {point['values']}"
        run = functools.partial(_softmax, function=function, over=point["over"], layout=point["layout"])
        exact = functools.partial(
            _softmax_exactly, exactly=exactly, rounding=Rounding(dtype, self.rounded_sums), over=point["over"]
        )
        return Case(name, dtype, (x, grad), run, exact)

    def cross_entropy(self, point: Point, seed: int) -> Case:
        """Build a case of cross_entropy and its gradient. Some targets are ignored if the point has an ignored
        index."""
        dtype, classes, samples, places = point["dtype"], point["classes"], point["rows"], point["places"]
        shape = (samples, *places)
        count = torch.Size(shape).numel()
        x = _logits(count, classes, "near 0" if seed % 2 else "near 96", seed).to(dtype)
        targets = hashed_inputs.hashes(count, seed + 1) % classes
        if point["ignored"] is not None:
            targets = torch.where(targets == point["ignored"], 0, targets)
            targets[1::3] = point["ignored"]
        given = [x, targets]
        if point["weights"]:
            given.append((hashed_inputs.whole((classes,), seed + 2, 7).abs() / 4).to(dtype))
        grad = hashed_inputs.whole(shape, seed + 3, 3) if point["reduction"] == "none" else torch.ones(())
        options: dict[str, Any] = {"reduction": point["reduction"], "label_smoothing": point["smoothing"]}
        if point["ignored"] is not None:
            options["ignore_index"] = point["ignored"]
        size = "x".join(map(str, (samples, classes, *places)))
        what = ", ".join(f"{name} {value}" for name, value in options.items() if value)
        name = f"cross_entropy {size}, {what}{', weights' if point['weights'] else ''}"
        run = functools.partial(_cross_entropy, shape=shape, grad=grad.to(dtype), options=options)
        exact = functools.partial(
            _losses, shape=shape, grad=grad, point=point, rounding=Rounding(dtype, self.rounded_sums)
        )
        return Case(name, dtype, tuple(given), run, exact)


def _logits(rows: int, width: int, values: str, seed: int) -> torch.Tensor:
    """Return multiples of 1/2 that differ by at most 5, so that each class has a measurable probability."""
    drawn = (hashed_inputs.hashes(rows * width, seed) % 5).reshape(rows, width) / 2
    if values == "late maximum":  # an online softmax must rescale its partial sum
        drawn[:, width // 2 :] += 2
        drawn[:, -1:] += 1
        return drawn
    return drawn + {"near 0": 0, "near 96": 96, "near -200": -200}[values]


def _softmax(x: torch.Tensor, grad: torch.Tensor, function: str, over: str, layout: str) -> Results:
    """Call the function twice, first with the rows in reverse order, to detect results that are kept from an earlier
    call."""
    again = _one_softmax(x.flip(0), grad.flip(0), function, over, layout)
    reversed_rows = {f"{name} of reversed rows": part.flip(0) for name, part in again.items()}
    return {**_one_softmax(x, grad, function, over, layout), **reversed_rows}


def _softmax_exactly(
    x: torch.Tensor, grad: torch.Tensor, exactly: Callable[..., dict[str, Exact]], rounding: Rounding, over: str
) -> Expected:
    """Return the expected results of both calls of `_softmax`, which are the same. For a softmax over the middle
    dimension, they contain the three variants of the rows that `_three_times` stacks."""
    found = exactly(x, grad, rounding)
    if over == "middle":
        found = {name: Exact(_three_times(part.value), _three_times(part.bound)) for name, part in found.items()}
    return {**found, **{f"{name} of reversed rows": part for name, part in found.items()}}


def _three_times(rows: torch.Tensor) -> torch.Tensor:
    """Stack three variants of the rows as the last dimension, so that neighbouring columns have different sums (except
    for a single row)."""
    return torch.stack((rows, rows.flip(0), rows.flip(1)), -1)


def _one_softmax(x: torch.Tensor, grad: torch.Tensor, function: str, over: str, layout: str) -> dict[str, torch.Tensor]:
    """Run the function with the rows laid out for `over`: (rows, width), (width, rows) or (rows, width, 3)."""

    def turned(y: torch.Tensor) -> torch.Tensor:
        return y.t() if over == "first" else _three_times(y) if over == "middle" else y

    leaf = with_large_gaps(turned(x), layout).detach().requires_grad_()
    output = getattr(torch, function)(leaf, dim={"last": -1, "first": 0, "middle": 1}[over])
    (gradient,) = backward_pass.gradients(output, (leaf,), with_large_gaps(turned(grad), layout))
    found = {"output": output.detach(), "gradient": gradient}
    return {name: part.t() if over == "first" else part for name, part in found.items()}


def _cross_entropy(
    x: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    shape: tuple[int, ...],
    grad: torch.Tensor,
    options: Mapping[str, Any],
) -> Results:
    given = x.view(*shape, -1).movedim(-1, 1).contiguous()
    leaf = given.detach().requires_grad_()
    loss = F.cross_entropy(leaf, targets.view(shape), weight=weights, **options)
    (gradient,) = backward_pass.gradients(loss, (leaf,), grad.to(loss.device))
    return {"output": loss.detach(), "gradient": gradient.movedim(1, -1).reshape(x.shape)}


def _losses(
    x: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    shape: tuple[int, ...],
    grad: torch.Tensor,
    point: Point,
    rounding: Rounding,
) -> Expected:
    """Return the expected loss and gradient. The loss of a row is -sum q log p. q is s w / classes everywhere, plus (1
    - s) w[target] at the target.

    log p is rounded, and so are its products with q and their sums, the gradients of log p, and the mean.
    """
    dtype, classes, smoothing = rounding.dtype, point["classes"], point["smoothing"]
    u = tolerances.unit_roundoff(dtype)
    arithmetic = 8 * u + 4 * tolerances.summation(classes) + 4 * tolerances.summation(len(x))
    w = torch.ones(classes, dtype=torch.float64) if weights is None else weights
    counted = torch.ones(len(x), 1, dtype=torch.bool)
    if point["ignored"] is not None:
        counted = (targets != point["ignored"])[:, None]
    hits = targets[:, None] == torch.arange(classes)
    of_target = (hits * w).sum(1, keepdim=True)
    q = ((1 - smoothing) * of_target * hits + smoothing / classes * w) * counted
    y = softmax_cross_entropy_and_gelu_fixed_cases.log_probabilities(x, rounding)
    losses, around = -(q * y.value).sum(1), (q * y.bound).sum(1)
    scale = grad.to(torch.float64).reshape(-1, 1).expand(len(x), 1)
    value = losses
    if point["reduction"] != "none":
        total = (of_target * counted).sum() if point["reduction"] == "mean" else torch.ones((), dtype=torch.float64)
        value, around, scale = losses.sum() / total, around.sum() / total, scale / total
    around = around + arithmetic * value.abs()
    p, mass = y.value.exp(), q.sum(1, keepdim=True)
    gradient = scale * (p * mass - q)
    limit = scale.abs() * (p * mass * torch.expm1(y.bound) + arithmetic * (p * mass + q))
    smallest = 8 * tolerances.rounding(torch.zeros_like(gradient), dtype)  # intermediate gradients may be subnormal
    reshaped = (
        part.reshape(shape) if part.dim() else part for part in (value, tolerances.rounding(value, dtype) + around)
    )
    return {
        "output": Exact(*reshaped),
        "gradient": Exact(gradient, tolerances.rounding(gradient, dtype) + limit + smallest),
    }


OPERATIONS = sampled_operations(rounded_sums=True)
