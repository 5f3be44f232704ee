"""A temporary folder that is gone with its process: where that was killed, the next one that makes such a folder
removes what it left."""

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

_YOUNG = 60.0  # seconds; a folder is there a moment before it is locked


@contextlib.contextmanager
def folder(prefix: str) -> Iterator[Path]:
    """A folder whose name begins so, locked while this process or one that it forked is there."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _left(path):
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)  # the kernel lets go of it, however this process ends
            yield Path(name)
        finally:
            os.close(held)


def _left(path: Path) -> bool:
    """Whether it is this user's, and nobody holds it."""
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
    except OSError:  # it is in use, or its file system knows no locks
        return False
    finally:
        os.close(held)
