"""`envbuild show` of a profile without a lock: its requests, and the command that locks it."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.support import PROFILE, envbuild, write_profile


def test_packages_without_a_lock_are_listed_as_asked_for(project: Path) -> None:
    write_profile(project, {**PROFILE, "packages": ["numpy", "einops>=0.8", "einops<2"]}, "mine")
    shown = envbuild("show", "mine").stdout
    assert "  numpy                any version              profiles/mine.yaml:" in shown
    assert "  einops               >=0.8,<2                 profiles/mine.yaml:" in shown
    assert "  lock: missing; next: envbuild lock mine\n" in shown


@pytest.mark.usefixtures("project")
def test_a_gpu_without_a_profile_names_the_command_that_writes_one() -> None:
    assert "  lock: missing; next: envbuild init h800\n" in envbuild("show", "h800").stdout


@pytest.mark.usefixtures("project")
def test_a_current_lock_has_no_next_command() -> None:
    shown = envbuild("show", "cpu").stdout
    assert "  lock: current " in shown
    assert "next:" not in shown and "any version" not in shown


def test_a_partial_profile_is_marked_and_names_what_it_does_not_have(project: Path) -> None:
    write_profile(project, {**PROFILE, "partial": ["alpha has only source on the index"]})
    shown = envbuild("show", "sample")
    assert "sample (partial): " in shown.stdout and "  partial: alpha has only source on the index\n" in shown.stdout
    assert envbuild("show", "sample", "--json").document["partial"] == ["alpha has only source on the index"]
    assert "\nsample (partial)  " in envbuild("show").stdout
    write_profile(project, PROFILE)
    assert "partial" not in envbuild("show", "sample").stdout
