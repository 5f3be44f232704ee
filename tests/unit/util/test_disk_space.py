"""The message about a full disk names the disk and its free space; if no disk is known to be full, the message lists
all disks."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Mapping
from pathlib import Path

import pytest

from envbuild.util import disk_space
from unit.support import envbuild

Usage = namedtuple("Usage", "total used free")


class Disks:
    """File systems by folder, with their free space; all others have plenty."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: Mapping[Path, int], files: int = 9) -> None:
        self.free = free
        self._statvfs = os.statvfs
        self._files = files
        monkeypatch.setattr(shutil, "disk_usage", self.usage)
        monkeypatch.setattr(os, "statvfs", self.statvfs)
        monkeypatch.setattr(disk_space, "_apart", lambda folders: dict.fromkeys(folders))

    def usage(self, folder: Path) -> Usage:
        free = self.free.get(Path(folder), 5 * 10**9)
        return Usage(8 * 10**9, 8 * 10**9 - free, free)

    def statvfs(self, folder: Path) -> os.statvfs_result:
        found = list(self._statvfs(folder))
        found[5], found[7] = 100, self._files  # f_files, f_favail
        return os.statvfs_result(found)


def test_the_full_one_of_several_is_named_with_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    b.mkdir()
    Disks(monkeypatch, {a: 3 * 10**9, b: 100_000})
    error = disk_space.full([a, None, b], "the disk is full here")
    assert error.message == f"the disk is full here: {b}: 0.0 of 8.0 GB free"
    assert (error.code, error.kind) == (6, "disk") and error.hint and "envbuild prune" in error.hint


def test_where_none_is_full_any_longer_all_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disks(monkeypatch, {})
    assert (
        disk_space.full([tmp_path]).message == f"the disk is full, or was a moment ago: {tmp_path}: 5.0 of 8.0 GB free"
    )


def test_a_disk_without_inodes_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disks(monkeypatch, {}, files=0)
    assert disk_space.full([tmp_path]).message.endswith("5.0 of 8.0 GB free, and no inode is free")


def test_without_folders_all_are_asked_that_are_written_to(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_space, "_apart", lambda folders: dict.fromkeys(folders))
    message = disk_space.full().message
    for folder in (project, *(Path(os.environ[f"XDG_{kind}_HOME"]) / "envbuild" for kind in ("CACHE", "STATE"))):
        assert f"{folder}: " in message  # also folders that do not exist yet


def test_one_file_system_is_named_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert disk_space.full([tmp_path, tmp_path / "a", tmp_path / "absent"]).message.count("free") == 1


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
    ],
)
def test_which_errors_are_a_full_disk(error: OSError, full: bool) -> None:
    assert disk_space.is_disk_full(error) is full


@pytest.mark.parametrize(
    ("output", "full"),
    [
        ("ERROR: write /var/lib/x: no space left on device", True),
        ("error: Failed to write to the cache: No space left on device (os error 28)", True),
        ("cp: error writing '/x': Disk quota exceeded", True),
        ("exit code: 28", False),
    ],
)
def test_which_words_are_a_full_disk(output: str, full: bool) -> None:
    assert disk_space.lacked(output) is full


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [("show",), ("show", "--json"), ("--help",), ("export", "schema")])
def test_output_that_cannot_be_written_causes_no_traceback(project: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-m", "envbuild", *arguments], stdout=full, stderr=subprocess.PIPE)
    stderr = done.stderr.decode()
    assert done.returncode == 6
    assert stderr.startswith("error: the disk is full") and "free" in stderr and "Traceback" not in stderr


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="this system has no /dev/full")
def test_an_error_that_cannot_be_printed_keeps_its_exit_code(project: Path) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "envbuild", "show", "absent", "--json"]
        assert subprocess.run(command, stdout=full, stderr=full).returncode == envbuild("show", "absent").code != 0
