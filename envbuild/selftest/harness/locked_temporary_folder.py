"""A temporary folder that is locked while it is in use. A later run removes unlocked folders of killed processes."""

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

_YOUNG = 60.0  # seconds in which a new folder is never removed, because it exists for a moment before it is locked


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder whose name begins with `prefix`, and remove it at the end of the `with` block.

    The folder is locked while the block runs and while a process forked in the block exists. Unlocked folders with the
    same prefix that earlier processes of this user left behind are removed first.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        if _left(path):
            shutil.rmtree(path, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)  # the kernel releases the lock even if this process is killed
            yield Path(name)
        finally:
            os.close(held)


def _left(path: Path) -> bool:
    """Return whether the path is a folder of this user, at least _YOUNG seconds old, and not locked."""
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
    except OSError:  # the folder is in use, or its file system does not support locks
        return False
    finally:
        os.close(held)
