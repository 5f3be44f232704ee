"""Availability of every wheel of a lock on the indexes: by the pages of the indexes, without the download of a
wheel."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.doctor import wheel_availability
from envbuild.doctor.check_result import Check
from envbuild.fetch import sha256_file_store
from envbuild.resolve import profile_reader_and_overrides
from unit.conftest import forget
from unit.support import Index, serving, serving_locked, write_wheel


@pytest.fixture
def served(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index with every wheel that the profile `sample` has locked."""
    with serving_locked(project, tmp_path / "served", monkeypatch) as found:
        yield found


def check() -> Check:
    forget()
    return wheel_availability.check_wheels(profile_reader_and_overrides.load("sample"), [])


def test_an_index_that_has_every_wheel(served: Index) -> None:
    assert check() == Check("wheels", "ok", "3 locked wheels to fetch: the configured indexes have them")
    assert served.requests and all(line.startswith("GET /simple/") for line in served.requests)


def test_a_missing_wheel_is_named(served: Index) -> None:
    (file,) = served.folder.glob("numpy*")
    file.unlink()
    found = check()
    assert (found.status, found.detail) == ("fail", f"no configured index has {file.name}")
    assert found.missing == (file.name,)
    assert "envbuild lock sample --upgrade NAME" in str(found.remedy)


def test_another_file_under_the_name_is_not_the_locked_one(served: Index) -> None:
    write_wheel(served.folder, "numpy", "1.0", content="# another\n")
    assert check().detail.startswith("no configured index has numpy-1.0")


def test_a_missing_build_of_the_cpu_names_pytorchs_index(
    served: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = served.folder.glob("torch*")
    (tmp_path / "pytorch").mkdir()
    file.rename(tmp_path / "pytorch" / file.name)
    found = check()
    assert found.status == "fail" and "--torch-index pytorch" in str(found.remedy)
    with serving(Index(tmp_path / "pytorch")) as mirror:
        monkeypatch.setenv("ENVBUILD_TORCH_INDEX", mirror.address)
        assert check().status == "ok"


def test_files_in_the_cache_are_not_requested(served: Index) -> None:
    for file in list(served.folder.iterdir()):
        sha256_file_store.wheel_store().put(file, sha256_file_store.file_digest(file), file.name)
    assert check().detail == "3 locked wheels: in the cache"
    assert served.requests == []


def test_where_no_index_answers_none_is_asked_for_each_wheel(served: Index) -> None:
    found = wheel_availability.check_wheels(
        profile_reader_and_overrides.load("sample"), [Check("index", "fail", "no answer")]
    )
    assert (found.status, served.requests) == ("skipped", [])
