"""Temporary folders and files that are removed when their process ends. If the process was killed, the next process
that creates a temporary file or folder in the same place removes them.

A process locks each temporary file and folder that it creates. If such a file or folder is not locked, its process has
ended, or has not locked it yet. In the second case another process may remove it; then the first process creates it
again.
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
    """Create a temporary folder, and keep it locked while it is in use. `kind`: becomes part of the name. `inside`:
    create a hidden folder in this folder, so that a rename can move its content to its final place; default: the
    system's temporary folder."""
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
    """Create a hidden temporary file in the folder `inside`, to be written and then renamed. It is removed if it was
    not renamed."""
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
    """Yield this user's temporary folders and files if the process that created them has ended; without `inside`, only
    folders. Each is locked while the caller handles it."""
    pattern = f".{_PREFIX}*" if inside else f"{_PREFIX}*"
    for path in sorted((inside or Path(tempfile.gettempdir())).glob(pattern)):
        with contextlib.suppress(OSError):  # it is in use, or another process is removing it
            found = path.lstat()
            ours = stat.S_ISDIR(found.st_mode) or (inside is not None and stat.S_ISREG(found.st_mode))
            if ours and found.st_uid == os.getuid():
                with _claimed(path):
                    yield path


def sweep(inside: Path | None = None) -> None:
    """Remove the temporary files and folders of processes that have ended."""
    for path in abandoned(inside):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _open(path: Path) -> int | None:
    """Lock a folder that was just created. Return None if another process removed it with `sweep`."""
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    if _hold(held, path):
        return held
    os.close(held)
    return None


def _hold(handle: int, path: Path) -> bool:
    """Lock a new file or folder until `handle` is closed. Return whether it still exists: if a `sweep` locked it first,
    this call waits until the sweep has removed it."""
    with contextlib.suppress(OSError):  # on file systems without locks, `sweep` removes nothing
        fcntl.flock(handle, fcntl.LOCK_SH)
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[None]:
    """Lock a file or folder exclusively. Raises BlockingIOError if it is in use."""
    held = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(held)
