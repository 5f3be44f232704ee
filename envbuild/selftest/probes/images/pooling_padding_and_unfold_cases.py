"""Pooling with all its arguments, padding, and unfolding of windows to columns, forward and backward, in one to three
dimensions.

For each dimension, a table lists the positions that each output reads. A maximum is found in one dimension after
another; its position is unique because the values of an image are distinct. An average is a product with one matrix per
dimension.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances, torch_fault_exclusions
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_nan_gaps import with_nan_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Sizes = tuple[int, ...]
Table = list[list[int]]  # for each output, the positions that it reads; positions outside the image are padding

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "channels last", "rows apart", "shifted by 1")
MOST = 256  # elements of an image: bfloat16 represents this many consecutive integers
LONG = (2, 5, 8, 9, 16, 17, 31, 33, 65, 127)
SHORT = (1, 2, 3, 5, 8, 9)
DIVISOR = 3
POOLS = (
    "max_pool",
    "max_pool with indices",
    "avg_pool",
    "avg_pool without padding",
    "avg_pool with a divisor",
    "adaptive_max_pool",
    "adaptive_avg_pool",
)


def pool(point: Point, seed: int) -> Case:
    """Build a case whose images consist of distinct integers."""
    dtype, sizes = point["dtype"], _sizes(point)
    images, channels = point["images"], point["channels"]
    count = math.prod(sizes)
    order = hashed_inputs.hashes(images * channels * count, seed).view(images * channels, count).argsort(-1)
    x = (order - count // 2).view(images, channels, *sizes).to(dtype)
    places = tuple(len(table) for table in _tables(point))
    grad = hashed_inputs.whole((images, channels, *places), seed + 1, 3).to(dtype)
    name = (
        f"images pooled by {point['function']}{point['rank']}d of {'x'.join(map(str, x.shape))}, {_arguments(point)}, "
        f"{point['layout']}, gradient {point['gradient layout']}"
    )
    return Case(
        name, dtype, (x, grad), functools.partial(_pool, point=point), functools.partial(_pool_exactly, point=point)
    )


def _sizes(point: Point) -> Sizes:
    rank = point["rank"]
    return {1: (point["long"],), 2: (point["short"], point["long"]), 3: (point["short"], 4, point["long"])}[rank]


def _by_dimension(point: Point, name: str) -> Sizes:
    return tuple(point[name][-point["rank"] :])


def _arguments(point: Point) -> dict[str, Any]:
    """Return the arguments of the call, limited by what torch accepts for this shape; for example, the padding is at
    most half of a window."""
    if point["function"].startswith("adaptive"):
        return {"output_size": tuple(min(n, size) for n, size in zip(_by_dimension(point, "outputs"), _sizes(point)))}
    kernel = _by_dimension(point, "kernel")
    stride = kernel if point["stride"] is None else _by_dimension(point, "stride")
    padding = tuple(min(p, k // 2) for p, k in zip(_by_dimension(point, "padding"), kernel))
    found = {"kernel_size": kernel, "stride": stride, "padding": padding, "ceil_mode": point["ceil_mode"]}
    if point["function"].startswith("max"):
        found["dilation"] = _by_dimension(point, "dilation")
    if point["function"] == "avg_pool without padding":
        found["count_include_pad"] = False
    if point["function"] == "avg_pool with a divisor":
        found["divisor_override"] = DIVISOR
    return found


def _extents(point: Point) -> Sizes:
    found = _arguments(point)
    dilation = found.get("dilation", (1, 1, 1))
    return tuple(d * (k - 1) + 1 for k, d in zip(found["kernel_size"], dilation))


def _is_pool(point: Point) -> bool:
    sizes = _sizes(point)
    few = math.prod(sizes) <= MOST and math.prod((point["images"], point["channels"])) <= 40
    if not few or (point["function"] == "avg_pool with a divisor" and point["rank"] == 1):
        return False
    if point["layout"] == "channels last" and point["rank"] == 1:
        return False
    if point["function"].startswith("adaptive"):
        return True
    # torch's avg_pool3d does not count the padding when it checks the window against the size
    padding = (0,) * 3 if point["rank"] == 3 else _arguments(point)["padding"]
    if any(extent > n + 2 * p for n, p, extent in zip(sizes, padding, _extents(point))):
        return False
    # A window that contains only padding has no maximum to locate. Without dilation, each window reads at least one
    # element.
    if max(_arguments(point).get("dilation", (1,))) == 1:
        return True
    return all(max(window) >= 0 for table in _tables(point) for window in table)


def _tables(point: Point) -> list[Table]:
    found, sizes = _arguments(point), _sizes(point)
    if point["function"].startswith("adaptive"):
        return [
            [list(range(i * n // out, -(-(i + 1) * n // out))) for i in range(out)]
            for n, out in zip(sizes, found["output_size"])
        ]
    tables = []
    for dim, (n, extent) in enumerate(zip(sizes, _extents(point))):
        k, s, p = (found[name][dim] for name in ("kernel_size", "stride", "padding"))
        d = found["dilation"][dim] if "dilation" in found else 1
        left = n + 2 * p - extent
        outputs = (-(-left // s) if found["ceil_mode"] else left // s) + 1
        if (outputs - 1) * s >= n + p:  # torch drops a window that begins in the padding at the end
            outputs -= 1
        windows = [[i * s - p + t * d for t in range(k)] for i in range(outputs)]
        tables.append([[at if 0 <= at < n else -1 for at in window if at < n + p] for window in windows])
    return tables


def _pool(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Results:
    leaf = with_nan_gaps(x, point["layout"]).detach().requires_grad_()
    arguments, kind = _arguments(point), point["function"].split(" ")[0]
    if point["function"] == "max_pool with indices":
        arguments = {**arguments, "return_indices": True}
    if point["stride"] is None and "stride" in arguments:
        del arguments["stride"]
    call = getattr(F, f"{kind}{point['rank']}d")
    found = call(leaf, **arguments)
    output, *indices = found if isinstance(found, tuple) else (found,)
    results = {"output": output.detach(), **({"indices": indices[0]} if indices else {})}
    at = {**point, "padded": any(arguments.get("padding", ()))}
    if torch_fault_exclusions.uncomputed_results("pooling", x.device.type, at):
        leaf = leaf.detach().contiguous().requires_grad_()
        output = call(leaf, **arguments)
    (results["gradient"],) = backward_pass.gradients(output, (leaf,), with_nan_gaps(grad, point["gradient layout"]))
    return results


def _pool_exactly(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    tables = _tables(point)
    if "max" in point["function"]:
        return _maxima(x, grad, tables, with_indices=point["function"].endswith("indices"))
    padded = point["function"] == "avg_pool"
    matrices = []
    for n, table in zip(x.shape[2:], tables):
        matrix = torch.zeros(len(table), n, dtype=torch.float64)
        for number, window in enumerate(table):
            inside = [at for at in window if at >= 0]
            matrix[number, inside] = 1.0
            if not point["function"].endswith("divisor"):
                matrix[number] /= len(window) if padded else len(inside)
        matrices.append(matrix)
    if point["function"].endswith("divisor"):
        matrices[0] /= DIVISOR
    dtype = point["dtype"]
    return {
        "output": _averages(x, matrices, dtype),
        "gradient": _averages(grad, [matrix.t() for matrix in matrices], dtype),
    }


def _averages(x: torch.Tensor, matrices: Sequence[torch.Tensor], dtype: torch.dtype) -> Exact:
    """Return sums of few terms. Each term may be rounded to the dtype, for example if a kernel adds it to memory."""
    value, size, terms = x, x.abs(), 1
    for dim, matrix in enumerate(matrices, start=2):
        value, size = (torch.tensordot(part, matrix, ([dim], [1])).movedim(-1, dim) for part in (value, size))
        terms *= int((matrix != 0).sum(1).max())
    return Exact(value, tolerances.rounding(value, dtype) + (terms + 2) * tolerances.unit_roundoff(dtype) * size)


def _maxima(x: torch.Tensor, grad: torch.Tensor, tables: Sequence[Table], with_indices: bool) -> Expected:
    images, channels = x.shape[:2]
    found = x
    for dim, table in enumerate(tables, start=2):
        lowest = found.new_full((*found.shape[:dim], 1, *found.shape[dim + 1 :]), -math.inf)
        extended = torch.cat((found, lowest), dim)
        found = torch.stack([extended[(slice(None),) * dim + (window,)].amax(dim) for window in table], dim)
    flat = x.reshape(images * channels, -1)
    lowest_of_image = -(flat.shape[1] // 2)
    # the values are consecutive integers, so a value gives its rank, and its rank gives its position
    order = flat.argsort(1)
    ranks = (found.reshape(images * channels, -1) - lowest_of_image).long()
    places = order.gather(1, ranks.clamp(0, flat.shape[1] - 1))
    summed = torch.zeros_like(flat).scatter_add_(1, places, grad.reshape(places.shape))
    result = {"output": without_rounding(found), "gradient": without_rounding(summed.view(x.shape))}
    if with_indices:
        result["indices"] = without_rounding(places.view(found.shape).to(torch.float64))
    return result


PADS = ((1, 2), (3, 0), (0, 1), (2, 2))
NUMBER = 5.0


MODES = ("constant", "reflect", "replicate", "circular")


def pad(point: Point, seed: int) -> Case:
    """Build a case that pads all spatial dimensions of an image, each by different widths, with its gradient."""
    sizes, dtype = _sizes(point), point["dtype"]
    widths = _widths(point)
    x = hashed_inputs.whole((point["images"], point["channels"], *sizes), seed, 100).to(dtype)
    outputs = tuple(len(table) for table in _pad_tables(point["mode"], sizes, widths))
    grad = hashed_inputs.whole((*x.shape[:2], *outputs), seed + 1, 3).to(dtype)
    name = f"images padded by {point['mode']} {widths} of {'x'.join(map(str, x.shape))}, {point['layout']}"
    return Case(
        name, dtype, (x, grad), functools.partial(_padded, point=point), functools.partial(_padded_exactly, point=point)
    )


def _widths(point: Point) -> list[tuple[int, int]]:
    """Return the widths before and after each dimension, limited by its size. With mode "constant", a width may be
    negative, which cuts elements off."""
    found = []
    for dim, n in enumerate(_sizes(point)):
        before, after = PADS[(point["widths"] + dim) % len(PADS)]
        most = {"reflect": n - 1, "circular": n}.get(point["mode"], 3)
        before, after = min(before, most), min(after, most)
        if point["mode"] == "constant" and point["cut"] and n > 3:
            before = -before
        found.append((before, after))
    return found


def _pad_tables(mode: str, sizes: Sizes, widths: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return, for each dimension, the position that each output copies; -1 stands for padding."""
    tables = []
    for n, (before, after) in zip(sizes, widths):
        places = range(-before, n + after)
        if mode == "constant":
            tables.append([at if 0 <= at < n else -1 for at in places])
        elif mode == "reflect":
            tables.append([abs(at) if at < n else 2 * (n - 1) - at for at in places])
        else:
            tables.append([at % n if mode == "circular" else min(max(at, 0), n - 1) for at in places])
    return tables


