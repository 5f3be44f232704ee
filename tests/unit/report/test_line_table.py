"""The page of all GPUs and lines, and what holds for every shipped line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from envbuild.facts import database
from envbuild.lock import lock_file
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.value_types import PLATFORM
from envbuild.resolve import cuda_line_choice, cuda_line_lookup, plan_resolver, profile_reader_and_overrides
from envbuild.resolve.cuda_line_choice import LineRequest
from unit.support import envbuild, write_profile

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


SUPPORTED = [gpu.id for gpu in database.gpus().values() if database.unsupported(gpu.id, PLATFORM) is None]
UNWRITTEN = [gpu for gpu in SUPPORTED if gpu not in profile_and_lock_name_lookup.profile_names()]


@pytest.mark.parametrize("gpu", SUPPORTED)
def test_each_supported_gpu_is_in_a_table_with_versions(gpu: str) -> None:
    text = line_table.PAGE.read_text(encoding="utf-8")
    parts = [
        part for part in re.split("^##+ ", text, flags=re.MULTILINE) if re.search(rf"(?<![\w-]){gpu}(?![\w-])", part)
    ]
    assert any(re.search(r"\| 12\.6 \||\| 13\.0 \|", part) for part in parts)


def test_the_only_line_of_the_v100_is_called_cu12() -> None:
    lines = line_table.PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith("| v100 |")]
    assert row.startswith("| v100 | cu12 (CUDA 12) | v100 |")
    assert any(
        line.startswith("| b200 and the GPUs with its pins | cu12 (CUDA 12) | torch 2.7.1 has no") for line in lines
    )


@pytest.mark.slow
@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("gpu", UNWRITTEN)
def test_each_line_of_a_gpu_without_a_profile_has_the_torch_of_the_line_it_extends(gpu: str) -> None:
    for line in cuda_line_lookup.gpu_lines(gpu):
        loaded = profile_reader_and_overrides.unwritten(line.profile)
        parent = profile_reader_and_overrides.load(str(loaded.parent))
        assert plan_resolver.resolve(loaded).core == plan_resolver.resolve(parent).core
        assert list(loaded.profile.gpus) == [gpu]


WITHOUT_FP8 = [gpu for gpu in SUPPORTED if "fp8" not in database.gpus()[gpu].features]
BY_USE = {  # for each current line that has any: the uses for which an advisory warns about it or refuses it
    **{gpu: {("features: [fp8]", "cudnn-9.24-fp8-splitkv")} for gpu in ("b200", "b300")},
    **{gpu: {("features: [fp8]", "fp8-scaled-mm-cc")} for gpu in WITHOUT_FP8},
}


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    "gpu", [pytest.param(gpu, marks=[pytest.mark.slow] if gpu in UNWRITTEN else []) for gpu in SUPPORTED]
)
def test_no_advisory_warns_of_a_current_line(gpu: str) -> None:
    """Advisories that need a use which the profile does not state are excepted, but only those in BY_USE."""
    try:
        loaded = profile_reader_and_overrides.load(gpu)
    except profile_and_lock_name_lookup.UnwrittenProfile as missing:
        loaded = profile_reader_and_overrides.unwritten(missing.name)
    plan = plan_resolver.resolve(loaded)
    assert not [item.advisory.id for item in plan.choice.advice if item.state == "warned"]
    lock = lock_file.read(loaded.known_lock) or lock_file.required_lock(
        profile_reader_and_overrides.load(str(loaded.parent))
    )
    situation = plan_resolver.as_locked(plan, lock.versions).situation
    found = {(use, advisory.id) for use, advisory in line_table.advisories_by_use(situation)}
    assert found == BY_USE.get(gpu, set())


@pytest.mark.parametrize(
    ("data", "advisory"),
    [
        ({"extends": "b200", "features": ["fp8"]}, "cudnn-9.24-fp8-splitkv"),
        ({"extends": "rtx4090-cu12", "gpu_count": 2}, "nccl-4090-p2p"),
    ],
)
def test_an_advisory_about_a_use_is_on_the_page_and_in_show_if_the_profile_states_the_use(
    data: dict[str, Any], advisory: str, project: Path
) -> None:
    rows = [
        row for row in line_table.PAGE.read_text(encoding="utf-8").splitlines() if row.startswith(f"| {advisory} |")
    ]
    assert len(rows) == 1 and f" {data['extends']}," in rows[0]
    assert advisory not in envbuild("show", data["extends"]).stdout
    write_profile(project, data, "own")
    assert f"  warned: {advisory}: " in envbuild("show", "own").stdout
