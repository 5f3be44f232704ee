"""Copies that rearrange a three-dimensional block: transposed, reversed, rolled, repeated, joined, cut, padded,
windows.

The expected elements are found by arithmetic on their indices.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Shape = tuple[int, int, int]
Index = torch.Tensor
Places = Callable[[Index, Index, Index], tuple[Index, Index, Index]]

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int16, torch.int8, torch.bool)
MOST = 8000  # maximum number of elements of a block
LARGE = ((1, 1030, 1031), (65539, 2, 3), (3, 70001, 2), (2, 3, 65537))


@dataclass(frozen=True)
class Arrangement:
    """A call that rearranges the elements of a block.

    `shape`: returns the shape of the result for that of the input. `places`: takes the shape of the input and returns a
    function. That function maps (i, j, k), the position of an element of the result, to the position of this element in
    the input. `fits`: whether the call accepts this shape and dtype.
    """

    call: Callable[[torch.Tensor], torch.Tensor]
    shape: Callable[[Shape], Shape]
    places: Callable[[Shape], Places]
    fits: Callable[[Shape, torch.dtype], bool] = lambda shape, dtype: True


def _same(shape: Shape) -> Shape:
    return shape


def _permuted(order: tuple[int, ...]) -> Arrangement:
    def places(shape: Shape) -> Places:
        return lambda *at: tuple(at[order.index(dim)] for dim in range(3))

    def turned(shape: Shape) -> Shape:
        return shape[order[0]], shape[order[1]], shape[order[2]]

    return Arrangement(lambda x: x.permute(order).contiguous(), turned, places)


def _reflected(at: Index, n: int) -> Index:
    at = at.abs()
    return torch.where(at >= n, 2 * (n - 1) - at, at)


def _is_floating(shape: Shape, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and shape[2] > 3


ARRANGEMENTS: dict[str, Arrangement] = {
    **{
        "permute " + "".join(map(str, order)): _permuted(order)
        for order in itertools.permutations(range(3))
        if order != (0, 1, 2)
    },
    "flip all": Arrangement(
        lambda x: x.flip(0, 1, 2), _same, lambda s: lambda i, j, k: (s[0] - 1 - i, s[1] - 1 - j, s[2] - 1 - k)
    ),
    "flip last": Arrangement(lambda x: x.flip(-1), _same, lambda s: lambda i, j, k: (i, j, s[2] - 1 - k)),
    "flip middle": Arrangement(lambda x: x.flip(1), _same, lambda s: lambda i, j, k: (i, s[1] - 1 - j, k)),
    "roll": Arrangement(
        lambda x: x.roll((2, -1), (0, 2)), _same, lambda s: lambda i, j, k: ((i - 2) % s[0], j, (k + 1) % s[2])
    ),
    "roll middle": Arrangement(lambda x: x.roll(3, 1), _same, lambda s: lambda i, j, k: (i, (j - 3) % s[1], k)),
    "roll flat": Arrangement(lambda x: x.roll(5), _same, lambda s: lambda i, j, k: _unflat((i, j, k), s, -5)),
    "rot90": Arrangement(
        lambda x: torch.rot90(x, 1, (1, 2)),
        lambda s: (s[0], s[2], s[1]),
        lambda s: lambda i, j, k: (i, k, s[2] - 1 - j),
    ),
    "repeat": Arrangement(
        lambda x: x.repeat(2, 1, 3),
        lambda s: (2 * s[0], s[1], 3 * s[2]),
        lambda s: lambda i, j, k: (i % s[0], j, k % s[2]),
    ),
    "tile middle": Arrangement(
        lambda x: x.tile(1, 3, 1), lambda s: (s[0], 3 * s[1], s[2]), lambda s: lambda i, j, k: (i, j % s[1], k)
    ),
    "repeat_interleave middle": Arrangement(
        lambda x: x.repeat_interleave(2, 1), lambda s: (s[0], 2 * s[1], s[2]), lambda s: lambda i, j, k: (i, j // 2, k)
    ),
    "repeat_interleave by counts": Arrangement(
        lambda x: x.repeat_interleave(torch.full((x.shape[2],), 3, device=x.device), 2),
        lambda s: (s[0], s[1], 3 * s[2]),
        lambda s: lambda i, j, k: (i, j, k // 3),
    ),
    "expand": Arrangement(
        lambda x: x[:, :, :1].expand(-1, -1, 7).contiguous(),
        lambda s: (s[0], s[1], 7),
        lambda s: lambda i, j, k: (i, j, 0 * k),
    ),
    "expand first": Arrangement(
        lambda x: x[:1].expand(5, -1, -1).clone(memory_format=torch.contiguous_format),
        lambda s: (5, s[1], s[2]),
        lambda s: lambda i, j, k: (0 * i, j, k),
    ),
    "copy_ broadcast": Arrangement(
        lambda x: x.new_zeros(x.shape).copy_(x[:, :1]), _same, lambda s: lambda i, j, k: (i, 0 * j, k)
    ),
    "cat middle": Arrangement(
        lambda x: torch.cat((x, x.flip(1), x[:, :1]), 1),
        lambda s: (s[0], 2 * s[1] + 1, s[2]),
        lambda s: lambda i, j, k: (i, torch.where(j < s[1], j, (2 * s[1] - 1 - j) % s[1] * (j < 2 * s[1])), k),
    ),
    "cat last": Arrangement(
        lambda x: torch.cat((x, x), -1), lambda s: (s[0], s[1], 2 * s[2]), lambda s: lambda i, j, k: (i, j, k % s[2])
    ),
    "cat of many": Arrangement(
        lambda x: torch.cat([x[:, at : at + 1] for at in reversed(range(x.shape[1]))], 1),
        _same,
        lambda s: lambda i, j, k: (i, s[1] - 1 - j, k),
        lambda s, dtype: s[1] < 300,
    ),
    "stack": Arrangement(
        lambda x: torch.stack((x[0], x[-1], x[0]), 1),
        lambda s: (s[1], 3, s[2]),
        lambda s: lambda i, j, k: ((j == 1) * (s[0] - 1), i, k),
    ),
    "stack last": Arrangement(
        lambda x: torch.stack((x[0], x[-1]), -1),
        lambda s: (s[1], s[2], 2),
        lambda s: lambda i, j, k: (k * (s[0] - 1), i, j),
    ),
    "unbind and stack": Arrangement(
        lambda x: torch.stack(x.unbind(2), 2), _same, lambda s: lambda i, j, k: (i, j, k), lambda s, dtype: s[2] < 300
    ),
    "every second": Arrangement(
        lambda x: x[:, 1:, ::2].contiguous(),
        lambda s: (s[0], s[1] - 1, -(-s[2] // 2)),
        lambda s: lambda i, j, k: (i, j + 1, 2 * k),
        lambda s, dtype: s[1] > 1,
    ),
    "windows": Arrangement(
        lambda x: x.unfold(2, 3, 2)[:, :, :, 1].contiguous(),
        lambda s: (s[0], s[1], (s[2] - 3) // 2 + 1),
        lambda s: lambda i, j, k: (i, j, 2 * k + 1),
        lambda s, dtype: s[2] > 3,
    ),
    "pad reflect": Arrangement(
        lambda x: F.pad(x, (3, 2), mode="reflect"),
        lambda s: (s[0], s[1], s[2] + 5),
        lambda s: lambda i, j, k: (i, j, _reflected(k - 3, s[2])),
        _is_floating,
    ),
    "pad replicate": Arrangement(
        lambda x: F.pad(x, (3, 2), mode="replicate"),
        lambda s: (s[0], s[1], s[2] + 5),
        lambda s: lambda i, j, k: (i, j, (k - 3).clamp(0, s[2] - 1)),
        _is_floating,
    ),
    "pad circular": Arrangement(
        lambda x: F.pad(x, (3, 2), mode="circular"),
        lambda s: (s[0], s[1], s[2] + 5),
        lambda s: lambda i, j, k: (i, j, (k - 3) % s[2]),
        _is_floating,
    ),
    "pad reflect of images": Arrangement(
        lambda x: F.pad(x, (3, 2, 1, 2), mode="reflect"),
        lambda s: (s[0], s[1] + 3, s[2] + 5),
        lambda s: lambda i, j, k: (i, _reflected(j - 1, s[1]), _reflected(k - 3, s[2])),
        lambda s, dtype: _is_floating(s, dtype) and s[1] > 2,
    ),
    "two indices": Arrangement(
        lambda x: x[_turning(x, 0), :, _turning(x, 2)][:, None],
        lambda s: (max(s[0], s[2]), 1, s[1]),
        lambda s: lambda i, j, k: ((i * 2 + 1) % s[0], k, (i * 2 + 1) % s[2]),
    ),
    "index_put": Arrangement(
        lambda x: (
            torch.zeros_like(x).index_put_((slice_of(x, 1).flip(0),), x.transpose(0, 1)).transpose(0, 1)
            if x.shape[0] == x.shape[1]
            else x.flip(1)
        ),
        _same,
        lambda s: lambda i, j, k: (i, s[1] - 1 - j, k),
    ),
    "take": Arrangement(
        lambda x: torch.take(x, torch.arange(x.numel(), device=x.device).flip(0).view(x.shape)),
        _same,
        lambda s: lambda i, j, k: (s[0] - 1 - i, s[1] - 1 - j, s[2] - 1 - k),
    ),
    "masked_scatter": Arrangement(
        lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format).masked_scatter_(
            torch.ones(x.shape, dtype=torch.bool, device=x.device), x.flip(2)
        ),
        _same,
        lambda s: lambda i, j, k: (i, j, s[2] - 1 - k),
    ),
}


def slice_of(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.arange(x.shape[dim], device=x.device)


def _turning(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the odd numbers 1, 3, 5, ... modulo the size of dimension `dim`. There are as many as the first or the
    last dimension has elements, whichever is longer."""
    count = max(x.shape[0], x.shape[2])
    return (torch.arange(count, device=x.device) * 2 + 1) % x.shape[dim]


