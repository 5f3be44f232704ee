"""Inputs that are identical on every machine, torch version and device: hashes of each element's index, computed on the
host.

torch's random number generators are not used, because they differ between devices. All values are exact in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF


def hashes(count: int, seed: int) -> torch.Tensor:
    """`count` 32-bit hashes as int64, of (seed, 0), (seed, 1), ...

    The mixing function is "lowbias32" (Christopher Wellons, "Prospecting for hash functions", 2018), computed in place
    in int32, which takes a third of the time of int64: sums and products wrap modulo 2^32, and bits that a shift copied
    from the sign are cleared.
    """
    return bits(count, seed).to(torch.int64).bitwise_and_(_MASK)


def bits(count: int, seed: int) -> torch.Tensor:
    """The same hashes as int32, from which all inputs are derived."""
    x = torch.arange(count, dtype=torch.int32).add_(_signed(seed * 0x9E3779B9))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x


def _shifted(x: torch.Tensor, places: int) -> torch.Tensor:
    """int32 shifted to the right, filled with zeros from the left."""
    return (x >> places).bitwise_and_(_MASK >> places)


def _signs(x: torch.Tensor) -> torch.Tensor:
    """-1 where the last bit is set, else 1."""
    return (x & 1).mul_(-2).add_(1)


def _signed(number: int) -> int:
    """The int32 with the number's low 32 bits."""
    return (number + (1 << 31) & _MASK) - (1 << 31)


def ternary(shape: Sequence[int], seed: int, every: int = 4) -> torch.Tensor:
    """float32 of {-1, 0, 1}, about one in `every` not zero: sums of their products are exact in every dtype."""
    x = bits(_size(shape), seed)
    return (_signs(x) * (_shifted(x, 1).remainder_(every) == 0)).to(torch.float32).reshape(tuple(shape))


def signs(count: int, seed: int) -> torch.Tensor:
    """float32 of {-1, 1}."""
    return _signs(bits(count, seed)).to(torch.float32)


def whole(shape: Sequence[int], seed: int, most: int) -> torch.Tensor:
    """float32 of +-1, +-2, ... +-`most` (at most 2^24), never 0, so that each element contributes to a sum."""
    x = bits(_size(shape), seed)
    found = _signs(x)
    if most > 1:
        found.mul_(_shifted(x, 1).remainder_(most).add_(1))
    return found.to(torch.float32).reshape(tuple(shape))


def uniform(shape: Sequence[int], seed: int) -> torch.Tensor:
    """float32 in [0, 1), multiples of 2^-24."""
    return _shifted(bits(_size(shape), seed), 8).to(torch.float32).mul_(2.0**-24).reshape(tuple(shape))


def signed(shape: Sequence[int], seed: int) -> torch.Tensor:
    """float32 in [-1, 1), multiples of 2^-23."""
    return uniform(shape, seed) * 2 - 1


def _size(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
