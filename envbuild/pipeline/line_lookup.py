"""Finds the lines of a profile, and what decides among them: options, settings, and the driver of this machine."""

from __future__ import annotations

import os

from envbuild.doctor import nvml_reader
from envbuild.facts import database
from envbuild.image.engine_endpoint_and_errors import endpoint
from envbuild.profile import profile_name_lookup
from envbuild.profile.loaded_profile import Source
from envbuild.profile.model import Profile
from envbuild.resolve import line_selection, minimum_driver, profile_reader_and_overrides
from envbuild.resolve.line_selection import CURRENT, GpuLine, LineChoice, LineRequest
from envbuild.util import settings
from envbuild.util.errors import EngineError, EnvbuildError, NotProved, SettingsError, UsageError

_COMPAT = "cuda/compat"  # part of the path of forward-compatibility libraries, in NVIDIA's packages and in our images
_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")


def select_line(name: str, *, line: str | None = None, driver: str | None = None, locked: bool = False) -> LineChoice:
    """Choose the line for a profile named on the command line. `line`, `driver`: the options. `locked`: ignore the
    driver of this machine.

    Raises UsageError if the options do not fit the profile, NotProved if no line supports the driver.
    """
    target = profile_name_lookup.meant(name)
    found = None if profile_name_lookup.is_path(target.profile) else profile_name_lookup.named_line(target.name)
    base, label = found or (name if target.requirements else target.profile, None)
    lines = gpu_lines(base)
    if not lines and (line or driver):
        raise UsageError(f"--line and --driver are for profiles of GPUs, and {name} names none")
    if not lines:
        return LineChoice(GpuLine(name, CURRENT, None), "the profile has no GPUs")
    request = LineRequest(
        named=label,
        line=line,
        driver=driver,
        site_line=settings.setting("line"),
        site_driver=settings.setting("driver"),
        found=None if locked else driver_here(),
    )
    return line_selection.choose_line(base, lines, request)


def line_or_name(name: str, *, line: str | None = None, driver: str | None = None, locked: bool = False) -> LineChoice:
    """Like `select_line`. If the profile cannot be loaded, its name is returned unchanged: loading it later reports the
    error."""
    try:
        return select_line(name, line=line, driver=driver, locked=locked)
    except (NotProved, UsageError, SettingsError):
        raise
    except EnvbuildError:
        return LineChoice(GpuLine(name, CURRENT, None), "the default")


def gpu_lines(name: str) -> list[GpuLine]:
    """The lines of the GPU profile `name`, the current one first; empty if it names no GPUs."""
    current = profile_reader_and_overrides.load(name)
    if not current.profile.gpus:
        return []
    others = sorted(profile_name_lookup.lines_of(name).items(), reverse=True)
    return [
        as_line(name, CURRENT, current.profile),
        *(as_line(other, label, profile_reader_and_overrides.load(other).profile) for label, other in others),
    ]


def related_lines(source: Source) -> list[GpuLine]:
    """All profiles for the same GPU as this one: h20 and h20-cu12, for either of them."""
    if source.meant is None or source.meant.requirements or profile_name_lookup.is_path(source.meant.profile):
        return []
    found = profile_name_lookup.named_line(source.name)
    return gpu_lines(found[0] if found else source.meant.profile)


def as_line(name: str, label: str, profile: Profile) -> GpuLine:
    release = database.torch_release(profile.torch)
    forced = any(_COMPAT in profile.env.get(variable, "") for variable in _LOADER)
    own = database.driver_minimum(release.cuda).compatible if release else None
    cuda = release.cuda.partition(".")[0] if release else None
    return GpuLine(name, label, minimum_driver.oldest(profile), forced, own, cuda)


def driver_here() -> str | None:
    """The version of this machine's driver; None without a driver, or if another machine runs the image."""
    if not runs_here() or in_ci():
        return None
    return nvml_reader.read().version


def runs_here() -> bool:
    """Whether self-tests run on this machine: no scheduler is set, and the engine is not remote."""
    if settings.setting("on") not in (None, "local"):
        return False
    try:
        return endpoint()[0].startswith("unix://")
    except EngineError:  # reported where the engine is used
        return False


def in_ci() -> bool:
    """Whether this is a CI job, by the variable that GitHub, GitLab and others set."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
