"""Gradients of sums, products, norms, extremes, sorted values and scans over dimensions of a three-dimensional block.

The references are sums of exponentials in float64, products with triangular matrices, and Python's sorts and products
of lists. No reference calls the tested function.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.numerics.single_rounding import lost_in_rounding
from envbuild.selftest.numerics.summation_error import summation_in
from envbuild.selftest.probes.reductions.multi_dim_reduction_and_scan_cases import OVER, Dims

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Call = Callable[[torch.Tensor, Dims, bool, int], torch.Tensor]

DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIZES = (1, 2, 3, 4, 5, 8, 17, 31, 33, 64, 65, 129, 200)
LONG = (257, 513, 1025, 2049)
MOST = 5000  # maximum number of elements of a block
ORDERED = ("extremes", "equals", "running extremes")  # groups whose input consists of ranks
# The most elements of a row. In longer rows, one changed element may change every gradient by less than its tolerance,
# and float16 and bfloat16 have too few distinct numbers.
LONGEST = {torch.float64: 2049, torch.float32: 2049, torch.float16: 200, torch.bfloat16: 33}
# The functions of each group, which have the same input.
GROUPS: dict[str, tuple[str, ...]] = {
    "sums": ("sum", "mean", "norm 1", "norm 2", "norm 3", "var", "var without correction", "std", "cumsum"),
    "exponentials": ("logsumexp",),
    "extremes": ("amax", "amin", "max", "min", "sort", "topk", "kthvalue", "median"),
    "equals": ("amax", "amin"),
    "logarithms": ("logcumsumexp",),
    "products": ("prod", "cumprod"),
    "running extremes": ("cummax", "cummin"),
}
SCANS = ("cumsum", "logcumsumexp")
LIKE_INPUT = (*SCANS, "cumprod", "cummax", "cummin", "sort", "topk")  # the result has a row for each row of the input
OF_ONE = (*LIKE_INPUT, "prod", "max", "min", "kthvalue", "median")  # functions that accept only one dimension

CALLS: dict[str, Call] = {
    "sum": lambda x, dims, keepdim, k: torch.sum(x, dims, keepdim),
    "mean": lambda x, dims, keepdim, k: torch.mean(x, dims, keepdim),
    "var": lambda x, dims, keepdim, k: torch.var(x, dims, correction=1, keepdim=keepdim),
    "var without correction": lambda x, dims, keepdim, k: torch.var(x, dims, correction=0, keepdim=keepdim),
    "std": lambda x, dims, keepdim, k: torch.std(x, dims, correction=1, keepdim=keepdim),
    "norm 1": lambda x, dims, keepdim, k: torch.linalg.vector_norm(x, 1, dims, keepdim),
    "norm 2": lambda x, dims, keepdim, k: torch.linalg.vector_norm(x, 2, dims, keepdim),
    "norm 3": lambda x, dims, keepdim, k: torch.linalg.vector_norm(x, 3, dims, keepdim),
    "logsumexp": lambda x, dims, keepdim, k: torch.logsumexp(x, dims, keepdim),
    "amax": lambda x, dims, keepdim, k: torch.amax(x, dims, keepdim),
    "amin": lambda x, dims, keepdim, k: torch.amin(x, dims, keepdim),
    "max": lambda x, dims, keepdim, k: torch.max(x, dims[0], keepdim)[0],
    "min": lambda x, dims, keepdim, k: torch.min(x, dims[0], keepdim)[0],
    "kthvalue": lambda x, dims, keepdim, k: torch.kthvalue(x, k, dims[0], keepdim)[0],
    "median": lambda x, dims, keepdim, k: torch.median(x, dims[0], keepdim)[0],
    "sort": lambda x, dims, keepdim, k: torch.sort(x, dims[0], descending=keepdim)[0],
    "topk": lambda x, dims, keepdim, k: torch.topk(x, k, dims[0], largest=keepdim)[0],
    "cumsum": lambda x, dims, keepdim, k: torch.cumsum(x, dims[0]),
    "logcumsumexp": lambda x, dims, keepdim, k: torch.logcumsumexp(x, dims[0]),
    "prod": lambda x, dims, keepdim, k: torch.prod(x, dims[0], keepdim),
    "cumprod": lambda x, dims, keepdim, k: torch.cumprod(x, dims[0]),
    "cummax": lambda x, dims, keepdim, k: torch.cummax(x, dims[0])[0],
    "cummin": lambda x, dims, keepdim, k: torch.cummin(x, dims[0])[0],
}
ONLY_OF_ONE = ("logarithms", "products", "running extremes")  # groups whose functions all accept only one dimension


def _sizes(point: Point) -> tuple[int, int, int]:
    return point["first"], point["middle"], point["last"]


def _length(point: Point) -> int:
    sizes = _sizes(point)
    return math.prod(sizes[dim] for dim in OVER[point["over"]])


def _is_possible(point: Point) -> bool:
    group, n, dtype = point["group"], _length(point), point["dtype"]
    if math.prod(_sizes(point)) > MOST:
        return False
    if group in ONLY_OF_ONE and len(OVER[point["over"]]) > 1:
        return False
    if group == "logarithms":
        return dtype in (torch.float32, torch.float64) and 1 < n <= 200
    return bool(3 < n <= LONGEST[dtype])


def _functions(point: Point) -> list[str]:
    single = len(OVER[point["over"]]) == 1
    return [name for name in GROUPS[point["group"]] if single or name not in OF_ONE]


def _taken(point: Point) -> int:
    """Return how many elements topk takes, and the rank for kthvalue."""
    return max(1, _length(point) * int(point["share"]) // 4)


def gradient_case(point: Point, seed: int) -> Case:
    """Build a case of a block of numbers that suit the functions, with up to two gradients of results: one number for
    each row, and one row for each row."""
    group, dtype, sizes, dims = point["group"], point["dtype"], _sizes(point), OVER[point["over"]]
    if group in ORDERED:
        order = hashed_inputs.hashes(math.prod(sizes), seed).reshape(sizes)
        order = _rows(order, dims).argsort(1).argsort(1)
        n = order.shape[1]
        if group == "equals":  # the two or three largest elements are equal, and so are the smallest
            order = order.clamp(1 + (n > 5), n - 2 - (n > 5))
        elif group == "running extremes":  # each number occurs twice, except the last if n is odd
            order = order // 2 * 2
        x = _block((order - n // 2).to(torch.float32), sizes, dims)
    elif group == "products":
        x = _block(_factors(math.prod(sizes) // _length(point), _length(point), dtype, seed), sizes, dims)
    elif group in ("exponentials", "logarithms"):
        x = hashed_inputs.whole(sizes, seed, 3) / 2
    else:
        rows = _rows(hashed_inputs.whole(sizes, seed, 4), dims).clone()
        rows[:, 0], rows[:, 1] = 1, -2  # so that no standard deviation is 0
        x = _block(rows, sizes, dims)
    functions = _functions(point)
    most = 1 if dtype == torch.bfloat16 else 2
    given = [x.to(dtype)]
    if any(name not in LIKE_INPUT for name in functions):
        shape = torch.sum(x, dims, point["keepdim"]).shape
        given.append(hashed_inputs.whole(shape, seed + 1, most).to(dtype))
    if any(name in LIKE_INPUT for name in functions):
        given.append(hashed_inputs.whole(sizes, seed + 4, most).to(dtype))
    what = "orders of" if group in ORDERED else "gradients of"
    size = "x".join(map(str, sizes))
    name = f"{what} {size} by {group}, over {point['over']}, {point['layout']}, keepdim {point['keepdim']}"
    run = functools.partial(_computed, point=point)
    return Case(name, dtype, tuple(given), run, functools.partial(_exactly, point=point))


def _factors(rows: int, length: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return factors whose products, and sums of these, the dtype represents. They are signs. In float32 and float64,
    each row also has one factor of +-2 and one of +-1/2. Every third row has a 0, which torch's gradients handle
    separately."""
    factors = hashed_inputs.signs(rows * length, seed).reshape(rows, length)
    places = hashed_inputs.hashes(rows * length, seed + 7).reshape(rows, length).argsort(1)
    if dtype in (torch.float32, torch.float64):
        for place, by in ((0, 2.0), (1, 0.5)):
            factors = factors.scatter(1, places[:, place, None], factors.gather(1, places[:, place, None]) * by)
    factors[seed % 3 :: 3] = factors[seed % 3 :: 3].scatter(1, places[seed % 3 :: 3, 2, None], 0.0)
    return factors


