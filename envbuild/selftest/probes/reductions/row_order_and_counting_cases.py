"""Sorting and ranks over each dimension of a block, rows with NaN or infinities, and counts, bins and positions."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, MATRICES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (torch.float32, *HALVES)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
OVER = {"first": 0, "middle": 1, "last": 2}
# Below, at and above the sizes at which torch switches kernels for sorting rows.
LENGTHS = (2, 16, 31, 32, 33, 63, 64, 65, 127, 128, 129, 256, 257, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049)
LONG = (4095, 4096, 4097)
# The sizes of the two dimensions of a block that are not sorted.
OTHERS = ((1, 1), (1, 2), (2, 3), (3, 1), (5, 17), (33, 2), (2, 65), (130, 1), (1, 130), (17, 17))
MOST = 9000  # maximum number of elements of a block
RANKS: dict[str, Callable[[int], int]] = {
    "1": lambda n: 1,
    "2": lambda n: min(2, n),
    "16": lambda n: min(16, n),
    "33": lambda n: min(33, n),
    "half": lambda n: (n + 1) // 2,
    "all but 2": lambda n: max(1, n - 2),
    "all but 1": lambda n: n - 1,
    "all": lambda n: n,
}
NOT_A_NUMBER, INFINITE = 2.0**20, 2.0**21  # replace NaN and infinity in results, which are compared as numbers


def _block_sizes(point: Point) -> tuple[int, int, int]:
    sizes = list(point["others"])
    sizes.insert(OVER[point["over"]], point["length"])
    return sizes[0], sizes[1], sizes[2]


def row_order(point: Point, seed: int) -> Case:
    """Build a case with numbers from the range of the dtype (see `_spread_out`). In each row, they are distinct if the
    values are "apart", and several of them are equal if the values are "equal" and the row is long enough."""
    dtype, length, dim = point["dtype"], point["length"], OVER[point["over"]]
    count = math.prod(point["others"])
    order = hashed_inputs.hashes(count * length, seed).reshape(count, length).argsort(1).argsort(1)
    if point["values"] == "equal":
        order = order * (7 if length > 7 else 3) // length
    x = _spread_out(order, 7 if point["values"] == "equal" else length, dtype)
    sizes = _block_sizes(point)
    kept = [size for axis, size in enumerate(sizes) if axis != dim]
    block = x.reshape(*kept, length).movedim(-1, dim).contiguous()
    size = "x".join(map(str, sizes))
    name = f"orders of {size} over {point['over']}, {point['layout']}, {point['values']}, rank {point['rank']}"
    run = functools.partial(_ordered, point=point)
    return Case(name, dtype, (block,), run, functools.partial(_ordered_exactly, point=point))


def _spread_out(order: torch.Tensor, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return increasing numbers for order 0, 1, ... below `count`. The dtype and float64 represent them exactly.

    Floating-point numbers have both signs if `count` is more than 2. Signed integers begin with the lowest one. None of
    them is positive if `count` is a power of two, or one more than that (exception: 256 numbers of int8).
    """
    if dtype == torch.bool:
        return order * 2 >= count
    if dtype.is_floating_point:
        return _float_numbers(count, dtype)[order]
    limits = torch.iinfo(dtype)
    step = max(1, (limits.max - limits.min) // count)
    step = 1 << (step.bit_length() - 1)  # a power of two, so that float64 represents the numbers
    return (limits.min + order.to(torch.int64) * step).to(dtype)


def _float_numbers(count: int, dtype: torch.dtype) -> torch.Tensor:
    """`count` different numbers in rising order: negative ones, 0 and positive ones. The bit patterns of the positive
    numbers are equally spaced, and so are those of the negative ones."""
    bits, exponent = {torch.float32: (23, 255), torch.float16: (10, 31), torch.bfloat16: (7, 255)}[dtype]
    normal = 1 << bits  # the bit pattern of the smallest normal number
    half = count // 2
    step = max(1, (exponent * normal - normal) // (half + 1))
    patterns = normal + torch.arange(half + 1, dtype=torch.int64) * step
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    positive = patterns.to(kind).view(dtype)
    return torch.cat((-positive[:half].flip(0), positive.new_zeros(1), positive))[:count]


def _ordered(x: torch.Tensor, point: Point) -> Results:
    dim, k, n = OVER[point["over"]], RANKS[point["rank"]](point["length"]), point["length"]
    given = with_large_gaps(x, point["layout"]) if x.dtype != torch.bool else x
    found: dict[str, torch.Tensor] = {}
    found["stable sort"], found["stable places"] = torch.sort(given, dim=dim, stable=True)
    falling, places = torch.sort(given, dim=dim, descending=True, stable=True)
    found["stable sort descending"], found["stable places descending"] = falling, places
    found["sort"], order = torch.sort(given, dim)
    found["sorted by place"] = given.gather(dim, order)
    found["each place once"] = _sum_of_places(order, dim)
    if x.dtype == torch.bool:
        return found
    for name, largest in (("largest", True), ("smallest", False)):
        values, chosen = torch.topk(given, k, dim, largest=largest)
        found[name], found[f"{name} by place"] = values, given.gather(dim, chosen)
        loose = torch.topk(given, k, dim, largest=largest, sorted=False)[0]
        found[f"{name}, not sorted"] = loose.sort(dim, descending=largest)[0]
    value, chosen = torch.kthvalue(given, k, dim, keepdim=True)
    found["kthvalue"], found["kthvalue by place"] = value, given.gather(dim, chosen)
    value, chosen = torch.median(given, dim, keepdim=True)
    found["median"], found["median by place"] = value, given.gather(dim, chosen)
    if point["values"] == "equal":
        found["mode"] = torch.mode(_with_most_of_one(given, dim, n), dim)[0]
    for name, scan in (("cummax", torch.cummax), ("cummin", torch.cummin)):
        found[name], found[f"place of {name}"] = scan(given, dim)
    return found


def _sum_of_places(order: torch.Tensor, dim: int) -> torch.Tensor:
    """Return, for each row, a number that is 0 if each position occurs exactly once."""
    numbers = torch.arange(order.shape[dim], device=order.device)
    return (order.sort(dim)[0].movedim(dim, -1) != numbers).sum(-1)


def _with_most_of_one(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    """Replace more than half of each row by its first element, so that the row has one most frequent number."""
    first = x.narrow(dim, 0, 1)
    return torch.cat((first.expand(x.narrow(dim, 0, n // 2 + 1).shape), x.narrow(dim, n // 2 + 1, n - n // 2 - 1)), dim)


def _ordered_exactly(x: torch.Tensor, point: Point) -> Expected:
    """Return the expected results, found by Python's stable sorts. Of equal numbers, the last one is the position of a
    running maximum or minimum."""
    dim, k, n, dtype = OVER[point["over"]], RANKS[point["rank"]](point["length"]), point["length"], point["dtype"]
    wide = x.to(torch.float64)
    up, down = _places_in_order(wide, dim, False), _places_in_order(wide, dim, True)
    rising, falling = wide.gather(dim, up), wide.gather(dim, down)
    once = torch.zeros([size for axis, size in enumerate(x.shape) if axis != dim], dtype=torch.float64)
    found = {
        "stable sort": rising,
        "stable places": up,
        "stable sort descending": falling,
        "stable places descending": down,
        "sort": rising,
        "sorted by place": rising,
        "each place once": once,
    }
    if dtype != torch.bool:
        high, low = falling.narrow(dim, 0, k), rising.narrow(dim, 0, k)
        for name, values in (("largest", high), ("smallest", low)):
            found.update(dict.fromkeys((name, f"{name} by place", f"{name}, not sorted"), values))
        for name, rank in (("kthvalue", k), ("median", (n + 1) // 2)):
            found.update(dict.fromkeys((name, f"{name} by place"), rising.narrow(dim, rank - 1, 1)))
        if point["values"] == "equal":
            found["mode"] = wide.select(dim, 0)
        for name, sign in (("cummax", 1), ("cummin", -1)):
            found[f"place of {name}"] = _running_places(sign * wide, dim)
            found[name] = wide.gather(dim, found[f"place of {name}"])
    return {name: without_rounding(values) for name, values in found.items()}


def _places_in_order(x: torch.Tensor, dim: int, is_falling: bool) -> torch.Tensor:
    """Return the positions of the sorted elements along a dimension. Equal elements keep their order."""
    rows = x.movedim(dim, -1).reshape(-1, x.shape[dim]).tolist()
    return _along(dim, x, [sorted(range(len(row)), key=row.__getitem__, reverse=is_falling) for row in rows])


def _running_places(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the positions of running maxima along a dimension; of equal elements, the last one."""
    found = []
    for row in x.movedim(dim, -1).reshape(-1, x.shape[dim]).tolist():
        places = [0]
        for place in range(1, len(row)):
            places.append(place if row[place] >= row[places[-1]] else places[-1])
        found.append(places)
    return _along(dim, x, found)


def _along(dim: int, x: torch.Tensor, rows: list[list[int]]) -> torch.Tensor:
    """Return a block in which the given rows lie along a dimension. It has the shape of x."""
    return torch.tensor(rows).reshape(x.movedim(dim, -1).shape).movedim(-1, dim)


# Each row of special values has one recipe, from which each element is drawn by hash. 0 stands for a whole number.
RECIPES: tuple[tuple[float, ...], ...] = (
    (0.0,),
    (0.0, 0.0, -math.inf),
    (-math.inf,),
    (0.0, 0.0, 0.0, math.inf, -math.inf),
    (0.0, 0.0, 0.0, math.nan),
    (math.nan, math.inf, -math.inf, 0.0),
    (math.inf, 0.0, 0.0),
)


def special(point: Point, seed: int) -> Case:
    """Build a case in which some rows have infinities, NaN, or only minus infinity, as an attention mask
    produces them."""
    rows, length, dtype = point["rows"], point["length"], point["dtype"]
    x = hashed_inputs.whole((rows, length), seed, 6)
    choice = hashed_inputs.hashes(rows * length, seed + 1).reshape(rows, length)
    for row in range(rows):
        recipe = torch.tensor(RECIPES[(row + seed) % len(RECIPES)])
        numbers = recipe[choice[row] % len(recipe)]
        x[row] = torch.where(numbers == 0, x[row], numbers)
    name = f"orders of special values {rows}x{length} over {point['over']}, {point['layout']}"
    run = functools.partial(_special, point=point)
    return Case(name, dtype, (x.to(dtype),), run, functools.partial(_special_exactly, point=point))


def _numbered(x: torch.Tensor) -> torch.Tensor:
    """Replace NaN and infinities by the numbers that represent them."""
    if not x.is_floating_point():
        return x
    wide = x if x.dtype == torch.float64 else x.to(torch.float32)
    return torch.nan_to_num(wide, nan=NOT_A_NUMBER, posinf=INFINITE, neginf=-INFINITE)


def _special(x: torch.Tensor, point: Point) -> Results:
    over, k = point["over"], (point["length"] + 1) // 2
    given, dim = (x, 1) if over == "rows" else (x.t(), 0)
    given = with_large_gaps(given, point["layout"])
    found = {
        "sum": given.sum(dim),
        "sum without NaN": torch.nansum(given, dim),
        "mean": given.mean(dim),
        "mean without NaN": torch.nanmean(given, dim),
        "amax": torch.amax(given, dim),
        "amin": torch.amin(given, dim),
        "median": torch.median(given, dim)[0],
        "median without NaN": torch.nanmedian(given, dim)[0],
        "kthvalue": torch.kthvalue(given, k, dim)[0],
        "norm inf": torch.linalg.vector_norm(given, math.inf, dim),
        "any": torch.any(given, dim),
        "all": torch.all(given, dim),
        "count": torch.count_nonzero(given, dim),
        "sort": torch.sort(given, dim)[0],
        "sort descending": torch.sort(given, dim, descending=True)[0],
        "stable places": torch.sort(given, dim=dim, stable=True)[1],
        "largest": torch.topk(given, k, dim)[0],
        "smallest": torch.topk(given, k, dim, largest=False)[0],
        "cummax": torch.cummax(given, dim)[0],
        "cummin": torch.cummin(given, dim)[0],
        "cumsum": torch.cumsum(given, dim),
        "logsumexp": torch.logsumexp(given, dim),
        "argmax": torch.argmax(given, dim),
        "argmin": torch.argmin(given, dim),
    }
    found["max"], found["place of max"] = torch.max(given, dim)
    found["min"], found["place of min"] = torch.min(given, dim)
    if x.dtype == torch.float32:
        found["logcumsumexp"] = torch.logcumsumexp(given, dim)
    return {
        name: _numbered(part.t() if dim == 0 and part.dim() == 2 else part.reshape(-1) if part.dim() == 1 else part)
        for name, part in found.items()
    }


def _ranked(value: float) -> tuple[bool, float]:
    """Return a sort key. In torch's order, NaN is larger than infinity and equal to NaN."""
    return (True, 0.0) if math.isnan(value) else (False, value)


def _special_exactly(x: torch.Tensor, point: Point) -> Expected:
    """Return the expected results, by Python's float arithmetic, which handles NaN and infinities."""
    dtype, n = point["dtype"], point["length"]
    k = (n + 1) // 2
    columns: dict[str, list[Any]] = {}
    for row in x.tolist():
        for name, value in _special_row(row, k).items():
            columns.setdefault(name, []).append(value)
    if dtype != torch.float32:
        del columns["logcumsumexp"]
    u = tolerances.unit_roundoff(dtype)
    found = {}
    for name, some in columns.items():
        value = torch.tensor(some, dtype=torch.float64)
        finite = torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0)
        limit = torch.zeros_like(finite)
        if name.startswith(("sum", "mean", "cumsum")):
            exact = finite.to(dtype).to(torch.float64) == finite
            limit = torch.where(exact, 0.0, 3 * tolerances.rounding(finite, dtype))
            if name.startswith("mean"):  # torch's CPU kernels may round the sum before dividing it
                limit = 4 * tolerances.rounding(finite, dtype)
        elif name == "logsumexp":
            limit = 6 * u * (6 + finite.abs()) + 4 * tolerances.summation(n) * (1 + finite.abs())
        elif name == "logcumsumexp":
            limit = tolerances.gamma(8 * n, u) * (1 + finite.abs())
        found[name] = Exact(_numbered(value), limit)
    return found


def _special_row(row: list[float], k: int) -> dict[str, Any]:
    numbers = [value for value in row if not math.isnan(value)]
    has_nan = len(numbers) < len(row)
    ranks = [_ranked(value) for value in row]
    rising = sorted(row, key=_ranked)
    first_nan = next((place for place, value in enumerate(row) if math.isnan(value)), -1)
    high, low = (math.nan, math.nan) if has_nan else (max(row), min(row))
    of_max, of_min = (first_nan, first_nan) if has_nan else (row.index(high), row.index(low))
    total, kept = sum(row), sum(numbers)
    ordered = sorted(numbers)
    return {
        "sum": total,
        "sum without NaN": kept,
        "mean": total / len(row),
        "mean without NaN": kept / len(numbers) if numbers else math.nan,
        "amax": high,
        "amin": low,
        "max": high,
        "min": low,
        "place of max": of_max,
        "place of min": of_min,
        "argmax": of_max,
        "argmin": of_min,
        "median": math.nan if has_nan else ordered[(len(row) - 1) // 2],
        "median without NaN": ordered[(len(numbers) - 1) // 2] if numbers else math.nan,
        "kthvalue": rising[k - 1],
        "norm inf": math.nan if has_nan else max(map(abs, row)),
        "any": float(any(value != 0 for value in row)),
        "all": float(all(value != 0 for value in row)),
        "count": float(sum(value != 0 for value in row)),
        "sort": rising,
        "sort descending": rising[::-1],
        "stable places": sorted(range(len(row)), key=ranks.__getitem__),
        "largest": rising[::-1][:k],
        "smallest": rising[:k],
        "cummax": _running(row, max),
        "cummin": _running(row, min),
        "cumsum": list(itertools.accumulate(row)),
        "logsumexp": _logarithm(row),
        "logcumsumexp": _logarithms(row),
    }


def _running(row: Sequence[float], pick: Callable[[float, float], float]) -> list[float]:
    """Return running maxima or minima, which are NaN from the first NaN on."""
    return list(itertools.accumulate(row, lambda a, b: math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)))


def _logarithm(row: Sequence[float]) -> float:
    return _logarithms(row)[-1]


def _logarithms(row: Sequence[float]) -> list[float]:
    """Return the logarithms of the running sums of exponentials."""
    sums = itertools.accumulate(math.exp(value) for value in row)
    return [math.log(total) if total > 0 else math.nan if math.isnan(total) else -math.inf for total in sums]


def counting(point: Point, seed: int) -> Case:
    """Build a case of counts, bins, quantiles and positions of whole numbers, some of which are usually equal."""
    rows, length, dtype = point["rows"], point["length"], point["dtype"]
    x = hashed_inputs.hashes(rows * length, seed).reshape(rows, length) % point["different"]
    weights = hashed_inputs.whole((rows * length,), seed + 1, 3)
    name = f"counts of {rows}x{length}, {point['different']} different numbers, {point['layout']}"
    run = functools.partial(_counted, point=point)
    given = (x.to(dtype), weights)
    return Case(name, dtype, given, run, functools.partial(_counted_exactly, point=point))


QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
WAYS = ("linear", "lower", "higher", "midpoint")


def _counted(x: torch.Tensor, weights: torch.Tensor, point: Point) -> Results:
    most, bins = point["different"], point["bins"]
    given = with_large_gaps(x, point["layout"])
    flat, first, dense = given.reshape(-1), given[:, 0], given.contiguous()
    rising, order = (part.contiguous() for part in given.sort(1))
    wide = torch.float32
    edges = torch.arange(0, most, 2, device=x.device).to(x.dtype)
    numbers = flat.to(torch.int64).abs()  # bincount refuses negative numbers
    found = {
        "number of each": torch.bincount(numbers, minlength=most + 3),
        "weights of each": torch.bincount(numbers, weights, minlength=most + 3),
        "bins": torch.histc(given.to(wide), bins, -0.5, bins - 0.5),
        "bins of all": torch.histc(given.to(wide) + 0.5, bins, 0, 2 * bins),
        "bins up to the last edge": torch.histc(given.to(wide), bins, 0, bins),
        "places in rows": torch.searchsorted(rising, dense),
        "places after": torch.searchsorted(rising, dense, right=True),
        "places of 32 bits": torch.searchsorted(rising, dense, out_int32=True),
        "places by order": torch.searchsorted(dense, dense, sorter=order),
        "buckets": torch.bucketize(dense, edges),
        "buckets after": torch.bucketize(dense, edges, right=True),
        "is in": torch.isin(given, edges),
        "is not in": torch.isin(given, first, invert=True),
    }
    names = ("values", "inverse", "counts")
    found.update(
        zip((f"unique {name}" for name in names), torch.unique(given, return_inverse=True, return_counts=True))
    )
    runs = torch.unique_consecutive(flat, return_inverse=True, return_counts=True)
    found.update(zip((f"runs {name}" for name in names), runs))
    pairs = torch.unique(given[:, :1] // 2, dim=0, return_inverse=True, return_counts=True)
    found.update(zip((f"rows {name}" for name in names), pairs))
    q = torch.tensor(QUARTERS, device=x.device)
    for way in WAYS:
        found[f"quantiles {way}"] = torch.quantile(given.to(wide), q, 1, interpolation=way)
    return found


def _counted_exactly(x: torch.Tensor, weights: torch.Tensor, point: Point) -> Expected:
    most, bins = point["different"], point["bins"]
    rows = [[int(value) for value in row] for row in x.tolist()]
    flat = [value for row in rows for value in row]
    edges = list(range(0, most, 2))
    heavy = [0.0] * (most + 3)
    for value, weight in zip(flat, weights.tolist()):
        heavy[value] += weight
    each = [flat.count(value) for value in range(most + 3)]
    pairs = [2 * i for i in range(bins)]
    lists: dict[str, Any] = {
        "number of each": each,
        "weights of each": heavy,
        "bins": [each[i] if i < most else 0 for i in range(bins)],
        "bins of all": [sum(each[i : i + 2]) if i < most else 0 for i in pairs],
        # The last bin includes its upper edge.
        "bins up to the last edge": [sum(each[i : i + 1 + (i == bins - 1)]) for i in range(bins)],
        "places in rows": [[sum(other < value for other in row) for value in row] for row in rows],
        "places after": [[sum(other <= value for other in row) for value in row] for row in rows],
        "buckets": [[(value + 1) // 2 for value in row] for row in rows],
        "buckets after": [[min(value // 2 + 1, len(edges)) for value in row] for row in rows],
        "is in": [[value % 2 == 0 for value in row] for row in rows],
    }
    first = {row[0] for row in rows}
    lists["is not in"] = [[value not in first for value in row] for row in rows]
    lists["places of 32 bits"] = lists["places by order"] = lists["places in rows"]
    values = sorted(set(flat))
    lists["unique values"], lists["unique counts"] = values, [each[value] for value in values]
    lists["unique inverse"] = [[values.index(value) for value in row] for row in rows]
    groups = [(value, len(list(some))) for value, some in itertools.groupby(flat)]
    lists["runs values"], lists["runs counts"] = [value for value, _ in groups], [count for _, count in groups]
    lists["runs inverse"] = [number for number, (_, count) in enumerate(groups) for _ in range(count)]
    heads = [row[0] // 2 for row in rows]
    distinct = sorted(set(heads))
    lists["rows values"] = [[value] for value in distinct]
    lists["rows inverse"] = [distinct.index(value) for value in heads]
    lists["rows counts"] = [heads.count(value) for value in distinct]
    found = {name: without_rounding(torch.tensor(some, dtype=torch.float64)) for name, some in lists.items()}
    ordered = torch.tensor([sorted(row) for row in rows], dtype=torch.float64)
    n = ordered.shape[1]
    for way in WAYS:
        columns = []
        for q in QUARTERS:
            rank = q * (n - 1)
            low, high = ordered[:, math.floor(rank)], ordered[:, math.ceil(rank)]
            part = {"linear": rank % 1, "lower": 0.0, "higher": 1.0, "midpoint": 0.5}[way]
            columns.append(low + (high - low) * part)
        quantiles = torch.stack(columns)
        found[f"quantiles {way}"] = Exact(quantiles, 4 * tolerances.rounding(quantiles + most, torch.float32))
    return found


def _can_be_ordered(point: Point) -> bool:
    dtype, n = point["dtype"], point["length"]
    if n * math.prod(point["others"]) > MOST:
        return False
    if dtype == torch.bool:
        return bool(point["layout"] == "contiguous" and point["values"] == "equal")
    different = {torch.float16: 20000, torch.bfloat16: 20000, torch.int8: 256, torch.uint8: 256}.get(dtype, 1 << 16)
    return bool(point["values"] == "equal" or n <= different)


def _can_be_counted(point: Point) -> bool:
    limit = {torch.int8: 127, torch.uint8: 255, torch.float16: 2048}.get(point["dtype"], 1 << 20)
    fits = point["rows"] * point["length"] <= 1500 and point["length"] <= 600
    return bool(fits and point["different"] <= limit)


OPERATIONS: tuple[Any, ...] = (
    Operation(
        "order along a dimension",
        {
            "dtype": (*FLOATS, torch.float32, *INTEGERS),
            "length": (*LENGTHS, *LONG),
            "others": OTHERS,
            "over": tuple(OVER),
            "values": ("apart", "equal"),
            "rank": tuple(RANKS),
            "layout": BATCHES,
        },
        row_order,
        {"quick": 12, "standard": 56, "full": 800},
        _can_be_ordered,
    ),
    Operation(
        "special values",
        {
            "dtype": FLOATS,
            "rows": (7, 8, 14, 35),
            "length": (2, 3, 5, 17, 31, 32, 33, 64, 65, 129, 257, 513, 1025),
            "over": ("rows", "columns"),
            "layout": MATRICES,
        },
        special,
        {"quick": 6, "standard": 24, "full": 300},
        lambda point: point["rows"] * point["length"] <= MOST,
    ),
    Operation(
        "counts and places",
        {
            "dtype": (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.float32),
            "rows": (1, 2, 3, 5, 33),
            "length": (2, 5, 17, 33, 64, 129, 257, 513),
            "different": (2, 3, 16, 100, 300, 1000),
            "bins": (1, 2, 7, 64, 300),
            "layout": MATRICES,
        },
        counting,
        {"quick": 6, "standard": 24, "full": 300},
        _can_be_counted,
    ),
)
