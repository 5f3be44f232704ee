"""Sums, means, variances, norms, cumulative sums, extremes and sorting, of sampled sizes, layouts and dtypes."""

from __future__ import annotations

import bisect
import collections
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import MATRICES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.single_rounding import lost_in_rounding
from envbuild.selftest.probes.operations.exact_fixed_cases import decode, finite_patterns

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

INTEGERS = (torch.int32, torch.int64, torch.bool)
SMALL = (torch.int16, torch.int8, torch.uint8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 2, 7, 31, 33, 64, 127, 129, 255, 257, 511, 515, 1023, 1025, 1500, 2049, 4099, 8191, 20001)
ROWS = (1, 2, 3, 5, 16, 33, 65)
MOST = 1 << 15  # maximum number of elements of a case
SCANNED = 2049  # maximum length of a cumulative sum
LISTED = 1 << 13  # maximum number of elements of a case that Python sorts

SUMS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "sum": lambda x, dim: torch.sum(x, dim),
    "mean": lambda x, dim: torch.mean(x, dim),
    "sum of both dimensions": lambda x, dim: torch.sum(x, (0, 1))[None],
    "sum of all": lambda x, dim: x.sum()[None],
    "mean of all": lambda x, dim: x.mean()[None],
    "sum with dtype float32": lambda x, dim: torch.sum(x, dim, dtype=torch.float32),
    "count of nonzero": lambda x, dim: torch.count_nonzero(x, dim),
    "product of signs": lambda x, dim: torch.prod(torch.sign(x), dim),
    "cumsum": lambda x, dim: torch.cumsum(x, dim),
}

SPREADS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "var": lambda x, dim: torch.var(x, dim),
    "var of all in a row": lambda x, dim: torch.var(x.select(1 - dim, 0))[None],
    "var without correction": lambda x, dim: torch.var(x, dim, correction=0),
    "std": lambda x, dim: torch.std(x, dim),
    "mean of var_mean": lambda x, dim: torch.var_mean(x, dim)[1],
    "norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
    "norm 1": lambda x, dim: torch.linalg.vector_norm(x, 1, dim=dim),
    "norm inf": lambda x, dim: torch.linalg.vector_norm(x, math.inf, dim=dim),
}
# The longest rows in which one changed element still changes the variance measurably.
LONGEST = {torch.float32: 4099, torch.float16: 1025, torch.bfloat16: 515}


def sampled_operations(rounded_sums: bool) -> tuple[Operation, ...]:
    """Return the operations. `rounded_sums`: a sum may be rounded to the dtype before it is divided, as torch's CPU
    kernel for the mean does."""
    makers = ReductionMakers(rounded_sums)
    return (
        Operation(
            "sum",
            {
                "dtype": (*DTYPES, *DTYPES, *INTEGERS),
                "length": LENGTHS,
                "rows": ROWS,
                "over": ("rows", "columns"),
                "layout": MATRICES,
                "values": ("integers", "large integers", "fractions"),
            },
            makers.sum,
            {"quick": 40, "standard": 200, "full": 1600},
            _can_be_added,
        ),
        Operation(
            "order",
            {
                "dtype": (*DTYPES, torch.int64, torch.int32, *SMALL),
                "length": (*LENGTHS[1:-1], 6007, 8191),  # without 1, where the position is known
                "rows": ROWS[:-1],
                "over": ("rows", "columns"),
                "layout": MATRICES,
                "values": ("apart", "crowded", "equal"),
                "taken": tuple(TAKEN),
            },
            order,
            {"quick": 28, "standard": 200, "full": 1600},
            _can_be_ordered,
        ),
        Operation(
            "long order",
            {
                "dtype": (*DTYPES[:1], torch.int64, torch.int32, *DTYPES[1:]),
                "length": (9001, 16385, 32771, 65537, 70001),
                "rows": (1,),
                "over": ("rows", "columns"),
                "layout": ("contiguous", "shifted"),
                "values": ("apart", "equal"),
                "taken": ("5", "64 and more", "half"),
            },
            order,
            {"quick": 1, "standard": 8, "full": 60},
            lambda point: point["values"] == "equal" or point["dtype"] not in DTYPES[1:],
        ),
        Operation(
            "variance and norm",
            {
                "dtype": DTYPES,
                "length": LENGTHS[2:],
                "rows": ROWS,
                "over": ("rows", "columns"),
                "layout": MATRICES,
                "values": ("near 0", "far from 0", "large"),
            },
            spread,
            {"quick": 16, "standard": 80, "full": 800},
            lambda point: point["length"] <= LONGEST[point["dtype"]] and point["length"] * point["rows"] <= MOST,
        ),
        Operation(
            "place in a long vector",
            {
                "past": (-1, 0, 1, 2, 3, 1025),  # added to 2^24, above which float32 does not represent every integer
                "from the end": (0, 1, 2, 4097),
                "dtype": DTYPES,
            },
            place,
            {"quick": 1, "standard": 6, "full": 40},
        ),
    )


