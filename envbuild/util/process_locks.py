"""Locks between the envbuild processes on one machine. They are in the user's cache folder, like most of the files that
they protect, because several checkouts or state folders may share this folder."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from envbuild.util import user_folders

# The environment variable that `make` sets for processes that it starts in parallel. A process that has it probably
# waits for another of these processes.
PARALLEL = "ENVBUILD_PARALLEL_MAKE"


@contextlib.contextmanager
def exclusive(name: str, doing: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock `name`. The kernel releases the lock, however the process ends. If another process holds it, report
    what that process does (`doing`), and wait. The name of a lock is a profile's name; names of other locks begin with
    an underscore, with which no profile's name begins."""
    with (user_folders.cache_folder("locks") / f"{name}.lock").open("a") as file:  # closing it releases the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            several = os.environ.get(PARALLEL)
            other = "another profile of this make, or another envbuild," if several else "another envbuild"
            say(f"{other} {doing}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def exclusive_environment(prefix: Path, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Let only one process at a time change the environment in this folder."""
    lock = hashlib.sha256(os.fsencode(os.path.realpath(prefix))).hexdigest()[:16]
    return exclusive(f"_environment-{lock}", f"changes {prefix}", say)