def _padded(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Results:
    leaf = with_nan_gaps(x, point["layout"]).detach().requires_grad_()
    widths = [width for pair in reversed(_widths(point)) for width in pair]
    output = F.pad(leaf, widths, mode=point["mode"], **({"value": NUMBER} if point["mode"] == "constant" else {}))
    (gradient,) = backward_pass.gradients(output, (leaf,), with_nan_gaps(grad, point["gradient layout"]))
    return {"output": output.detach(), "gradient": gradient}


def _padded_exactly(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    tables = _pad_tables(point["mode"], _sizes(point), _widths(point))
    value, inside, gradient = x, torch.ones_like(x), grad
    for dim, table in enumerate(tables, start=2):
        matrix = (torch.tensor(table)[:, None] == torch.arange(x.shape[dim])).to(torch.float64)
        value, inside = (torch.tensordot(part, matrix, ([dim], [1])).movedim(-1, dim) for part in (value, inside))
        gradient = torch.tensordot(gradient, matrix, ([dim], [0])).movedim(-1, dim)
    return {"output": without_rounding(value + NUMBER * (1 - inside)), "gradient": without_rounding(gradient)}


def columns(point: Point, seed: int) -> Case:
    """Build a case of F.unfold, and of F.fold, which adds overlapping windows to an image. Each of the two is the
    gradient of the other."""
    sizes, dtype = (point["short"], point["long"]), point["dtype"]
    x = hashed_inputs.whole((point["images"], point["channels"], *sizes), seed, 3).to(dtype)
    count = math.prod(len(table) for table in _column_tables(point))
    taps = math.prod(_options(point)["kernel_size"])
    grad = hashed_inputs.whole((point["images"], point["channels"] * taps, count), seed + 1, 3).to(dtype)
    name = f"windows as columns, {'x'.join(map(str, x.shape))}, {_options(point)}, {point['layout']}"
    run = functools.partial(_columns, point=point)
    return Case(name, dtype, (x, grad), run, functools.partial(_columns_exactly, point=point))


def _options(point: Point) -> dict[str, Sizes]:
    return {
        "kernel_size": point["kernel"][-2:],
        "dilation": point["dilation"][-2:],
        "padding": point["padding"][-2:],
        "stride": point["stride"][-2:],
    }


def _column_tables(point: Point) -> list[Table]:
    tables = []
    for n, k, d, p, s in zip((point["short"], point["long"]), *_options(point).values()):
        outputs = (n + 2 * p - d * (k - 1) - 1) // s + 1
        tables.append([[i * s - p + t * d for t in range(k)] for i in range(outputs)])
    return tables


def _has_columns(point: Point) -> bool:
    sizes, tables = (point["short"], point["long"]), _column_tables(point)
    reads = [any(0 <= at < n for window in table for at in window) for n, table in zip(sizes, tables)]
    return math.prod(sizes) <= MOST and all(reads)


def _columns(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Results:
    leaf = with_nan_gaps(x, point["layout"]).detach().requires_grad_()
    output = F.unfold(leaf, **_options(point))
    (gradient,) = backward_pass.gradients(output, (leaf,), grad)
    other = with_nan_gaps(grad, point["gradient layout"]).detach().requires_grad_()
    folded = F.fold(other, (point["short"], point["long"]), **_options(point))
    (unfolded,) = backward_pass.gradients(folded, (other,), x)
    found = {"output": output.detach(), "gradient": gradient}
    return {**found, "folded": folded.detach(), "gradient of the folded": unfolded}


def _columns_exactly(x: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    """Return the expected results. They use one matrix of 0 and 1 per dimension, (taps, outputs, positions), which
    marks the position that each tap of each output reads."""
    rows, places = (
        torch.stack(
            [(torch.tensor(window)[:, None] == torch.arange(n)).to(torch.float64) for window in table], 1
        )  # (taps, outputs, positions)
        for n, table in zip(x.shape[2:], _column_tables(point))
    )
    output = torch.einsum("aih,bjw,nchw->ncabij", rows, places, x).reshape(grad.shape)
    shape = (*x.shape[:2], rows.shape[0], places.shape[0], rows.shape[1], places.shape[1])
    gradient = torch.einsum("aih,bjw,ncabij->nchw", rows, places, grad.reshape(shape))
    found = {"output": without_rounding(output), "gradient": without_rounding(gradient)}
    return {**found, "folded": found["gradient"], "gradient of the folded": found["output"]}


KERNELS = ((2, 2, 2), (3, 3, 3), (2, 3, 1), (1, 2, 3), (3, 2, 5))
STRIDES = ((1, 1, 1), (2, 2, 2), (1, 2, 3), (3, 1, 2))
OPERATIONS = (
    Operation(
        "pooling",
        {
            "function": POOLS,
            "dtype": DTYPES,
            "rank": (1, 2, 2, 3),
            "images": (1, 2, 3),
            "channels": (1, 3, 8, 17, 33),
            "long": LONG,
            "short": SHORT,
            "kernel": KERNELS,
            "stride": (None, *STRIDES),
            "padding": ((0, 0, 0), (1, 1, 1), (0, 1, 2), (1, 0, 0)),
            "dilation": ((1, 1, 1), (2, 2, 2), (1, 2, 3)),
            "ceil_mode": (False, True),
            "outputs": ((1, 1, 1), (2, 3, 4), (3, 1, 7)),
            "layout": LAYOUTS,
            "gradient layout": LAYOUTS[:3],
        },
        pool,
        {"quick": 20, "standard": 90, "full": 1200},
        _is_pool,
    ),
    Operation(
        "padding",
        {
            "mode": MODES,
            "dtype": DTYPES,
            "rank": (1, 2, 3),
            "images": (1, 2, 3),
            "channels": (1, 3, 8, 17),
            "long": LONG,
            "short": SHORT,
            "widths": (0, 1, 2, 3),
            "cut": (False, True),
            "layout": LAYOUTS,
            "gradient layout": LAYOUTS[:3],
        },
        pad,
        {"quick": 6, "standard": 36, "full": 600},
        lambda point: (
            point["short"] * point["long"] <= MOST
            and (point["rank"] > 1 or "channels last" not in (point["layout"], point["gradient layout"]))
        ),
    ),
    Operation(
        "windows as columns",
        {
            "dtype": DTYPES,
            "images": (1, 2, 3),
            "channels": (1, 3, 8),
            "long": LONG,
            "short": SHORT,
            "kernel": KERNELS,
            "stride": STRIDES,
            "padding": ((0, 0, 0), (0, 1, 2), (1, 0, 0), (0, 2, 1)),
            "dilation": ((1, 1, 1), (2, 2, 2), (1, 2, 3)),
            "layout": LAYOUTS,
            "gradient layout": ("contiguous", "rows apart", "shifted by 1"),
        },
        columns,
        {"quick": 4, "standard": 20, "full": 400},
        _has_columns,
    ),
)
