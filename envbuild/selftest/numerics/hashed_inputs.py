"""Test inputs that are identical on every machine, with every torch version and for every device.

Each element is derived from a hash of its index, computed on the host. torch's random number generators are not used,
because they give different numbers on different devices. float32 represents all floating-point inputs exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF


def hashes(count: int, seed: int) -> torch.Tensor:
    """Return the 32-bit hashes of (seed, 0), (seed, 1), ..., (seed, count - 1), as int64.

    The hash function is "lowbias32" (Christopher Wellons, "Prospecting for hash functions", 2018). It is computed in
    place in int32, which takes a third of the time that int64 takes. Sums and products wrap modulo 2^32. Copies of the
    sign bit that a right shift inserts are cleared.
    """
    return bits(count, seed).to(torch.int64).bitwise_and_(_MASK)


def bits(count: int, seed: int) -> torch.Tensor:
    """Return the hashes of `hashes` as int32. All inputs are derived from them."""
    x = torch.arange(count, dtype=torch.int32).add_(_signed(seed * 0x9E3779B9))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x


def _shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """Shift int32 values to the right, and fill with zeros from the left."""
    return (x >> places).bitwise_and_(_MASK >> places)


def _signs(x: torch.Tensor) -> torch.Tensor:
    """Return -1 for each element whose last bit is set, and 1 for the others."""
    return (x & 1).mul_(-2).add_(1)


def _signed(number: int) -> int:
    """Return the signed 32-bit number that has the low 32 bits of `number`."""
    return (number + (1 << 31) & _MASK) - (1 << 31)


def ternary(shape: Sequence[int], seed: int, every: int = 4) -> torch.Tensor:
    """Return float32 values of {-1, 0, 1}, of which about one in `every` is not zero.

    Sums of products of such values are small integers, which every dtype represents exactly unless the sums are long.
    """
    x = bits(_size(shape), seed)
    return (_signs(x) * (_shifted(x, 1).remainder_(every) == 0)).to(torch.float32).reshape(tuple(shape))


def signs(count: int, seed: int) -> torch.Tensor:
    """Return `count` float32 values of {-1, 1}."""
    return _signs(bits(count, seed)).to(torch.float32)


def whole(shape: Sequence[int], seed: int, most: int) -> torch.Tensor:
    """Return float32 values of {±1, ±2, ..., ±`most`}; `most` is at most 2^24.

    They are never 0, so that each element contributes to a sum.
    """
    x = bits(_size(shape), seed)
    found = _signs(x)
    if most > 1:
        found.mul_(_shifted(x, 1).remainder_(most).add_(1))
    return found.to(torch.float32).reshape(tuple(shape))


def uniform(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return float32 values in [0, 1) that are multiples of 2^-24."""
    return _shifted(bits(_size(shape), seed), 8).to(torch.float32).mul_(2.0**-24).reshape(tuple(shape))


def signed(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Return float32 values in [-1, 1) that are multiples of 2^-23."""
    return uniform(shape, seed) * 2 - 1


def _size(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
