"""Embeddings, and selecting, writing, adding and joining by index, of sampled sizes, layouts and dtypes.

Every value is an integer, and so are all sums: results are exact. Expected results come from Python's lists.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import MATRICES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Lists = list[list[float]]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ANY = (*DTYPES, *DTYPES, torch.float64, torch.int64, torch.int32)
WIDTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65, 127, 129, 257)
ROWS = (2, 3, 5, 10, 33, 97)
COUNTS = (1, 7, 40, 90, 129, 601, 801, 1030)  # approximate numbers of look-ups
MOST = 12000  # maximum number of elements of a case


def embedding(point: Point, seed: int) -> Case:
    """Build a case that looks up rows by index and sums the gradients of each row. Each row is looked up a power of two
    times, so that gradients divided by this count are exact."""
    keys, width, dtype = point["rows"], point["width"], point["dtype"]
    indices = _indices(point["count"], keys, seed)
    table, grad = hashed_inputs.whole((keys, width), seed, 100), hashed_inputs.whole((len(indices), width), seed + 1, 1)
    options: dict[str, Any] = {}
    if point["padding"]:
        options["padding_idx"] = {"first": 0, "last": -1, "middle": keys // 2}[point["padding"]]
    if point["by_frequency"]:
        options["scale_grad_by_freq"] = True
    what = ", ".join(f"{name} {value}" for name, value in options.items())
    name = f"embedding {len(indices)} {point['shape']} of {keys}x{width} {point['layout']}{', ' if what else ''}{what}"
    run = functools.partial(_embedding, shape=point["shape"], layout=point["layout"], options=options)
    exact = functools.partial(_looked_up, options=options)
    return Case(name, dtype, (indices, table.to(dtype), grad.to(dtype)), run, exact)


def _indices(count: int, keys: int, seed: int) -> torch.Tensor:
    """Return about `count` indices. Each row occurs a power of two times, and at least once; with fewer than `keys`
    look-ups requested, each row occurs once."""
    left, drawn = count - keys, []
    for row in hashed_inputs.hashes(keys, seed).argsort().tolist():
        often = 1
        while often <= left:
            left -= often
            often *= 2
        drawn += [row] * often
    return torch.tensor(drawn)[hashed_inputs.hashes(len(drawn), seed + 1).argsort()]


def _embedding(
    indices: torch.Tensor,
    table: torch.Tensor,
    grad: torch.Tensor,
    shape: str,
    layout: str,
    options: Mapping[str, Any],
) -> Results:
    """Look up rows with indices in one dimension, in a matrix, or in a matrix with transposed memory."""
    leaf = with_large_gaps(table, layout).detach().requires_grad_()
    given = indices
    if shape != "in a line" and len(indices) % 2 == 0:
        given = indices.view(2, -1)
    if shape == "transposed" and given.dim() == 2:
        given = given.t().contiguous().t()
    rows = F.embedding(given, leaf, **options)
    (gradient,) = backward_pass.gradients(rows, (leaf,), grad.view(rows.shape))
    return {"output": rows.detach().reshape(grad.shape), "gradient": gradient}


def _looked_up(indices: torch.Tensor, table: torch.Tensor, grad: torch.Tensor, options: Mapping[str, Any]) -> Expected:
    keys, order = len(table), indices.tolist()
    sums = [[0.0] * table.shape[1] for _ in range(keys)]
    padding = options["padding_idx"] % keys if "padding_idx" in options else None
    for row, values in zip(order, grad.tolist()):
        if row != padding:
            sums[row] = [total + value for total, value in zip(sums[row], values)]
    if options.get("scale_grad_by_freq"):
        counts = [max(1, order.count(row)) for row in range(keys)]
        sums = [[value / count for value in line] for count, line in zip(counts, sums)]
    rows = table.tolist()
    return {"output": _exactly([rows[index] for index in order]), "gradient": _exactly(sums)}


# A call of x (rows, width), y (count, width), an index of `count` rows, and the dimension of the rows. If this
# dimension is 1, x and y are transposed.
Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
ALONG: dict[str, Call] = {
    "index_select": lambda x, y, index, dim: torch.index_select(x, dim, index),
    "x[index]": lambda x, y, index, dim: x[index] if dim == 0 else x[:, index],
    "gather": lambda x, y, index, dim: torch.gather(x, dim, _everywhere(index, x, dim)),
    "take_along_dim": lambda x, y, index, dim: torch.take_along_dim(x, _everywhere(index, x, dim).contiguous(), dim),
    "index_add": lambda x, y, index, dim: torch.index_add(x, dim, index, y),
    "scatter_add": lambda x, y, index, dim: torch.scatter_add(x, dim, _everywhere(index, x, dim), y),
    "scatter": lambda x, y, index, dim: torch.scatter(x, dim, _everywhere(index, x, dim).contiguous(), y),
    "index_copy": lambda x, y, index, dim: torch.index_copy(x, dim, index, y),
    "cat": lambda x, y, index, dim: torch.cat((x, y, x), dim),
    "roll": lambda x, y, index, dim: torch.roll(x, 1, dim),
    "repeat_interleave": lambda x, y, index, dim: torch.repeat_interleave(x, 3, dim),
}
CALLS: dict[str, Call] = {
    **ALONG,
    "index_put accumulate": lambda x, y, index, dim: x.clone().index_put_((index,), y, accumulate=True),
    "masked_fill": lambda x, y, index, dim: x.masked_fill(_mask(x, index), 7),
    "masked_fill by row": lambda x, y, index, dim: x.masked_fill(_mask(x, index)[:, :1], 7),
    "masked_fill by column": lambda x, y, index, dim: x.masked_fill(_mask(x, index)[0], 7),
    "where": lambda x, y, index, dim: torch.where(_mask(x, index), x, -x),
    "where by row": lambda x, y, index, dim: torch.where(_mask(x, index)[:, :1], x, -x),
    "where by column": lambda x, y, index, dim: torch.where(_mask(x, index)[0], x, -x),
    "where of a number": lambda x, y, index, dim: torch.where(_mask(x, index), x, 7),
    "masked_select": lambda x, y, index, dim: torch.masked_select(x, _mask(x, index)),
    "tril": lambda x, y, index, dim: torch.tril(x, 1),
    "triu": lambda x, y, index, dim: torch.triu(x, 1),
    "pad": lambda x, y, index, dim: F.pad(x, (1, 2, 3, 4), value=5),
}
DISTINCT = ("scatter", "index_copy")  # with repeated indices their result would be undefined, so the index has none
ADDING = ("index_add", "scatter_add", "index_put accumulate")
WITH_OTHERS = (*DISTINCT, *ADDING, "cat")  # calls that use y
WITHOUT_INDEX = ("cat", "roll", "repeat_interleave", "tril", "triu", "pad")
TAKING = ("index_select", "x[index]", "gather", "take_along_dim")
# The calls of one case, which have the same inputs.
GROUPS = {
    "by index": TAKING,
    "to distinct places": DISTINCT,
    "added along a dimension": ADDING[:2],
    "added to rows": ADDING,
    "joined": ("cat",),
    "repeated": ("roll", "repeat_interleave"),
    "of triangles": ("tril", "triu", "pad"),
    "by a mask": tuple(name for name in CALLS if name.startswith(("masked", "where"))),
}


def _everywhere(index: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Expand the index of the rows to one index for each element of these rows."""
    return index[:, None].expand(-1, x.shape[1]) if dim == 0 else index.expand(x.shape[0], -1)


