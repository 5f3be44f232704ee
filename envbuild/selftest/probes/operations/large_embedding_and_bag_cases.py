"""Embeddings of many rows, wide rows or many look-ups, and sums, means and maxima of bags of rows.

Values are whole numbers, and most bags have a power of two of rows, so that most results are exact. The expected
results come from lists.
"""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Lists = list[list[float]]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDICES = (torch.int64, torch.int32)
MOST, LARGEST = 40000, 120000  # maximum number of elements that are looked up, and of elements of a table
BAG = 4  # rows of a bag, except for a few shorter and empty bags
LONGEST_ROW = 4.0  # the value of max_norm


def large_embedding(point: Point, seed: int) -> Case:
    """Build a case that looks up rows of a table. The last row is among them, and one row is looked up more often than
    the others."""
    rows, width, count, dtype = point["rows"], point["width"], point["count"], point["dtype"]
    index = hashed_inputs.hashes(count, seed) % rows
    index[count // 2 :: 7] = rows // 3
    index[count // 3] = index[-1] = rows - 1
    # The gradients of a row have random signs, so their sum is a small integer that bfloat16 represents.
    grad = hashed_inputs.whole((count, width), seed + 1, 1)
    table = hashed_inputs.whole((rows, width), seed + 2, 100)
    used = torch.unique(index)
    name = f"embedding {count} of {rows}x{width}, {point['index']}, gradient {point['gradient']}, {point['kind']}"
    run = functools.partial(_large, rows=rows, places=used, point=point)
    given = (index.to(point["index"]), table[used].to(dtype), grad.to(dtype))
    return Case(name, dtype, given, run, functools.partial(_large_by_hand, point=point))


def _large(
    index: torch.Tensor, used: torch.Tensor, grad: torch.Tensor, rows: int, places: torch.Tensor, point: Point
) -> Results:
    """Return the result of the lookup, the gradients of the rows of the table that are looked up, and the sum of the
    absolute gradients of all other rows. `rows`: the number of rows of the table. `used`: the rows that are looked up;
    `places`: their row numbers."""
    places = places.to(used.device)
    table = used.new_full((rows, used.shape[1]), 77.0).index_copy_(0, places, used)
    leaf = table.requires_grad_()
    shaped = index.view(2, 3, -1) if point["kind"] == "three dimensions" and len(index) % 6 == 0 else index
    found = F.embedding(shaped, leaf, sparse=point["kind"] == "sparse")
    upstream = with_large_gaps(grad, point["gradient"]).view(found.shape) if shaped is index else grad.view(found.shape)
    (gradient,) = backward_pass.gradients(found, (leaf,), upstream)
    if gradient.is_sparse:
        gradient = gradient.coalesce().to_dense()
    kept = gradient[places]
    total = gradient.float().abs().sum() - kept.float().abs().sum()
    return {"output": found.detach().reshape(grad.shape), "gradient": kept, "gradient of other rows": total[None]}


def _large_by_hand(index: torch.Tensor, used: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    order = index.tolist()
    numbers = {row: number for number, row in enumerate(sorted(set(order)))}
    rows = used.tolist()
    sums = [[0.0] * used.shape[1] for _ in numbers]
    for row, values in zip(order, grad.tolist()):
        number = numbers[row]
        sums[number] = [total + value for total, value in zip(sums[number], values)]
    found = torch.tensor(sums, dtype=torch.float64)
    # A kernel that adds one number after the other rounds sums above 1 / u.
    counts = collections.Counter(order)
    often = torch.tensor([float(counts[row]) for row in numbers], dtype=torch.float64)[:, None]
    u = tolerances.unit_roundoff(point["dtype"])
    limit = torch.where(often > 1 / u, 16 * u * often, 0.0)
    return {
        "output": without_rounding(torch.tensor([rows[numbers[row]] for row in order], dtype=torch.float64)),
        "gradient": Exact(found, limit.expand_as(found)),
        "gradient of other rows": without_rounding(torch.zeros(1, dtype=torch.float64)),
    }


def bag(point: Point, seed: int) -> Case:
    """Build a case with bags of four rows; unless the bags are the rows of a matrix, one bag is empty, one has one row
    and one has two."""
    rows, width, dtype, count = point["rows"], point["width"], point["dtype"], point["bags"]
    lengths = [BAG] * count
    if point["bags are"] != "rows of a matrix":
        for place, length in ((0, 1), (count // 2, 0), (count - 1, 2)):
            lengths[place] = length
    index = hashed_inputs.hashes(sum(lengths), seed) % rows
    table = hashed_inputs.whole((rows, width), seed + 1, 20)
    if point["mode"] == "max":  # the numbers in each column are distinct
        order = hashed_inputs.hashes(rows * width, seed + 1).view(rows, width).argsort(0).argsort(0)
        table = (order - rows // 2).to(torch.float32)
    grad = hashed_inputs.whole((count, width), seed + 2, 4)
    given = [index.to(point["index"]), table.to(dtype), grad.to(dtype)]
    if point["weights"]:
        given.append(hashed_inputs.whole((len(index),), seed + 3, 3).to(dtype))
    name = (
        f"embedding bags {point['mode']} {count} of {rows}x{width}, {point['bags are']}, {point['index']}, "
        f"{'weights' if point['weights'] else 'without weights'}, "
        f"{'ignored row' if point['padding'] else 'each row counts'}"
    )
    run = functools.partial(_bags, lengths=lengths, point=point)
    return Case(name, dtype, tuple(given), run, functools.partial(_bags_by_hand, lengths=lengths, point=point))


def _bags(
    index: torch.Tensor,
    table: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lengths: list[int],
    point: Point,
) -> Results:
    leaf = table.detach().requires_grad_()
    factors = None if weights is None else weights.detach().requires_grad_()
    offsets, shaped = None, factors
    options = {"mode": point["mode"], "padding_idx": 1 if point["padding"] else None, "sparse": point["sparse"]}
    if point["bags are"] != "rows of a matrix":
        options["include_last_offset"] = point["bags are"] == "offsets and the end"
        starts = [sum(lengths[:number]) for number in range(len(lengths) + int(options["include_last_offset"]))]
        offsets = torch.tensor(starts, dtype=index.dtype, device=index.device)
    else:
        index = index.view(-1, BAG)
        shaped = None if factors is None else factors.view(-1, BAG)
    output = F.embedding_bag(index, leaf, offsets, per_sample_weights=shaped, **options)
    leaves = [leaf, *([] if factors is None else [factors])]
    gradient, *of_weights = backward_pass.gradients(output, leaves, grad)
    found = {"output": output.detach(), "gradient": gradient.to_dense() if gradient.is_sparse else gradient}
    return {**found, **dict(zip(["gradient of the weights"], of_weights))}


def _bags_by_hand(
    index: torch.Tensor,
    table: torch.Tensor,
    grad: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    lengths: list[int],
    point: Point,
) -> Expected:
    """Return the expected results: sums; means, which divide by the number of rows that are not ignored; or maxima,
    whose gradient goes to the row with the largest element."""
    order, rows, mode = index.tolist(), table.tolist(), point["mode"]
    factors = [1.0] * len(order) if weights is None else weights.tolist()
    of_factors, squares = [0.0] * len(order), [0.0] * len(order)
    width, begin = table.shape[1], 0
    output: Lists = []
    gradient: Lists = [[0.0] * width for _ in rows]
    for length, upstream in zip(lengths, grad.tolist()):
        bagged = [place for place in range(begin, begin + length) if not (point["padding"] and order[place] == 1)]
        begin += length
        share = 1 / max(1, len(bagged)) if mode == "mean" else 1.0
        line = []
        for column in range(width):
            if mode == "max":
                best = max(bagged, key=lambda place: rows[order[place]][column], default=None)
                line.append(rows[order[best]][column] if best is not None else 0.0)
                if best is not None:
                    gradient[order[best]][column] += upstream[column]
                continue
            line.append(sum(rows[order[place]][column] * factors[place] * share for place in bagged))
            for place in bagged:
                gradient[order[place]][column] += upstream[column] * factors[place] * share
                product = upstream[column] * rows[order[place]][column]
                of_factors[place] += product
                squares[place] += product**2
        output.append(line)
    found = {
        name: torch.tensor(part, dtype=torch.float64) for name, part in (("output", output), ("gradient", gradient))
    }
    thirds = mode == "mean" and point["padding"]
    # A mean may divide by 3. A kernel that adds such terms one after the other rounds each partial sum.
    size = (4 + len(order) / len(rows)) * tolerances.unit_roundoff(point["dtype"]) if thirds else 0.0
    exact = {
        name: Exact(value, size * torch.full_like(value, float(value.abs().max()) + 8)) for name, value in found.items()
    }
    if weights is not None:
        products, roots = (torch.tensor(part, dtype=torch.float64) for part in (of_factors, squares))
        # The kernel may add the products of a row with a gradient in the dtype. This causes `width` independent
        # roundings of partial sums, each of which is as large as the root of the sum of squares.
        u = tolerances.unit_roundoff(point["dtype"])
        limit = tolerances.LIKELY * math.sqrt(width) * u * roots.sqrt()
        exact["gradient of the weights"] = Exact(products, tolerances.rounding(products, point["dtype"]) + limit)
    return exact


def renormalized(point: Point, seed: int) -> Case:
    """Build a case with max_norm: rows that are too long are shortened in the table itself, and the others are kept."""
    rows, width, count = point["rows"], point["width"], point["count"]
    table = hashed_inputs.whole((rows, width), seed, 3) * (2.0 / width**0.5)
    table[::2] /= 8
    index = torch.cat((torch.arange(rows), hashed_inputs.hashes(count, seed + 1) % rows))
    name = f"embedding with max_norm {len(index)} of {rows}x{width}, norm {point['norm']}"
    run = functools.partial(_renormalized, p=point["norm"])
    return Case(name, torch.float32, (index, table), run, functools.partial(_renormalized_exactly, p=point["norm"]))


def _renormalized(index: torch.Tensor, table: torch.Tensor, p: float) -> Results:
    changed = table.clone()
    found = F.embedding(index, changed, max_norm=LONGEST_ROW, norm_type=p)
    return {"output": found, "table": changed}


def _renormalized_exactly(index: torch.Tensor, table: torch.Tensor, p: float) -> Expected:
    norms = (table.abs() ** p).sum(1, keepdim=True) ** (1 / p)
    factor = torch.where(norms > LONGEST_ROW, LONGEST_ROW / (norms + 1e-7), 1.0)
    scaled = table * factor
    limit = tolerances.rounding(scaled, torch.float32) + 8 * tolerances.summation(table.shape[1]) * scaled.abs()
    touched = torch.zeros(len(table), 1, dtype=torch.bool)
    touched[index] = True
    whole = Exact(torch.where(touched, scaled, table), limit)
    return {"output": Exact(scaled[index], limit[index]), "table": whole}


OPERATIONS = (
    Operation(
        "large embedding",
        {
            "dtype": DTYPES,
            "rows": (33, 129, 1025, 32771, 65539),
            "width": (1, 3, 8, 33, 256, 513, 1030),
            "count": (6, 257, 1026, 3078, 4104),
            "index": INDICES,
            "gradient": ("contiguous", "transposed", "rows apart", "shifted"),
            "kind": ("dense", "sparse", "three dimensions"),
        },
        large_embedding,
        {"quick": 3, "standard": 40, "full": 400},
        lambda point: point["rows"] * point["width"] <= LARGEST and point["count"] * point["width"] <= MOST,
    ),
    Operation(
        "embedding bag",
        {
            "dtype": DTYPES,
            "mode": ("sum", "mean", "max"),
            "rows": (3, 10, 97),
            "width": (1, 3, 8, 17, 33, 64, 130),
            "bags": (3, 8, 33, 130),
            "bags are": ("offsets", "rows of a matrix", "offsets and the end"),
            "index": INDICES,
            "weights": (False, True),
            "padding": (False, True),
            "sparse": (False, False, True),
        },
        bag,
        {"quick": 6, "standard": 60, "full": 600},
        lambda point: (
            (not point["weights"] or point["mode"] == "sum")
            and (point["dtype"] != torch.bfloat16 or BAG * point["bags"] <= 12 * point["rows"])  # keeps sums below 256
            and point["rows"] <= BAG * point["bags"]  # otherwise most rows would be in no bag
            and not (point["mode"] == "max" and point["sparse"])
        ),
    ),
    Operation(
        "embedding with max_norm",
        {"rows": (3, 17, 65), "width": (4, 7, 33, 130), "count": (1, 40, 300), "norm": (1.0, 2.0, 3.0)},
        renormalized,
        {"quick": 1, "standard": 6, "full": 60},
    ),
)
