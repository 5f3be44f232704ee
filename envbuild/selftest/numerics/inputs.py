"""Inputs that are the same on every machine, torch version and device: a hash of each element's index, on the host.

No random number generator of torch is used, since those differ between devices. All values are exact in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_MASK = 0xFFFFFFFF


def hashes(count: int, seed: int) -> torch.Tensor:
    """`count` 32-bit hashes as int64, of (seed, 0), (seed, 1), ...

    The mixing is "lowbias32" (Christopher Wellons, "Prospecting for hash functions", 2018), in place in int32, which
    takes a third of the time of int64: sums and products are taken modulo 2^32, and bits that a shift copied from the
    sign are cleared.
    """
    x = torch.arange(count, dtype=torch.int32).add_(_signed(seed * 0x9E3779B9))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(_signed(0x7FEB352D))
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(_signed(0x846CA68B))
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    return x.to(torch.int64).bitwise_and_(_MASK)


def _signed(number: int) -> int:
    """The int32 with the number's low 32 bits."""
    return (number + (1 << 31) & _MASK) - (1 << 31)


def ternary(shape: Sequence[int], seed: int, every: int = 4) -> torch.Tensor:
    """float32 of {-1, 0, 1}, about one in `every` not zero: sums of their products are exact in every dtype."""
    x = hashes(_size(shape), seed)
    sign = 1 - 2 * (x & 1)
    return (sign * ((x >> 1) % every == 0)).to(torch.float32).reshape(tuple(shape))


def signs(count: int, seed: int) -> torch.Tensor:
    """float32 of {-1, 1}."""
    return (1 - 2 * (hashes(count, seed) & 1)).to(torch.float32)


def whole(shape: Sequence[int], seed: int, most: int) -> torch.Tensor:
    """float32 of +-1, +-2, ... +-`most` (at most 2^24), never 0: each element counts in a sum."""
    x = hashes(_size(shape), seed)
    return ((1 - 2 * (x & 1)) * (1 + (x >> 1) % most)).to(torch.float32).reshape(tuple(shape))


def uniform(shape: Sequence[int], seed: int) -> torch.Tensor:
    """float32 in [0, 1), multiples of 2^-24."""
    return ((hashes(_size(shape), seed) >> 8).to(torch.float32) * 2.0**-24).reshape(tuple(shape))


def signed(shape: Sequence[int], seed: int) -> torch.Tensor:
    """float32 in [-1, 1), multiples of 2^-23."""
    return uniform(shape, seed) * 2 - 1


def _size(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count
