"""How much room the disks have that envbuild writes to, and what is said where one has none."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import platformdirs

from envbuild.util.errors import DiskError

_LOW = 64 << 20  # bytes: a write of ours is larger than that only where room was asked for before
_SAID = re.compile(r"no space left on device|disk quota exceeded|os error (28|122)\b", re.IGNORECASE)
_HINT = "free some, then run the same command again: envbuild prune; docker buildx prune; docker image prune"


def is_disk_full(error: OSError) -> bool:
    """Whether a call failed because a disk, or this user's quota of it, is full; tempfile says so in words alone."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or (
        error.errno == errno.ENOENT and "No usable temporary directory" in str(error.strerror)
    )


def lacked(said: str) -> bool:
    """The same of what a program or an engine said."""
    return bool(_SAID.search(said))


def is_none(folder: Path) -> bool:
    """Whether a folder's disk has not even a MiB: some programs, apt for one, go on as if they had written."""
    return shutil.disk_usage(_there(folder)).free < 1 << 20


def full(folders: Iterable[Path | None] = (), what: str = "the disk is full", hint: str = _HINT) -> DiskError:
    """The error to raise, with figures: of those `folders` that have hardly any room, or of all where none is low (a
    quota is used up, or room was made meanwhile). Without any, of all folders that envbuild writes to."""
    found = list(_apart([folder for folder in folders if folder] or written_folders()))
    low = [folder for folder in found if is_low(folder)]
    when = "" if low else ", or was a moment ago"
    return DiskError(f"{what}{when}: {'; '.join(map(free_space, low or found))}", hint=hint)


def written_folders() -> list[Path]:
    """Where envbuild writes here: the project, its own folders, temporary files, and stdout if that is a file."""
    own = [Path(platformdirs.user_cache_dir("envbuild")), Path(platformdirs.user_state_dir("envbuild"))]
    # gettempdir raises where no place for temporary files has room
    temporary = [Path(os.environ.get("TMPDIR") or "/tmp")]
    with contextlib.suppress(OSError):
        temporary = [Path(tempfile.gettempdir())]
    stdout = Path("/proc/self/fd/1").resolve()
    return [Path.cwd(), *own, *temporary, *([stdout.parent] if stdout.is_file() else [])]


def free_space(folder: Path) -> str:
    """`/x: 1.2 of 8.0 GB free`, of the file system that the folder is on."""
    usage = shutil.disk_usage(_there(folder))
    unit, size = ("GB", 1e9) if usage.total >= 1e9 else ("MB", 1e6)
    nodes = os.statvfs(_there(folder))
    none = ", and no file more can be made" if nodes.f_files and not nodes.f_favail else ""
    return f"{folder}: {usage.free / size:.1f} of {usage.total / size:.1f} {unit} free{none}"


def is_low(folder: Path) -> bool:
    """Whether a folder's disk has next to nothing free, for bytes or for files."""
    nodes = os.statvfs(_there(folder))
    return shutil.disk_usage(_there(folder)).free < _LOW or bool(nodes.f_files and not nodes.f_favail)


def _apart(folders: Iterable[Path]) -> Iterator[Path]:
    """One of each file system, the first that is named."""
    seen: set[int] = set()
    for folder in folders:
        device = _there(folder).stat().st_dev
        if device not in seen:
            seen.add(device)
            yield folder


def _there(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())
