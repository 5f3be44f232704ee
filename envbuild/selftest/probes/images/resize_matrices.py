"""Resizing as a product with one matrix per dimension: the matrices in float64, and the tolerance of the product.

The centre of output element i is at the input position scale * (i + 1/2) - 1/2. If the centres of the first and last
elements of input and output coincide ("aligned"), it is at scale * i (aten/src/ATen/native/UpSample.h).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import without_rounding

# The number of roundings when a position is computed in float32. Three results are rounded, each at most n: the scale,
# its product with i + 1/2, and that product minus 1/2.
POSITION = 3
SLOPE = 1.5  # the largest derivative of a cubic weight by its position: 1.35 for a = -3/4, 1.39 for a = -1/2
# Roundings of the weights of one output that may fall on one element, in units of ROUNDED. Linear: both weights, at a
# border. Cubic, by running error analysis of torch's polynomials (Higham, 2nd ed., 5.1): 35 in the weight of an element
# at a distance between 1 and 2 (those of t and of ((a t - 5 a) t + 8 a) t - 4 a), and 6 in that of a nearer one. At a
# border, three weights fall on the border element: one far, two near.
LINEAR_ROUNDINGS, CUBIC_ROUNDINGS = 2, 35 + 2 * 6
# Antialiased weights are divided by their sum W, which is at least 1/2. Two errors count, both divided by W: that of
# the weight and that of W.
NORMALIZED = 2 * 2
# torch's CPU kernels round a linear weight t to the dtype, which changes 1 - t by the same amount. This is at most u /
# 2, half the distance between adjacent numbers from 1/2 to 1. Relative to a small weight, this is more than one
# rounding.
COMPLEMENT = 0.5
ENDS = 2  # elements just beyond the taps, one at each end


@dataclass(frozen=True)
class Side:
    """The resizing of one dimension.

    `matrix`: (outputs, n), the weight of each input element in each output. `error`: how much a kernel's weights may
    differ from `matrix`. `complement`: an additional difference in units of the dtype's u, for kernels that round the
    weights to the dtype.
    """

    matrix: torch.Tensor
    error: float = 0.0
    complement: float = 0.0

    def transposed(self) -> Side:
        """Return the transposed matrix for the gradient. Its weights are not rounded to the dtype before they are
        multiplied, so `complement` is 0."""
        return Side(self.matrix.t(), self.error)


def scale_of(n: int, out: int, is_aligned: bool) -> Fraction:
    """Return the number of input elements per output element for these sizes."""
    if is_aligned:
        return Fraction(n - 1, out - 1) if out > 1 else Fraction(0)
    return Fraction(n, out)


def area_side(n: int, out: int) -> Side:
    """Return the weights of averages: output i is the mean of the elements from floor(i n / out) to ceil((i + 1) n /
    out), exclusive."""
    number, place = torch.arange(out)[:, None], torch.arange(n)
    inside = ((place >= number * n // out) & (place < -(-(number + 1) * n // out))).to(torch.float64)
    return Side(inside / inside.sum(1, keepdim=True))


def nearest_side(n: int, out: int, scale: Fraction, is_centred: bool = False) -> Side:
    """Return, for each output, the input element that contains the start of the output, or its centre if
    `is_centred`."""
    shift = Fraction(1, 2) if is_centred else Fraction(0)
    places = torch.tensor([min(math.floor((number + shift) * scale), n - 1) for number in range(out)])
    return Side((places[:, None] == torch.arange(n)).to(torch.float64))


def linear_side(n: int, out: int, scale: Fraction, is_aligned: bool) -> Side:
    place = _places(out, scale, is_aligned).clamp(0, n - 1)
    matrix = (1 - (place[:, None] - torch.arange(n)).abs()).clamp(min=0)
    error = _error(scale, POSITION * n + LINEAR_ROUNDINGS)
    return Side(matrix, error, COMPLEMENT if error else 0.0)


def cubic_side(n: int, out: int, scale: Fraction, is_aligned: bool) -> Side:
    """Return the cubic weights. Positions beyond the border read the border element."""
    place = _places(out, scale, is_aligned)
    matrix, first = torch.zeros(out, n, dtype=torch.float64), place.floor()
    for tap in range(-1, 3):
        at = (first + tap).clamp(0, n - 1).long()
        matrix[torch.arange(out), at] += cubic_weight((place - first - tap).abs(), -0.75)
    # At a border, several weights fall on one element. Their slopes add up to at most SLOPE, because the slopes of all
    # four weights add up to 0.
    return Side(matrix, _error(scale, SLOPE * POSITION * n + CUBIC_ROUNDINGS))


def antialiased_side(n: int, out: int, scale: Fraction, is_cubic: bool) -> Side:
    """Return the weights of a kernel that is as wide as an output element if the image is reduced, as in PIL (with a =
    -1/2). The weights of an output add up to 1."""
    centre = (torch.arange(out, dtype=torch.float64) + 0.5) * float(scale)
    distance = (torch.arange(n) + 0.5 - centre[:, None]).abs() / max(float(scale), 1.0)
    weights = cubic_weight(distance, -0.5) if is_cubic else (1 - distance).clamp(min=0)
    slope, roundings = (SLOPE, CUBIC_ROUNDINGS) if is_cubic else (1.0, LINEAR_ROUNDINGS)
    error = _error(scale, NORMALIZED * (slope * POSITION * n + roundings))
    return Side(weights / weights.sum(1, keepdim=True), error)


def _error(scale: Fraction, roundings: float) -> float:
    """Return the error of the weights. With a scale of 1, each position is that of an element, and all weights are
    exact."""
    return 0.0 if scale == 1 else roundings * tolerances.ROUNDED


def cubic_weight(t: torch.Tensor, a: float) -> torch.Tensor:
    """The convolution kernel of Keys, "Cubic convolution interpolation for digital image processing", 1981."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    return torch.where(t <= 1, near, torch.where(t < 2, a * (((t - 5) * t + 8) * t - 4), 0.0))


