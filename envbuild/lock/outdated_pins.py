"""Which pins have a newer patch release on the configured index, and which an advisory asks for.

A patch release has the same first two numbers: 12.6.4.1 -> 12.6.9.9, 2.26.2 -> 2.26.5. That is what moves without a
change of the profile. An advisory may ask for more of a CUDA library: any newer version of the same major number, which
runs beside torch's own (minor-version compatibility) and can be pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from packaging.version import Version

from envbuild.facts import database
from envbuild.fetch import index_config, wheel_resolution_and_download
from envbuild.lock.lock_file import Lock
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.errors import ProfileError


@dataclass(frozen=True)
class AdvisedUpdate:
    """An advisory that holds for the profile, and the nearest newer version that it asks for."""

    advisory: str
    state: str
    version: str


@dataclass(frozen=True)
class Outdated:
    """A pin that could move. `newest`: the newest patch release, None where that is the pin itself."""

    name: str
    version: str
    newest: str | None
    asked: tuple[AdvisedUpdate, ...] = ()


@dataclass(frozen=True)
class _Wish:
    """An advisory's wish for one distribution: any of `requirements`."""

    name: str
    advisory: str
    state: str
    requirements: tuple[str, ...]


def find_outdated(plan: Plan, lock: Lock) -> list[Outdated]:
    """Raises NetworkError where the index does not answer."""
    versions = lock.versions
    newest = _newest(plan, {name: patches_of(name, version) for name, version in versions.items()})
    asked = [(wish, _nearest(plan, wish)) for wish in _wishes(plan, versions)]
    return list(_rows(versions, newest, asked))


def _rows(
    versions: Mapping[str, str], newest: Mapping[str, str], answers: Iterable[tuple[_Wish, str | None]]
) -> Iterator[Outdated]:
    told: dict[str, list[AdvisedUpdate]] = {}
    for wish, version in answers:
        if version is not None:
            told.setdefault(wish.name, []).append(AdvisedUpdate(wish.advisory, wish.state, version))
    for name, version in versions.items():
        # another build of the same version (2.13.0, where 2.13.0+cpu is pinned) is no newer one
        found = Version(newest.get(name, version))
        moved = found > Version(version) and found.local == Version(version).local
        if moved or name in told:
            yield Outdated(name, version, str(found) if moved else None, tuple(told.get(name, ())))


def patches_of(name: str, version: str) -> str:
    """The requirement that this pin and its later patch releases meet: `numpy>=2.4.6,==2.4.*`."""
    return _within(name, version, 2)


def _within(name: str, version: str, numbers: int) -> str:
    """This version and newer, as long as the first numbers stay."""
    known = Version(version)
    epoch = f"{known.epoch}!" if known.epoch else ""
    head = ".".join(map(str, (*known.release, 0)[:numbers]))
    return f"{name}>={known.public},=={epoch}{head}.*"


def _wishes(plan: Plan, versions: Mapping[str, str]) -> Iterator[_Wish]:
    """What the advisories that hold ask for, of distributions that are locked and in another version."""
    choice = plan.choice.locked(versions)
    for advice in choice.advice:
        change = advice.advisory.change
        for pin, wanted in {**change.pins, **({"torch": change.torch} if change.torch else {})}.items():
            name = database.distribution_of(pin, choice.situation.cuda or "") or pin
            if name in versions and versions[name] not in wanted:
                within = _within(name, versions[name], 1 if database.is_cuda_library(name) else 2)
                asked = tuple(f"{within},{specifier}" for specifier in wanted.any_of)
                yield _Wish(name, advice.advisory.id, advice.state, asked)


def _newest(plan: Plan, requirements: Mapping[str, str]) -> dict[str, str]:
    """Of each distribution the newest version that meets its requirement; what the index no longer has is left out."""
    try:
        return wheel_resolution_and_download.offered(list(requirements.values()), plan.python, plan.glibc)
    except ProfileError:  # one that nothing meets fails all: a version that was taken back, say
        with ThreadPoolExecutor(index_config.PARALLEL) as pool:
            found = pool.map(lambda requirement: _one(plan, requirement), requirements.values())
        return {name: version for name, version in zip(requirements, found, strict=True) if version}


def _nearest(plan: Plan, wish: _Wish) -> str | None:
    found = (_one(plan, requirement, oldest=True) for requirement in wish.requirements)
    return min(filter(None, found), key=Version, default=None)


def _one(plan: Plan, requirement: str, oldest: bool = False) -> str | None:
    try:
        return next(
            iter(wheel_resolution_and_download.offered([requirement], plan.python, plan.glibc, oldest=oldest).values()),
            None,
        )
    except ProfileError:
        return None
