"""Attacks by a package index on `scripts/torch_pins.py`, which reads metadata of wheels that no lock names."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.support import Index, quick_pip, serving

from envbuild.facts import database
from envbuild.fetch import torch_pin_comparison, wheel_resolution_and_download
from envbuild.fetch.locked_wheel_types import Wheel
from envbuild.util.errors import HashMismatch, NetworkError

WHEEL = Wheel("torch", "2.7.1", "torch-2.7.1-py3-none-any.whl", "0" * 64)
LONG = bytes(1 << 23)


def archive(*members: tuple[str, bytes]) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", zipfile.ZIP_DEFLATED) as made:
        for folder, content in members:
            made.writestr(f"{folder}.dist-info/METADATA", content)
    return raw.getvalue()


def claiming(directory: int, content: bytes) -> bytes:
    """Return an archive whose last bytes claim a directory of this size."""
    return content[:-10] + directory.to_bytes(4, "little") + content[-6:]


VALID = archive(("torch-2.7.1", b"Name: torch\nRequires-Dist: triton==3.3.1\n"))


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """An index that serves ranges. uv is not used, because uv reads the wheel itself."""
    quick_pip(monkeypatch)
    with serving(Index(tmp_path, ranges=True)) as found:
        address = f"http://127.0.0.1:{found.port}/files/{WHEEL.file}"
        monkeypatch.setattr(wheel_resolution_and_download, "locate", lambda *_: {WHEEL: address})
        yield found


def read(served: Index, content: bytes, metadata: bytes | None = None) -> list[torch_pin_comparison.Difference]:
    (served.folder / WHEEL.file).write_bytes(content)
    if metadata is not None:
        (served.folder / f"{WHEEL.file}.metadata").write_bytes(metadata)
    return torch_pin_comparison.pin_differences(database.torch_releases()["2.7.1"], pytest.fail)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(
            archive(("torch-2.7.1", LONG)),
            marks=pytest.mark.attack("index", "METADATA that unpacks to megabytes", "torch_pins.py: too long"),
        ),
        pytest.param(
            archive(("torch-2.7.1", b"Name: a"), ("torch-2.7.2", b"Name: b")),
            marks=pytest.mark.attack("index", "a wheel with two METADATA files", "torch_pins.py: invalid wheel"),
        ),
        pytest.param(
            archive(),
            marks=pytest.mark.attack("index", "a wheel without METADATA", "torch_pins.py: invalid wheel"),
        ),
        pytest.param(
            claiming((1 << 32) - 1, VALID),
            marks=pytest.mark.attack("index", "a zip directory of 4 GB", "torch_pins.py: invalid wheel"),
        ),
        pytest.param(
            b"no archive" * 9_000,
            marks=pytest.mark.attack("index", "a wheel that is not a zip archive", "torch_pins.py: invalid wheel"),
        ),
    ],
    ids=["long", "two", "none", "directory", "no archive"],
)
def test_an_invalid_wheel_is_refused(content: bytes, served: Index) -> None:
    with pytest.raises(NetworkError, match="invalid wheel from the index"):
        read(served, content)


@pytest.mark.attack("index", "a metadata file of megabytes", "torch_pins.py: longer than the limit, not read")
def test_a_long_metadata_file_is_refused(served: Index) -> None:
    with pytest.raises(HashMismatch, match="longer than"):
        read(served, VALID, LONG)


@pytest.mark.legitimate("index", "a wheel whose metadata file is missing", "torch_pins.py reads it by range requests")
def test_a_valid_wheel_is_read(served: Index) -> None:
    assert "triton" not in [difference.distribution for difference in read(served, VALID)]
