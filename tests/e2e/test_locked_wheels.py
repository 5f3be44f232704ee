"""The directories of every shipped profile's wheels, as the configured index serves them: no engine is needed."""

from __future__ import annotations

import pytest

from envbuild.facts import database
from envbuild.fetch import wheel_resolution_and_download
from envbuild.fetch.locked_artifact_types import LockedWheel
from envbuild.lock import lock_file, wheel_conflicts
from envbuild.profile import profile_name_lookup
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util import user_folders


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for all: each wheel is asked for once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "listings"))


@pytest.mark.legitimate("every shipped profile", "installs its locked wheels together", "accepted")
@pytest.mark.parametrize("name", [name for name in profile_name_lookup.profile_names() if not name.endswith("-devel")])
def test_the_wheels_of_a_shipped_profile_go_together(name: str) -> None:
    locked = lock_file.required_lock(profile_reader_and_overrides.load(name))
    glibc = database.suites()[locked.suite].glibc if locked.suite else "2.28"
    for group in (locked.wheels, locked.compiled_with):
        look(group, locked.python, glibc)


def look(group: tuple[LockedWheel, ...], python: str, glibc: str) -> None:
    """Raises ProfileError for wheels that do not go together; a wheel that could not be looked at fails the test."""
    versions = {item.wheel.name: item.wheel.version for item in group}
    found = wheel_resolution_and_download.locate(versions, python, glibc, {item.wheel.sha256 for item in group})
    assert set(found) == {item.wheel for item in group}
    wheel_conflicts.refuse_offered(found, wheel_resolution_and_download.request_heads(found))
    noted = {file.stem for file in user_folders.cache_folder("listings").iterdir()}
    assert {item.wheel.sha256 for item in group} <= noted
