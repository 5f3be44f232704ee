"""Reads the free disk space of the folders to which envbuild writes, and makes the error for a full disk."""

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

_LOW = 64 << 20  # bytes; a disk with less free space counts as nearly full
_DISK_FULL = re.compile(r"no space left on device|disk quota exceeded|os error (28|122)\b", re.IGNORECASE)
_HINT = "free disk space (envbuild prune; docker buildx prune; docker image prune), then run the same command again"


def is_disk_full(error: OSError) -> bool:
    """Whether a call failed because the disk is full or the user's quota is used up. tempfile reports a full disk with
    the error number of a missing file, so its error is recognised by its message."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or (
        error.errno == errno.ENOENT and "No usable temporary directory" in str(error.strerror)
    )


def lacked(output: str) -> bool:
    """Whether the output of a program or of the engine reports a full disk or a used-up quota."""
    return bool(_DISK_FULL.search(output))


def require_free(folder: Path, needed: int, what: str) -> None:
    """Raise DiskError if the folder's disk has less than `needed` bytes free. `what`: what needs them."""
    available = shutil.disk_usage(folder).free
    if available < needed:
        raise DiskError(
            f"{what} needs about {needed / 1e9:.1f} GB in {folder}, {available / 1e9:.1f} GB are free",
            hint="free space: envbuild prune; docker buildx prune; docker image prune",
        )


def is_none(folder: Path) -> bool:
    """Whether the folder's disk has less than 1 MiB free. On such a disk, some programs, such as apt, do not report
    that they could not write."""
    return shutil.disk_usage(_there(folder)).free < 1 << 20


def full(folders: Iterable[Path | None] = (), what: str = "the disk is full", hint: str = _HINT) -> DiskError:
    """The error for a full disk, with the free space of folders, one for each disk. The error lists those of `folders`
    whose disk is nearly full. If no disk is nearly full (a quota is used up, or space was freed meanwhile), the error
    lists one folder of every disk. `folders` defaults to all folders to which envbuild writes."""
    found = list(_apart([folder for folder in folders if folder] or written_folders()))
    low = [folder for folder in found if is_low(folder)]
    when = "" if low else ", or was a moment ago"
    return DiskError(f"{what}{when}: {'; '.join(map(free_space, low or found))}", hint=hint)


def written_folders() -> list[Path]:
    """The folders to which envbuild writes: the working folder, the user's cache and state folders, the folder for
    temporary files, and the folder of stdout if stdout is a file."""
    own = [Path(platformdirs.user_cache_dir("envbuild")), Path(platformdirs.user_state_dir("envbuild"))]
    # gettempdir raises OSError if no temporary folder has free space
    temporary = [Path(os.environ.get("TMPDIR") or "/tmp")]
    with contextlib.suppress(OSError):
        temporary = [Path(tempfile.gettempdir())]
    stdout = Path("/proc/self/fd/1").resolve()
    return [Path.cwd(), *own, *temporary, *([stdout.parent] if stdout.is_file() else [])]


def free_space(folder: Path) -> str:
    """The free space of the folder's file system as text: `/x: 1.2 of 8.0 GB free`."""
    usage = shutil.disk_usage(_there(folder))
    unit, size = ("GB", 1e9) if usage.total >= 1e9 else ("MB", 1e6)
    nodes = os.statvfs(_there(folder))
    none = ", and no inode is free" if nodes.f_files and not nodes.f_favail else ""
    return f"{folder}: {usage.free / size:.1f} of {usage.total / size:.1f} {unit} free{none}"


def is_low(folder: Path) -> bool:
    """Whether the folder's disk has little free space or no free inode."""
    nodes = os.statvfs(_there(folder))
    return shutil.disk_usage(_there(folder)).free < _LOW or bool(nodes.f_files and not nodes.f_favail)


def _apart(folders: Iterable[Path]) -> Iterator[Path]:
    """The first of the folders on each file system."""
    seen: set[int] = set()
    for folder in folders:
        device = _there(folder).stat().st_dev
        if device not in seen:
            seen.add(device)
            yield folder


def _there(folder: Path) -> Path:
    """The folder itself, or its nearest existing parent folder."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def system_fault(error: OSError) -> EnvbuildError:
    """Convert an OSError, such as a full disk or a missing permission, to an error that is shown without a
    traceback."""
    if is_disk_full(error):
        return full([Path(error.filename).parent if isinstance(error.filename, str) else None])
    where = f"{error.filename}: " if error.filename else ""
    return SystemFault(f"{where}{error.strerror or error}")
