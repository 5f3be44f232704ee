"""Reductions over one or several dimensions of a three-dimensional block, and scans over one: sums, extremes,
variances, norms."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.single_rounding import lost_in_rounding

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Dims = tuple[int, ...]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
OVER: dict[str, Dims] = {
    "first": (0,),
    "middle": (1,),
    "last": (2,),
    "first two": (0, 1),
    "last two": (1, 2),
    "outer two": (0, 2),
    "all": (0, 1, 2),
}
GROUPS = ("sums", "orders", "spreads", "truths", "exponentials", "scans")
FOR_INTEGERS = ("sums", "orders", "truths", "scans")
LENGTHS = (1, 2, 3, 4, 5, 8, 17, 31, 33, 64, 65, 129, 257, 513, 1025, 2049, 4099, 9001)
OTHERS = (1, 2, 3, 4, 5, 8, 17, 33, 65, 130)
MOST = 10000  # maximum number of elements of a block
# The largest numbers of terms in a logarithm or a variance for which one changed element changes the result by more
# than its tolerance.
LONGEST = {torch.float32: 2100, torch.float16: 200, torch.bfloat16: 40}
EXPANDED = "expanded"
ORDERS = (0, 1, 2, 3, math.inf, -math.inf)  # orders of norms


def _sizes(point: Point) -> tuple[int, int, int]:
    return point["first"], point["middle"], point["last"]


def _is_possible(point: Point) -> bool:
    sizes, dtype, group, dims = _sizes(point), point["dtype"], point["group"], OVER[point["over"]]
    count = math.prod(sizes[dim] for dim in dims)
    if math.prod(sizes) > MOST or (dtype in INTEGERS and group not in FOR_INTEGERS):
        return False
    if point["layout"] == EXPANDED and (group != "sums" or dtype in INTEGERS or sizes[1] > 33 or count > 300):
        return False
    if group == "scans":
        return len(dims) == 1 and point["keepdim"] is False
    if group in ("spreads", "exponentials"):
        return count <= LONGEST[dtype] and (count > 3 or group == "exponentials")
    return group != "orders" or (count > 1 and dtype != torch.bool)


def reduction(point: Point, seed: int) -> Case:
    """Build a case of a block of numbers that suit the functions: whole numbers for sums, distinct numbers for
    comparisons."""
    dtype, group, sizes, dims = point["dtype"], point["group"], _sizes(point), OVER[point["over"]]
    most = 1 if dtype == torch.bfloat16 else 2  # torch's nansum may round partial sums, which here have no fractions
    if point["layout"] == EXPANDED:
        x = hashed_inputs.whole((sizes[0], 1, sizes[2]), seed, most)
    elif group == "orders":
        x = _different(sizes, dims, dtype, seed)
    elif group == "truths":
        x = (hashed_inputs.hashes(math.prod(sizes), seed) % (3 if seed % 2 else 40) == 0).to(torch.float32).view(sizes)
        x[0, 0, 0] = 1
    elif group == "spreads":
        x = hashed_inputs.whole(sizes, seed, 8).abs()
    elif group == "exponentials":
        x = hashed_inputs.whole(sizes, seed, 3) / 2
    else:
        x = hashed_inputs.whole(sizes, seed, most)
        x = x.abs() if dtype in (torch.uint8, torch.bool) else x
    size = "x".join(map(str, sizes))
    name = f"{group} of {size}, over {point['over']}, {point['layout']}, keepdim {point['keepdim']}"
    run = functools.partial(_run, point=point)
    return Case(name, dtype, (x.to(dtype),), run, functools.partial(_exactly, point=point))


def _different(sizes: Sequence[int], dims: Dims, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return whole numbers that are distinct as far as the dtype has enough of them."""
    order = hashed_inputs.hashes(math.prod(sizes), seed).argsort().argsort().reshape(tuple(sizes))
    most = {torch.float16: 2048, torch.bfloat16: 256, torch.int8: 120, torch.uint8: 250}.get(dtype, 1 << 20)
    numbers = order % most
    return (numbers if dtype == torch.uint8 else numbers - min(most, order.numel()) // 2).to(torch.float32)


def _given(x: torch.Tensor, point: Point) -> torch.Tensor:
    return x.expand(_sizes(point)) if point["layout"] == EXPANDED else with_large_gaps(x, point["layout"])


def _run(x: torch.Tensor, point: Point) -> Results:
    given, dims, keepdim = _given(x, point), OVER[point["over"]], point["keepdim"]
    return RUNS[point["group"]](given, dims, keepdim)


def _sums(x: torch.Tensor, dims: Dims, keepdim: bool) -> Results:
    found = {"sum": torch.sum(x, dims, keepdim), "count": torch.count_nonzero(x, dims)}
    if x.is_floating_point():
        found["mean"] = torch.mean(x, dims, keepdim)
        found["sum without NaN"] = torch.nansum(x, dims, keepdim)
        found["sum in float32"] = torch.sum(x, dims, keepdim, dtype=torch.float32)
        out = x.new_zeros(found["sum"].shape)
        found["sum out="] = torch.sum(x, dims, keepdim, out=out)
    if len(dims) == 1 and x.dtype != torch.bool:
        found["product"] = torch.prod(torch.sign(x), dims[0], keepdim)
    return found


def _orders(x: torch.Tensor, dims: Dims, keepdim: bool) -> Results:
    found = {"amax": torch.amax(x, dims, keepdim), "amin": torch.amin(x, dims, keepdim)}
    if len(dims) == 3:
        shape = found["amax"].shape
        found["max"], found["min"] = x.max().reshape(shape), x.min().reshape(shape)
        found["argmax"], found["argmin"] = x.argmax().reshape(shape), x.argmin().reshape(shape)
    if len(dims) == 1:
        found["argmax"] = torch.argmax(x, dims[0], keepdim)
        found["argmin"] = torch.argmin(x, dims[0], keepdim)
        found["max"], found["place of max"] = torch.max(x, dims[0], keepdim)
        found["min"], found["place of min"] = torch.min(x, dims[0], keepdim)
        found["min of aminmax"], found["max of aminmax"] = torch.aminmax(x, dim=dims[0], keepdim=keepdim)
        found["median"] = torch.median(x, dims[0], keepdim)[0]
    return found


def _spreads(x: torch.Tensor, dims: Dims, keepdim: bool) -> Results:
    found = {f"norm {p}": torch.linalg.vector_norm(x, p, dims, keepdim) for p in ORDERS}
    for correction in (0, 1, 2):
        found[f"var {correction}"] = torch.var(x, dims, correction=correction, keepdim=keepdim)
        found[f"std {correction}"] = torch.std(x, dims, correction=correction, keepdim=keepdim)
    found["var of var_mean"], found["mean of var_mean"] = torch.var_mean(x, dims, keepdim=keepdim)
    return found


def _truths(x: torch.Tensor, dims: Dims, keepdim: bool) -> Results:
    found = {"count": torch.count_nonzero(x, dims), "true": x.to(torch.bool).sum(dims, keepdim)}
    if len(dims) == 1:
        found["any"], found["all but"] = torch.any(x, dims[0], keepdim), torch.all(x == 0, dims[0], keepdim)
        found["all"] = torch.all(x, dims[0], keepdim)
    if len(dims) == 3:
        shape = found["true"].shape
        found["any"], found["all but"], found["all"] = (
            part.reshape(shape) for part in (x.any(), (x == 0).all(), x.all())
        )
        found["places"] = torch.nonzero(x)
    return found


def _exponentials(x: torch.Tensor, dims: Dims, keepdim: bool) -> Results:
    return {"logsumexp": torch.logsumexp(x, dims, keepdim), "far": torch.logsumexp(x - 128, dims, keepdim) + 128}


def _scans(x: torch.Tensor, dims: Dims, keepdim: bool) -> Results:
    (dim,) = dims
    found = {"cumsum": torch.cumsum(x, dim)}
    if x.dtype == torch.bool:
        return found
    found["cumprod"] = torch.cumprod(torch.sign(x), dim)
    found["cumsum in place"] = x.to(torch.int64 if not x.is_floating_point() else x.dtype).clone().cumsum_(dim)
    found["cummax"], found["cummin"] = torch.cummax(x, dim)[0], torch.cummin(x, dim)[0]
    found["reverse"] = x.flip(dim).cumsum(dim).flip(dim)
    if x.dtype == torch.float32:
        found["logcumsumexp"] = torch.logcumsumexp(x, dim)
    return found


RUNS: dict[str, Callable[[torch.Tensor, Dims, bool], Results]] = {
    "sums": _sums,
    "orders": _orders,
    "spreads": _spreads,
    "truths": _truths,
    "exponentials": _exponentials,
    "scans": _scans,
}


def _exactly(x: torch.Tensor, point: Point) -> Expected:
    """Return the expected results: each function is applied to the rows of a float64 matrix, and reshaped to the shape
    of its result."""
    dims, dtype = OVER[point["over"]], point["dtype"]
    sizes = _sizes(point)
    wide = x.to(torch.float64).expand(sizes)
    kept = [dim for dim in range(3) if dim not in dims]
    rows = wide.permute(*kept, *dims).reshape(math.prod(sizes[dim] for dim in kept), -1)
    group = point["group"]
    if group == "scans":
        order = torch.Size(sizes[dim] for dim in (*kept, *dims))
        back = [(*kept, *dims).index(dim) for dim in range(3)]
        found = _scans_exactly(rows, dtype)
        return {
            name: Exact(
                part.value.reshape(order).permute(back), part.bound.expand_as(rows).reshape(order).permute(back)
            )
            for name, part in found.items()
        }
    squeezed = tuple(sizes[dim] for dim in kept)
    shape = tuple(1 if dim in dims else size for dim, size in enumerate(sizes)) if point["keepdim"] else squeezed
    found = EXACTLY[group](rows, dtype)
    if group == "truths" and len(dims) == 3:
        found["places"] = without_rounding(torch.tensor(_places(wide.tolist()), dtype=torch.float64).reshape(-1, 3))
    names = _names(group, dims, dtype)
    return {
        name: part
        if name == "places"
        else Exact(
            part.value.reshape(squeezed if name == "count" else shape),
            part.bound.reshape(squeezed if name == "count" else shape) if part.bound.dim() else part.bound,
        )
        for name, part in found.items()
        if names is None or name in names
    }


def _places(block: list[list[list[float]]]) -> list[tuple[int, int, int]]:
    found = []
    for i, rows in enumerate(block):
        for j, row in enumerate(rows):
            found += [(i, j, k) for k, value in enumerate(row) if value]
    return found


def _names(group: str, dims: Dims, dtype: torch.dtype) -> set[str] | None:
    """Return the names of the results that a group has for these dimensions and this dtype; None if it always has all
    of them."""
    names = {"sums": {"sum", "count"}, "orders": {"amax", "amin"}, "truths": {"count", "true"}}.get(group)
    if names is None:
        return None
    single, whole = len(dims) == 1, len(dims) == 3
    if group == "sums":
        names |= {"mean", "sum without NaN", "sum in float32", "sum out="} if dtype.is_floating_point else set()
        names |= {"product"} if single and dtype != torch.bool else set()
    elif group == "truths":
        names |= {"any", "all but", "all"} if single or whole else set()
        names |= {"places"} if whole else set()
    elif single:
        names |= {"argmax", "argmin", "max", "place of max", "min", "place of min", "median"}
        names |= {"min of aminmax", "max of aminmax"}
    elif whole:
        names |= {"max", "min", "argmax", "argmin"}
    return names


def _sums_exactly(rows: torch.Tensor, dtype: torch.dtype) -> dict[str, Exact]:
    total, count = torch.tensor([math.fsum(row) for row in rows.tolist()], dtype=torch.float64), rows.shape[1]
    mean = total / count
    whole = Exact(total, lost_in_rounding(total, dtype))
    # torch's CPU kernels may round the sum before dividing it.
    of_mean = (
        2 * tolerances.rounding(mean, dtype) + lost_in_rounding(total, dtype) / count
        if dtype.is_floating_point
        else total
    )
    return {
        "sum": whole,
        "count": without_rounding((rows != 0).to(torch.float64).sum(1)),
        "mean": Exact(mean, of_mean),
        "sum without NaN": whole,
        "sum in float32": Exact(total, lost_in_rounding(total, torch.float32)),
        "sum out=": whole,
        "product": without_rounding(torch.where((rows < 0).sum(1) % 2 == 1, -1.0, 1.0).to(torch.float64)),
    }


def _orders_exactly(rows: torch.Tensor, dtype: torch.dtype) -> dict[str, Exact]:
    """Return the expected extremes. The position of an extreme is the first one if several elements are equal."""
    n = rows.shape[1]
    lists = rows.tolist()
    high, low = ([pick(row) for row in lists] for pick in (max, min))
    places = [[float(row.index(value)) for row, value in zip(lists, some)] for some in (high, low)]
    middle = [sorted(row)[(n - 1) // 2] for row in lists]
    values = {
        **dict.fromkeys(("amax", "max", "max of aminmax"), high),
        **dict.fromkeys(("amin", "min", "min of aminmax"), low),
        **dict.fromkeys(("argmax", "place of max"), places[0]),
        **dict.fromkeys(("argmin", "place of min"), places[1]),
        "median": middle,
    }
    return {name: without_rounding(torch.tensor(some, dtype=torch.float64)) for name, some in values.items()}


def _spreads_exactly(rows: torch.Tensor, dtype: torch.dtype) -> dict[str, Exact]:
    """Return the expected results. An error of the mean changes each distance from it, and thereby the variance. A root
    halves a relative error."""
    n, error = rows.shape[1], 4 * tolerances.summation(rows.shape[1])
    mean = rows.mean(1)
    distance = (rows - mean[:, None]).abs()
    squares = distance.square().sum(1)
    moved = error * (2 * (distance * (rows.abs() + mean.abs()[:, None])).sum(1) + squares)
    values = {"mean of var_mean": (mean, error * mean.abs()), "var of var_mean": (squares / (n - 1), moved / (n - 1))}
    for correction in (0, 1, 2):
        variance, limit = squares / (n - correction), moved / (n - correction)
        values[f"var {correction}"] = variance, limit
        values[f"std {correction}"] = variance.sqrt(), limit / variance.sqrt().clamp(min=2.0**-100)
    largest, least = rows.abs().amax(1), rows.abs().amin(1)
    for p in ORDERS:
        if p in (math.inf, -math.inf):
            norm = largest if p > 0 else least
            values[f"norm {p}"] = norm, torch.zeros_like(norm)
        elif p == 0:
            values["norm 0"] = (rows != 0).to(torch.float64).sum(1), torch.zeros_like(mean)
        else:
            norm = (rows.abs() ** p).sum(1) ** (1 / p)
            values[f"norm {p}"] = norm, 2 * error * norm
    return {name: Exact(value, tolerances.rounding(value, dtype) + limit) for name, (value, limit) in values.items()}


def _truths_exactly(rows: torch.Tensor, dtype: torch.dtype) -> dict[str, Exact]:
    count = (rows != 0).to(torch.float64).sum(1)
    values = {"count": count, "true": count, "any": count.clamp(max=1), "all but": 1 - count.clamp(max=1)}
    values["all"] = (count == rows.shape[1]).to(torch.float64)
    return {name: without_rounding(value) for name, value in values.items()}


def _exponentials_exactly(rows: torch.Tensor, dtype: torch.dtype) -> dict[str, Exact]:
    """Return the expected results. torch rounds the difference from the maximum, its exponential, the sum and its
    logarithm to the dtype."""
    value = rows.exp().sum(1).log()
    u = tolerances.unit_roundoff(dtype)
    limit = tolerances.rounding(value, dtype) + 3 * u + 4 * tolerances.summation(rows.shape[1]) * (1 + value.abs())
    far = Exact(value, limit + 2 * tolerances.rounding(value.abs() + 128, dtype))
    return {"logsumexp": Exact(value, limit), "far": far}


def _scans_exactly(rows: torch.Tensor, dtype: torch.dtype) -> dict[str, Exact]:
    """Return the expected scans, each by Python's itertools.accumulate. The running logarithm of sums of exponentials
    is rounded at each step."""
    lists = rows.tolist()

    def along(step: Callable[[float, float], float], some: Sequence[Sequence[float]] = lists) -> torch.Tensor:
        return torch.tensor([list(itertools.accumulate(row, step)) for row in some], dtype=torch.float64)

    sums = along(operator.add)
    backwards = along(operator.add, [row[::-1] for row in lists]).flip(1)
    signs = [[math.copysign(1.0, value) for value in row] for row in lists]
    logarithms = along(operator.add, rows.exp().tolist()).log()
    u, n = tolerances.unit_roundoff(torch.float32), rows.shape[1]
    values = {
        "cumsum": Exact(sums, lost_in_rounding(sums, dtype)),
        "cumsum in place": Exact(sums, lost_in_rounding(sums, dtype)),
        "reverse": Exact(backwards, lost_in_rounding(backwards, dtype)),
        "cumprod": without_rounding(along(operator.mul, signs)),
        "cummax": without_rounding(along(max)),
        "cummin": without_rounding(along(min)),
        "logcumsumexp": Exact(logarithms, tolerances.gamma(8 * n, u) * (1 + logarithms.abs())),
    }
    if dtype == torch.bool:
        return {"cumsum": values["cumsum"]}
    return {name: value for name, value in values.items() if name != "logcumsumexp" or dtype == torch.float32}


EXACTLY: dict[str, Callable[[torch.Tensor, torch.dtype], dict[str, Exact]]] = {
    "sums": _sums_exactly,
    "orders": _orders_exactly,
    "spreads": _spreads_exactly,
    "truths": _truths_exactly,
    "exponentials": _exponentials_exactly,
    "scans": _scans_exactly,
}

OPERATIONS = (
    Operation(
        "block reduction",
        {
            "group": GROUPS,
            "dtype": (*FLOATS, *FLOATS, *INTEGERS),
            "first": OTHERS,
            "middle": LENGTHS,
            "last": (*OTHERS, 257, 1030, 5001),
            "over": tuple(OVER),
            "keepdim": (False, True),
            "layout": (*BATCHES, EXPANDED),
        },
        reduction,
        {"quick": 50, "standard": 320, "full": 3000},
        _is_possible,
    ),
)
