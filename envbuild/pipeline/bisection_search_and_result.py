"""Where an outcome changes in a row of versions, found with few tries. Pure: how a version is tried is the caller's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Found:
    """Two indexes and whether each passes. Where they differ, nothing between them could be tried; where they agree,
    they are the ends of the row."""

    low: int
    high: int
    low_passes: bool
    high_passes: bool

    @property
    def changes(self) -> bool:
        return self.low_passes != self.high_passes

    @property
    def passing(self) -> int | None:
        """The oldest known to pass."""
        return self.low if self.low_passes else self.high if self.high_passes else None


def search_versions(count: int, passes: Callable[[int], bool | None]) -> Found | None:
    """Try both ends, then halve what lies between them, if they differ; None where nothing could be tried.

    `passes` says None for what cannot be tried at all; its neighbours are then. With one change in the row that one is
    found; with several, one of them: what is returned was tried in any case.
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
    """How often `search_versions` asks at most of a row of `count`, where each can be tried: both ends, then halves."""
    return min(count, 2) + max(0, count - 2).bit_length()


@dataclass(frozen=True)
class Hunt:
    """What a bisection looks for: the pin to move, what decides (a probe, or the file `script`), and between which
    versions to search, both included."""

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
    """One version of a bisection. `passed` None: no image can be made of it."""

    version: str
    passed: bool | None
    reason: str
    seconds: float


@dataclass
class Bisection:
    """What a bisection came to; filled in as it goes. `versions`: all that lay within its bounds, oldest first."""

    profile: str
    hunt: Hunt
    distribution: str | None = None
    versions: list[str] = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    found: Found | None = None

    def document(self) -> dict[str, Any]:
        """`first`: the oldest version known to pass; `change`: the two versions between which the outcome changes."""
        found, versions = self.found, self.versions
        first = found.passing if found else None
        return {
            "profile": self.profile,
            "pin": self.hunt.pin,
            "distribution": self.distribution,
            "decides": self.hunt.decides,
            "first": versions[first] if first is not None else None,
            "change": [versions[found.low], versions[found.high]] if found and found.changes else None,
            "versions": versions,
            "tries": [asdict(item) for item in self.tries],
        }
