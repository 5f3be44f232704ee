"""Free disk space of the folders that envbuild writes to, and the error for a full disk."""

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

from envbuild.util.errors import DiskError, EnvbuildError, SystemFault

_LOW = 64 << 20  # bytes: larger writes check the free space first
_DISK_FULL = re.compile(r"no space left on device|disk quota exceeded|os error (28|122)\b", re.IGNORECASE)
_HINT = "free some, then run the same command again: envbuild prune; docker buildx prune; docker image prune"


def is_disk_full(error: OSError) -> bool:
    """Whether a call failed because the disk or this user's quota is full. tempfile reports that only in its
    message."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or (
        error.errno == errno.ENOENT and "No usable temporary directory" in str(error.strerror)
    )


def lacked(output: str) -> bool:
    """Whether the output of a program or engine reports a full disk or quota."""
    return bool(_DISK_FULL.search(output))


def is_none(folder: Path) -> bool:
    """Whether the folder's disk has less than 1 MiB free. Some programs, such as apt, then continue as if they had
    written."""
    return shutil.disk_usage(_there(folder)).free < 1 << 20


def full(folders: Iterable[Path | None] = (), what: str = "the disk is full", hint: str = _HINT) -> DiskError:
    """The error for a full disk, with the free space. It lists those of `folders` that are nearly full, or all of them
    if none is (a quota is used up, or space was freed meanwhile). Default: all folders that envbuild writes to."""
    found = list(_apart([folder for folder in folders if folder] or written_folders()))
    low = [folder for folder in found if is_low(folder)]
    when = "" if low else ", or was a moment ago"
    return DiskError(f"{what}{when}: {'; '.join(map(free_space, low or found))}", hint=hint)


def written_folders() -> list[Path]:
    """The folders that envbuild writes to: the project, its own folders, temporary files, and stdout if it is a
    file."""
    own = [Path(platformdirs.user_cache_dir("envbuild")), Path(platformdirs.user_state_dir("envbuild"))]
    # gettempdir raises if no temporary folder has free space
    temporary = [Path(os.environ.get("TMPDIR") or "/tmp")]
    with contextlib.suppress(OSError):
        temporary = [Path(tempfile.gettempdir())]
    stdout = Path("/proc/self/fd/1").resolve()
    return [Path.cwd(), *own, *temporary, *([stdout.parent] if stdout.is_file() else [])]


def free_space(folder: Path) -> str:
    """The free space of the folder's file system: `/x: 1.2 of 8.0 GB free`."""
    usage = shutil.disk_usage(_there(folder))
    unit, size = ("GB", 1e9) if usage.total >= 1e9 else ("MB", 1e6)
    nodes = os.statvfs(_there(folder))
    none = ", and no file more can be made" if nodes.f_files and not nodes.f_favail else ""
    return f"{folder}: {usage.free / size:.1f} of {usage.total / size:.1f} {unit} free{none}"


def is_low(folder: Path) -> bool:
    """Whether the folder's disk is nearly full, in bytes or in inodes."""
    nodes = os.statvfs(_there(folder))
    return shutil.disk_usage(_there(folder)).free < _LOW or bool(nodes.f_files and not nodes.f_favail)


def _apart(folders: Iterable[Path]) -> Iterator[Path]:
    """The first folder of each file system."""
    seen: set[int] = set()
    for folder in folders:
        device = _there(folder).stat().st_dev
        if device not in seen:
            seen.add(device)
            yield folder


def _there(folder: Path) -> Path:
    """The folder, or its nearest existing parent."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def system_fault(error: OSError) -> EnvbuildError:
    """What a full disk, or a file that may not be written, is to a user: an error without a traceback."""
    if is_disk_full(error):
        return full([Path(error.filename).parent if isinstance(error.filename, str) else None])
    where = f"{error.filename}: " if error.filename else ""
    return SystemFault(f"{where}{error.strerror or error}")
