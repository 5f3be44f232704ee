"""Gathering, scattering and reducing by index along a dimension of a block, by pairs of indices and by masks, forward
and backward.

The expected results come from comparing each index with all positions, so that no indexing kernel computes them. In the
inputs of a case, the indexed dimension is the last one. For the call it is moved to its place.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping
from typing import Callable

import torch

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances, torch_fault_exclusions
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, *FLOATS, torch.float64, torch.int64, torch.int32)
MOST = 150_000  # maximum number of comparisons of an index with a position
FILL = 7
REDUCTIONS = ("sum", "prod", "mean", "amax", "amin")
GROUPS = ("gather", "scatter_add", "scatter_reduce", "scatter of a number", "index", "index_reduce", "pairs", "masks")
FOR_FLOATS = ("scatter_reduce", "index_reduce", "masks")  # groups with means or gradients, which integers do not have
# Groups whose gradients are not computed, or in which `others` serves as the gradient.
WITHOUT_GRADIENT = ("gather", "pairs", "scatter of a number", "index_reduce")
BY_ROW = ("index", "index_reduce")  # groups that use the same list of indices for all rows


def case(point: Point, seed: int) -> Case:
    """Build a case with x (outer, inner, length) and, in most groups, `others` (outer, inner, count) and `count`
    indices into the last dimension of x, for each row or one list for all rows. `pairs` has pairs of indices into the
    last and the first dimension, `masks` a mask. `masks`, `scatter of a number` and `gather` of integers have no
    `others`."""
    dtype, group, count = point["dtype"], point["group"], point["count"]
    shape = point["outer"], point["inner"], point["length"]
    x, others = hashed_inputs.whole(shape, seed, 9), hashed_inputs.whole((*shape[:2], count), seed + 1, 3)
    if group.endswith("reduce"):
        x, others = (_powers(part, seed + 6) for part in (x, others))
    index = hashed_inputs.hashes(others.numel(), seed + 2).view(others.shape) % shape[2]
    if group in BY_ROW or point["index"] == "expanded":
        index = index[:1, :1]
    if group == "pairs":
        index = torch.stack((index[0, 0], hashed_inputs.hashes(count, seed + 3) % shape[0]))
    grad = hashed_inputs.whole(shape, seed + 4, 3)
    given = [part.to(dtype) for part in (x, others, grad)]
    if group == "masks":
        index = (hashed_inputs.hashes(shape[1] * shape[2], seed + 5) % 3 == 0).view(shape[1:])
        index[0, 0] = True
        given = given[::2]
    given = given if dtype.is_floating_point and group not in WITHOUT_GRADIENT else given[:2]
    name = (
        f"blocks by {group}, {'x'.join(map(str, shape))} {point['layout']}, {count} indices {point['index']}, "
        f"dimension {point['dim']}"
    )
    if group == "scatter of a number" or (group == "gather" and not dtype.is_floating_point):
        given = given[:1]
    if group == "index":
        index = index.to(point["index dtype"])
    if group in BY_ROW:
        index = index[0, 0]
    run = functools.partial(_run, point=point)
    return Case(name, dtype, (given[0], index, *given[1:]), run, functools.partial(_exactly, point=point))


def _run(x: torch.Tensor, index: torch.Tensor, *rest: torch.Tensor, point: Point) -> Results:
    return RUNS[point["group"]](index, x, *rest, point=point)


def _exactly(x: torch.Tensor, index: torch.Tensor, *rest: torch.Tensor, point: Point) -> Expected:
    return EXACTLY[point["group"]](index, x, *rest, point=point)


def _powers(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return powers of two: 1 or -1, and one time in 8 one of 2, -2, 1/2 and -1/2. Their products are powers of two in
    float16's range."""
    drawn = hashed_inputs.hashes(x.numel(), seed).view(x.shape) % 16
    return x.sign() * torch.where(drawn == 0, 2.0, torch.where(drawn == 1, 0.5, 1.0))