def _can_be_ordered(point: Point) -> bool:
    """Return whether the dtype has enough numbers. Half-precision dtypes have too few for "crowded" values, and small
    integer dtypes have too few for distinct values."""
    fits: bool = point["length"] * point["rows"] <= LISTED and (
        point["dtype"] not in SMALL or point["values"] == "equal"
    )
    return fits and (point["values"] != "crowded" or point["dtype"] not in DTYPES[1:])


def _can_be_added(point: Point) -> bool:
    """Return whether the values suit the dtype. Large integers test in which width a sum of integers, or a mean of
    float16, is accumulated."""
    dtype, values = point["dtype"], point["values"]
    if point["length"] * point["rows"] > MOST or (dtype in INTEGERS and values == "fractions"):
        return False
    return values != "large integers" or dtype in INTEGERS[:2] or (dtype == torch.float16 and point["length"] < SCANNED)


def _functions(point: Point) -> list[str]:
    """Return the functions for these values: no mean of integers, and no sum that exceeds float16's range."""
    if point["dtype"] in INTEGERS:
        functions = ["sum", "sum of all", "sum of both dimensions", "count of nonzero"]
    elif point["values"] == "large integers":
        return ["mean", "mean of all"]
    else:
        functions = [name for name in SUMS if name != "cumsum"]
    return functions + (["cumsum"] if point["length"] <= SCANNED and point["values"] != "fractions" else [])


