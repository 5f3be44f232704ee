"""The oldest driver that an image runs on: the newest minimum of torch's CUDA, the profile and the GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envbuild.doctor import profile_hardware_needs
from envbuild.resolve import minimum_driver, profile_reader_and_overrides, torch_compatibility_and_advisories
from envbuild.util.errors import ProfileError
from unit.support import profile_of

CUDA12 = {"base": {"bootstrap": "bookworm"}, "python": "3.11", "torch": "2.9.1", "gpus": ["h200"]}
COMPAT = {"compat": {"sha256": "0" * 64, "url": "https://mirror.example/compat.tar"}}


@pytest.mark.parametrize(
    ("changes", "oldest"),
    [
        ({}, "525.60.13"),
        ({"driver": {"minimum": "550.54.14"}}, "550.54.14"),
        ({"driver": {"minimum": "470.57.02"}}, "525.60.13"),
        ({"gpus": ["rtx5090"]}, "570"),
        ({"gpus": ["rtx5090"], "driver": {"minimum": "550.54.14"}}, "570"),
        ({"driver": COMPAT}, "450.80.02"),
        ({"driver": {"minimum": "470.57.02", **COMPAT}}, "470.57.02"),
        ({"gpus": ["b200"], "driver": COMPAT}, "570"),
        ({"gpus": [], "torch": "2.9.1+cpu"}, None),
    ],
)
def test_the_newest_floor_counts_for_all_who_ask(project: Path, changes: dict[str, Any], oldest: str | None) -> None:
    loaded = profile_of(project, {**CUDA12, **changes})
    assert minimum_driver.oldest(loaded.profile) == oldest
    assert torch_compatibility_and_advisories.choose_stack(loaded).driver == oldest
    assert profile_hardware_needs.needs_of(loaded).driver == oldest


def test_compatibility_libraries_do_not_make_every_driver_new_enough(project: Path) -> None:
    need = profile_hardware_needs.needs_of(profile_of(project, {**CUDA12, "driver": COMPAT}))
    assert need.runs_on("470.57.02")
    assert not need.runs_on("390.1")


def test_a_driver_is_kept_as_nvidia_writes_it() -> None:
    assert minimum_driver.oldest(profile_reader_and_overrides.load("h200").profile) == "580.65.06"


@pytest.mark.parametrize("text", ["", "v580", "580.", "580.65.06+x", "1.2.3.4.5"])
def test_an_invalid_driver_version_is_refused(project: Path, text: str) -> None:
    with pytest.raises(ProfileError):
        profile_of(project, {**CUDA12, "driver": {"minimum": text}})
