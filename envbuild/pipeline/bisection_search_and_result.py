"""Binary search for the version where an outcome changes, and the types of its result. Pure: the caller tries
versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Found:
    """The result of a search: the indexes of two versions that were tried, and whether each of them passes.

    If the outcomes differ, no version between the two can be tried. If they agree, the two are the oldest and the
    newest version that can be tried.
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
        """The index of the version that passes; the older one if both pass, None if both fail."""
        return self.low if self.low_passes else self.high if self.high_passes else None


def search_versions(count: int, passes: Callable[[int], bool | None]) -> Found | None:
    """Try the first and the last of `count` versions; if their outcomes differ, bisect between them. Return None if no
    version can be tried.

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
    """The parameters of a bisection: the pin to vary, the probe or the file `script` that decides, and the range of
    versions to search, bounds included. `keep`: the images are not removed."""

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
    """The result of trying one version. `passed` is None if no image can be built with this version, or if the audit
    refuses the image."""

    version: str
    passed: bool | None
    reason: str
    seconds: float


TryState = Literal["passed", "failed", "not-built"]


@dataclass(frozen=True)
class TryRow:
    version: str
    state: TryState
    reason: str
    seconds: float


@dataclass(frozen=True)
class VersionChange:
    """Two versions with different outcomes. No version between them can be tried."""

    before: str
    after: str


@dataclass(frozen=True)
class BisectionDocument:
    """The document of `bisect`. `state`: found: the outcome changes; all-pass, none-pass: both ends agree; unknown: no
    version could be tried. `passing_version`: the version of `change` that passes; without a change, the oldest
    version that could be tried, if it passes."""

    profile: str
    state: Literal["found", "all-pass", "none-pass", "unknown"]
    pin: str
    distribution: str | None
    probe: str
    script: str | None
    passing_version: str | None
    change: VersionChange | None
    versions: tuple[str, ...]
    tries: tuple[TryRow, ...]


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

    def document(self) -> BisectionDocument:
        found, versions = self.found, self.versions
        passing = found.passing if found else None
        return BisectionDocument(
            profile=self.profile,
            state=_state(found),
            pin=self.hunt.pin,
            distribution=self.distribution,
            probe=self.hunt.probe,
            script=str(self.hunt.script) if self.hunt.script else None,
            passing_version=versions[passing] if passing is not None else None,
            change=VersionChange(versions[found.low], versions[found.high]) if found and found.changes else None,
            versions=versions,
            tries=tuple(
                TryRow(item.version, _TRY_STATES[item.passed], item.reason, item.seconds) for item in self.tries
            ),
        )


_TRY_STATES: Mapping[bool | None, TryState] = {True: "passed", False: "failed", None: "not-built"}


def _state(found: Found | None) -> Literal["found", "all-pass", "none-pass", "unknown"]:
    if found is None:
        return "unknown"
    return "found" if found.changes else "all-pass" if found.low_passes else "none-pass"