def _is_possible(point: Point) -> bool:
    if point["outer"] * point["inner"] * point["count"] * point["length"] > MOST:
        return False
    if point["group"] == "scatter of a number" and point["dtype"] == torch.bfloat16 and point["count"] > 33:
        return False  # keeps sums below 256, so that each order of addition gives the same result
    if point["group"] == "pairs" and point["outer"] == 1:
        return False
    return point["dtype"].is_floating_point or point["group"] not in FOR_FLOATS


def _leaf(x: torch.Tensor, point: Point) -> torch.Tensor:
    """Return x with its last dimension moved to the place of the indexed dimension, in the layout of the point."""
    moved = with_large_gaps(x.movedim(-1, point["dim"]).contiguous(), point["layout"]).detach()
    return moved.requires_grad_() if x.is_floating_point() else moved


def _back(x: torch.Tensor, point: Point) -> torch.Tensor:
    return x.detach().movedim(point["dim"], -1)


def _indices(index: torch.Tensor, shape: torch.Size, point: Point) -> torch.Tensor:
    """Return the indices contiguous, with the last two dimensions swapped in memory, or as one row of indices expanded
    with strides of 0."""
    whole = index.expand(*shape[:2], -1).movedim(-1, point["dim"])
    if point["index"] == "expanded":
        return whole
    return whole.mT.contiguous().mT if point["index"] == "transposed" else whole.contiguous()


def _gather(index: torch.Tensor, x: torch.Tensor, others: torch.Tensor | None = None, *, point: Point) -> Results:
    """Gather by index. `others` is the gradient of the gathered elements."""
    leaf, places = _leaf(x, point), _indices(index, x.shape, point)
    taken = torch.gather(leaf, point["dim"], places)
    along = torch.take_along_dim(leaf, places, point["dim"])
    found = {"output": _back(taken, point), "take_along_dim": _back(along, point)}
    if others is not None:
        found["gradient"] = _back(backward_pass.gradients(taken, (leaf,), _leaf(others, point).detach())[0], point)
    return found


def _gather_exactly(
    index: torch.Tensor, x: torch.Tensor, others: torch.Tensor | None = None, *, point: Point
) -> Expected:
    hits = _hits(index, x)
    found = {"output": _taken(hits, x), "take_along_dim": _taken(hits, x)}
    if others is not None:
        found["gradient"] = without_rounding(_sums(hits, others))
    return found


