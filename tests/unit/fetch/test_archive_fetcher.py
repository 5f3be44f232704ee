"""Archives by sha256, fetched from a folder and from a small server of our own."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from urllib3.util.retry import Retry

from envbuild.fetch import archive_fetcher, index_config, sha256_file_store
from envbuild.fetch.archive_spec import COMPAT, TOOLKIT, Archive, ArchiveRequest
from envbuild.util import user_folders
from envbuild.util.errors import Fault, HashMismatch, NetworkError, ProfileError
from unit.conftest import forget
from unit.support import Index, quick_pip, serving, sha, write_tar

AT = Fault("", "profiles/sample.yaml", 7, "driver.compat")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip is not called, and downloads are repeated without pauses."""
    quick_pip(monkeypatch)
    monkeypatch.setattr(index_config, "Retry", lambda **options: Retry(**{**options, "backoff_factor": 0.0}))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Index]:
    (tmp_path / "served").mkdir()
    with serving(Index(tmp_path / "served")) as found:
        yield found


def address(served: Index, name: str) -> str:
    return f"http://127.0.0.1:{served.port}/files/{name}"


@pytest.fixture
def wanted(served: Index) -> ArchiveRequest:
    """An archive with the libraries of one driver, on a server."""
    file = served.folder / "compat.tar.gz"
    sha256 = write_tar(file, {"compat/libcuda.so.580.95.05": b"the driver's"})
    return ArchiveRequest(COMPAT, sha256, address(served, file.name), ">=580", AT)


def take(wanted: ArchiveRequest) -> Archive:
    return archive_fetcher.inspect_archive(wanted, lambda name, count: None)


def test_an_archive_is_fetched_once_and_looked_through(wanted: ArchiveRequest, served: Index) -> None:
    came: list[tuple[str, int]] = []
    size = (served.folder / "compat.tar.gz").stat().st_size
    found = archive_fetcher.inspect_archive(wanted, lambda name, count: came.append((name, count)))
    assert found == Archive("cuda-compat", "580.95.05", wanted.sha256, size)
    assert came == [("cuda-compat", size)]
    assert sha256_file_store.archive_store().holds(wanted.sha256, "cuda-compat")
    before = list(served.requests)
    assert take(replace(wanted, url="http://127.0.0.1:1/nowhere")) == found
    assert served.requests == before


def test_an_archive_may_lie_in_a_folder(wanted: ArchiveRequest, served: Index) -> None:
    assert take(replace(wanted, url=(served.folder / "compat.tar.gz").as_uri())).version == "580.95.05"


def test_a_sites_own_place_comes_first(wanted: ArchiveRequest, served: Index) -> None:
    (served.folder / "compat.tar.gz").rename(served.folder / f"{wanted.sha256}.tar")
    user_folders.config_file().parent.mkdir(parents=True)
    user_folders.config_file().write_text(f"archives: {address(served, '{sha256}.tar')}\n", encoding="utf-8")
    forget()
    for url in (None, "http://127.0.0.1:1/nowhere"):
        assert take(replace(wanted, url=url)).version == "580.95.05"


def test_another_file_is_refused_and_not_kept(wanted: ArchiveRequest, served: Index) -> None:
    spoiled = b"something else"
    served.spoil = {"compat.tar.gz": spoiled}
    with pytest.raises(HashMismatch) as caught:
        take(wanted)
    assert caught.value.code == 3
    assert "cuda-compat" in caught.value.message
    assert sha(spoiled.decode()) in caught.value.message and wanted.sha256 in caught.value.message
    assert "compat.tar.gz serves a different file than the one in profiles/sample.yaml:7" in str(caught.value.hint)
    assert list(sha256_file_store.archive_store().folder.iterdir()) == []


def test_a_stored_file_that_changed_is_not_blamed_on_the_profile(wanted: ArchiveRequest) -> None:
    take(wanted)
    file = sha256_file_store.archive_store().path(wanted.sha256, wanted.name)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(HashMismatch, match="cuda-compat was damaged on this disk"):
        take(wanted)
    assert take(wanted).version == "580.95.05"


@pytest.mark.parametrize(
    "url", ["{served}/files/nosuch", "http://127.0.0.1:1/x", "file:///nosuch/file", "file:///", "http://["]
)
def test_an_address_that_gives_nothing_is_an_error_of_the_network(
    wanted: ArchiveRequest, served: Index, url: str
) -> None:
    with pytest.raises(NetworkError) as caught:
        take(replace(wanted, url=url.replace("{served}", f"http://127.0.0.1:{served.port}")))
    assert caught.value.code == 7
    assert "cuda-compat" in caught.value.message
    assert not sha256_file_store.archive_store().holds(wanted.sha256, "cuda-compat")


