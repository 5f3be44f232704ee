"""A temporary folder that is locked while it is used, so that a later run removes what a killed one left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_YOUNG = 60.0  # seconds; a folder exists for a moment before it is locked


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder with this prefix, locked as long as this process or a process forked from it exists.

    Unlocked folders with this prefix that earlier processes left behind are removed.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _left(path):
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)  # the kernel releases the lock however this process ends
            yield Path(name)
        finally:
            os.close(held)


def _left(path: Path) -> bool:
    """Whether the folder belongs to this user and is not locked."""
    try:
        found = path.lstat()
        ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        if not ours or time.time() - found.st_mtime < _YOUNG:
            return False
        held = os.open(str(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:  # it is in use, or its file system does not support locks
        return False
    finally:
        os.close(held)
