"""How far a resolved version is behind the newest release, and why. Pure."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuild.fetch.index_pages import Listed
from envbuild.util.errors import Fault, ProfileError, some

MOST_DAYS = 548
"""A version that is older than the newest release by more days than this is far behind. 18 months is about as long as a
torch release and the packages made for it stay usable together."""
MOST_RELEASES = 78
"""A version with more newer releases than this is far behind too. This is how many releases a project with weekly
releases has in 18 months. Releases are counted because an index may report no dates."""


@dataclass(frozen=True)
class Release:
    """A version that is not yanked. `fits`: whether one of its files supports the profile's Python; `usable`: whether
    one of those files is a wheel for the image's platform. `uploaded`: time of the first upload; None if the index does
    not provide it."""

    version: Version
    uploaded: datetime.datetime | None
    fits: bool
    usable: bool


@dataclass(frozen=True)
class Lag:
    """How far the resolved version `chosen` is behind `newest`, in `releases` and `days`; `far`: whether it is far
    behind. `newest`: the newest release in the required range for the profile's Python; if no newer release is for this
    Python, the newest for any. `rival`: the newest of the newer releases with a usable wheel; None if none has one.
    `reason`: why a newer release was not chosen: it has no usable wheel, requires a different Python, or
    conflicts with another requirement."""

    name: str
    chosen: str
    newest: str
    rival: str | None
    releases: int
    days: int | None
    reason: Literal["no wheel", "python", "incompatible"]
    far: bool

    @property
    def refused(self) -> bool:
        """Whether the lag is an error. A lag that is caused by the profile's Python is only reported."""
        return self.far and self.reason != "python"

    @property
    def lacks_wheel(self) -> bool:
        """Whether the newest release has no usable wheel."""
        return self.reason == "no wheel" or (self.reason == "incompatible" and self.rival != self.newest)

    @property
    def distance(self) -> str:
        months = f", {some(round(self.days / 30.4), 'month')}" if self.days is not None else ""
        return f"{some(self.releases, 'release')}{months} behind {self.newest}"


def matching_releases(files: Iterable[Listed], python: str, tags: Collection[Tag]) -> list[Release]:
    """The versions of a package that are not yanked, oldest first. `python`, `tags`: the Python release and the wheel
    tags of the image."""
    grouped: dict[Version, list[Listed]] = {}
    for file in files:
        if file.parsed and not file.yanked:
            grouped.setdefault(file.parsed[1], []).append(file)
    found = []
    for version, group in sorted(grouped.items()):
        fitting = [file for file in group if _takes(file.requires_python, python)]
        dates = [file.uploaded for file in group if file.uploaded]
        usable = any(_tagged(file.file, tags) for file in fitting)
        found.append(Release(version, min(dates, default=None), bool(fitting), usable))
    return found


@lru_cache  # most files of a package have the same text
def _takes(requires: str, python: str) -> bool:
    try:
        return SpecifierSet(requires).contains(python)
    except InvalidSpecifier:
        return True


def _tagged(file: str, tags: Collection[Tag]) -> bool:
    try:
        return file.endswith(".whl") and any(tag in tags for tag in parse_wheel_filename(file)[3])
    except InvalidWheelFilename:
        return False


def specifier(name: str, requirements: Iterable[str], python: str) -> SpecifierSet:
    """The combined specifier of all requirements on the package `name` that apply to this Python on Linux."""
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux",
            "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix", "extra": ""}  # fmt: skip
    found = SpecifierSet()
    for text in requirements:
        requirement = Requirement(text)
        holds = requirement.marker is None or requirement.marker.evaluate(here)
        if canonicalize_name(requirement.name) == name and holds:
            found &= requirement.specifier
    return found


def is_pinned(specifiers: SpecifierSet) -> bool:
    return any(one.operator in ("==", "===") and not one.version.endswith(".*") for one in specifiers)


def lag(name: str, chosen: str, wanted: SpecifierSet, known: Sequence[Release]) -> Lag | None:
    """Compare a resolved version with the newest release that `wanted` allows; None if there is nothing to report."""
    own = Version(chosen)
    newer = [r for r in known if r.version > own and not r.version.is_prerelease and wanted.contains(r.version)]
    if not newer:
        return None
    uploaded = next((release.uploaded for release in known if release.version == own), None)

    def judged(later: list[Release], reason: Literal["no wheel", "python", "incompatible"]) -> Lag:
        newest = later[-1]
        days = (newest.uploaded - uploaded).days if newest.uploaded and uploaded else None
        far = len(later) > MOST_RELEASES or (days is not None and days > MOST_DAYS)
        rivals = [str(release.version) for release in later if release.usable]
        rival = rivals[-1] if rivals else None
        return Lag(name, chosen, str(newest.version), rival, len(later), days, reason, far)

    fitting = [release for release in newer if release.fits]
    if not fitting:
        found = judged(newer, "python")
        return found if found.far else None
    usable = any(release.usable for release in fitting)
    found = judged(fitting, "incompatible" if usable else "no wheel")
    return found if found.far or not fitting[-1].usable else None


def lag_sentence(found: Lag, target: str) -> str:
    """A sentence with the version, the newest release, and why the latter was not chosen. `target`: the platform that a
    wheel must support."""
    why = [f"{found.newest} has no wheel for {target}"] if found.lacks_wheel else []
    if found.reason == "python":
        why.append(f"{found.newest} needs a different Python")
    if found.reason == "incompatible":
        why.append(f"{found.rival} has a wheel, but does not fit the other requirements")
    return f"{found.name} {found.chosen} is {found.distance}: {'; '.join(why)}"


def lag_note(found: Lag, target: str) -> str:
    """The result of `lag_sentence` and what to do, for a version that is locked."""
    return lag_sentence(found, target) + (f"; {COMPILE}" if found.lacks_wheel else "")


def refusal(found: Sequence[Lag], target: str, reasons: Mapping[str, str]) -> ProfileError:
    """The error for versions that are far behind and not pinned. `reasons`: name and version of a newer release -> why
    it does not fit, in uv's words."""
    ways = [COMPILE] if any(one.lacks_wheel for one in found) else []
    accepting = " ".join(f"--accept-old {one.name}" for one in found)
    pins = ", ".join(f"{one.name}=={one.chosen}" for one in found)
    ways.append(f"to take the old version: {accepting} (recorded in the lock), or require it: {pins}")
    return ProfileError(
        f"far behind the newest release, and not requested: {', '.join(f'{one.name} {one.chosen}' for one in found)}",
        hint="\n".join([*ways, *(f"why not {name}: {text[:600]}" for name, text in reasons.items())]),
        faults=[Fault(lag_sentence(one, target)) for one in found],
    )


COMPILE = "to compile a package from source, add it to extensions: in the profile (docs/profiles.md)"