def _places(out: int, scale: Fraction, is_aligned: bool) -> torch.Tensor:
    number = torch.arange(out, dtype=torch.float64)
    return number * float(scale) if is_aligned else (number + 0.5) * float(scale) - 0.5


def weighted(x: torch.Tensor, sides: Sequence[Side], dtype: torch.dtype) -> Exact:
    """Multiply x (images, channels, ...) by the matrix of each dimension, and add the tolerance of a kernel for it.

    The tolerance is the rounding of the result plus two terms, with u of the dtype:

    - (terms + dimensions) u |A| |x|, where A is the product of the matrices. A kernel may round each term to the
      dtype, for example when it adds to memory (upsample_increment_value_bounded in UpSample.cuh), and the weights of
      each dimension. Copies are exact, and so are sums of whole numbers up to 1 / u.
    - max |x| times the sum over the dimensions of (`error` (taps + ENDS) + `complement` u taps), each multiplied by
      the largest sums of |weights| of the other dimensions. ENDS accounts for a rounded position that crosses an
      element: the element just beyond the taps, whose exact weight is 0, then has a weight of up to `error`.
    """
    value, size, terms, u = x, x.abs(), 1, tolerances.unit_roundoff(dtype)
    sums, moved = [], []
    for dim, side in enumerate(sides, start=2):
        value, size = (
            torch.tensordot(part, weights, ([dim], [1])).movedim(-1, dim)
            for part, weights in ((value, side.matrix), (size, side.matrix.abs()))
        )
        taps = int((side.matrix != 0).sum(1).max())
        terms *= taps
        sums.append(float(side.matrix.abs().sum(1).max()))
        moved.append(side.error * (taps + ENDS) + side.complement * u * taps)
    is_whole = all(bool((part == part.round()).all()) for part in (x, *(side.matrix for side in sides)))
    if is_whole and not any(moved) and float(size.max()) <= 1 / u:
        return without_rounding(value)
    steps = terms + len(sides)
    relative = sum(part * math.prod(sums[:dim] + sums[dim + 1 :]) for dim, part in enumerate(moved))
    limit = steps * u * size + relative * x.abs().max()
    return Exact(value, tolerances.rounding(value, dtype) + limit)
