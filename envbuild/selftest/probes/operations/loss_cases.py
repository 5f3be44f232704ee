"""Losses other than cross_entropy with class indices, forward and backward, of sampled sizes, layouts and arguments.

The reference computes each loss by a formula in float64, and its derivatives by autograd; it calls no loss function.
If a formula has kinks, inputs are multiples of 1/8, and targets or margins lie between them, so that no difference is
at a kink.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import MATRICES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Formula = Callable[..., torch.Tensor]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Near the sizes of a vector register, a warp, a block or one pass of a kernel.
LENGTHS = (1, 2, 7, 8, 9, 31, 33, 64, 127, 129, 257, 511, 1023, 1025, 2049)
ROWS = (1, 2, 3, 5, 17, 33)
MOST = 2100  # maximum number of elements of a case, so that sums of losses are within float16's range
REDUCTIONS = ("mean", "sum", "none")
STEPS = 6  # roundings of a loss or its derivative, each at most as large as that of the largest term
IGNORED = -1


@dataclass(frozen=True)
class Loss:
    """A loss of single elements.

    `call(*tensors, reduction=...)`: the loss as models call it. `formula(*tensors)`: returns the loss of each element.
    `kinds`: the kind of values of each tensor, see _values. `leaves`: how many of the tensors, from the first on, have
    a gradient.
    """

    call: Callable[..., torch.Tensor]
    formula: Formula
    kinds: Sequence[str]
    leaves: int = 1


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def _smooth(difference: torch.Tensor, beta: float) -> torch.Tensor:
    """Return a parabola up to `beta`, and a line with the slope 1 beyond."""
    size = difference.abs()
    return torch.where(size < beta, size * size / (2 * beta), size - beta / 2)


def _with_logits(x: torch.Tensor, t: torch.Tensor, positive: torch.Tensor | float = 1.0) -> torch.Tensor:
    return t * positive * _softplus(-x) + (1 - t) * _softplus(x)


def _binary(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return -t * torch.log(x) - (1 - t) * torch.log(1 - x)


def _divergence(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return t * (torch.log(t) - x)


def _stirling(t: torch.Tensor) -> torch.Tensor:
    return torch.where(t > 1, t * torch.log(t) - t + torch.log(2 * math.pi * t) / 2, 0.0)


def _weighted_binary(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor, reduction: str) -> torch.Tensor:
    """Call the function behind F.binary_cross_entropy. F.binary_cross_entropy itself imports sympy to expand weights,
    which takes half a second."""
    number = {"none": 0, "mean": 1, "sum": 2}[reduction]
    return torch.ops.aten.binary_cross_entropy.default(x, t, w.expand_as(x), number)  # type: ignore[no-any-return]


def _kl_div(x: torch.Tensor, t: torch.Tensor, **options: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this mean is not the mathematical one
        return F.kl_div(x, t, **options)


def _of_batch(x: torch.Tensor, t: torch.Tensor, reduction: str) -> torch.Tensor:
    """Call kl_div. Its reduction "batchmean" divides the sum by the number of rows."""
    return F.kl_div(x, t, reduction="batchmean" if reduction == "mean" else reduction)


LOSSES: dict[str, Loss] = {
    "mse_loss": Loss(lambda x, t, **how: F.mse_loss(x, t, **how), lambda x, t: (x - t) ** 2, ("real", "between"), 2),
    "l1_loss": Loss(lambda x, t, **how: F.l1_loss(x, t, **how), lambda x, t: (x - t).abs(), ("real", "between"), 2),
    "smooth_l1_loss": Loss(
        lambda x, t, **how: F.smooth_l1_loss(x, t, **how), lambda x, t: _smooth(x - t, 1.0), ("real", "between"), 2
    ),
    "smooth_l1_loss beta 0.5": Loss(
        lambda x, t, **how: F.smooth_l1_loss(x, t, beta=0.5, **how),
        lambda x, t: _smooth(x - t, 0.5),
        ("real", "between"),
        2,
    ),
    "huber_loss": Loss(
        lambda x, t, **how: F.huber_loss(x, t, **how), lambda x, t: _smooth(x - t, 1.0), ("real", "between"), 2
    ),
    "huber_loss delta 2": Loss(
        lambda x, t, **how: F.huber_loss(x, t, delta=2.0, **how),
        lambda x, t: 2 * _smooth(x - t, 2.0),
        ("real", "between"),
        2,
    ),
    "binary_cross_entropy": Loss(
        lambda x, t, **how: F.binary_cross_entropy(x, t, **how), _binary, ("probability", "probability")
    ),
    "binary_cross_entropy, weight": Loss(
        lambda x, t, w, **how: _weighted_binary(x, t, w, **how),
        lambda x, t, w: w * _binary(x, t),
        ("probability", "probability", "weights"),
    ),
    "binary_cross_entropy, weight of columns": Loss(
        lambda x, t, w, **how: _weighted_binary(x, t, w, **how),
        lambda x, t, w: w * _binary(x, t),
        ("probability", "probability", "weights of columns"),
    ),
    "binary_cross_entropy_with_logits": Loss(
        lambda x, t, **how: F.binary_cross_entropy_with_logits(x, t, **how), _with_logits, ("real", "probability")
    ),
    "binary_cross_entropy_with_logits, weight": Loss(
        lambda x, t, w, **how: F.binary_cross_entropy_with_logits(x, t, w, **how),
        lambda x, t, w: w * _with_logits(x, t),
        ("real", "probability", "weights"),
    ),
    "binary_cross_entropy_with_logits, pos_weight": Loss(
        lambda x, t, w, **how: F.binary_cross_entropy_with_logits(x, t, pos_weight=w, **how),
        _with_logits,
        ("real", "probability", "weights of columns"),
    ),
    "kl_div": Loss(lambda x, t, **how: _kl_div(x, t, **how), _divergence, ("real", "probability"), 2),
    "kl_div batchmean": Loss(_of_batch, _divergence, ("real", "probability"), 2),
    "kl_div log_target": Loss(
        lambda x, t, **how: _kl_div(x, t, log_target=True, **how),
        lambda x, t: torch.exp(t) * (t - x),
        ("real", "logarithm"),
        2,
    ),
    "poisson_nll_loss": Loss(
        lambda x, t, **how: F.poisson_nll_loss(x, t, **how), lambda x, t: torch.exp(x) - t * x, ("logarithm", "count")
    ),
    "poisson_nll_loss full": Loss(
        lambda x, t, **how: F.poisson_nll_loss(x, t, log_input=False, full=True, eps=1e-3, **how),
        lambda x, t: x - t * torch.log(x + 1e-3) + _stirling(t),
        ("count", "count"),
    ),
    "gaussian_nll_loss full": Loss(
        lambda x, t, v, **how: F.gaussian_nll_loss(x, t, v, full=True, **how),
        lambda x, t, v: (torch.log(v) + (x - t) ** 2 / v + math.log(2 * math.pi)) / 2,
        ("real", "between", "weights"),
    ),
    "soft_margin_loss": Loss(
        lambda x, t, **how: F.soft_margin_loss(x, t, **how), lambda x, t: _softplus(-t * x), ("real", "sign")
    ),
    "hinge_embedding_loss": Loss(
        lambda x, t, **how: F.hinge_embedding_loss(x, t, margin=1.5625, **how),
        lambda x, t: torch.where(t > 0, x, (1.5625 - x).clamp(min=0)),
        ("real", "sign"),
    ),
    "margin_ranking_loss": Loss(
        lambda x, y, t, **how: F.margin_ranking_loss(x, y, t, margin=0.5, **how),
        lambda x, y, t: (-t * (x - y) + 0.5).clamp(min=0),
        ("real", "between", "sign"),
        2,
    ),
}


def _values(kind: str, rows: int, length: int, seed: int) -> torch.Tensor:
    """Return values of one kind. "real": multiples of 1/8 from -3.875 to 3.875. "between": such multiples plus 1/16.
    "probability": 1/16 to 15/16. "logarithm": -2 to -1/8. "weights": 1/2 to 4. "count": 1 to 6. "sign": 1 or -1."""
    shape = (1 if kind == "weights of columns" else rows, length)
    drawn = hashed_inputs.hashes(shape[0] * length, seed).reshape(shape)
    if kind in ("real", "between"):
        return hashed_inputs.whole(shape, seed, 31) / 8 + (0.0625 if kind == "between" else 0.0)
    if kind == "probability":
        return (drawn % 15 + 1) / 16
    if kind == "logarithm":
        return -(drawn % 16 + 1) / 8.0
    if kind.startswith("weights"):
        return (drawn % 8 + 1) / 2
    return drawn % 6 + 1.0 if kind == "count" else hashed_inputs.signs(drawn.numel(), seed).reshape(shape)


def loss_case(point: Point, seed: int) -> Case:
    """Build a case of an elementwise loss, such as mse_loss, whose inputs are matrices of `rows` x `length`."""
    which, dtype, rows, length = point["loss"], point["dtype"], point["rows"], point["length"]
    given = [_values(kind, rows, length, 8 * seed + n) for n, kind in enumerate(LOSSES[which].kinds)]
    if point["reduction"] == "none":
        given.append(hashed_inputs.whole((rows, length), 8 * seed + 7, 3))
    name = f"losses by {which}, {rows}x{length}, {point['reduction']}, {point['layout']}, others {point['others']}"
    exact = functools.partial(_loss_exactly, point=point)
    return Case(name, dtype, tuple(part.to(dtype) for part in given), functools.partial(_loss, point=point), exact)


def _loss(*given: torch.Tensor, point: Point) -> Results:
    each = LOSSES[point["loss"]]
    tensors = [
        with_large_gaps(part, point["others"] if n else point["layout"]).detach().requires_grad_(n < each.leaves)
        for n, part in enumerate(given[: len(each.kinds)])
    ]
    output = each.call(*tensors, reduction=point["reduction"])
    upstream = given[len(each.kinds)] if point["reduction"] == "none" else output.detach().new_ones(())
    gradients = backward_pass.gradients(output, tensors[: each.leaves], upstream)
    return {"output": output.detach(), **{f"gradient {n}": part for n, part in enumerate(gradients)}}


def _loss_exactly(*given: torch.Tensor, point: Point) -> Expected:
    each, dtype = LOSSES[point["loss"]], point["dtype"]
    u = STEPS * tolerances.unit_roundoff(dtype)
    tensors = [part.detach().requires_grad_(n < each.leaves) for n, part in enumerate(given[: len(each.kinds)])]
    losses = each.formula(*tensors)
    weight = given[2].abs() if len(given) > 2 and each.kinds[2:] and each.kinds[2].startswith("weights") else 1.0
    size = losses.detach().abs() + (1 + given[0].abs() + given[1].abs()) * weight
    count = losses.numel()
    scale = torch.ones((), dtype=torch.float64)
    if point["reduction"] == "none":
        value, limit, scale = losses.detach(), u * size, given[len(each.kinds)]
    else:
        value, limit = losses.detach().sum(), u * size.sum() + 4 * tolerances.summation(count) * losses.abs().sum()
        if point["reduction"] == "mean":
            scale = scale / (len(losses) if point["loss"].endswith("batchmean") else count)
            value, limit = value * scale, limit * scale
    found = {"output": Exact(value.detach(), (tolerances.rounding(value.detach(), dtype) + limit).detach())}
    slopes = torch.autograd.grad((losses * scale).sum(), tensors[: each.leaves])
    for n, slope in enumerate(slopes):
        around = u * (slope.abs() + scale.abs() * weight * _steepness(each.kinds[n], given[n]))
        smallest = 4 * tolerances.rounding(torch.zeros_like(slope), dtype)
        found[f"gradient {n}"] = Exact(slope, tolerances.rounding(slope, dtype) + around + smallest)
    return found


def _steepness(kind: str, x: torch.Tensor) -> torch.Tensor | float:
    """Return a bound for the size of those terms of a derivative that may cancel each other."""
    return 1 / (x * (1 - x)) if kind == "probability" else 1.0


@dataclass(frozen=True)
class RowLoss:
    """A loss of rows. The fields mean the same as in Loss, but `formula` returns the loss of each row and the weight of
    each row in a mean. `dtypes`: the dtypes in which the loss is tested."""

    call: Callable[..., torch.Tensor]
    formula: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    kinds: Sequence[str]
    leaves: int = 1
    dtypes: Sequence[torch.dtype] = (torch.float32,)


def _evenly(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return losses, torch.ones(len(losses), dtype=torch.float64)


def _picked(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None = None, ignored: int | None = None) -> Any:
    """Return -w x at the target (0 for ignored rows), and the weight of each row."""
    hits = t[:, None] == torch.arange(x.shape[1])
    weights = (hits * (1.0 if w is None else w)).sum(1).to(torch.float64)
    if ignored is not None:
        weights = torch.where(t == ignored, 0.0, weights)
    return -(hits * x).sum(1) * weights, weights


def _cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y).sum(1) / ((x * x).sum(1) * (y * y).sum(1)).sqrt()


def _distance(x: torch.Tensor, y: torch.Tensor, p: float = 2.0) -> torch.Tensor:
    return ((x - y + 1e-6).abs() ** p).sum(1) ** (1 / p)


def _margins(x: torch.Tensor, t: torch.Tensor, p: int, margin: float, w: torch.Tensor | None = None) -> torch.Tensor:
    hits = t[:, None] == torch.arange(x.shape[1])
    own = (hits * x).sum(1, keepdim=True)
    terms = torch.where(hits, 0.0, (margin - own + x).clamp(min=0) ** p)
    factor = 1.0 if w is None else (hits * w).sum(1)
    return factor * terms.sum(1) / x.shape[1]


def _log_softmax(x: torch.Tensor) -> torch.Tensor:
    return x - x.exp().sum(1, keepdim=True).log()


def _of_probabilities(x: torch.Tensor, q: torch.Tensor, w: torch.Tensor | None, smoothing: float) -> Any:
    """Return -sum w q log p, with equal weights for the mean: torch divides by the number of rows, whatever w is
    (cross_entropy's documentation)."""
    smoothed = (1 - smoothing) * q + smoothing / x.shape[1]
    return _evenly(-(smoothed * _log_softmax(x) * (1.0 if w is None else w)).sum(1))


ROW_LOSSES: dict[str, RowLoss] = {
    "nll_loss": RowLoss(lambda x, t, **how: F.nll_loss(x, t, **how), _picked, ("real", "class"), dtypes=DTYPES),
    "nll_loss, weight": RowLoss(
        lambda x, t, w, **how: F.nll_loss(x, t, w, **how), _picked, ("real", "class", "class weights"), dtypes=DTYPES
    ),
    "nll_loss, weight, ignore_index": RowLoss(
        lambda x, t, w, **how: F.nll_loss(x, t, w, ignore_index=1, **how),
        lambda x, t, w: _picked(x, t, w, 1),
        ("real", "class", "class weights"),
    ),
    "nll_loss of images": RowLoss(
        lambda x, t, w, **how: _as_images(x, t, w, **how), _picked, ("real", "class", "class weights")
    ),
    "nll_loss of images, ignore_index": RowLoss(
        lambda x, t, **how: _as_images(x, t, None, ignore_index=1, **how),
        lambda x, t: _picked(x, t, None, 1),
        ("real", "class"),
    ),
    "cross_entropy of probabilities": RowLoss(
        lambda x, q, **how: F.cross_entropy(x, q, **how),
        lambda x, q: _of_probabilities(x, q, None, 0.0),
        ("real", "probability"),
    ),
    "cross_entropy of probabilities, weight, smoothing": RowLoss(
        lambda x, q, w, **how: F.cross_entropy(x, q, w, label_smoothing=0.25, **how),
        lambda x, q, w: _of_probabilities(x, q, w, 0.25),
        ("real", "probability", "class weights"),
    ),
    "cosine_embedding_loss": RowLoss(
        lambda x, y, t, **how: F.cosine_embedding_loss(x, y, t, margin=-2.0, **how),
        lambda x, y, t: _evenly(torch.where(t > 0, 1 - _cosine(x, y), _cosine(x, y) + 2)),
        ("real", "between", "row sign"),
        2,
    ),
    "cosine_similarity": RowLoss(
        lambda x, y, **how: _reduced(F.cosine_similarity(x, y, dim=1), **how),
        lambda x, y: _evenly(_cosine(x, y)),
        ("real", "between"),
        2,
    ),
    "pairwise_distance": RowLoss(
        lambda x, y, **how: _reduced(F.pairwise_distance(x, y), **how),
        lambda x, y: _evenly(_distance(x, y)),
        ("real", "between"),
        2,
    ),
    "pairwise_distance p 1": RowLoss(
        lambda x, y, **how: _reduced(F.pairwise_distance(x, y, p=1.0), **how),
        lambda x, y: _evenly(_distance(x, y, 1.0)),
        ("real", "between"),
        2,
    ),
    "triplet_margin_loss": RowLoss(
        lambda x, y, z, **how: F.triplet_margin_loss(x, y, z, margin=50.0, **how),
        lambda x, y, z: _evenly((_distance(x, y) - _distance(x, z) + 50.0).clamp(min=0)),
        ("real", "between", "between"),
        3,
    ),
    "multi_margin_loss": RowLoss(
        lambda x, t, **how: F.multi_margin_loss(x, t, margin=8.0625, **how),
        lambda x, t: _evenly(_margins(x, t, 1, 8.0625)),
        ("real", "class"),
    ),
    "multi_margin_loss p 2, weight": RowLoss(
        lambda x, t, w, **how: F.multi_margin_loss(x, t, p=2, margin=8.0625, weight=w, **how),
        lambda x, t, w: _evenly(_margins(x, t, 2, 8.0625, w)),
        ("real", "class", "class weights"),
    ),
    "multilabel_soft_margin_loss, weight": RowLoss(
        lambda x, t, w, **how: F.multilabel_soft_margin_loss(x, t, w, **how),
        lambda x, t, w: _evenly((w * _with_logits(x, t)).mean(1)),
        ("real", "binary", "class weights"),
    ),
    "cdist": RowLoss(
        lambda x, y, **how: _reduced(torch.cdist(x, y[:1].expand(3, -1)).sum(1), **how),
        lambda x, y: _evenly(3 * ((x - y[:1]) ** 2).sum(1).sqrt()),
        ("real", "between"),
    ),
}


def _as_images(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor | None, **how: Any) -> torch.Tensor:
    """Pass the rows as the positions of two images, or of one if their number is odd, with the classes as the second
    dimension."""
    places = next(part for part in (3, 2, 1) if len(t) % (2 * part) == 0) if len(t) % 2 == 0 else 0
    shape = (2, places, -1) if places else (1, 1, len(t))
    images = x.reshape(*t.view(shape).shape, -1).movedim(3, 1).contiguous()
    found = F.nll_loss(images, t.view(shape), w, **how)
    return found.flatten() if found.dim() else found


def _reduced(rows: torch.Tensor, reduction: str) -> torch.Tensor:
    return rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()


def _row_values(kind: str, rows: int, classes: int, seed: int) -> torch.Tensor:
    if kind == "class":
        return hashed_inputs.hashes(rows, seed) % classes
    if kind == "class weights":
        return _values("weights of columns", 1, classes, seed)[0]
    if kind == "row sign":
        return hashed_inputs.signs(rows, seed)
    if kind == "binary":
        return (hashed_inputs.signs(rows * classes, seed).reshape(rows, classes) + 1) / 2
    return _values(kind, rows, classes, seed)


def row_loss(point: Point, seed: int) -> Case:
    """Build a case of a loss of rows of classes or coordinates."""
    which, rows, classes = point["loss"], point["rows"], point["classes"]
    each = ROW_LOSSES[which]
    dtype = point["dtype"] if point["dtype"] in each.dtypes else torch.float32
    given = [_row_values(kind, rows, classes, 8 * seed + n) for n, kind in enumerate(each.kinds)]
    if "ignore_index" in which:
        given[1][::3] = 1
        given[1][-1] = classes - 1
    given = [part.to(dtype) if part.is_floating_point() else part for part in given]
    if point["reduction"] == "none":
        given.append(hashed_inputs.whole((rows,), 8 * seed + 7, 3).to(dtype))
    name = f"losses by {which}, {rows} rows of {classes}, {point['reduction']}, {point['layout']}"
    exact = functools.partial(_row_loss_exactly, point=point, dtype=dtype)
    return Case(name, dtype, tuple(given), functools.partial(_row_loss, point=point), exact)


def _row_loss(*given: torch.Tensor, point: Point) -> Results:
    each = ROW_LOSSES[point["loss"]]
    tensors = [
        (with_large_gaps(part, point["layout"]) if part.dim() == 2 else part).detach().requires_grad_(n < each.leaves)
        if part.is_floating_point()
        else part
        for n, part in enumerate(given[: len(each.kinds)])
    ]
    output = each.call(*tensors, reduction=point["reduction"])
    upstream = given[-1] if point["reduction"] == "none" else output.detach().new_ones(())
    gradients = backward_pass.gradients(output, tensors[: each.leaves], upstream)
    return {"output": output.detach(), **{f"gradient {n}": part for n, part in enumerate(gradients)}}


def _row_loss_exactly(*given: torch.Tensor, point: Point, dtype: torch.dtype) -> Expected:
    """Return the expected results. A loss is at most a few times the size of its terms. The largest derivative times
    the values is a bound for this size. The derivative of a cosine, y/(|x| |y|) - cos x/|x|^2, is the difference of two
    terms of at most 1/|x|, which cancel each other where x and y are almost parallel."""
    each, count = ROW_LOSSES[point["loss"]], point["classes"]
    error = 2 * STEPS * tolerances.unit_roundoff(dtype) + 8 * tolerances.summation(max(count, point["rows"]))
    tensors = [
        part.detach().requires_grad_(n < each.leaves) if part.is_floating_point() else part
        for n, part in enumerate(given[: len(each.kinds)])
    ]
    losses, weights = each.formula(*tensors)
    scale = torch.ones(len(losses), dtype=torch.float64)
    if point["reduction"] == "none":
        scale = given[-1]
    elif point["reduction"] == "mean":
        scale = scale / weights.detach().sum()
    slopes = torch.autograd.grad((losses * scale).sum(), tensors[: each.leaves])
    size = 8 + losses.detach().abs()
    value, limit = losses.detach(), error * size
    if point["reduction"] != "none":
        value, limit = (value * scale).sum(), (limit * scale.abs()).sum()
    found = {"output": Exact(value, tolerances.rounding(value, dtype) + limit)}
    for n, slope in enumerate(slopes):
        around = error * (slope.abs() + slope.abs().amax(1, keepdim=True) / math.sqrt(count))
        if point["loss"].startswith("cosine"):
            around = around + error * scale.abs()[:, None] / given[n].norm(dim=1, keepdim=True)
        smallest = 4 * tolerances.rounding(torch.zeros_like(slope), dtype)
        found[f"gradient {n}"] = Exact(slope, tolerances.rounding(slope, dtype) + around + smallest)
    return found


OPERATIONS = (
    Operation(
        "loss",
        {
            "loss": tuple(LOSSES),
            "dtype": DTYPES,
            "length": LENGTHS,
            "rows": ROWS,
            "reduction": REDUCTIONS,
            "layout": MATRICES,
            "others": MATRICES,
        },
        loss_case,
        {"quick": 21, "standard": 84, "full": 1200},
        lambda point: point["length"] * point["rows"] <= MOST,
    ),
    Operation(
        "loss of rows",
        {
            "loss": tuple(ROW_LOSSES),
            "dtype": DTYPES,
            "classes": (3, 5, 17, 33, 64, 127, 257, 1025),
            "rows": (2, 3, 5, 12, 33, 66, 513),
            "reduction": REDUCTIONS,
            "layout": MATRICES,
        },
        row_loss,
        {"quick": 16, "standard": 64, "full": 1000},
        lambda point: point["classes"] * point["rows"] <= 6000,
    ),
)
