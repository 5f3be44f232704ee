"""The connectionist temporal classification loss (CTC) of sampled lengths, forward and backward.

The reference sums the probabilities of all alignments in float64 with the forward recursion of Graves et al.,
"Connectionist temporal classification", 2006. autograd computes its derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import with_large_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

STEPS = 16  # roundings of the logarithm of a sum of three exponentials, and of the additions around it


def ctc(point: Point, seed: int) -> Case:
    """Build a case. Its inputs are logits (times, samples, classes), targets of different lengths and, with reduction
    "none", the gradient of each sample's loss. The first sample has the full length. With `too long`, the targets of
    the last sample do not fit into its times."""
    samples, classes, times, length = point["samples"], point["classes"], point["times"], point["length"]
    logits = hashed_inputs.whole((times, samples, classes), seed, 8) / 4
    drawn = hashed_inputs.hashes(samples * length, seed + 1).view(samples, length) % (classes - 1)
    blank = _blank(point)
    targets = drawn + (drawn >= blank).to(torch.int64)
    if length > 1:
        targets[:, 1] = targets[:, 0]  # between two equal classes, the alignment needs a blank
    grad = hashed_inputs.whole((samples,), seed + 2, 3)
    name = (
        f"losses by ctc_loss, {times} times of {samples}x{classes}, targets of {length} {point['targets']}, "
        f"blank {blank}, {point['reduction']}{', too long' if point['too long'] else ''}, {point['layout']}"
    )
    given = [logits.to(point["dtype"]), targets]
    if point["reduction"] == "none":
        given.append(grad.to(point["dtype"]))
    exact = functools.partial(_ctc_exactly, point=point)
    return Case(name, point["dtype"], tuple(given), functools.partial(_ctc, point=point), exact)


def _blank(point: Point) -> int:
    """Return the index of the blank class."""
    last = int(point["classes"]) - 1
    return {"first": 0, "last": last, "middle": (last + 1) // 2}[point["blank"]]


def _lengths(point: Point) -> tuple[list[int], list[int]]:
    """Return the numbers of times and of targets of each sample."""
    times = [point["times"] - number % 3 for number in range(point["samples"])]
    lengths = [point["length"] - number % 2 * (point["length"] > 1) for number in range(point["samples"])]
    if point["too long"]:
        times[-1] = lengths[-1] - 1
    return times, lengths


def _is_ctc(point: Point) -> bool:
    # A blank must lie between equal classes, so n targets need at most 2 n - 1 times.
    fits = point["times"] - 2 >= 2 * point["length"] - 1 and point["classes"] > 2
    return fits and (not point["too long"] or (point["samples"] > 1 and point["length"] > 2))


def _ctc(logits: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor | None = None, *, point: Point) -> Results:
    leaf = with_large_gaps(logits, point["layout"]).detach().requires_grad_()
    times, lengths = _lengths(point)
    wanted = targets.to(point["index"])
    if point["targets"] == "in a line":
        wanted = torch.cat([row[:count] for row, count in zip(wanted, lengths)])
    given, wanted_counts = (torch.tensor(part, dtype=point["index"], device=logits.device) for part in (times, lengths))
    options = {"reduction": point["reduction"], "zero_infinity": point["too long"]}
    loss = F.ctc_loss(torch.log_softmax(leaf, -1), wanted, given, wanted_counts, _blank(point), **options)
    upstream = loss.detach().new_ones(()) if grad is None else grad
    (gradient,) = backward_pass.gradients(loss, (leaf,), upstream)
    return {"output": loss.detach(), "gradient": gradient}


def _ctc_exactly(
    logits: torch.Tensor, targets: torch.Tensor, grad: torch.Tensor | None = None, *, point: Point
) -> Expected:
    """Return the expected loss and gradient. Each of the T steps of both recursions adds STEPS roundings of logarithms
    whose size is that of the loss. These roundings also affect the probabilities in the gradient, which are at most
    1."""
    leaf = logits.detach().requires_grad_()
    probabilities = leaf - leaf.logsumexp(-1, keepdim=True)
    times, lengths = _lengths(point)
    losses = []
    for sample, (duration, count) in enumerate(zip(times, lengths)):
        if point["too long"] and sample == len(times) - 1:
            losses.append(0 * leaf.sum())  # no alignment exists; zero_infinity makes the loss 0
            continue
        losses.append(-_alignments(probabilities[:duration, sample], targets[sample, :count].tolist(), _blank(point)))
    each = torch.stack(losses)
    scale = torch.ones(len(each), dtype=torch.float64) if grad is None else grad
    if point["reduction"] == "mean":
        scale = scale / torch.tensor(lengths).clamp(min=1) / len(each)
    (slope,) = torch.autograd.grad((each * scale).sum(), (leaf,))
    value = each.detach()
    error = tolerances.unit_roundoff(point["dtype"]) * STEPS * point["times"] * (value + point["times"])
    limit = error
    if point["reduction"] != "none":
        value, limit = (value * scale).sum(), (error * scale.abs()).sum()
    around = (2 * error * scale.abs())[None, :, None].expand_as(slope)
    return {"output": Exact(value, limit), "gradient": Exact(slope, around)}


def _alignments(probabilities: torch.Tensor, classes: list[int], blank: int) -> torch.Tensor:
    """Return the logarithm of the total probability of all alignments of `classes`, given log-probabilities (times,
    classes)."""
    path = [blank]
    for each in classes:
        path += [each, blank]
    none = torch.tensor(-1e300, dtype=torch.float64)
    alpha = [probabilities[0, path[n]] if n < 2 else none for n in range(len(path))]
    for row in probabilities[1:]:
        before = alpha
        alpha = []
        for n, each in enumerate(path):
            terms = [before[n], before[n - 1] if n else none]
            if n > 1 and each not in (blank, path[n - 2]):
                terms.append(before[n - 2])
            alpha.append(torch.stack(terms).logsumexp(0) + row[each])
    return torch.stack(alpha[-2:]).logsumexp(0)


OPERATIONS = (
    Operation(
        "ctc loss",
        {
            "dtype": (torch.float32, torch.float32, torch.float64),
            "samples": (1, 2, 3, 5),
            "classes": (3, 5, 17, 33, 130),
            "times": (4, 7, 9, 12),
            "length": (1, 2, 3, 4),
            "targets": ("in rows", "in a line"),
            "index": (torch.int64, torch.int32),
            "blank": ("first", "middle", "last"),
            "reduction": ("mean", "sum", "none"),
            "too long": (False, False, True),
            "layout": ("contiguous", "transposed", "rows apart", "batch inside"),
        },
        ctc,
        {"quick": 1, "standard": 8, "full": 150},
        _is_ctc,
    ),
)
