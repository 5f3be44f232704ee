"""The pins of a torch release are read from small wheels on a local index."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envbuild.facts import database
from envbuild.facts.database import TorchRelease
from envbuild.fetch import (
    file_download_and_range_reads,
    index_config,
    sha256_file_store,
    torch_pin_comparison,
    wheel_file_lists_and_clashes,
)
from envbuild.fetch.file_download_and_range_reads import RemoteFile
from envbuild.util.errors import NetworkError
from unit.support import Index, quick_pip, serving, write_wheel

VERSION = "2.7.1"
PINS = ["nvidia-cublas-cu12==12.6.4.1; platform_system == 'Linux'", "triton==3.3.1", "sympy>=1.13.3"]
DIFFERENT = [torch_pin_comparison.Difference(VERSION, "nvidia-cublas-cu12", "==12.6.4.2", "==12.6.4.1")]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index whose only torch has a wheel of more than one range request."""
    quick_pip(monkeypatch)
    write_wheel(tmp_path / "served", "torch", VERSION, PINS, content="#" * 300_000)
    with serving(Index(tmp_path / "served", ranges=True)) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


@pytest.fixture
def release() -> TorchRelease:
    known = database.torch_releases()[VERSION]
    return dataclasses.replace(known, pins={"nvidia-cublas-cu12": "==12.6.4.2", "triton": "==3.3.1"})


def wheel_file(served: Index) -> Path:
    (file,) = served.folder.glob("*.whl")
    return file


def fetched() -> list[str]:
    return [file.name for file in sha256_file_store.wheel_store().folder.rglob("*.whl")]


def test_metadata_is_read_from_within_the_wheel_by_range_requests(served: Index, release: TorchRelease) -> None:
    notes: list[str] = []
    assert torch_pin_comparison.pin_differences(release, notes.append) == DIFFERENT
    assert (notes, fetched()) == ([], [])


def test_without_ranges_the_wheel_is_fetched_into_the_store(served: Index, release: TorchRelease) -> None:
    served.ranges = False
    notes: list[str] = []
    assert torch_pin_comparison.pin_differences(release, notes.append) == DIFFERENT
    assert len(notes) == 1 and "serves no ranges: downloading torch-2.7.1-py3-none-any.whl" in notes[0]
    assert fetched() == [wheel_file(served).name]


def test_a_metadata_file_is_read_where_the_index_has_one(served: Index, release: TorchRelease) -> None:
    text = "Metadata-Version: 2.1\nRequires-Dist: nvidia-cublas-cu12==12.6.4.2\nRequires-Dist: triton==3.3.1\n"
    (served.folder / f"{wheel_file(served).name}.metadata").write_text(text, encoding="utf-8")
    assert torch_pin_comparison.pin_differences(release, pytest.fail) == []


def test_an_index_that_wants_credentials_gets_them(
    served: Index, release: TorchRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.user, served.password = "me", "secret"
    monkeypatch.setenv("PIP_INDEX_URL", served.with_credentials())
    assert torch_pin_comparison.pin_differences(release, pytest.fail) == DIFFERENT


def test_a_wheel_in_a_folder_is_read_there(
    served: Index, release: TorchRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(served.folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert torch_pin_comparison.pin_differences(release, pytest.fail) == DIFFERENT


def test_the_script_compares_a_release_without_a_metadata_file(served: Index) -> None:
    script = Path(__file__).parents[3] / "scripts" / "torch_pins.py"
    command = [sys.executable, str(script), "--release", VERSION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"torch {VERSION}: nvidia-cublas-cu12:" not in done.stdout
    assert f"torch {VERSION}: nvidia-cudnn-cu12: facts" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("1 releases read, ")


def test_only_the_directory_and_the_metadata_are_fetched(served: Index) -> None:
    file = wheel_file(served)
    address = f"http://127.0.0.1:{served.port}/files/{file.name}"
    with file_download_and_range_reads.open_remote_file(
        index_config.index_session(), RemoteFile(address, file.name), file.stat().st_size
    ) as stream:
        assert zipfile.ZipFile(stream).namelist()[1] == f"torch-{VERSION}.dist-info/METADATA"
        assert len(served.requests) == 1
        stream.seek(100_000)
        assert stream.read(10) == file.read_bytes()[100_000:100_010]
        assert stream.read() == file.read_bytes()[100_010:]


def test_a_part_is_bounded(served: Index) -> None:
    """The size of the directory is stated in the last bytes of an archive, so it is not trusted."""
    address = f"http://127.0.0.1:{served.port}/files/{wheel_file(served).name}"
    with (
        file_download_and_range_reads.open_remote_file(
            index_config.index_session(), RemoteFile(address, "torch"), 1 << 40
        ) as stream,
        pytest.raises(NetworkError, match="one part of it claims"),
    ):
        stream.read((1 << 26) + 1)
    assert served.requests == []


def test_a_part_that_is_cut_off_is_an_error_of_the_network(served: Index) -> None:
    """zipfile would report an OSError as an invalid archive, that is, as the wheel's fault."""
    file = wheel_file(served)
    served.cut[file.name] = 9
    address = f"http://127.0.0.1:{served.port}/files/{file.name}"
    with (
        file_download_and_range_reads.open_remote_file(
            index_config.index_session(), RemoteFile(address, file.name), file.stat().st_size
        ) as stream,
        pytest.raises(NetworkError, match=r"torch-2\.7\.1-py3-none-any\.whl cannot be fetched: "),
    ):
        wheel_file_lists_and_clashes.read(stream, file.name)
