"""Locks among the envbuilds of one machine. They lie in the cache folder, as most of what they keep whole does: two
checkouts, or two state folders, may share it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from filelock import FileLock, Timeout

from envbuild.util import user_folders
from envbuild.util.errors import EnvbuildError

# In the environment of those that one `make` started beside each other: who is waited for is likely one of them.
BESIDE = "ENVBUILD_BESIDE_OTHERS"


class Taken(EnvbuildError):
    """Another process holds what was not to be waited for."""


@contextlib.contextmanager
def exclusive(name: str, doing: str, say: Callable[[str], None], wait: bool = True) -> Iterator[None]:
    """One process at a time holds `name`, until it ends, however that is. Another waits, and says so: `doing` tells
    what for; without `wait` it raises Taken. No profile's name begins with an underscore."""
    file = FileLock(user_folders.cache_folder("locks") / f"{name}.lock")
    try:
        file.acquire(timeout=0)
    except Timeout:
        if not wait:
            raise Taken(f"another envbuild {doing}") from None
        other = "another profile of this make, or another envbuild," if os.environ.get(BESIDE) else "another envbuild"
        say(f"{other} {doing}; waiting for it")
        file.acquire()
    try:
        yield
    finally:
        file.release()
