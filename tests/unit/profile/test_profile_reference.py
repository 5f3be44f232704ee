"""docs/profile-format.md matches the schema of profiles."""

from __future__ import annotations

from envbuild.profile import model as profile_model

from . import profile_reference


def test_the_page_is_that_of_this_schema() -> None:
    page = profile_reference.PAGE.read_text(encoding="utf-8")
    assert page == profile_reference.page(), "cd tests && python -m unit.profile.profile_reference"


def test_every_key_has_a_meaning() -> None:
    lines = [line for line in profile_reference.page().splitlines() if line.startswith("| `")]
    assert len(lines) > len(profile_model.Profile.model_fields)
    assert [line for line in lines if line.endswith("|  |")] == []
