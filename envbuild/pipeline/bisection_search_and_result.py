"""Binary search for the version where an outcome changes, and the types of its result. Pure: the caller tries
versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Found:
    """The result of the search: two indexes, and whether each version passes.

    If the outcomes differ, no version between the two could be tried. If they agree, the indexes are the two ends of
    the list.
    """

    low: int
    high: int
    low_passes: bool
    high_passes: bool

    @property
    def changes(self) -> bool:
        return self.low_passes != self.high_passes

    @property
    def passing(self) -> int | None:
        """The oldest version known to pass."""
        return self.low if self.low_passes else self.high if self.high_passes else None


def search_versions(count: int, passes: Callable[[int], bool | None]) -> Found | None:
    """Try both ends; if they differ, bisect between them. Return None if no version could be tried.

    `passes` returns None for a version that cannot be tried; the search then tries its neighbours. If the outcome
    changes once in the list, the search finds that change; if it changes several times, it finds one of the changes.
    Both returned versions were actually tried.
    """
    outcomes: dict[int, bool | None] = {}

    def tried(index: int) -> bool | None:
        if index not in outcomes:
            outcomes[index] = passes(index)
        return outcomes[index]

    low = next((index for index in range(count) if tried(index) is not None), None)
    if low is None:
        return None
    high = next(index for index in reversed(range(low, count)) if tried(index) is not None)
    first, last = bool(tried(low)), bool(tried(high))
    while first != last:
        middle = (low + high) // 2
        between = [index for index in range(low + 1, high) if outcomes.get(index, True) is not None]
        if not between:
            break
        index = min(between, key=lambda other: abs(other - middle))
        outcome = tried(index)
        if outcome is None:
            continue
        low, high = (index, high) if outcome == first else (low, index)
    return Found(low, high, first, last)


def most_tries(count: int) -> int:
    """The largest number of tries that `search_versions` needs for `count` versions if each can be tried: both ends,
    then a binary search."""
    return min(count, 2) + max(0, count - 2).bit_length()


@dataclass(frozen=True)
class Hunt:
    """The parameters of a bisection: the pin to vary, what decides (a probe, or the file `script`), and the range of
    versions to search, bounds included."""

    pin: str
    decides: str
    script: Path | None = None
    oldest: str | None = None
    newest: str | None = None
    keep: bool = False

    @property
    def probe(self) -> str:
        return self.decides if self.script is None else "own.script"


@dataclass(frozen=True)
class Try:
    """The try of one version. `passed` is None if no image can be built with it."""

    version: str
    passed: bool | None
    reason: str
    seconds: float


@dataclass(frozen=True)
class Bisection:
    """The result of a bisection; a field keeps its default until its value is known. `versions`: all versions within
    the bounds, oldest first."""

    profile: str
    hunt: Hunt
    distribution: str | None = None
    versions: tuple[str, ...] = ()
    tries: tuple[Try, ...] = ()
    found: Found | None = None

    def document(self) -> dict[str, Any]:
        """Return the JSON document. `first`: the oldest version known to pass; `change`: the two versions between which
        the outcome changes."""
        found, versions = self.found, self.versions
        first = found.passing if found else None
        return {
            "profile": self.profile,
            "pin": self.hunt.pin,
            "distribution": self.distribution,
            "decides": self.hunt.decides,
            "first": versions[first] if first is not None else None,
            "change": [versions[found.low], versions[found.high]] if found and found.changes else None,
            "versions": list(versions),
            "tries": [asdict(item) for item in self.tries],
        }