def _mask(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return a mask of x's shape, True where row + column + the first index is a multiple of 3."""
    rows, columns = (torch.arange(n, device=x.device) for n in x.shape)
    return (rows[:, None] + columns + index[:1]) % 3 == 0


def indexing(point: Point, seed: int) -> Case:
    """Build a case of calls with integers, and with other rows or an index if the calls use them."""
    rows, width, dtype, functions = point["rows"], point["width"], point["dtype"], GROUPS[point["functions"]]
    index = _indices(point["count"], rows, seed)
    if functions == DISTINCT:
        index = hashed_inputs.hashes(rows, seed).argsort()[: rows // 2]
    elif point["functions"] == "by a mask":
        index = index[:1]
    x = hashed_inputs.whole((rows, width), seed + 2, 50).to(dtype)
    y = hashed_inputs.whole((len(index), width), seed + 3, 1).to(dtype)
    name = f"{rows}x{width} {point['layout']} {point['functions']}, {len(index)} rows, dimension {point['dim']}"
    run = functools.partial(_indexed, functions=functions, dim=point["dim"], layout=point["layout"])
    takes_others, takes_index = functions[0] in WITH_OTHERS, functions[0] not in WITHOUT_INDEX
    given = (x, *([y] if takes_others else []), *([index] if takes_index else []))
    return Case(name, dtype, given, run, functools.partial(_indexed_by_hand, functions=functions))


def _named(given: tuple[torch.Tensor, ...], function: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x, y and index of a case. If the calls use no y or no index, x is returned in its place."""
    x, *rest = given
    y = rest.pop(0) if function in WITH_OTHERS else x
    return x, y, rest[0] if rest else x


def _indexed(*given: torch.Tensor, functions: Sequence[str], dim: int, layout: str) -> Results:
    x, y, index = _named(given, functions[0])
    if dim == 1:
        x, y = x.t(), y.t()
    x, y = with_large_gaps(x, layout), with_large_gaps(y, layout)
    found = {name: CALLS[name](x, y, index, dim) for name in functions}
    return {name: part.t() if dim == 1 else part for name, part in found.items()}


def _indexed_by_hand(*given: torch.Tensor, functions: Sequence[str]) -> Expected:
    x, y, index = (part.tolist() for part in _named(given, functions[0]))
    return {name: _exactly(_by_hand(name, x, y, index)) for name in functions}


def _by_hand(function: str, x: Lists, y: Lists, index: list[int]) -> Any:
    """Return the result of a call, computed with Python's lists."""
    if function in TAKING:
        return [x[row] for row in index]
    if function in ADDING:
        sums = [list(row) for row in x]
        for row, values in zip(index, y):
            sums[row] = [total + value for total, value in zip(sums[row], values)]
        return sums
    if function in DISTINCT:
        placed = dict(zip(index, y))
        return [placed.get(number, row) for number, row in enumerate(x)]
    if function == "cat":
        return x + y + x
    if function == "roll":
        return x[-1:] + x[:-1]
    if function == "repeat_interleave":
        return [row for row in x for _ in range(3)]
    if function == "pad":
        filled = [5.0] * (len(x[0]) + 3)
        return [filled] * 3 + [[5.0, *row, 5.0, 5.0] for row in x] + [filled] * 4
    first = index[0] if function not in WITHOUT_INDEX else 0
    elements = [[_element(function, i, j, value, first) for j, value in enumerate(row)] for i, row in enumerate(x)]
    if function == "masked_select":
        return [value for row in elements for value in row if value is not None]
    return elements


def _element(function: str, i: int, j: int, value: float, first: int) -> float | None:
    """Return one element of the result of a call that keeps, replaces or omits elements, depending on row and
    column."""
    if function in ("tril", "triu"):
        return value if (j <= i + 1 if function == "tril" else j >= i + 1) else 0.0
    name, _, by = function.partition(" by ")
    masked = ((0 if by == "column" else i) + (0 if by == "row" else j) + first) % 3 == 0
    if name == "masked_fill":
        return 7.0 if masked else value
    return value if masked else {"where": -value, "where of a number": 7.0}.get(name)


def _exactly(values: Any) -> Exact:
    return without_rounding(torch.tensor(values, dtype=torch.float64))


def _is_possible(point: Point) -> bool:
    """Return whether the case can be tested. Excluded, among others: masks on two rows, because masked_select could
    then select nothing."""
    fits = point["count"] * point["width"] <= MOST // 2 and (point["functions"] != "by a mask" or point["rows"] > 2)
    return fits and (point["dim"] == 0 or set(GROUPS[point["functions"]]) <= set(ALONG))


OPERATIONS = (
    Operation(
        "embedding",
        {
            "dtype": DTYPES,
            "rows": ROWS,
            "width": WIDTHS,
            "count": COUNTS,
            "shape": ("in a line", "in a matrix", "transposed"),
            "padding": ("", "first", "middle", "last"),
            "by_frequency": (False, True),
            "layout": MATRICES[:3],
        },
        embedding,
        {"quick": 30, "standard": 160, "full": 1400},
        lambda point: point["count"] * point["width"] <= MOST,
    ),
    Operation(
        "indexing",
        {
            "functions": tuple(GROUPS),
            "dtype": ANY,
            "rows": ROWS,
            "width": WIDTHS,
            "count": COUNTS,
            "dim": (0, 1),
            "layout": MATRICES,
        },
        indexing,
        {"quick": 40, "standard": 200, "full": 1600},
        _is_possible,
    ),
)
