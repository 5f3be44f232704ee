"""Temporary folders and files that do not outlive their process: gone at its end; where it was killed, the next one
that makes one in the same place sweeps.

Each is locked by its process. One that nobody holds is abandoned, or so young that its maker has not locked it yet:
that one then finds it gone, and makes another.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PREFIX = "envbuild-tmp-"


@contextlib.contextmanager
def folder(kind: str, inside: Path | None = None) -> Iterator[Path]:
    """A folder of its own, locked while it is in use; `kind` says in its name what it is for. `inside`: hidden in that
    folder, so that what it holds can be moved to a place there in one step; otherwise where temporary files go.
    """
    sweep(inside)
    prefix = f".{_PREFIX}{kind}-" if inside else f"{_PREFIX}{kind}-"
    while True:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=inside, ignore_cleanup_errors=True) as name:
            held = _open(Path(name))
            if held is None:
                continue
            try:
                yield Path(name)
                return
            finally:
                os.close(held)


@contextlib.contextmanager
def file(inside: Path) -> Iterator[tuple[BinaryIO, Path]]:
    """A hidden file, to be written and moved to its place in that folder; otherwise it is gone afterwards."""
    sweep(inside)
    while True:
        handle, name = tempfile.mkstemp(dir=inside, prefix=f".{_PREFIX}")
        path = Path(name)
        with os.fdopen(handle, "wb") as stream:
            if not _hold(handle, path):
                continue
            try:
                yield stream, path
                return
            finally:
                path.unlink(missing_ok=True)


def abandoned(inside: Path | None = None) -> Iterator[Path]:
    """Folders and files of this user whose process is gone; each is locked while it is looked at."""
    pattern = f".{_PREFIX}*" if inside else f"{_PREFIX}*"
    for path in sorted((inside or Path(tempfile.gettempdir())).glob(pattern)):
        with contextlib.suppress(OSError):  # somebody else is sweeping, or it is in use
            found = path.lstat()
            ours = stat.S_ISDIR(found.st_mode) or (inside is not None and stat.S_ISREG(found.st_mode))
            if ours and found.st_uid == os.getuid():
                with _claimed(path):
                    yield path


def sweep(inside: Path | None = None) -> None:
    """Remove what killed processes left."""
    for path in abandoned(inside):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _open(path: Path) -> int | None:
    """A folder that was just made, locked; None where a sweep took it for abandoned."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _hold(held, path):
        return held
    os.close(held)
    return None


def _hold(handle: int, path: Path) -> bool:
    """Lock it; the kernel lets go of it, however this process ends. Whether it is still there: a sweep that was faster
    has it locked until it is gone."""
    with contextlib.suppress(OSError):  # a file system without locks: nothing is swept there either
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Raises BlockingIOError where it is in use."""
    held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)
