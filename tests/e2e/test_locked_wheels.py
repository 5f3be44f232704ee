"""The directories of every shipped profile's wheels, as the configured index serves them: no engine is needed."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest

from envbuild.facts import database
from envbuild.fetch import (
    file_download_and_range_reads,
    index_config,
    sha256_file_store,
    wheel_file_lists_and_clashes,
    wheel_resolution_and_download,
)
from envbuild.fetch.file_download_and_range_reads import RemoteFile
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.lock import lock_file, wheel_conflicts
from envbuild.lock.wheel_conflicts import OfferedListing
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.value_types import StartupFile
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util import user_folders


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache for all tests: each wheel is requested once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "listings"))


# Members that may run code when Python starts or torch is imported, and more: wheel_conflicts.py decides.
# a .pth file in a folder of a package is not read at start: it is often a model of torch
STARTUP = re.compile(
    rf"{wheel_file_lists_and_clashes.SITE}/[^/]*\.pth"
    r"|(.*/)?(entry_points\.txt|(site|user)customize[./].*|apport_python_hook[./].*)"
)
BROUGHT = {"setuptools": "distutils-precedence.pth"}
"""The only start-up files in the wheels of the shipped profiles, by distribution."""


@pytest.mark.legitimate("every shipped profile", "installs its locked wheels together", "accepted")
@pytest.mark.parametrize(
    "name", [name for name in profile_and_lock_name_lookup.profile_names() if not name.endswith("-devel")]
)
def test_the_wheels_of_a_shipped_profile_go_together(name: str) -> None:
    """Their start-up files are all known, too."""
    locked = lock_file.required_lock(profile_reader_and_overrides.load(name))
    glibc = database.suites()[locked.suite].glibc if locked.suite else "2.28"
    for group in (locked.wheels, locked.compiled_with):
        look(group, locked.python, glibc, locked.startup)


def look(group: tuple[LockedWheel, ...], python: str, glibc: str, accepted: Collection[StartupFile]) -> None:
    """Raises ProfileError or LockError for wheels that do not go together, and for unknown start-up files; a wheel that
    could not be looked at fails the test."""
    versions = {item.wheel.name: item.wheel.version for item in group}
    found = wheel_resolution_and_download.locate(versions, python, glibc, {item.wheel.sha256 for item in group})
    assert set(found) == {item.wheel for item in group}
    wheel_conflicts.check_offered(found)
    folder = user_folders.cache_folder("listings")
    noted = {wheel: sha256_file_store.noted(folder / f"{wheel.sha256}.json", OfferedListing) for wheel in found}
    offered = {wheel: known for wheel, known in noted.items() if known is not None}
    assert offered.keys() == found.keys()
    starting = {
        wheel: reduced(wheel, found[wheel], known.bytes)
        for wheel, known in offered.items()
        if any(map(STARTUP.fullmatch, known.listing.files))
    }
    wheel_conflicts.refuse_stored(
        (), accepted, {f"{wheel.name} {wheel.version}": file for wheel, file in starting.items()}
    )
    for wheel, file in starting.items():
        with zipfile.ZipFile(file) as archive:
            brought = {path for path in archive.namelist() if not path.endswith("/entry_points.txt")}
        assert brought <= {BROUGHT.get(wheel.name)}, wheel


def reduced(wheel: Wheel, address: str, size: int) -> Path:
    """Return a wheel of the same name with only the start-up members, read by range requests; kept for the other
    profiles."""
    file = user_folders.cache_folder("startup") / wheel.sha256 / wheel.file
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        session = index_config.index_session()
        with (
            file_download_and_range_reads.open_remote_file(session, RemoteFile(address, wheel.file), size) as stream,
            zipfile.ZipFile(stream) as whole,
            zipfile.ZipFile(file, "w") as kept,
        ):
            for info in whole.infolist():
                if STARTUP.fullmatch(wheel_file_lists_and_clashes.installed(info.filename, wheel.name)):
                    kept.writestr(info.filename, whole.read(info))
    return file
