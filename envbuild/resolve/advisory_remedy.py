"""Converts the change that an advisory requires to keys and values of a profile. Versions are chosen from those in the
facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import yaml
from packaging.version import Version

from envbuild.facts import database
from envbuild.facts.advisory_model import Change, Situation
from envbuild.facts.fact_field_types import VersionRange, is_version


def written(change: Change, known: Situation, unpinned: Situation | None = None) -> dict[str, Any]:
    """The profile keys and values that make an advisory's change: {"pins": {"cublas": "12.4.5.8"}}. Leaves out torch
    if its version fits already, or if no fitting release has code for all GPUs and runs with the driver. Leaves out
    each library whose version fits already or which has no fitting version for this CUDA. `known`: the current
    versions; the next newer fitting version is taken, otherwise the next older one. `unpinned`: the
    situation without the versions of --pin; a version in it is preferred if it fits and is newer."""
    found: dict[str, Any] = {}
    driver = None if change.driver or "cuda-compat" in known.environment else known.driver
    torch = _torch(change.torch, known, unpinned.torch if unpinned else None, driver) if change.torch else None
    release = database.torch_release(torch) if torch else None
    if release:
        found |= {"torch": release.version, "cuda": release.cuda}
    cuda = release.cuda if release else known.cuda
    libraries = {name: versions for name, versions in change.pins.items() if name in database.libraries()}
    before = unpinned.libraries if unpinned and unpinned.cuda == cuda else {}
    pins = {
        name: _version(name, cuda, wanted, known.libraries.get(name), before.get(name))
        for name, wanted in libraries.items()
    }
    if any(pins.values()):
        found["pins"] = {name: version for name, version in pins.items() if version}
    packages = [f"{name}{wanted.any_of[-1]}" for name, wanted in change.pins.items() if name not in libraries]
    if packages:
        found["packages"] = packages
    minimum = next(_floors(change.driver), None) if change.driver else None
    if minimum:
        found["driver"] = {"minimum": minimum}
    env = change_variables(change, known)
    return found | ({"env": env} if env else {})


def change_variables(change: Change, known: Situation) -> dict[str, str]:
    """The variables of the change: those for every profile, and those for an installed distribution."""
    own = (found for name, found in change.env_with.items() if name in known.distributions)
    return dict(change.env) | {name: value for found in own for name, value in found.items()}


def yaml_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Each key as a line of YAML: `pins: {cublas: 12.4.5.8}`."""
    for key, value in document.items():
        inline = yaml.safe_dump([value], default_flow_style=True, width=10_000).strip()
        yield f"{key}: {inline[1:-1]}"


def _torch(wanted: VersionRange, known: Situation, unpinned: str | None, driver: str | None) -> str | None:
    """The nearest torch release in `wanted` that has code for all GPUs and runs with `driver`; None if the current
    release fits, or if no release does."""
    fits = [
        release.version
        for release in database.torch_releases().values()
        if all(release.kernels(gpu.compute_capability) for gpu in known.gpus)
        and (driver is None or database.driver_runs(release.cuda, driver))
    ]
    return _nearest(fits, wanted, known.torch, unpinned)


def _version(library: str, cuda: str | None, wanted: VersionRange, now: str | None, unpinned: str | None) -> str | None:
    """The version that `_nearest` finds among the library's versions for this CUDA. If CUDA is unknown, those for CUDA
    12 are tried first, then those for other CUDA versions."""
    distributions = database.libraries()[library].distributions
    majors = [cuda.partition(".")[0]] if cuda else sorted(distributions, key=lambda major: (major != "12", major))
    found = (_nearest(_versions(distributions.get(major, "")), wanted, now, unpinned) for major in majors)
    return next(filter(None, found), None)


def _versions(distribution: str) -> list[str]:
    ranges = [release.pins.get(distribution, "") for release in database.torch_releases().values()]
    return [*database.known_versions(distribution), *(text.removeprefix("==") for text in ranges)]


def _nearest(versions: Iterable[str], wanted: VersionRange, now: str | None, unpinned: str | None) -> str | None:
    """The lowest version in `wanted` above `now`, otherwise the highest below it. None if `now` fits, or if no version
    does. If `now` is unknown: the oldest fitting version if `wanted` has a minimum, otherwise the newest. `unpinned`,
    the version without --pin, is returned instead if it fits and is newer."""
    if now is not None and now in wanted:
        return None
    found = _next(versions, wanted, now)
    if found and unpinned and is_version(unpinned) and unpinned in wanted and Version(found) < Version(unpinned):
        return unpinned
    return found


def _next(versions: Iterable[str], wanted: VersionRange, now: str | None) -> str | None:
    fits = sorted({text for text in versions if text and is_version(text) and text in wanted}, key=Version)
    if now is None or not is_version(now):
        return (fits[0] if any(_floors(wanted)) else fits[-1]) if fits else None
    return next((text for text in fits if Version(text) > Version(now)), fits[-1] if fits else None)


def _floors(wanted: VersionRange) -> Iterator[str]:
    for specifiers in wanted.any_of:
        yield from (item.version for item in specifiers if item.operator in (">=", ">", "=="))