@dataclass(frozen=True)
class ReductionMakers:
    """Builds the case of the operation `sum` for one combination of parameter values (`point`)."""

    rounded_sums: bool

    def sum(self, point: Point, seed: int) -> Case:
        dtype, shape = point["dtype"], (point["rows"], point["length"])
        # with fractions, the second half of a sum cancels the first, so that lost digits of partial sums show
        if point["values"] == "fractions":
            x = (1 + hashed_inputs.uniform(shape, seed)) / 2
            x[:, point["length"] // 2 :] *= -1
        elif point["values"] == "large integers":
            x = 50 + hashed_inputs.whole(shape, seed, 50).abs()
            x = x * (1 << 24) - 1 if dtype in INTEGERS else x
        else:
            x = hashed_inputs.whole(shape, seed, 1 if dtype == torch.bfloat16 else 2)
            if dtype == torch.bool:
                x = x.clamp(min=0)
        name = f"sums of {shape[0]}x{shape[1]} over {point['over']}, {point['layout']}, {point['values']}"
        functions = _functions(point)
        run = functools.partial(_sums, functions=functions, point=point)
        exact = functools.partial(_sums_exactly, functions=functions, point=point, rounded=self.rounded_sums)
        return Case(name, dtype, (x.to(dtype),), run, exact)


def _turned(x: torch.Tensor, over: str, layout: str) -> tuple[torch.Tensor, int]:
    """Return x as (rows, length) or (length, rows), and the dimension that contains the length."""
    return (with_large_gaps(x, layout), 1) if over == "rows" else (with_large_gaps(x.t(), layout), 0)


def _sums(x: torch.Tensor, functions: Sequence[str], point: Point) -> Results:
    given, dim = _turned(x, point["over"], point["layout"])
    found = {name: SUMS[name](given, dim) for name in functions}
    return {name: part.t() if name == "cumsum" and dim == 0 else part for name, part in found.items()}


def _sums_exactly(x: torch.Tensor, functions: Sequence[str], point: Point, rounded: bool) -> Expected:
    return {name: _sum_exactly(x, name, point, rounded) for name in functions}


def _sum_exactly(x: torch.Tensor, function: str, point: Point, rounded: bool) -> Exact:
    """Return an expected sum or mean. Sums of integers are exact if the dtype represents them. A float32 sum of
    fractions has the error tolerances.summation."""
    dtype = point["dtype"]
    if function == "count of nonzero":
        return without_rounding(torch.tensor([sum(map(bool, row)) for row in x.tolist()], dtype=torch.float64))
    if function == "product of signs":
        signs = [math.prod((value > 0) - (value < 0) for value in row) for row in x.tolist()]
        return without_rounding(torch.tensor(signs, dtype=torch.float64))
    if function == "cumsum":
        sums = torch.tensor([list(itertools.accumulate(row)) for row in x.tolist()], dtype=torch.float64)
        return Exact(sums, lost_in_rounding(sums, dtype))
    rows = [x.flatten().tolist()] if "all" in function or "both" in function else x.tolist()
    count = len(rows[0])
    total = torch.tensor([float(sum(row)) for row in rows], dtype=torch.float64)
    size = torch.tensor([float(sum(map(abs, row))) for row in rows], dtype=torch.float64)
    wide = torch.float32 if "float32" in function else dtype
    arithmetic = tolerances.summation(count) * size if point["values"] == "fractions" else torch.zeros_like(size)
    if not function.startswith("mean"):
        return Exact(total, lost_in_rounding(total, wide) + arithmetic)
    value = total / count
    before = tolerances.rounding(total, dtype) if rounded else torch.zeros_like(total)
    return Exact(value, 2 * tolerances.rounding(value, dtype) + (before + arithmetic) / count)


# Each function returns its results by name.
ORDERS: dict[str, Callable[[torch.Tensor, int, int], dict[str, torch.Tensor]]] = {
    "max": lambda x, dim, k: dict(zip(("largest", "place"), torch.max(x, dim))),
    "min": lambda x, dim, k: dict(zip(("smallest", "place"), torch.min(x, dim))),
    "amax and amin": lambda x, dim, k: {"largest": torch.amax(x, dim), "smallest": torch.amin(x, dim)},
    "argmax": lambda x, dim, k: {"place": torch.argmax(x, dim)},
    "argmin": lambda x, dim, k: {"place": torch.argmin(x, dim)},
    "max of all": lambda x, dim, k: {"largest": x.max()[None]},
    "argsort": lambda x, dim, k: {"places": torch.argsort(x, dim)},
    "topk": lambda x, dim, k: dict(zip(("values", "places"), torch.topk(x, k, dim))),
    "topk of the smallest": lambda x, dim, k: dict(zip(("values", "places"), torch.topk(x, k, dim, largest=False))),
    "sort": lambda x, dim, k: dict(zip(("values", "places"), torch.sort(x, dim))),
    "sort descending": lambda x, dim, k: dict(zip(("values", "places"), torch.sort(x, dim, descending=True))),
    "kthvalue": lambda x, dim, k: dict(zip(("value", "place"), torch.kthvalue(x, k, dim))),
    "median": lambda x, dim, k: dict(zip(("value", "place"), torch.median(x, dim))),
    "stable sort": lambda x, dim, k: dict(zip(("values", "places"), torch.sort(x, dim=dim, stable=True))),
    "stable sort descending": lambda x, dim, k: dict(
        zip(("values", "places"), torch.sort(x, dim=dim, stable=True, descending=True))
    ),
    "stable argsort": lambda x, dim, k: {"places": torch.argsort(x, dim=dim, stable=True)},
    "values of topk": lambda x, dim, k: {
        "largest": torch.topk(x, k, dim)[0],
        "smallest": torch.topk(x, k, dim, largest=False)[0],
        "largest by place": x.gather(dim, torch.topk(x, k, dim)[1]),
    },
    "values of sort": lambda x, dim, k: {
        "rising": torch.sort(x, dim)[0],
        "falling": torch.sort(x, dim, descending=True)[0],
        "rising by place": x.gather(dim, torch.sort(x, dim)[1]),
    },
    "values of a rank": lambda x, dim, k: {
        "kthvalue": torch.kthvalue(x, k, dim)[0],
        "median": torch.median(x, dim)[0],
    },
    "unique": lambda x, dim, k: dict(
        zip(
            ("values", "inverse", "counts"), torch.unique(x.select(1 - dim, 0), return_inverse=True, return_counts=True)
        )
    ),
    "searchsorted": lambda x, dim, k: {
        "left": torch.searchsorted(torch.sort(x.select(1 - dim, 0))[0], x.select(1 - dim, -1).contiguous()),
        "right": torch.bucketize(x.select(1 - dim, -1).contiguous(), torch.sort(x.select(1 - dim, 0))[0], right=True),
    },
}
FIRST_OF_EQUALS = (
    "max",
    "min",
    "argmax",
    "argmin",
    "stable sort",
    "stable sort descending",
    "stable argsort",
    "values of topk",
    "values of sort",
    "values of a rank",
    "unique",
    "searchsorted",
    "amax and amin",
)
# How many of n elements are taken.
TAKEN: dict[str, Callable[[int], int]] = {
    "1": lambda n: 1,
    "5": lambda n: min(5, n),
    "17": lambda n: min(17, n),
    "64 and more": lambda n: min(64 + n // 50, n),
    "half": lambda n: (n + 1) // 2,
    "all but 1": lambda n: n - 1,
    "all": lambda n: n,
}


def order(point: Point, seed: int) -> Case:
    """Build a case of sorting and similar functions. Unless the values are "equal", the numbers in each row are
    distinct."""
    dtype, rows, length = point["dtype"], point["rows"], point["length"]
    places = hashed_inputs.hashes(rows * length, seed).reshape(rows, length).argsort(1)
    if point["values"] == "equal":
        x = (places % 120 - (0 if dtype == torch.uint8 else 60)).to(dtype)
    elif point["values"] == "crowded":  # the leading bits of all numbers are equal
        x = (8 + places * 2.0**-20 if dtype.is_floating_point else (1 << 20) + places).to(dtype)
    elif dtype in (torch.float16, torch.bfloat16):
        patterns = finite_patterns(dtype)
        numbers = decode(patterns[(patterns & 0x7FFF) > 0x0400], dtype)  # neither 0 nor subnormal
        apart = len(numbers) // length
        x = numbers[(places * apart + hashed_inputs.hashes(rows, seed + 1)[:, None]) % len(numbers)].to(dtype)
    else:
        x = ((places - length // 2) * 1237).to(dtype)
    name = (
        f"orders of {rows}x{length} over {point['over']}, {point['layout']}, {point['values']}, {point['taken']} taken"
    )
    # With equal numbers, only functions are used for which torch promises the first position, or whose results do not
    # depend on it.
    functions = FIRST_OF_EQUALS if point["values"] == "equal" else tuple(ORDERS)
    taken = TAKEN[point["taken"]](length)
    run = functools.partial(_ordered, functions=functions, over=point["over"], layout=point["layout"], taken=taken)
    return Case(name, dtype, (x,), run, functools.partial(_ordered_by_hand, functions=functions, taken=taken))


def _ordered(x: torch.Tensor, functions: Sequence[str], over: str, layout: str, taken: int) -> Results:
    """Return the results. In addition, maxima and minima of rows with a NaN must be NaN."""
    given, dim = _turned(x, over, layout)
    found = {f"{name}: {what}": part for name in functions for what, part in ORDERS[name](given, dim, taken).items()}
    if x.is_floating_point():
        holed = given.clone()
        holed.select(dim, -1).fill_(math.nan)
        for name, extreme in (("amax", torch.amax), ("amin", torch.amin)):
            found[f"{name} with NaN is NaN"] = torch.isnan(extreme(holed, dim))
    return {name: part.t() if dim == 0 and part.dim() > 1 else part for name, part in found.items()}


def _ordered_by_hand(x: torch.Tensor, functions: Sequence[str], taken: int) -> Expected:
    rows: list[list[float]] = x.tolist()
    rising = [sorted(range(len(row)), key=row.__getitem__) for row in rows]
    # this sort is stable too
    falling = [sorted(places, key=row.__getitem__, reverse=True) for row, places in zip(rows, rising)]
    up, down = (_picked(rows, places) for places in (rising, falling))
    top, middle = taken, (len(rows[0]) + 1) // 2
    of_rank, of_middle = up["values"][:, top - 1], up["values"][:, middle - 1]
    first, last = ({what: part[:, 0] for what, part in order.items()} for order in (up, down))
    smallest, largest = {"smallest": first["values"]}, {"largest": last["values"]}
    parts: dict[str, dict[str, torch.Tensor]] = {
        "max": {**largest, "place": last["places"]},
        "min": {**smallest, "place": first["places"]},
        "amax and amin": {**largest, **smallest},
        "argmax": {"place": last["places"]},
        "argmin": {"place": first["places"]},
        "max of all": {"largest": torch.tensor([max(map(max, rows))], dtype=torch.float64)},
        "argsort": {"places": up["places"]},
        "kthvalue": {"value": of_rank, "place": up["places"][:, top - 1]},
        "topk": {what: part[:, :top] for what, part in down.items()},
        "topk of the smallest": {what: part[:, :top] for what, part in up.items()},
        "sort": up,
        "stable sort": up,
        "sort descending": down,
        "stable sort descending": down,
        "stable argsort": {"places": up["places"]},
        "median": {"value": of_middle, "place": up["places"][:, middle - 1]},
        "values of topk": {
            **dict.fromkeys(("largest", "largest by place"), down["values"][:, :top]),
            "smallest": up["values"][:, :top],
        },
        "values of sort": {
            **dict.fromkeys(("rising", "rising by place"), up["values"]),
            "falling": down["values"],
        },
        "values of a rank": {"kthvalue": of_rank, "median": of_middle},
        "unique": _unique(rows[0]),
        "searchsorted": _searched(sorted(rows[0]), rows[-1]),
    }
    found = {f"{name}: {what}": part for name in functions for what, part in parts[name].items()}
    if x.is_floating_point():
        ones = torch.ones(len(rows), dtype=torch.float64)
        found.update({"amax with NaN is NaN": ones, "amin with NaN is NaN": ones})
    return {name: without_rounding(values) for name, values in found.items()}


def _unique(row: list[float]) -> dict[str, torch.Tensor]:
    """Return the distinct numbers of a row, the index of each element's number among them, and the count of each
    number."""
    counts = collections.Counter(row)
    values = sorted(counts)
    numbers = {value: number for number, value in enumerate(values)}
    lists = {"values": values, "inverse": [numbers[value] for value in row], "counts": [counts[v] for v in values]}
    return {name: torch.tensor(some, dtype=torch.float64) for name, some in lists.items()}


def _searched(rising: list[float], values: list[float]) -> dict[str, torch.Tensor]:
    """Return where values would be inserted: before or after equal ones."""
    # Positions of values that occur are looked up, because searching for 70,001 of them took most of the time of a long
    # case.
    left = {value: len(rising) - place for place, value in enumerate(reversed(rising), 1)}
    right = {value: place for place, value in enumerate(rising, 1)}
    lists = {
        "left": [left[value] if value in left else bisect.bisect_left(rising, value) for value in values],
        "right": [right[value] if value in right else bisect.bisect_right(rising, value) for value in values],
    }
    return {name: torch.tensor(some, dtype=torch.float64) for name, some in lists.items()}


def _picked(rows: list[list[float]], places: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return the given positions of each row, and the values there."""
    values = [[row[place] for place in order] for row, order in zip(rows, places)]
    lists: dict[str, list[Any]] = {"values": values, "places": places}
    return {name: torch.tensor(numbers, dtype=torch.float64) for name, numbers in lists.items()}


def spread(point: Point, seed: int) -> Case:
    """Build a case of variances, deviations and norms. The numbers are positive, so that each sign matters."""
    dtype, rows, length = point["dtype"], point["rows"], point["length"]
    x = hashed_inputs.whole((rows, length), seed, 8).abs()
    if point["values"] == "far from 0":
        x = x + (2000 if dtype == torch.float32 else 50)
    # the sum of squares is just within float32's range; for float16, that of a long row exceeds its range
    elif point["values"] == "large":
        x = x * 2.0 ** (3 if dtype == torch.float16 else 60 - math.ceil(math.log2(8 * length) / 2))
    name = f"variances and norms of {rows}x{length} over {point['over']}, {point['layout']}, {point['values']}"
    run = functools.partial(_spreads, over=point["over"], layout=point["layout"])
    return Case(name, dtype, (x.to(dtype),), run, functools.partial(_spreads_exactly, dtype=dtype))


def _spreads(x: torch.Tensor, over: str, layout: str) -> Results:
    given, dim = _turned(x, over, layout)
    return {name: function(given, dim) for name, function in SPREADS.items()}


def _spreads_exactly(x: torch.Tensor, dtype: torch.dtype) -> Expected:
    """Return the expected results. An error of the mean changes each x - mean, and thereby the variance (as in
    norm_sampled_cases). A root halves a relative error."""
    n = x.shape[1]
    mean, error = x.mean(1), 4 * tolerances.summation(n)
    shifted = (x - mean[:, None]).abs()
    squares = shifted.square().sum(1)
    moved = error * (2 * (shifted * (x.abs() + mean.abs()[:, None])).sum(1) + squares)
    norm, total = x.square().sum(1).sqrt(), x.abs().sum(1)
    variance, limit = squares / (n - 1), moved / (n - 1)
    values = {
        "var": (variance, limit),
        "var of all in a row": (variance[:1], limit[:1]),
        "var without correction": (squares / n, moved / n),
        "std": (variance.sqrt(), limit / variance.sqrt().clamp(min=2.0**-100)),
        "mean of var_mean": (mean, error * mean.abs()),
        "norm": (norm, error * norm),
        "norm 1": (total, error * total),
    }
    found = {name: Exact(value, tolerances.rounding(value, dtype) + limit) for name, (value, limit) in values.items()}
    return {**found, "norm inf": without_rounding(x.abs().amax(1))}


FINDERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda x: torch.argmax(x)[None],
    "max": lambda x: torch.max(x, 0)[1][None],
    "argmin": lambda x: torch.argmin(-x)[None],
    "nonzero": lambda x: torch.nonzero(x)[:, 0],
}


def place(point: Point, seed: int) -> Case:
    """Build a case that finds the position of the only nonzero element of a long vector."""
    length = (1 << 24) + 4099 + point["past"]
    where = torch.tensor([(1 << 24) + point["past"] + point["from the end"]])
    run = functools.partial(_found, length=length, dtype=point["dtype"])
    return Case(f"place in {length}", point["dtype"], (where,), run, _where)


def _found(where: torch.Tensor, length: int, dtype: torch.dtype) -> Results:
    x = torch.zeros(length, dtype=dtype, device=where.device)
    x[where] = 1
    return {name: finder(x) for name, finder in FINDERS.items()}


def _where(where: torch.Tensor) -> Expected:
    return dict.fromkeys(FINDERS, without_rounding(where))


OPERATIONS = sampled_operations(rounded_sums=True)
