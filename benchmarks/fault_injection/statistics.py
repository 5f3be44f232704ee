"""Computes shares with confidence intervals, and counts, from the records of a campaign."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .records import OUTCOMES, PARTIAL, Record

LARGE = 8  # units in the last place: no correct algorithm is expected to have a larger error
NORMAL_95 = 1.959964  # 95% of a normal distribution are within this many standard deviations


@dataclass(frozen=True)
class Share:
    """`part` of `count`, with Wilson's interval of 95% (Wilson, "Probable inference", 1927)."""

    part: int
    count: int

    @property
    def value(self) -> float:
        return self.part / self.count if self.count else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        if not self.count:
            return 0.0, 1.0
        n, p, z = self.count, self.value, NORMAL_95
        centre, width = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        scale = 1 + z * z / n
        return max(0.0, (centre - width) / scale), min(1.0, (centre + width) / scale)


def detected(records: Iterable[Record]) -> Share:
    """Return how many of the injections that can escape were detected."""
    found = [record.detected for record in records if record.outcome == PARTIAL]
    return Share(sum(found), len(found))


def detected_large(records: Iterable[Record]) -> Share:
    """The same for the injections that move a result by more than LARGE units of its largest element."""
    return detected(record for record in records if record.units > LARGE)


def outcomes(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of injections by outcome."""
    return {outcome: sum(record.outcome == outcome for record in records) for outcome in OUTCOMES}


def grouped(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Group the records by a key, in the order of first appearance."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return groups