def _unflat(at: tuple[Index, Index, Index], s: Shape, by: int) -> tuple[Index, Index, Index]:
    flat = ((at[0] * s[1] + at[1]) * s[2] + at[2] + by) % math.prod(s)
    return flat // (s[1] * s[2]), flat // s[2] % s[1], flat % s[2]


def _case(shape: Shape, dtype: torch.dtype, layout: str, names: tuple[str, ...], seed: int) -> Case:
    most = 2 if dtype == torch.bool else 120
    x = (hashed_inputs.hashes(math.prod(shape), seed) % most).reshape(shape).to(dtype)
    names = tuple(name for name in names if ARRANGEMENTS[name].fits(shape, dtype))
    title = f"copies of {'x'.join(map(str, shape))}, rearranged, {layout}"
    run = functools.partial(_arranged, names=names, layout=layout)
    return Case(title, dtype, (x,), run, functools.partial(_by_index, names=names))


def arrangement(point: Point, seed: int) -> Case:
    shape = point["first"], point["middle"], point["last"]
    return _case(shape, point["dtype"], point["layout"], tuple(ARRANGEMENTS), seed)


def large_rearrangement(point: Point, seed: int) -> Case:
    names = tuple(ARRANGEMENTS)[point["part"] :: 6]
    return _case(point["shape"], point["dtype"], point["layout"], ("permute 021", *names), seed)


