"""Remembers how long the steps of each profile took on this machine, and estimates the next run from that."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from envbuild.pipeline.progress_events import Step
from envbuild.util import temporary_files, user_folders
from envbuild.util.atomic_files import write_atomically

BUILD_STEPS = frozenset({"lock", "extensions", "build", "load", "audit"})
TEST_STEPS = frozenset({"self-test", "nodes"})
_FOLDER = "durations"


@dataclass(frozen=True)
class StepDurations:
    """The seconds that each step of a profile took when it last had something to do. `size`: the estimated bytes
    of its image on the engine's disk."""

    profile: str
    size: int
    seconds: Mapping[str, float]
    date: str


@dataclass(frozen=True)
class Estimate:
    """An estimated duration. `profile`: the profile whose earlier run is the basis."""

    minutes: float
    profile: str


_FILE: TypeAdapter[StepDurations] = TypeAdapter(StepDurations)


def keep_durations(profile: str, size: int, steps: Sequence[Step]) -> None:
    """Write the durations of the steps that had something to do. Write errors are ignored, because only estimates
    depend on the file."""
    # what a killed run left: this run may write nothing, and so remove nothing
    temporary_files.sweep(user_folders.state_folder(_FOLDER, make=False))
    took = {s.name: round(s.seconds, 1) for s in steps if not s.cached and s.name in BUILD_STEPS | TEST_STEPS}
    if not took:
        return
    before = next((one for one in read_durations() if one.profile == profile), None)
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    now = StepDurations(profile, size, {**(before.seconds if before else {}), **took}, date)
    with contextlib.suppress(OSError):
        write_atomically(user_folders.state_folder(_FOLDER) / f"{profile}.json", _FILE.dump_json(now).decode())


def read_durations() -> list[StepDurations]:
    """The durations of all profiles, the latest first; without damaged files."""
    found = []
    for file in user_folders.state_folder(_FOLDER, make=False).glob("*.json"):
        with contextlib.suppress(OSError, ValidationError):
            found.append(_FILE.validate_json(file.read_bytes()))
    return sorted(found, key=lambda one: one.date, reverse=True)


def estimate(runs: Sequence[StepDurations], profile: str, size: int, steps: Collection[str]) -> Estimate | None:
    """Estimate the minutes of `steps` for a build of `size` bytes. The basis is the profile's own run, otherwise the
    latest run of another profile that had a build, whose build steps are scaled by size. None without such a run,
    if `steps` has neither "build" nor "self-test", or if that run has no time for one of these two or "extensions",
    that `steps` has. Pure."""
    own = next((one for one in runs if one.profile == profile), None)
    others = (one for one in runs if one.size and "build" in one.seconds)
    best = own or next(others, None)
    if best is None:
        return None
    scale = size / best.size if size and best.size and best is not own else 1.0
    known = {name: seconds for name, seconds in best.seconds.items() if name in steps}
    longest = {"build", "self-test", "extensions"} & set(steps)
    if longest <= {"extensions"} or not longest <= known.keys():
        return None
    total = sum(seconds * (scale if name in BUILD_STEPS else 1) for name, seconds in known.items())
    return Estimate(round(total / 60, 1), best.profile)
