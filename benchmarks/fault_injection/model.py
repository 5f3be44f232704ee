"""The fault model: it says which values an operation's output has after a hardware fault. Pure functions.

A fault changes values in one way (KINDS) at one set of places (PLACES). The probabilities are data, each with its
source:

- [T] Tung et al., "The Anatomy of Silent Data Corruption: GPU Error Pattern Study and Modeling Guidance", arXiv
  2605.04213, 2026: stuck-at faults in the gates of a data-center GPU. Its abstract says that NaN and infinity are 1.01%
  of the outcomes, that single-bit flips are less than 40% of the bit flips, and that addresses are periodic.
- [Q] Numbers of the same paper, known only from three public repositories that quote it: 50.68% of the
  outcomes are zeros, 48.31% bit flips; and the period is 2, 4, 8 or 16 elements within a warp.
- [N] NVBitFI (github.com/NVlabs/nvbitfi), NVIDIA's fault injector: one bit, two adjacent bits, a random value, zero.
- [A] Assumed: no number was found. The results are listed by kind and by place, so that readers can apply other shares.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

WARP = 32  # the number of threads that compute adjacent elements together

BIT_FLIPS = 0.4831  # [Q]
SINGLE = 0.4  # [T]: "less than 40%", of the bit flips
MANY = BIT_FLIPS * (1 - SINGLE) / 3  # [N] for the first two, [A] for the third and for equal shares


@dataclass(frozen=True)
class Share:
    """The probability of a choice, the source of the probability, and the effect of the choice."""

    name: str
    value: float
    source: str
    meaning: str


ONE_BIT, TWO_BITS, RANDOM_VALUE, OTHER_ELEMENT = "one bit", "two adjacent bits", "random value", "another element"
ZERO, SPECIAL = "zero", "NaN or infinity"
KINDS = (
    Share(ZERO, 0.5068, "Q", "the value becomes 0"),
    Share(ONE_BIT, BIT_FLIPS * SINGLE, "T, Q", "one bit is inverted"),
    Share(TWO_BITS, MANY, "N, A", "two neighbouring bits are inverted"),
    Share(RANDOM_VALUE, MANY, "N, A", "every bit is drawn again"),
    Share(OTHER_ELEMENT, MANY, "A", "a wrong address: the value of the element one step away"),
    Share(SPECIAL, 0.0101, "T", "the value becomes NaN, infinity or -infinity"),
)
SINGLE_ELEMENT, LANE, PERIODIC = "one element", "stuck lane", "periodic address"
PERIODS = (2, 4, 8, 16)  # [Q]
_EACH = 1 / 3
PLACES = (
    Share(SINGLE_ELEMENT, _EACH, "A", "one element"),
    Share(LANE, _EACH, "A", "every 32nd element of the output; its bits are stuck at a value, not inverted"),
    Share(PERIODIC, _EACH, "T, Q, A", "every 2nd, 4th, 8th or 16th of 32 neighbouring elements"),
)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FRACTIONS = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 2,
}


@dataclass(frozen=True)
class Fault:
    """A change of an output of `count` elements. `kind` is applied to the elements `start`, `start` + `step`, ... below
    `end`. `mask`: the bits that are changed; `word`: their new values; `flip`: invert the bits instead. `value`: the
    new value of elements for the kind "NaN or infinity"."""

    kind: str
    place: str
    start: int
    end: int
    step: int
    mask: int = 0
    word: int = 0
    flip: bool = False
    value: float = 0.0


def draw(generator: random.Random, count: int, dtype: torch.dtype, element: int) -> Fault:
    """Draw, with the probabilities above, a fault that changes `element` of an output of `count` elements of this
    dtype. The kind "NaN or infinity" is left out for integers and float8, and two bits for bool; the other kinds keep
    their ratio."""
    kinds = [share for share in KINDS if _exists(share.name, dtype)]
    kind, place = _chosen(generator, kinds), _chosen(generator, PLACES)
    start, end, step = _places(generator, place, count, element)
    width = _width(dtype)
    mask = word = 0
    if kind == ONE_BIT:
        mask = 1 << generator.randrange(width)
    elif kind == TWO_BITS:
        mask = 3 << generator.randrange(width - 1)
    elif kind in (RANDOM_VALUE, ZERO):
        mask = (1 << width) - 1
    word = 0 if kind == ZERO else generator.getrandbits(width) & mask
    # A stuck lane sets its bits to fixed values; other kinds of fault invert bits.
    flip = kind in (ONE_BIT, TWO_BITS) and place != LANE
    value = generator.choice((float("nan"), float("inf"), float("-inf"))) if kind == SPECIAL else 0.0
    return Fault(kind, place, start, end, step, mask, word, flip, value)


def apply(fault: Fault, values: torch.Tensor) -> torch.Tensor:
    """Return the values (of one dimension) after the fault; the argument is not changed."""
    found = values.clone()
    struck = found[fault.start : fault.end : fault.step]
    if fault.kind == SPECIAL:
        struck.fill_(fault.value)
    elif fault.kind == OTHER_ELEMENT:
        # The value of the element one step before; the first element of a period takes the value of the next one.
        away = torch.arange(fault.start, min(fault.end, len(values)), fault.step) - fault.step
        away = torch.where(away < 0, (away + 2 * fault.step).clamp(max=len(values) - 1), away)
        struck.copy_(values[away])
    else:
        bits = struck.view(_INTEGERS[struck.element_size()])
        whole = (1 << 8 * bits.itemsize) - 1
        mask, others, word = (_wrapped(number, bits.dtype) for number in (fault.mask, whole ^ fault.mask, fault.word))
        bits.copy_(bits ^ mask if fault.flip else bits & others | word)
    return found


def field(fault: Fault, dtype: torch.dtype) -> str:
    """Return the part of a floating-point number that contains the highest changed bit; "" if that has no meaning."""
    if fault.kind not in (ONE_BIT, TWO_BITS) or dtype not in _FRACTIONS:
        return ""
    highest, fraction = fault.mask.bit_length() - 1, _FRACTIONS[dtype]
    if highest == _width(dtype) - 1:
        return "sign"
    if highest >= fraction:
        return "exponent"
    return "upper half of the fraction" if 2 * highest >= fraction else "lower half of the fraction"


def _chosen(generator: random.Random, shares: Sequence[Share]) -> str:
    return generator.choices([share.name for share in shares], [share.value for share in shares])[0]


def _exists(kind: str, dtype: torch.dtype) -> bool:
    if kind == SPECIAL:  # float8_e4m3fn has no infinity
        return dtype.is_floating_point and dtype.itemsize > 1
    return kind != TWO_BITS or dtype != torch.bool


def _width(dtype: torch.dtype) -> int:
    return 1 if dtype == torch.bool else 8 * dtype.itemsize


def _places(generator: random.Random, place: str, count: int, element: int) -> tuple[int, int, int]:
    """Return (start, end, step): every 32nd element of the output, or every n-th element of one warp's 32."""
    if place == LANE:
        return element % WARP, count, WARP
    if place == PERIODIC:
        step, first = generator.choice(PERIODS), element // WARP * WARP
        return first + (element - first) % step, min(first + WARP, count), step
    return element, element + 1, 1


def _wrapped(number: int, dtype: torch.dtype) -> int:
    """Return the bits as a number of this dtype, which may be signed."""
    most = torch.iinfo(dtype).max
    return number if number <= most else number - 2 * (most + 1)