def _hits(index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a boolean tensor (outer, inner, count, length) that is True where an index equals a position."""
    return index.expand(*x.shape[:2], -1)[..., None] == torch.arange(x.shape[2])


def _taken(hits: torch.Tensor, x: torch.Tensor) -> Exact:
    return without_rounding((hits * x.double()[:, :, None]).sum(3))


def _sums(hits: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return (hits * others.double()[..., None]).sum(2)


def _scatter_add(
    index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, grad: torch.Tensor | None = None, *, point: Point
) -> Results:
    leaf, more = _leaf(x, point), _leaf(others, point)
    places = _indices(index, x.shape, point)
    added = torch.scatter_add(leaf, point["dim"], places, more)
    with torch.no_grad():
        again = leaf.clone().scatter_add_(point["dim"], places, more)
    found = {"output": _back(added, point), "in place": _back(again, point)}
    if grad is not None:
        slopes = backward_pass.gradients(added, (leaf, more), _leaf(grad, point).detach())
        found.update(zip(("gradient", "gradient of others"), (_back(slope, point) for slope in slopes)))
    return found


def _scatter_add_exactly(
    index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, grad: torch.Tensor | None = None, *, point: Point
) -> Expected:
    hits = _hits(index, x)
    total = without_rounding(x.double() + _sums(hits, others))
    found = {"output": total, "in place": total}
    if grad is not None:
        found.update({"gradient": without_rounding(grad), "gradient of others": _taken(hits, grad)})
    return found


def _scatter_reduce(
    index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, grad: torch.Tensor, *, point: Point
) -> Results:
    """Run every reduction, with and without the elements of x; compute the gradients of sums and means."""
    places, found = _indices(index, x.shape, point), {}
    for how in REDUCTIONS:
        for included in (True, False):
            leaf, more = _leaf(x, point), _leaf(others, point)
            output = torch.scatter_reduce(leaf, point["dim"], places, more, how, include_self=included)
            name = f"{how}{'' if included else ' of others'}"
            found[name] = _back(output, point)
            if how in ("sum", "mean"):
                slopes = backward_pass.gradients(output, (leaf, more), _leaf(grad, point).detach())
                found[f"{name}, gradient"], found[f"{name}, gradient of others"] = (
                    _back(slope, point) for slope in slopes
                )
    return found


def _reduced(hits: torch.Tensor, x: torch.Tensor, others: torch.Tensor, how: str, included: bool) -> torch.Tensor:
    """Return the reduced elements. Positions to which no index points keep x."""
    neutral = {"prod": 1.0, "amax": -math.inf, "amin": math.inf}.get(how, 0.0)
    terms = torch.where(hits, others[..., None], neutral)
    counts = hits.sum(2)
    if included:
        terms, counts = torch.cat((terms, x[:, :, None]), 2), counts + 1
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda part: part.sum(2),
        "mean": lambda part: part.sum(2) / counts.clamp(min=1),
        "prod": lambda part: part.prod(2),
        "amax": lambda part: part.amax(2),
        "amin": lambda part: part.amin(2),
    }
    return torch.where(counts > 0, functions[how](terms), x)


def _scatter_reduce_exactly(
    index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, grad: torch.Tensor, *, point: Point
) -> Expected:
    """Return the expected results. A mean divides an exact sum, which is one rounding. Its gradient is divided and
    rounded too, before it is gathered."""
    hits, dtype, found = _hits(index, x), point["dtype"], {}
    for how in REDUCTIONS:
        for included in (True, False):
            name = f"{how}{'' if included else ' of others'}"
            value = _reduced(hits, x, others, how, included)
            divided = tolerances.rounding(value, dtype) if how == "mean" else torch.zeros_like(value)
            found[name] = Exact(value, divided)
            if how not in ("sum", "mean"):
                continue
            counts = hits.sum(2) + int(included)
            share = grad / counts.clamp(min=1) if how == "mean" else grad
            own = share if included else torch.where(counts > 0, 0.0, grad)
            for kind, slope in (("gradient", own), ("gradient of others", _taken(hits, share).value)):
                error = tolerances.rounding(slope, dtype) if how == "mean" else torch.zeros_like(slope)
                found[f"{name}, {kind}"] = Exact(slope, error)
    return found


def _of_number(index: torch.Tensor, x: torch.Tensor, *, point: Point) -> Results:
    leaf, dim = _leaf(x, point).detach(), point["dim"]
    places = _indices(index, x.shape, point)
    return {
        "output": _back(torch.scatter(leaf, dim, places, FILL), point),
        "in place": _back(leaf.clone().scatter_(dim, places, FILL), point),
        "added": _back(leaf.clone().scatter_(dim, places, FILL, reduce="add"), point),
    }


def _of_number_exactly(index: torch.Tensor, x: torch.Tensor, *, point: Point) -> Expected:
    hits = _hits(index, x)
    put = without_rounding(torch.where(hits.any(2), float(FILL), x.double()))
    return {"output": put, "in place": put, "added": without_rounding(x.double() + FILL * hits.sum(2))}


def _index(
    index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, grad: torch.Tensor | None = None, *, point: Point
) -> Results:
    leaf, more, dim = _leaf(x, point), _leaf(others, point), point["dim"]
    taken = torch.index_select(leaf, dim, index)
    added = torch.index_add(leaf, dim, index, more, alpha=-2)
    found = {"index_select": taken, "index_add": added, "index_fill": torch.index_fill(leaf, dim, index.long(), FILL)}
    if grad is not None:
        (found["index_select, gradient"],) = backward_pass.gradients(taken, (leaf,), more.detach())
        slopes = backward_pass.gradients(added, (leaf, more), _leaf(grad, point).detach())
        found.update(zip(("index_add, gradient", "index_add, gradient of others"), slopes))
    return {name: _back(part, point) for name, part in found.items()}


def _index_exactly(
    index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, grad: torch.Tensor | None = None, *, point: Point
) -> Expected:
    hits = _hits(index, x)
    sums = _sums(hits, others)
    found = {
        "index_select": _taken(hits, x),
        "index_add": without_rounding(x.double() - 2 * sums),
        "index_fill": without_rounding(torch.where(hits.any(2), float(FILL), x.double())),
    }
    if grad is not None:
        found["index_select, gradient"] = without_rounding(sums)
        found["index_add, gradient"] = without_rounding(grad)
        found["index_add, gradient of others"] = _taken(hits, -2 * grad)
    return found


def _index_reduce(index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, *, point: Point) -> Results:
    given, found = [_leaf(part, point).detach() for part in (x, others)], {}
    at = {**point, "single row": point["outer"] * point["inner"] == 1}
    uncomputed = torch_fault_exclusions.uncomputed_results("blocks by index", x.device.type, at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that index_reduce is in beta
        for how in REDUCTIONS[1:]:
            for included in (True, False):
                name = f"{how}{'' if included else ' of others'}"
                leaf, more = (part.float() for part in given) if name in uncomputed else given
                output = torch.index_reduce(leaf, point["dim"], index, more, how, include_self=included)
                found[name] = _back(output.to(x.dtype), point)
    return found


def _index_reduce_exactly(index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, *, point: Point) -> Expected:
    found = {}
    for how in REDUCTIONS[1:]:
        for included in (True, False):
            value = _reduced(_hits(index, x), x, others, how, included)
            error = tolerances.rounding(value, point["dtype"]) if how == "mean" else torch.zeros_like(value)
            found[f"{how}{'' if included else ' of others'}"] = Exact(value, error)
    return found


def _pairs(index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, *, point: Point) -> Results:
    """Index with pairs of indices, one into the last dimension and one into the first. `others` has a row for each
    pair."""
    leaf, rows = with_large_gaps(x, point["layout"]).detach(), others[0].t()
    leaf = leaf.requires_grad_(x.is_floating_point())
    last, first = index
    taken = leaf[first, :, last]
    with torch.no_grad():
        put = leaf.clone(memory_format=torch.contiguous_format).movedim(1, 2)
        put.index_put_((first, last), rows, accumulate=True)
        outer = leaf.detach()[first[:9, None], :, last]
        single = leaf[..., 0].clone().index_put_((first, first % x.shape[1]), rows[:, 0], accumulate=True)
    found = {"output": taken.detach(), "accumulated": put.movedim(2, 1), "all pairs": outer, "in a matrix": single}
    if x.is_floating_point():
        (found["gradient"],) = backward_pass.gradients(taken, (leaf,), rows)
    return found


def _pairs_exactly(index: torch.Tensor, x: torch.Tensor, others: torch.Tensor, *, point: Point) -> Expected:
    last, first = (part[:, None] == torch.arange(n) for part, n in zip(index, (x.shape[2], x.shape[0])))
    one, other, whole = first.double(), last.double(), x.double()
    rows = others[0].t().double()
    sums = torch.einsum("ma,mn,mb->abn", one, other, rows)
    column = (index[1] % x.shape[1])[:, None] == torch.arange(x.shape[1])
    found = {
        "output": torch.einsum("ma,mn,abn->mb", one, other, whole),
        "accumulated": whole + sums,
        "all pairs": torch.einsum("la,mn,abn->lmb", one[:9], other, whole),
        "in a matrix": whole[..., 0] + torch.einsum("ma,mb,m->ab", one, column.double(), rows[:, 0]),
    }
    if x.is_floating_point():
        found["gradient"] = sums
    return {name: without_rounding(value) for name, value in found.items()}


def _masks(mask: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, *, point: Point) -> Results:
    """Run functions of masks. The mask has no first dimension, so it is broadcast. masked_scatter writes the first
    elements of -x to the positions of the mask."""
    leaf, source = (with_large_gaps(part, point["layout"]).detach().requires_grad_() for part in (x, -x))
    upstream = with_large_gaps(grad, point["layout"])
    scattered = leaf.masked_scatter(mask, source)
    filled = leaf.masked_fill(mask, FILL)
    column = (2 * x[:1, :, :1]).detach().requires_grad_()
    chosen = torch.where(mask, leaf, column)
    selected = torch.masked_select(leaf, mask)
    places = torch.nonzero(mask.expand(x.shape))
    found = {"masked_scatter": scattered, "masked_fill": filled, "where": chosen, "masked_select": selected}
    found = {name: part.detach() for name, part in found.items()} | {"nonzero": places}
    first, second = backward_pass.gradients(scattered, (leaf, source), upstream)
    found.update({"masked_scatter, gradient": first, "masked_scatter, gradient of source": second})
    (found["masked_fill, gradient"],) = backward_pass.gradients(filled, (leaf,), upstream)
    first, second = backward_pass.gradients(chosen, (leaf, column), upstream)
    found.update({"where, gradient": first, "where, gradient of column": second})
    (found["masked_select, gradient"],) = backward_pass.gradients(selected, (leaf,), selected.detach())
    kept = leaf.detach().clone(memory_format=torch.contiguous_format)
    kept[mask.expand(x.shape)] = 0
    return {**found, "x[mask] = 0": kept}


def _masks_exactly(mask: torch.Tensor, x: torch.Tensor, grad: torch.Tensor, *, point: Point) -> Expected:
    wide = mask.expand(x.shape)
    flags, values, grads = (part.flatten().tolist() for part in (wide, x, grad))
    where = [place for place, flag in enumerate(flags) if flag]
    scattered, of_source = list(values), [0.0] * len(values)
    for number, place in enumerate(where):
        scattered[place] = -values[number]
        of_source[number] = grads[place]
    b, n = x.shape[1:]
    found = {
        "masked_scatter": torch.tensor(scattered, dtype=torch.float64).view(x.shape),
        "masked_scatter, gradient": grad * ~wide,
        "masked_scatter, gradient of source": torch.tensor(of_source, dtype=torch.float64).view(x.shape),
        "masked_fill": x + (FILL - x) * wide,
        "masked_fill, gradient": grad * ~wide,
        "where": x * wide + 2 * x[:1, :, :1] * ~wide,
        "where, gradient": grad * wide,
        "masked_select": torch.tensor([values[place] for place in where], dtype=torch.float64),
        "masked_select, gradient": x * wide,
        "nonzero": torch.tensor([[place // (b * n), place // n % b, place % n] for place in where]).double(),
        "x[mask] = 0": x * ~wide,
    }
    exact = {name: without_rounding(value) for name, value in found.items()}
    # A sum of whole numbers below 1 / u is exact. torch may add larger ones in any order, which rounds them.
    sums, terms = (grad * ~wide).sum((0, 2), keepdim=True), x.shape[0] * n
    largest = (grad * ~wide).abs().sum((0, 2), keepdim=True)
    is_exact = 1 / tolerances.unit_roundoff(point["dtype"]) >= float(largest.max())
    error = (
        0.0 * sums if is_exact else tolerances.rounding(sums, point["dtype"]) + tolerances.summation(terms) * largest
    )
    return {**exact, "where, gradient of column": Exact(sums, error)}


RUNS: dict[str, Callable[..., Results]] = {
    "gather": _gather,
    "scatter_add": _scatter_add,
    "scatter_reduce": _scatter_reduce,
    "scatter of a number": _of_number,
    "index": _index,
    "index_reduce": _index_reduce,
    "pairs": _pairs,
    "masks": _masks,
}
EXACTLY: dict[str, Callable[..., Expected]] = {
    "gather": _gather_exactly,
    "scatter_add": _scatter_add_exactly,
    "scatter_reduce": _scatter_reduce_exactly,
    "scatter of a number": _of_number_exactly,
    "index": _index_exactly,
    "index_reduce": _index_reduce_exactly,
    "pairs": _pairs_exactly,
    "masks": _masks_exactly,
}
OPERATIONS = (
    Operation(
        "blocks by index",
        {
            "group": GROUPS,
            "dtype": DTYPES,
            "outer": (1, 2, 3, 5),
            "inner": (1, 2, 3, 8, 17, 33),
            "length": (2, 3, 7, 16, 33, 65, 130),
            "count": (1, 3, 16, 33, 65, 130),
            "dim": (0, 1, 2, -1, -2, -3),
            "index": ("contiguous", "expanded", "transposed"),
            "index dtype": (torch.int64, torch.int32),
            "layout": BATCHES,
        },
        case,
        {"quick": 8, "standard": 60, "full": 800},
        _is_possible,
    ),
)
