"""Selects the test cases of an operation, which are points of a parameter space, so that they cover pairs of values.

Most software faults depend on one or two parameters (Kuhn, Wallace and Gallo, "Software fault interactions and
implications for software testing", IEEE TSE 30(6), 2004). Such faults are found by a set of points that contains each
pair of values of two parameters. A different seed selects different points. torch's OpInfo and CUTLASS's profiler use
fixed lists of cases instead.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from envbuild.selftest.harness.probe_context import Context, Refusal, is_unsupported
from envbuild.selftest.harness.probe_outcome_and_figures import worst_of_each_dtype
from envbuild.selftest.numerics import operation_case
from envbuild.selftest.numerics.operation_case import Case

Point = Mapping[str, Any]

_CANDIDATES = 24  # random points from which each selected point is chosen
_DRAWS = 200  # maximum number of attempts to draw a possible point


def _always(point: Point) -> bool:
    return True


@dataclass(frozen=True)
class Operation:
    """An operation and its parameter space.

    `space` maps each dimension (parameter) to its values. A point has one value for each dimension; only points for
    which `possible` returns true are used. `make(point, seed)` builds the test case of a point. `counts` maps a level
    to its number of points; a level that is missing there tests none.
    """

    name: str
    space: Mapping[str, Sequence[Any]]
    make: Callable[[Point, int], Case]
    counts: Mapping[str, int]
    possible: Callable[[Point], bool] = field(default=_always)


@dataclass(frozen=True)
class Sample:
    """The points of an operation that a run tests.

    `of`: the number of possible pairs of values that `all_pairs` found. `covered`: how many of them occur in these
    points.
    """

    points: tuple[Point, ...]
    covered: int
    of: int


def sample(operation: Operation, count: int, seed: int) -> Sample:
    """Select `count` points. Each is the one of _CANDIDATES random points that covers the most pairs not yet covered.

    When all pairs are covered, further points are random. The result depends only on the operation, `count` and `seed`.
    Raises ValueError if _DRAWS random points in succession are not possible.
    """
    numbers = random.Random(f"{operation.name} {seed}")
    left = all_pairs(operation)
    of = len(left)
    points: list[Point] = []
    for _ in range(count):
        drawn = [_draw(operation, numbers) for _ in range(_CANDIDATES if left else 1)]
        best = max(drawn, key=left.count)
        left.remove(best)
        points.append(best)
    return Sample(tuple(points), of - len(left), of)


def cases(operation: Operation, points: Sequence[Point], seed: int) -> Iterator[Case]:
    """Yield the case of each point. Each case gets its own seed, so that the inputs differ."""
    for number, point in enumerate(points):
        yield operation.make(point, seed + number)


def check(context: Context, operations: Sequence[Operation], may_refuse: Refusal = is_unsupported) -> None:
    """Run and judge the cases that are sampled for the job's level and seed.

    The probe's trait `coverage` records the number of cases and of covered pairs. Only the worst figure of each
    operation and dtype is kept, because thousands of figures would make the record too large.
    """
    coverage = context.traits.setdefault("coverage", {})
    for operation in operations:
        level, seed = context.job.level, context.job.seed
        taken = sample(operation, operation.counts.get(level, 0), seed)
        coverage[operation.name] = {"cases": len(taken.points), "pairs": taken.covered, "of": taken.of}
        begin = len(context.figures)
        for case in cases(operation, taken.points, seed):
            operation_case.check(context, case, may_refuse)
            context.figures[begin:] = worst_of_each_dtype(context.figures[begin:])


class PairSet:
    """A set of pairs of values, where the two values of a pair belong to different dimensions of a space.

    Each value has a number and a row of bits. Bit n of the row is set if the value and the value with number n are a
    pair of the set. Sampling counts the pairs of thousands of points, which is fast with these rows.
    """

    def __init__(self, space: Mapping[str, Sequence[Any]]) -> None:
        numbers = itertools.count()
        self._numbers = {name: dict(zip(dict.fromkeys(values), numbers)) for name, values in space.items()}
        self._rows = [0] * next(numbers)

    def __len__(self) -> int:
        return sum(map(_bit_count, self._rows)) // 2

    def has(self, one: str, a: Any, other: str, b: Any) -> bool:
        """Return whether value `a` of dimension `one` and value `b` of dimension `other` are a pair of the set."""
        return bool(self._rows[self._numbers[one][a]] >> self._numbers[other][b] & 1)

    def count(self, point: Point) -> int:
        """Return how many pairs of the point's values are in the set."""
        values, mask = self._encode(point)
        return sum(_bit_count(self._rows[value] & mask) for value in values) // 2

    def add(self, point: Point) -> None:
        """Add all pairs of the point's values."""
        values, mask = self._encode(point)
        for value in values:
            self._rows[value] |= mask ^ (1 << value)

    def remove(self, point: Point) -> None:
        """Remove all pairs of the point's values; pairs that are not in the set are ignored."""
        values, mask = self._encode(point)
        for value in values:
            self._rows[value] &= ~mask

    def _encode(self, point: Point) -> tuple[list[int], int]:
        """Return the numbers of the point's values, and a mask with one bit for each of these numbers."""
        values = [self._numbers[name][value] for name, value in point.items()]
        return values, sum(1 << value for value in values)


def _bit_count(bits: int) -> int:
    return bin(bits).count("1")


def all_pairs(operation: Operation) -> PairSet:
    """Return the pairs of values that occur in a possible point.

    Possible points are searched at random, so a pair that occurs in very few of them can be missed.
    """
    numbers = random.Random(operation.name)
    found = PairSet(operation.space)
    for (one, values), (other, more) in itertools.combinations(operation.space.items(), 2):
        for a, b in itertools.product(values, more):
            if not found.has(one, a, other, b):
                for _ in range(_DRAWS):
                    point = _any(operation, numbers) | {one: a, other: b}
                    if operation.possible(point):
                        found.add(point)
                        break
    return found


def _draw(operation: Operation, numbers: random.Random) -> dict[str, Any]:
    for _ in range(_DRAWS):
        point = _any(operation, numbers)
        if operation.possible(point):
            return point
    raise ValueError(f"{operation.name}: {_DRAWS} points were drawn, and none is possible")


def _any(operation: Operation, numbers: random.Random) -> dict[str, Any]:
    # Python guarantees that random() gives the same numbers in every version. It does not guarantee that for choice().
    draw = numbers.random
    return {name: values[int(draw() * len(values))] for name, values in operation.space.items()}