def _computed(x: torch.Tensor, *gradients: torch.Tensor, point: Point) -> Results:
    dims, layout, found = OVER[point["over"]], point["layout"], {}
    for name in _functions(point):
        leaf = x.detach().clone().requires_grad_()
        given = with_large_gaps(leaf, layout) if layout != "contiguous" else leaf * 1
        output = CALLS[name](given, dims, point["keepdim"], _taken(point))
        g = gradients[-1 if name in LIKE_INPUT else 0]
        g = g.narrow(dims[0], 0, output.shape[dims[0]]) if name == "topk" else g
        # If the gradient has fewer dimensions than the block, it stays contiguous.
        turned = with_large_gaps(g, layout) if g.dim() == 3 else g
        (found[name],) = backward_pass.gradients(output, (leaf,), turned)
    return found


def _rows(x: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Return a block as a matrix. Each row contains the elements over the dimensions `dims`."""
    kept = [dim for dim in range(3) if dim not in dims]
    return x.permute(*kept, *dims).reshape(math.prod(x.shape[dim] for dim in kept), -1)


def _block(rows: torch.Tensor, sizes: tuple[int, ...], dims: Dims) -> torch.Tensor:
    """Return the block for a matrix; the inverse of `_rows`."""
    kept = [dim for dim in range(3) if dim not in dims]
    order = (*kept, *dims)
    whole = rows.reshape([sizes[dim] for dim in order])
    return whole.permute([order.index(dim) for dim in range(3)]).contiguous()


def _exactly(x: torch.Tensor, *gradients: torch.Tensor, point: Point) -> Expected:
    dtype, dims, sizes, found = point["dtype"], OVER[point["over"]], _sizes(point), {}
    rows = _rows(x, dims)
    for name in _functions(point):
        g = gradients[-1 if name in LIKE_INPUT else 0]
        g = _rows(g, dims) if name in LIKE_INPUT else g.reshape(len(rows), 1)
        value, limit = _of_rows(name, rows, g, point)
        once = lost_in_rounding(value, dtype)
        limit = (limit + once).expand_as(value)
        found[name] = Exact(_block(value, sizes, dims), _block(limit, sizes, dims))
    return found


def _of_rows(function: str, x: torch.Tensor, g: torch.Tensor, point: Point) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of each row, and its tolerance without the rounding of the result. The factors of u count
    roundings to the dtype between the steps of torch's formulas. Statistics have the error of a summation in float32,
    or in float64 for float64 (summation_in)."""
    n, dtype = x.shape[1], point["dtype"]
    u, zero = tolerances.unit_roundoff(dtype), torch.zeros((), dtype=torch.float64)
    error = 4 * summation_in(n, dtype)
    if function == "sum":
        return g.expand_as(x), zero
    if function == "mean":
        value = g.expand_as(x) / n
        return value, 2 * u * value.abs()
    if function.startswith(("var", "std")):
        count = n if "without" in function else n - 1
        mean = x.mean(1, keepdim=True)
        value, size = g * (x - mean) / count, g.abs() * (x.abs() + mean.abs()) / count
        if function.startswith("var"):
            return 2 * value, 2 * size * (6 * u + error)
        deviation = ((x - mean).square().sum(1, keepdim=True) / count).sqrt()
        return value / deviation, size / deviation * (8 * u + 2 * error)
    if function == "norm 1":
        return g * x.sign(), zero
    if function.startswith("norm"):
        p = int(function[-1])
        norm = (x.abs() ** p).sum(1, keepdim=True) ** (1 / p)
        value = g * x * x.abs() ** (p - 2) / norm ** (p - 1)
        return value, value.abs() * (10 * u + 2 * error)
    if function == "logsumexp":
        largest, powers = _powers(x)
        total = powers.sum(1, keepdim=True)
        result = largest + total.log()
        value = g * powers / total
        return value, value.abs() * (torch.expm1(2 * u * (x.abs() + result.abs())) + 6 * u + error)
    if function in SCANS:
        return _of_scans(x, g, function, dtype)
    if function in ("prod", "cumprod"):
        return torch.tensor(list(map(_of_products, x.tolist(), _whole(function, x, g))), dtype=torch.float64), zero
    if function in ("cummax", "cummin"):
        return torch.tensor([_of_running(function, *rows) for rows in zip(x.tolist(), g.tolist())]), zero
    return _of_extremes(function, x, g, point)


def _powers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest element of each row, and the exponentials of the differences from it."""
    largest = x.max(1, keepdim=True)[0]
    return largest, (x - largest).exp()


def _of_scans(x: torch.Tensor, g: torch.Tensor, function: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of cumulative sums or of running logarithms of sums. The sums along rows are products with a
    triangular matrix of ones: (rows, n) times (n, n)."""
    n = x.shape[1]
    if function == "cumsum":
        return product(g, torch.tril(torch.ones(n, n, dtype=torch.float64))), torch.zeros((), dtype=torch.float64)
    largest, powers = _powers(x)
    sums = product(powers, torch.triu(torch.ones(n, n, dtype=torch.float64)))
    weights = torch.tril(powers[:, None, :] / sums[:, :, None])  # (rows, result, element)
    value, size = (g[:, :, None] * weights).sum(1), (g.abs()[:, :, None] * weights).sum(1)
    # torch adds the positive and the negative part. It computes each as the logarithm of a sum, which is rounded at
    # each step.
    results = largest + sums.log()
    depth = tolerances.gamma(16 * n, tolerances.unit_roundoff(dtype)) * (1 + results.abs().max(1, keepdim=True)[0])
    return value, depth * size


def _whole(function: str, x: torch.Tensor, g: torch.Tensor) -> list[list[float]]:
    """Return the gradients of the running products. For prod, only the last running product has a gradient."""
    if function == "cumprod":
        return g.tolist()
    zeros = [0.0] * (x.shape[1] - 1)
    return [[*zeros, value] for value in g[:, 0].tolist()]


def _of_products(row: Sequence[float], g: Sequence[float]) -> list[float]:
    """Return the gradient of a row, given the gradients g of its running products. For x_i it is the product of the
    elements before i, times a sum over j >= i. The terms of the sum are g_j times the product of the elements after i
    up to j; the sum is computed from the end."""
    before = [1.0, *itertools.accumulate(row[:-1], lambda a, b: a * b)]
    after, found = 0.0, []
    for value, of_result in zip(reversed((*row[1:], 0.0)), reversed(g)):
        after = of_result + value * after
        found.append(after)
    return [a * b for a, b in zip(before, reversed(found))]


def _of_running(function: str, row: Sequence[float], g: Sequence[float]) -> list[float]:
    """Return the gradient of a row. Each g_i goes to the position of the running extreme; of equal elements, this is
    the last one."""
    sign = 1 if function == "cummax" else -1
    found, place = [0.0] * len(row), 0
    for i, (value, of_result) in enumerate(zip(row, g)):
        place = i if sign * value >= sign * row[place] else place
        found[place] += of_result
    return found


def _of_extremes(function: str, x: torch.Tensor, g: torch.Tensor, point: Point) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient and its tolerance, which is 0. Equal extremes share a gradient equally. The positions of
    sorted elements come from Python's sort."""
    k, n = _taken(point), x.shape[1]
    zero = torch.zeros((), dtype=torch.float64)
    rows = x.tolist()
    if function in ("amax", "amin", "max", "min"):
        extreme = torch.tensor([[(max if "max" in function else min)(row)] for row in rows], dtype=torch.float64)
        chosen = (x == extreme).to(torch.float64)
        return chosen * g / chosen.sum(1, keepdim=True), zero
    is_falling = bool(point["keepdim"] and function in ("sort", "topk"))
    order = torch.tensor([sorted(range(n), key=row.__getitem__, reverse=is_falling) for row in rows])
    if function in ("kthvalue", "median"):
        rank = k if function == "kthvalue" else (n + 1) // 2
        order = order[:, rank - 1 : rank]
    elif function == "topk":
        order, g = order[:, :k], g[:, :k]
    return torch.zeros_like(x).scatter(1, order, g.expand(order.shape)), zero


OPERATIONS: tuple[Any, ...] = (
    Operation(
        "gradient of a reduction",
        {
            "group": tuple(GROUPS),
            "dtype": DTYPES,
            "first": SIZES,
            "middle": (*SIZES, *LONG),
            "last": (*SIZES, *LONG),
            "over": tuple(OVER),
            "keepdim": (False, True),
            "share": (0, 1, 3, 4),  # quarters of a row that topk takes
            "layout": BATCHES,
        },
        gradient_case,
        {"quick": 16, "standard": 90, "full": 1000},
        _is_possible,
    ),
)
