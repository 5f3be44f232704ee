"""Chooses one of the lines of a GPU: profiles for the same GPU that differ in CUDA, and so in the drivers they support.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import Version

from envbuild.facts import database
from envbuild.util.errors import NotProved, UsageError, near

CURRENT = "current"
"""The label of the profile with the GPU's name; the label of the profile NAME-cu12 is `cu12`."""
AUTO = "auto"


@dataclass(frozen=True)
class GpuLine:
    """A profile as one of the lines of a GPU. `driver`: the oldest driver that supports it, None if unknown. `cuda`:
    its CUDA major version; the current line is also called cu13 if this is 13. `forced`: whether the profile puts
    forward-compatibility libraries into the loader's path, so that they are used with every driver. `without_them`: the
    oldest driver that supports this CUDA without these libraries. `gpus`: the ids of the profile's GPUs."""

    profile: str
    label: str
    driver: str | None
    forced: bool = False
    without_them: str | None = None
    cuda: str | None = None
    gpus: tuple[str, ...] = ()

    def is_called(self, label: str) -> bool:
        return label == self.label or (self.cuda is not None and label == f"cu{self.cuda}")

    def refusal(self, driver: str) -> str | None:
        """Why the profile does not work with a driver; None if it does."""
        if self.driver and Version(driver) < Version(self.driver):
            return f"{self.profile} needs driver {self.driver} or newer, not {driver}"
        if self.forced and self.without_them and Version(driver) >= Version(self.without_them):
            return (
                f"{self.profile} forces CUDA forward compatibility, and driver {driver} is new enough without it: CUDA "
                "would fail with error 803"
            )
        return None


@dataclass(frozen=True)
class LineRequest:
    """What the user requests, and the machine's driver. `named`: the label in the profile's name, such as cu12 in
    h20-cu12. `line`, `driver`: the options. `site_line`, `site_driver`: the settings. `found`: the driver of the
    machine that will run the image; None if it is unknown, or ignored on purpose."""

    named: str | None = None
    line: str | None = None
    driver: str | None = None
    site_line: str | None = None
    site_driver: str | None = None
    found: str | None = None


@dataclass(frozen=True)
class LineChoice:
    """The line to build. `reason`: which input decided. `driver`: the driver that the image is for, None if unknown."""

    line: GpuLine
    reason: str
    driver: str | None = None


def choose_line(name: str, lines: Sequence[GpuLine], request: LineRequest) -> LineChoice:
    """Choose one of `lines`, the lines of the GPU profile `name`, which are sorted by CUDA, the newest first. The first
    of these decides: the profile's full name, the options, the settings. Otherwise the current line is chosen.

    The machine's driver counts only if the option or the setting is `auto`. Raises UsageError if a line does not exist
    or does not support the driver that an option names, if the profile's full name and the option select different
    lines, or if the option is `auto` and no driver is known. Raises NotProved if no line supports the driver.
    """
    driver = request.driver or request.site_driver or request.found
    if request.named:
        if request.line not in (None, AUTO, request.named):
            raise UsageError(
                f"{name}-{request.named} and --line {request.line} select different lines", hint="leave one of them out"
            )
        return _named(name, lines, request.named, "the profile's full name", request)
    if request.line and request.line != AUTO:
        return _named(name, lines, request.line, f"--line {request.line}", request)
    if request.line == AUTO:
        if driver is None:
            raise UsageError(
                "--line auto: the driver of the machine that runs the image is not known",
                hint="give --driver VERSION, or name the line: --line current",
            )
        return _fitting(name, lines, driver, f"--line auto, driver {driver}")
    if request.driver:
        return _fitting(name, lines, request.driver, f"--driver {request.driver}")
    if request.site_line == AUTO and driver:
        return _fitting(name, lines, driver, f"the setting line: auto, driver {driver}")
    if request.site_line and request.site_line != AUTO and any(one.is_called(request.site_line) for one in lines):
        return _named(name, lines, request.site_line, f"the setting line: {request.site_line}", request)
    if request.site_driver:
        return _fitting(name, lines, request.site_driver, f"the setting driver: {request.site_driver}")
    return _named(name, lines, CURRENT, "the default", request)


def _named(name: str, lines: Sequence[GpuLine], label: str, reason: str, request: LineRequest) -> LineChoice:
    found = next((one for one in lines if one.is_called(label)), None)
    if found is None:
        labels = [one.label for one in lines]
        raise UsageError(
            f"{name} has no line {label}{_without_code(lines, label)}",
            hint=near(label, labels) or f"its lines: {', '.join(labels) or 'none'}",
        )
    if request.driver and (refusal := found.refusal(request.driver)):
        raise UsageError(f"--driver {request.driver}: {refusal}", hint=other_line(lines, found, request.driver))
    return LineChoice(found, reason, request.driver or request.site_driver or request.found)


def _without_code(lines: Sequence[GpuLine], label: str) -> str:
    """The reason for a missing line if it is that torch has no code for a GPU; otherwise an empty text."""
    releases = [one for one in database.torch_releases().values() if f"cu{one.cuda.partition('.')[0]}" == label]
    ids = dict.fromkeys(ident for line in lines for ident in line.gpus)
    gpus = [gpu for ident, gpu in database.gpus().items() if ident in ids]
    names = [gpu.id for gpu in gpus if not any(one.kernels(gpu.compute_capability) for one in releases)]
    text = f": no known torch release for CUDA {label.removeprefix('cu')} has code for {', '.join(names)}"
    return text if releases and names else ""


def _fitting(name: str, lines: Sequence[GpuLine], driver: str, reason: str) -> LineChoice:
    fits = next((one for one in lines if one.refusal(driver) is None), None)
    if fits is None:
        raise NotProved(f"no line of {name} supports driver {driver}", hint=drivers_needed(lines, driver))
    return LineChoice(fits, reason, driver)


def other_line(lines: Sequence[GpuLine], line: GpuLine, driver: str) -> str:
    """A hint for a line that does not support the driver: another line that supports it, or the drivers that the lines
    need."""
    fits = next((one for one in lines if one != line and one.refusal(driver) is None), None)
    if fits is None:
        return drivers_needed(lines, driver)
    return f"{fits.profile} supports it: envbuild make {fits.profile}, or --line auto"


def drivers_needed(lines: Sequence[GpuLine], driver: str) -> str:
    """For each line that does not support the driver, the reason."""
    return "\n".join(text for one in lines if (text := one.refusal(driver)))
