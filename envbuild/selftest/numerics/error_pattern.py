"""Describes wrong elements: their common positions, the bits of one of them, and the likely kind of fault.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_TILES = (256, 128, 64, 32, 16)  # sizes, in elements, of the blocks into which kernels split their work
_PERIODS = (*_TILES, 8, 4, 2)
_LITTLE = 2.0**-6  # the largest relative error that counts as "a little off"
_MOST = 0.9  # the share of the wrong elements that must show a kind of fault, unless all must show it
_BITS = {2: torch.int16, 4: torch.int32}


def describe(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, worst: int) -> str:
    """Describe the wrong elements in one line.

    `got` and `expected` have the same shape, and `expected` is float64. `wrong` is a mask of the wrong elements, at
    least one. `worst` is the flat index (in C order) of a wrong element, whose bits are described.
    """
    parts = [*_places(wrong), *_bits(got, expected, worst), *_kind(got, expected, wrong)]
    return "; ".join(parts)


def _places(wrong: torch.Tensor) -> Iterator[str]:
    """Yield a text for each dimension in which all wrong elements are in one slice, or in regularly spaced slices.

    A single wrong element is described only in dimensions in which it is at the edge of a tile or the last one.
    """
    single = int(wrong.sum()) == 1
    for dimension, size in enumerate(wrong.shape):
        others = [other for other in range(wrong.dim()) if other != dimension]
        hit = (wrong.any(dim=others) if others else wrong).nonzero().flatten()
        if len(hit) == 1 and size > 1:
            edge = _edge(int(hit[0]), size)
            if not single:
                yield f"all at {int(hit[0])} of {size} in dimension {dimension}{edge}"
            elif edge:
                yield f"in dimension {dimension}{edge}"
        elif len(hit) > 2:
            period = next((period for period in _PERIODS if bool((hit % period == hit[0] % period).all())), None)
            if period:
                yield f"all at {int(hit[0]) % period} modulo {period} in dimension {dimension}"


def _edge(index: int, size: int) -> str:
    for tile in _TILES:
        if index >= tile and index % tile == 0:
            return f", the first of a tile of {tile}"
        if (index + 1) % tile == 0 and index + 1 < size:
            return f", the last of a tile of {tile}"
    return ", the last one" if index == size - 1 else ""


def _bits(got: torch.Tensor, expected: torch.Tensor, worst: int) -> Iterator[str]:
    as_integers = _BITS.get(got.element_size())
    if not got.dtype.is_floating_point or as_integers is None:
        return
    width = 8 * got.element_size()
    value, right = (
        int(part.view(as_integers)) & ((1 << width) - 1)
        for part in (got.flatten()[worst].clone(), expected.flatten()[worst].to(got.dtype))
    )
    differing = bin(value ^ right).count("1")
    yield f"bits {value:0{width // 4}x} instead of {right:0{width // 4}x}" + (", one differs" if differing == 1 else "")


def _kind(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor) -> Iterator[str]:
    values, right = got[wrong].to(torch.float64), expected[wrong]
    if bool((values == 0).all()):
        yield "all zero: not written, or nothing was summed"
        return
    if not bool(torch.isfinite(values).all() and torch.isfinite(right).all()):
        return
    if len(values) > 1 and bool((values == values[0]).all()) and not bool((right == right[0]).all()):
        yield "all the same value"
        return
    relative = (values - right).abs() / right.abs().clamp(min=1e-300)
    spread = len(values) > 0.5 * got.numel()
    if spread and _share(relative <= _LITTLE) >= _MOST:
        yield "many elements a little off: sums in a narrow accumulator, or another rounding"
    elif len(values) > 2 and _share((values.abs() < right.abs()) & (values * right >= 0)) >= _MOST:
        yield "nearly all too small: part of a sum may be left out"
    elif len(values) > 2 and bool(torch.isin(values, expected.flatten().to(got.dtype).to(torch.float64)).all()):
        yield "each is the right value of another element: read from, or written to, another place"


def _share(which: torch.Tensor) -> float:
    return float(which.to(torch.float64).mean())
