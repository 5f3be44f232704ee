"""Selects the cases of an operation that a run tests: points of a parameter space, chosen to cover pairs of values.

Most software faults depend on one or two parameters (Kuhn, Wallace and Gallo, "Software fault interactions and
implications for software testing", IEEE TSE 30(6), 2004). Points that together contain each pair of values of two
dimensions find those faults; a different seed selects different points. torch's OpInfo and CUTLASS's profiler list
their cases instead.
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

_CANDIDATES = 24  # points drawn for each selected point
_DRAWS = 200  # attempts to draw a possible point


def _always(point: Point) -> bool:
    return True


@dataclass(frozen=True)
class Operation:
    """An operation and its parameter space.

    `make(point, seed)`: builds the case for one combination of parameter values. `space`: maps each dimension to its
    values; only `possible` combinations (points) are used. `counts`: the number of points for each level; a level
    without a count tests none.
    """

    name: str
    space: Mapping[str, Sequence[Any]]
    make: Callable[[Point, int], Case]
    counts: Mapping[str, int]
    possible: Callable[[Point], bool] = field(default=_always)


@dataclass(frozen=True)
class Sample:
    """The points of an operation that a run tests, and the number of pairs of values that they cover, `of` all possible
    pairs.
    """

    points: tuple[Point, ...]
    covered: int
    of: int


def sample(operation: Operation, count: int, seed: int) -> Sample:
    """Select `count` points: of several random points, each time the one that covers most new pairs.

    The result is the same on every machine for the same seed. Raises ValueError if no possible point is found.
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
    """The case at each point, each with different inputs."""
    for number, point in enumerate(points):
        yield operation.make(point, seed + number)


def check(context: Context, operations: Sequence[Operation], may_refuse: Refusal = is_unsupported) -> None:
    """Run and judge the cases sampled for the job's level and seed; the trait `coverage` counts them and their pairs.

    Only the worst figure of each operation and dtype is kept, because a record must not hold thousands of cases.
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
    """A set of pairs of values of two dimensions of a space.

    Each value has a number and a row of bits, one for each value with which it forms a pair. Rows make counting a
    point's pairs fast, which sampling does for thousands of points.
    """

    def __init__(self, space: Mapping[str, Sequence[Any]]) -> None:
        numbers = itertools.count()
        self._numbers = {name: dict(zip(dict.fromkeys(values), numbers)) for name, values in space.items()}
        self._rows = [0] * next(numbers)

    def __len__(self) -> int:
        return sum(map(_bit_count, self._rows)) // 2

    def has(self, one: str, a: Any, other: str, b: Any) -> bool:
        """Whether value `a` of dimension `one` and value `b` of dimension `other` are a pair of the set."""
        return bool(self._rows[self._numbers[one][a]] >> self._numbers[other][b] & 1)

    def count(self, point: Point) -> int:
        """Number of pairs of this point that are in the set."""
        values, mask = self._encode(point)
        return sum(_bit_count(self._rows[value] & mask) for value in values) // 2

    def add(self, point: Point) -> None:
        """Add all pairs of this point."""
        values, mask = self._encode(point)
        for value in values:
            self._rows[value] |= mask ^ (1 << value)

    def remove(self, point: Point) -> None:
        """Remove those pairs of this point that are in the set."""
        values, mask = self._encode(point)
        for value in values:
            self._rows[value] &= ~mask

    def _encode(self, point: Point) -> tuple[list[int], int]:
        """The numbers of a point's values, and their bit mask."""
        values = [self._numbers[name][value] for name, value in point.items()]
        return values, sum(1 << value for value in values)


def _bit_count(bits: int) -> int:
    return bin(bits).count("1")


def all_pairs(operation: Operation) -> PairSet:
    """Every pair of values that occurs in a possible point, as far as random points show it."""
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
    # random() is the same in every version of Python; choice() has no such guarantee.
    draw = numbers.random
    return {name: values[int(draw() * len(values))] for name, values in operation.space.items()}
