"""Finds pins with a newer patch release on the configured index, and versions required by advisories.

A patch release has the same first two numbers: 12.6.4.1 -> 12.6.9.9, 2.26.2 -> 2.26.5. Such an update needs no change
of the profile. A version that torch requires exactly has none: `lock --upgrade` would keep it. For a CUDA library, a
version that an advisory requires only needs the same major number: it works with torch's other libraries (minor-version
compatibility) and can be pinned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from packaging.version import Version

from envbuild.facts import database
from envbuild.fetch import index_config, wheel_resolution_and_download
from envbuild.lock import base_image_tag_lookup
from envbuild.lock.lock_creation_and_update import BASE
from envbuild.lock.lock_file import Lock
from envbuild.resolve.plan_resolver import Plan
from envbuild.resolve.torch_compatibility_and_advisories import Advice
from envbuild.util.errors import ProfileError
from envbuild.util.json_output_types import AdvisoryRow

_NO_TAG = "tag missing in the registry"


@dataclass(frozen=True)
class AdvisedUpdate(AdvisoryRow):
    """An advisory that applies to the profile, and the nearest newer version that it requires."""

    version: str


@dataclass(frozen=True)
class Outdated:
    """A pin with a possible update. `newest`: the newest patch release, None if the pin is the newest. For the pin
    `base`, `version` is the locked base image by digest, and `newest` is the image to which its tag points now, or the
    text "tag missing in the registry"."""

    name: str
    version: str
    newest: str | None
    advisories: tuple[AdvisedUpdate, ...] = ()


@dataclass(frozen=True)
class _RequiredUpdate:
    """The versions of one distribution that an advisory requires: any of `requirements`."""

    name: str
    advice: Advice
    requirements: tuple[str, ...]


def find_outdated(plan: Plan, lock: Lock) -> list[Outdated]:
    """The locked pins with a possible update, and the base image if its tag is missing or now points to another image.
    Raises NetworkError if the index or the registry does not answer."""
    versions = lock.versions
    release = database.torch_release(versions.get("torch", ""))
    free = versions.items() - (release.exact_versions.items() if release else set())
    newest = _newest(plan, {name: patches_of(name, version) for name, version in sorted(free)})
    nearest = [(update, _nearest(plan, update)) for update in _required_updates(plan, versions)]
    return [*_moved_base(lock), *_rows(versions, newest, nearest)]


def _moved_base(lock: Lock) -> Iterator[Outdated]:
    if lock.image and lock.image_tag:
        try:
            now = base_image_tag_lookup.image_of_tag(lock.image_tag)
        except ProfileError:  # the image of the lock may still be there, by its digest
            now = _NO_TAG
        if now != lock.image:
            yield Outdated(BASE, lock.image, now)


def _rows(
    versions: Mapping[str, str], newest: Mapping[str, str], answers: Iterable[tuple[_RequiredUpdate, str | None]]
) -> Iterator[Outdated]:
    advised: dict[str, list[AdvisedUpdate]] = {}
    for update, version in answers:
        if version is not None:
            given = update.advice
            row = AdvisedUpdate(given.advisory.id, given.state, given.reason, given.advisory.remedy, version)
            advised.setdefault(update.name, []).append(row)
    for name, version in versions.items():
        # a different build of the same version (2.13.0 instead of the pinned 2.13.0+cpu) is not newer
        found = Version(newest.get(name, version))
        moved = found > Version(version) and found.local == Version(version).local
        if moved or name in advised:
            yield Outdated(name, version, str(found) if moved else None, tuple(advised.get(name, ())))


def patches_of(name: str, version: str) -> str:
    """The requirement that matches this pin and its later patch releases: `numpy>=2.4.6,==2.4.*`."""
    return _within(name, version, 2)


def _within(name: str, version: str, numbers: int) -> str:
    """The requirement that matches this version and newer versions with the same first `numbers` parts: for 2 parts,
    numpy>=2.4.6,==2.4.*."""
    known = Version(version)
    epoch = f"{known.epoch}!" if known.epoch else ""
    head = ".".join(map(str, (*known.release, 0)[:numbers]))
    return f"{name}>={known.public},=={epoch}{head}.*"


def _required_updates(plan: Plan, versions: Mapping[str, str]) -> Iterator[_RequiredUpdate]:
    """The versions that applicable advisories require of distributions that are locked in a different version."""
    choice = plan.choice.locked(versions)
    for advice in choice.advice:
        change = advice.advisory.change
        for pin, wanted in {**change.pins, **({"torch": change.torch} if change.torch else {})}.items():
            name = database.distribution_of(pin, choice.situation.cuda or "") or pin
            if name in versions and versions[name] not in wanted:
                within = _within(name, versions[name], 1 if database.is_cuda_library(name) else 2)
                requirements = tuple(f"{within},{specifier}" for specifier in wanted.any_of)
                yield _RequiredUpdate(name, advice, requirements)


def _newest(plan: Plan, requirements: Mapping[str, str]) -> dict[str, str]:
    """For each distribution, the newest version on the index that meets its requirement. Distributions without such a
    version are left out."""
    try:
        return wheel_resolution_and_download.offered(list(requirements.values()), plan.python, plan.glibc)
    except ProfileError:  # one requirement without a version, such as a withdrawn one, makes the whole query fail
        with ThreadPoolExecutor(index_config.PARALLEL) as pool:
            found = pool.map(lambda requirement: _one(plan, requirement), requirements.values())
        return {name: version for name, version in zip(requirements, found, strict=True) if version}


def _nearest(plan: Plan, update: _RequiredUpdate) -> str | None:
    found = (_one(plan, requirement, oldest=True) for requirement in update.requirements)
    return min(filter(None, found), key=Version, default=None)


def _one(plan: Plan, requirement: str, oldest: bool = False) -> str | None:
    try:
        return next(
            iter(wheel_resolution_and_download.offered([requirement], plan.python, plan.glibc, oldest=oldest).values()),
            None,
        )
    except ProfileError:
        return None
