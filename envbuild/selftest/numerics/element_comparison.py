"""Compares a result with its reference, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.numerics.error_pattern import describe


@dataclass(frozen=True)
class Worst:
    """The worst element of a comparison, and how many elements are wrong.

    `error` and `bound`: the error and the tolerance of the worst element. `where`: its index. `wrong`: the number of
    elements whose error exceeds their tolerance, of `count` elements. `beyond_rounding`: the largest (error - rounding)
    / (tolerance - rounding) of all elements, where rounding is the largest error of rounding the exact result once. It
    is above 1 if an element with a tolerance above this error is wrong. `pattern`: what the wrong elements have in
    common.
    """

    error: float
    bound: float
    beyond_rounding: float
    where: tuple[int, ...]
    got: float
    expected: float
    wrong: int
    count: int
    pattern: str = ""

    @property
    def kind(self) -> str:
        """The kind of failure, one of probe_outcome_and_figures.FAILURES."""
        return "bound" if math.isfinite(self.got) else "nonfinite"

    def __str__(self) -> str:
        # 9 digits distinguish every float32 from its neighbours.
        what = f"element {list(self.where)} is {self.got:.9g}, should be {self.expected:.9g} within {self.bound:g}"
        return f"{what} ({self.wrong} of {self.count} wrong{'; ' * bool(self.pattern)}{self.pattern})"


_SURELY_RIGHT = 0.999  # if the computed error / tolerance is below this, its exact value is below 1
_LEAST = 2.0**-1074  # the smallest positive error, which is already wrong if there is no tolerance
_SMALLEST = 2.0**-1022  # smallest divisor, which avoids a division by 0


def compare(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None) -> Worst:
    """Compare `got` with `expected` and find the element with the largest error / bound.

    Without `bound`, any difference is wrong, and the element with the largest error is the worst one. For an element
    that is unexpectedly NaN or infinite, error / bound counts as infinite. If it is infinite for several elements, the
    first of them is the worst one. Raises ValueError if the shapes differ.
    """
    expected = expected.to(torch.float64)
    values = got.detach().to("cpu").to(torch.float64)
    if values.shape != expected.shape:
        raise ValueError(f"shape {tuple(values.shape)} instead of {tuple(expected.shape)}")
    if torch.equal(values, expected):
        return _exact(expected, bound)
    error = (values - expected).abs_()
    severity = error if bound is None else error / bound
    flat = int(severity.argmax())  # the first NaN, if any
    wrong, pattern = 0, ""
    if not float(severity.reshape(-1)[flat]) < (_SURELY_RIGHT if bound is not None else _LEAST):
        error.masked_fill_(values == expected, 0.0)  # where both are the same infinity, the difference was NaN
        limit = torch.zeros_like(error) if bound is None else bound.expand_as(error)
        beyond = ~(error <= limit)  # not `error > limit`, because NaN must count as wrong
        severity = error if bound is None else error / limit
        severity = torch.where(torch.isnan(severity), torch.where(beyond, torch.inf, 0.0), severity)
        flat, wrong = int(severity.argmax()), int(beyond.sum())
        pattern = describe(got.detach().to("cpu"), expected, beyond, flat) if wrong else ""
    largest = float(error.reshape(-1)[flat])
    if largest == 0 or bound is None:
        share = 0.0 if largest == 0 else math.inf
    else:
        once = tolerances.rounding(expected, got.dtype) if got.is_floating_point() else torch.zeros_like(error)
        share = _beyond_rounding(error, bound, once)
    return Worst(
        error=largest,
        bound=0.0 if bound is None else float(bound.expand_as(error)[_index(flat, tuple(error.shape))]),
        beyond_rounding=share,
        where=_index(flat, tuple(error.shape)),
        got=float(values.reshape(-1)[flat]),
        expected=float(expected.reshape(-1)[flat]),
        wrong=wrong,
        count=error.numel(),
        pattern=pattern,
    )


def _exact(expected: torch.Tensor, bound: torch.Tensor | None) -> Worst:
    """Return the result of a comparison in which all elements are exact. It reports the first element as the worst."""
    value = _first(expected)
    return Worst(
        error=0.0,
        bound=0.0 if bound is None else _first(bound),
        beyond_rounding=0.0,
        where=(0,) * expected.dim(),
        got=value,
        expected=value,
        wrong=0,
        count=expected.numel(),
    )


def _first(x: torch.Tensor) -> float:
    """Return the first element.

    as_strided is one operation, while indexing would take one for each dimension. Speed matters, because most
    comparisons are exact and use this function.
    """
    return float(x.as_strided((), ()))


def _beyond_rounding(error: torch.Tensor, bound: torch.Tensor, once: torch.Tensor) -> float:
    """Return the largest (error - once) / (bound - once), or 0 if no error exceeds `once`. Overwrites `error`.

    The result is infinite if an error is NaN, or if an error exceeds `once` where the bound is not larger than `once`.
    """
    left = (bound - once).clamp_(min=_SMALLEST)
    share = float(error.sub_(once).div_(left).max())
    return max(0.0, share) if share < 1e30 else math.inf


def _index(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    where = []
    for length in reversed(shape):
        flat, position = divmod(flat, length)
        where.append(position)
    return tuple(reversed(where))
