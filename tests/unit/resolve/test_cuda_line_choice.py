"""Which line of a GPU is built: the full name, the options, the settings, the driver, the default, in this order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envbuild.resolve import cuda_line_choice
from envbuild.resolve.cuda_line_choice import GpuLine, LineRequest
from envbuild.util.errors import EnvbuildError, NotProved, UsageError

CURRENT = GpuLine("h20", "current", "580.65.06", without_them="580", cuda="13")
CU12 = GpuLine("h20-cu12", "cu12", "525.60.13", without_them="525.60.13", cuda="12")
OLD, MIDDLE, NEW = "470.57.02", "550.54.14", "595.45.04"


@pytest.mark.parametrize(
    ("request_", "profile", "reason"),
    [
        # nothing is asked for: the default, whatever the driver
        (LineRequest(), "h20", "the default"),
        (LineRequest(found=NEW), "h20", "the default"),
        (LineRequest(found=MIDDLE), "h20", "the default"),
        (LineRequest(found=OLD), "h20", "the default"),
        # the full name comes first
        (LineRequest(named="cu12"), "h20-cu12", "the profile's full name"),
        (LineRequest(named="cu12", line="auto", found=NEW), "h20-cu12", "the profile's full name"),
        (LineRequest(named="cu12", line="cu12"), "h20-cu12", "the profile's full name"),
        (LineRequest(named="cu12", site_line="current", site_driver=NEW), "h20-cu12", "the profile's full name"),
        # then the options
        (LineRequest(line="current", site_line="cu12", found=MIDDLE), "h20", "--line current"),
        (LineRequest(line="cu12", found=NEW), "h20-cu12", "--line cu12"),
        (LineRequest(line="cu13", found=MIDDLE), "h20", "--line cu13"),
        (LineRequest(line="cu12", driver=NEW), "h20-cu12", "--line cu12"),
        (LineRequest(line="auto", found=MIDDLE), "h20-cu12", f"--line auto, driver {MIDDLE}"),
        (LineRequest(line="auto", found=NEW), "h20", f"--line auto, driver {NEW}"),
        (LineRequest(line="auto", driver=NEW, found=MIDDLE), "h20", f"--line auto, driver {NEW}"),
        (LineRequest(line="auto", site_driver=MIDDLE, found=NEW), "h20-cu12", f"--line auto, driver {MIDDLE}"),
        (LineRequest(driver=MIDDLE, found=NEW), "h20-cu12", f"--driver {MIDDLE}"),
        (LineRequest(driver=NEW, site_line="cu12"), "h20", f"--driver {NEW}"),
        # then the settings
        (LineRequest(site_line="cu12", found=NEW), "h20-cu12", "the setting line: cu12"),
        (LineRequest(site_line="current", site_driver=MIDDLE), "h20", "the setting line: current"),
        (LineRequest(site_line="cu11", found=NEW), "h20", "the default"),  # a line of other GPUs
        (LineRequest(site_line="auto", found=MIDDLE), "h20-cu12", f"the setting line: auto, driver {MIDDLE}"),
        (LineRequest(site_line="auto"), "h20", "the default"),
        (LineRequest(site_driver=MIDDLE, found=NEW), "h20-cu12", f"the setting driver: {MIDDLE}"),
    ],
)
def test_the_line_and_what_decided(request_: LineRequest, profile: str, reason: str) -> None:
    found = cuda_line_choice.choose_line("h20", [CURRENT, CU12], request_)
    assert (found.line.profile, found.reason) == (profile, reason)
    assert found.driver == (request_.driver or request_.site_driver or request_.found)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (LineRequest(line="cu11"), UsageError, "h20 has no line cu11"),
        (LineRequest(named="cu12", line="current"), UsageError, "h20-cu12 and --line current select different lines"),
        (LineRequest(line="auto"), UsageError, "--line auto: the driver of the machine that runs the image"),
        (LineRequest(line="current", driver=MIDDLE), UsageError, f"h20 needs driver 580.65.06 or newer, not {MIDDLE}"),
        (LineRequest(line="auto", found=OLD), NotProved, f"no line of h20 supports driver {OLD}"),
        (LineRequest(driver=OLD), NotProved, f"no line of h20 supports driver {OLD}"),
        (LineRequest(site_driver=OLD), NotProved, f"no line of h20 supports driver {OLD}"),
        (LineRequest(site_line="auto", found=OLD), NotProved, f"no line of h20 supports driver {OLD}"),
    ],
)
def test_an_unusable_line_is_refused(request_: LineRequest, error: type[EnvbuildError], words: str) -> None:
    with pytest.raises(error) as caught:
        cuda_line_choice.choose_line("h20", [CURRENT, CU12], request_)
    assert words in caught.value.message
    if error is NotProved:
        assert f"h20-cu12 needs driver 525.60.13 or newer, not {OLD}" in str(caught.value.hint)


def test_the_line_that_supports_the_driver_is_named() -> None:
    lines = [CURRENT, CU12]
    assert "h20-cu12 supports it" in cuda_line_choice.other_line(lines, CURRENT, MIDDLE)
    assert "h20 needs driver 580.65.06" in cuda_line_choice.other_line(lines, CURRENT, OLD)
    assert "h20 supports it" in cuda_line_choice.other_line(lines, replace(CU12, forced=True), NEW)


@pytest.mark.parametrize(
    ("driver", "works"), [(OLD, False), (MIDDLE, True), ("575.57.08", True), ("580.65.06", False), (NEW, False)]
)
def test_forced_compatibility_is_refused_for_a_driver_that_needs_none(driver: str, works: bool) -> None:
    forced = GpuLine("h20", "current", "525.60.13", forced=True, without_them="580")
    refusal = forced.refusal(driver)
    assert (refusal is None) is works
    assert ("error 803" in str(refusal)) is (driver in ("580.65.06", NEW))


def test_the_only_line_is_called_by_its_cuda_too() -> None:
    only = GpuLine("v100", "current", "525.60.13", cuda="12")
    assert cuda_line_choice.choose_line("v100", [only], LineRequest(line="cu12")).line == only


def test_a_line_without_code_for_the_gpu_is_refused_with_the_reason() -> None:
    only = GpuLine("v100", "current", "525.60.13", cuda="12", gpus=("v100",))
    for label, reason in {"cu13": ": no known torch release for CUDA 13 has code for v100", "cu99": ""}.items():
        with pytest.raises(UsageError) as caught:
            cuda_line_choice.choose_line("v100", [only], LineRequest(line=label))
        assert caught.value.message == f"v100 has no line {label}{reason}"


def test_a_line_without_a_known_minimum_supports_every_driver() -> None:
    assert GpuLine("h20", "current", None).refusal(OLD) is None