def _arranged(x: torch.Tensor, names: tuple[str, ...], layout: str) -> Results:
    laid = with_large_gaps(x, layout)
    return {name: ARRANGEMENTS[name].call(laid) for name in names}


def _by_index(x: torch.Tensor, names: tuple[str, ...]) -> Expected:
    shape = (x.shape[0], x.shape[1], x.shape[2])
    flat = x.reshape(-1)
    found = {}
    for name in names:
        each = ARRANGEMENTS[name]
        i, j, k = (
            torch.arange(n).reshape([-1 if dim == at else 1 for at in range(3)])
            for dim, n in enumerate(each.shape(shape))
        )
        a, b, c = each.places(shape)(i, j, k)
        places = torch.broadcast_to((a * shape[1] + b) * shape[2] + c, each.shape(shape))
        found[name] = without_rounding(flat[places].to(torch.float64))
    return found


OPERATIONS = (
    Operation(
        "rearrangement",
        {
            "dtype": DTYPES,
            "first": (1, 2, 3, 5, 17, 33),
            "middle": (1, 2, 3, 7, 8, 31, 32, 33, 64, 65, 129, 260),
            "last": (1, 2, 3, 4, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 127, 129, 257, 1030),
            "layout": BATCHES,
        },
        arrangement,
        {"quick": 8, "standard": 120, "full": 1200},
        lambda point: point["first"] * point["middle"] * point["last"] <= MOST,
    ),
    Operation(
        "large rearrangement",
        {
            "shape": LARGE,
            "dtype": (torch.float16, torch.int8, torch.int64),
            "layout": ("contiguous", "transposed"),
            "part": tuple(range(6)),
        },
        large_rearrangement,
        {"quick": 1, "standard": 6, "full": 60},
    ),
)
