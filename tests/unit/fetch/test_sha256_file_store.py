from __future__ import annotations

import os
from pathlib import Path

import pytest

from envbuild.fetch import sha256_file_store
from envbuild.fetch.sha256_file_store import Store
from envbuild.util import atomic_files
from envbuild.util.errors import HashMismatch
from unit.support import sha


def put(found: Store, content: str, name: str, digest: str | None = None) -> Path:
    with found.incoming() as folder:
        file = folder / "download"
        file.write_text(content, encoding="utf-8")
        return found.put(file, digest or sha(content), name)


def test_a_file_is_kept_by_its_hash_and_name(tmp_path: Path) -> None:
    found = Store(tmp_path / "wheels")
    path = put(found, "content", "a.whl")
    assert path == found.path(sha("content"), "a.whl") == tmp_path / "wheels" / sha("content") / "a.whl"
    assert path.read_text(encoding="utf-8") == "content"
    assert found.holds(sha("content"), "a.whl")
    assert not found.holds(sha("content"), "b.whl")
    assert not found.holds(sha("other"), "a.whl")


def test_another_file_is_refused_by_name_and_nothing_stays(tmp_path: Path) -> None:
    found = Store(tmp_path)
    with pytest.raises(HashMismatch, match=r"a\.whl is not the file that was locked") as caught:
        put(found, "spoiled", "a.whl", sha("content"))
    assert sha("spoiled") in caught.value.message
    assert sha("content") in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_a_rewritten_file_keeps_its_permissions(tmp_path: Path) -> None:
    file, new = tmp_path / "README.md", tmp_path / "new"
    file.write_text("mine", encoding="utf-8")
    file.chmod(0o600)
    atomic_files.write_atomically(file, "content")
    atomic_files.write_atomically(new, "content")
    assert [path.stat().st_mode & 0o777 for path in (file, new)] == [0o600, 0o644]


def test_an_interrupted_download_leaves_nothing(tmp_path: Path) -> None:
    found = Store(tmp_path)
    with pytest.raises(KeyboardInterrupt), found.incoming() as folder:
        (folder / "half").write_text("x", encoding="utf-8")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_folder_under_a_files_name_is_not_the_file(tmp_path: Path) -> None:
    found = Store(tmp_path)
    found.path(sha("x"), "a.whl").mkdir(parents=True)
    assert not found.holds(sha("x"), "a.whl")


def test_bytes_are_written_and_links_stay(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("a.bin")
    atomic_files.write_atomically(tmp_path / "link", b"\xff")
    assert (tmp_path / "a.bin").read_bytes() == b"\xff"
    assert (tmp_path / "link").is_symlink()


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    atomic_files.write_atomically(tmp_path / "pipe", "text")
    assert os.read(reader, 10) == b"text"
    assert (tmp_path / "pipe").is_fifo()
    os.close(reader)


def test_writing_replaces_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "new" / "a.txt"
    atomic_files.write_atomically(file, "old, and longer")
    atomic_files.write_atomically(file, "new")
    assert file.read_text(encoding="utf-8") == "new"
    assert file.stat().st_mode & 0o777 == 0o644
    assert [found.name for found in file.parent.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    file = tmp_path / "a.txt"
    atomic_files.write_atomically(file, "old")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(*((os, "fsync", fail) if failing == "fsync" else (Path, "replace", fail)))
    with pytest.raises(KeyboardInterrupt):
        atomic_files.write_atomically(file, "new")
    assert file.read_text(encoding="utf-8") == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["a.txt"]


def test_text_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    atomic_files.write_atomically(file, "old")
    with pytest.raises(UnicodeEncodeError):
        atomic_files.write_atomically(file, "\ud800")
    assert file.read_text(encoding="utf-8") == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["a.txt"]


def test_digests(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"content")
    assert sha256_file_store.file_digest(file) == sha("content")