def test_a_download_that_breaks_off_is_an_error_of_the_network(wanted: ArchiveRequest, served: Index) -> None:
    served.cut = {"compat.tar.gz": 1000}
    with pytest.raises(NetworkError):
        take(wanted)
    assert list(sha256_file_store.archive_store().folder.iterdir()) == []


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_a_download_that_does_not_end_is_stopped(
    wanted: ArchiveRequest, served: Index, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    size = (served.folder / "compat.tar.gz").stat().st_size
    if scheme == "file":
        wanted = replace(wanted, url=(served.folder / "compat.tar.gz").as_uri())
    monkeypatch.setattr(archive_fetcher, "_LARGEST", size - 1)
    with pytest.raises(HashMismatch, match=f"cuda-compat .* is longer than {size - 1} bytes"):
        take(wanted)
    assert list(sha256_file_store.archive_store().folder.iterdir()) == []
    monkeypatch.setattr(archive_fetcher, "_LARGEST", size)
    assert take(wanted).version == "580.95.05"


def test_an_archive_that_unpacks_for_ever_is_refused_at_its_line(
    wanted: ArchiveRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow").write_text("import time\ntime.sleep(60)\n", encoding="utf-8")
    monkeypatch.setattr(archive_fetcher, "UNPACKER", tmp_path / "slow")
    monkeypatch.setattr(archive_fetcher, "_LOOK_SECONDS", 0.1)
    with pytest.raises(ProfileError) as caught:
        take(wanted)
    assert caught.value.faults == (replace(AT, message="reading the archive takes longer than 0 s"),)


def test_without_any_address_it_says_where_one_goes(wanted: ArchiveRequest) -> None:
    with pytest.raises(NetworkError, match="no URL is known for cuda-compat") as caught:
        take(replace(wanted, url=None))
    assert "profiles/sample.yaml:7" in str(caught.value.hint)
    assert "config.yaml" in str(caught.value.hint)


def test_the_answer_of_a_server_is_reported_with_the_line_of_the_profile(wanted: ArchiveRequest, served: Index) -> None:
    with pytest.raises(NetworkError) as caught:
        take(replace(wanted, url=f"http://127.0.0.1:{served.port}/files/nosuch"))
    assert "cannot be fetched: 404" in caught.value.message
    assert caught.value.faults == (replace(AT, message="the archive is named here"),)


def test_a_password_in_an_address_is_not_shown(wanted: ArchiveRequest, served: Index) -> None:
    url = f"http://me:secret@127.0.0.1:{served.port}/files/nosuch?token=secret"
    with pytest.raises(NetworkError) as caught:
        take(replace(wanted, url=url))
    assert "secret" not in caught.value.message + str(caught.value.hint)
    served.spoil = {"compat.tar.gz": b"x"}
    with pytest.raises(HashMismatch) as other:
        take(replace(wanted, url=f"http://me:secret@127.0.0.1:{served.port}/files/compat.tar.gz"))
    assert "secret" not in other.value.message + str(other.value.hint)


@pytest.mark.parametrize(
    ("name", "fits", "message"),
    [
        (COMPAT, ">=590", "cuda-compat has version 580.95.05, but must match >=590"),
        (TOOLKIT, "==13.0.*", "cuda-toolkit has version 12.6.3, but must match ==13.0.*"),
    ],
)
def test_another_version_is_refused_at_its_line(
    wanted: ArchiveRequest, served: Index, name: str, fits: str, message: str
) -> None:
    members = {"libcuda.so.580.95.05": b"x", "bin/nvcc": b"x", "version.json": b'{"cuda": {"version": "12.6.3"}}'}
    sha256 = write_tar(served.folder / "a", members)
    with pytest.raises(ProfileError) as caught:
        take(ArchiveRequest(name, sha256, address(served, "a"), fits, AT))
    assert (caught.value.code, caught.value.faults) == (3, (replace(AT, message=message),))
    assert take(ArchiveRequest(name, sha256, address(served, "a"), "", AT)).version in message


def test_a_member_that_would_leave_is_refused_at_the_profiles_line(wanted: ArchiveRequest, served: Index) -> None:
    members: dict[str, Any] = {
        "libcuda.so.580.95.05": b"x",
        "evil": {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"},
    }
    sha256 = write_tar(served.folder / "a", members)
    with pytest.raises(ProfileError) as caught:
        take(replace(wanted, sha256=sha256, url=address(served, "a")))
    (fault,) = caught.value.faults
    assert (fault.file, fault.line, fault.field) == (AT.file, AT.line, AT.field)
    assert fault.message == "invalid archive for cuda-compat: 'evil' links to '/etc/passwd', outside the folder"
