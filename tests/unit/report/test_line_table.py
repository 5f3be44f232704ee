"""The page of all GPUs and lines, and what holds for every shipped line."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from envbuild.profile import profile_and_lock_name_lookup
from envbuild.resolve import cuda_line_choice, cuda_line_lookup, plan_resolver, profile_reader_and_overrides
from envbuild.resolve.cuda_line_choice import LineRequest

from . import line_table

LINES = line_table.shipped_lines()


def test_the_page_is_that_of_these_profiles(project: Path) -> None:
    assert line_table.PAGE.read_text(encoding="utf-8") == line_table.page(), (
        "cd tests && python -m unit.report.line_table"
    )


def test_there_are_lines() -> None:
    assert {"h20-cu12", "h100-cu12", "h200-cu12", "a100-cu12"} <= set(LINES)


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("name", LINES)
def test_a_line_serves_older_drivers_than_the_current_one(name: str) -> None:
    found = profile_and_lock_name_lookup.named_line(name)
    assert found is not None
    base, label = found
    current, line = (profile_reader_and_overrides.load(one).profile for one in (base, name))
    assert line.gpus == current.gpus and str(line.cuda).startswith(f"{label.removeprefix('cu')}.")
    assert Version(str(current.cuda)) > Version(str(line.cuda))
    lines = cuda_line_lookup.gpu_lines(base)
    for driver, profile in (("550.54.14", name), ("580.65.06", base)):
        assert cuda_line_choice.choose_line(base, lines, LineRequest(driver=driver)).line.profile == profile


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("name", LINES)
def test_no_advisory_warns_of_a_current_line(name: str) -> None:
    base = str(profile_and_lock_name_lookup.named_line(name)).split("'")[1]
    plan = plan_resolver.resolve(profile_reader_and_overrides.load(base))
    warned = [item.advisory.id for item in plan.choice.advice if item.state == "warned"]
    assert not warned
