"""Locks between envbuild processes of one machine. They are in the cache folder, like most of the files they protect:
several checkouts or state folders may share it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from filelock import FileLock, Timeout

from envbuild.util import user_folders

# Set in the environment of the processes that one `make` starts in parallel: a process that waits probably waits for
# one of them.
PARALLEL = "ENVBUILD_PARALLEL_MAKE"


@contextlib.contextmanager
def exclusive(name: str, doing: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock `name`; the kernel releases it however the process ends. If another process holds it, report
    what it does (`doing`) and wait. The names of locks that are not for a profile begin with an underscore, because no
    profile name does."""
    file = FileLock(user_folders.cache_folder("locks") / f"{name}.lock")
    try:
        file.acquire(timeout=0)
    except Timeout:
        other = "another profile of this make, or another envbuild," if os.environ.get(PARALLEL) else "another envbuild"
        say(f"{other} {doing}; waiting for it")
        file.acquire()
    try:
        yield
    finally:
        file.release()
