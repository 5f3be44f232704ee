"""Temporary folders and files that are removed when their process ends. If it was killed, the next process that creates
one in the same folder removes them.

Each is locked by its process. An unlocked one is abandoned, or so new that its process has not locked it yet. If a new
one is removed that way, its process creates another.
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
    """A new temporary folder, locked while it is in use; `kind` becomes part of its name. `inside`: create it hidden in
    that folder, so that its content can be moved within that folder in one step. Default: the system's temporary
    folder."""
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
    """A new hidden temporary file in a folder, to be written and renamed within it; otherwise it is removed
    afterwards."""
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
    """Temporary folders and files of this user whose process has ended. Each is locked while the caller handles it."""
    pattern = f".{_PREFIX}*" if inside else f"{_PREFIX}*"
    for path in sorted((inside or Path(tempfile.gettempdir())).glob(pattern)):
        with contextlib.suppress(OSError):  # another process is sweeping, or it is in use
            found = path.lstat()
            ours = stat.S_ISDIR(found.st_mode) or (inside is not None and stat.S_ISREG(found.st_mode))
            if ours and found.st_uid == os.getuid():
                with _claimed(path):
                    yield path


def sweep(inside: Path | None = None) -> None:
    """Remove temporary files and folders of killed processes."""
    for path in abandoned(inside):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _open(path: Path) -> int | None:
    """Lock a folder that was just created. None if a sweep removed it."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _hold(held, path):
        return held
    os.close(held)
    return None


def _hold(handle: int, path: Path) -> bool:
    """Lock it until this process ends. Returns whether it still exists: a sweep that came first holds the lock until it
    has removed it."""
    with contextlib.suppress(OSError):  # file systems without locks are never swept either
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Lock it exclusively. Raises BlockingIOError if it is in use."""
    held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)
