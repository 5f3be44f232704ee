"""Temporary folders that do not outlive their process: gone at its end; where it was killed, the next one sweeps."""

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

_PREFIX = "envbuild-tmp-"
_YOUNG = 60.0  # seconds; a folder is there a moment before it is locked


@contextlib.contextmanager
def folder(kind: str) -> Iterator[Path]:
    """A folder of its own, locked while it is in use; `kind` says in its name what it is for."""
    sweep()
    with tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{kind}-", ignore_cleanup_errors=True) as name:
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_SH)  # the kernel lets go of it, however this process ends
            yield Path(name)
        finally:
            os.close(held)


def abandoned() -> Iterator[Path]:
    """Folders of this user whose process is gone: of those that we make, nobody holds the lock."""
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):  # somebody else is sweeping, or it is in use
            found = path.lstat()
            ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
            if ours and time.time() - found.st_mtime > _YOUNG and _is_free(path):
                yield path


def sweep() -> None:
    """Remove what killed processes left."""
    for path in abandoned():
        shutil.rmtree(path, ignore_errors=True)


def _is_free(path: Path) -> bool:
    """Raises BlockingIOError where it is in use."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    finally:
        os.close(held)
