"""Chooses the CUDA line to build, by the options, the settings and the driver of this machine."""

from __future__ import annotations

import os

from envbuild.image.engine_endpoint_and_errors import endpoint
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.resolve import cuda_line_choice, cuda_line_lookup
from envbuild.resolve.cuda_line_choice import CURRENT, GpuLine, LineChoice, LineRequest
from envbuild.util import settings
from envbuild.util.errors import EngineError, EnvbuildError, NotProved, SettingsError, UsageError


def select_line(name: str, *, line: str | None = None, driver: str | None = None, locked: bool = False) -> LineChoice:
    """Choose which CUDA line of a GPU (for example `h200` or `h200-cu12`) to use for a name given by the user. `line`,
    `driver`: the values of the options --line and --driver. `locked`: ignore the driver of this machine.

    Raises UsageError if the options do not fit the profile, NotProved if no line supports the driver.
    """
    base, label = _split(name)
    lines = cuda_line_lookup.gpu_lines(base)
    if not lines and (line or driver):
        raise UsageError(f"--line and --driver are only for profiles with GPUs, and {name} has none")
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
    return cuda_line_choice.choose_line(base, lines, request)


def _split(name: str) -> tuple[str, str | None]:
    """The profile of the current line for a name given by the user, and the label of the line that the name selects."""
    try:
        target = profile_and_lock_name_lookup.meant(name)
    except profile_and_lock_name_lookup.UnwrittenProfile as missing:
        return profile_and_lock_name_lookup.named_line(missing.name) or (missing.name, None)
    if profile_and_lock_name_lookup.is_path(target.profile):
        return target.profile, None
    found = profile_and_lock_name_lookup.named_line(target.name)
    return found or (name if target.requirements else target.profile, None)


def line_or_name(name: str, *, line: str | None = None, driver: str | None = None, locked: bool = False) -> LineChoice:
    """Like `select_line`, but if the profile cannot be loaded, return a choice with the name unchanged: the error is
    reported when the profile is loaded later."""
    try:
        return select_line(name, line=line, driver=driver, locked=locked)
    except (NotProved, UsageError, SettingsError):
        raise
    except EnvbuildError:
        return LineChoice(GpuLine(name, CURRENT, None), "the default")


def driver_here() -> str | None:
    """The version of this machine's driver; None without a driver, in a CI job, or if another machine runs the
    image."""
    if not runs_here() or in_ci():
        return None
    from envbuild.doctor import nvml_reader  # not needed for the CPU

    return nvml_reader.read().version


def runs_here() -> bool:
    """Whether self-tests run on this machine: no scheduler is set, and the engine's address is known and not remote."""
    if settings.setting("on") not in (None, "local"):
        return False
    try:
        return endpoint()[0].startswith("unix://")
    except EngineError:  # reported where the engine is used
        return False


def in_ci() -> bool:
    """Whether this is a CI job, by the variable CI, which GitHub, GitLab and others set."""
    return os.environ.get("CI", "").lower() not in ("", "0", "false")
