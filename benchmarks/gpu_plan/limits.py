"""Enforces the time limits of steps, and ends every process that a step started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PATIENCE = 10.0  # seconds to wait for killed processes; one that the driver blocks can take several


class TimeUp(BaseException):
    """The time limit of a step has passed. Not an Exception, so that no error handler catches it."""


@contextlib.contextmanager
def time_limit(seconds: float, but: frozenset[int] = frozenset()) -> Iterator[None]:
    """Raise TimeUp in the main thread after this number of seconds, whatever the thread waits for. Before that, end
    every descendant process, except those in `but`.

    So code that waits for a process while TimeUp propagates, as Popen does at the end of its block, does not block.
    """

    def expire(*_: object) -> None:
        end_descendants(but)
        raise TimeUp

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that no descendant leaves this process
    tree. Probes run in their own sessions, so killing a process group does not end the probes."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The running processes below `pid`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        stat = _stat(int(entry.name)) if entry.name.isdigit() else None
        if stat:
            parents[int(entry.name)] = int(stat[1])
    below, found = {pid}, []
    while below := {child for child, parent in parents.items() if parent in below}:
        found += sorted(child for child in below if is_running(child))
    return found


def is_running(pid: int) -> bool:
    """Whether this process exists and runs; a process that ended and waits for its parent (a zombie) does not run."""
    stat = _stat(pid)
    return stat is not None and stat[0] not in "ZX"


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process name (state, parent, ...). The name may contain any
    character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:  # it has ended
        return None


def end_descendants(but: frozenset[int] = frozenset()) -> list[int]:
    """Kill every descendant of this process, except those in `but`, and collect their exit statuses. Return the ids of
    the processes that were running."""
    found: list[int] = []
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        # Without a subreaper a killed orphan stops being a descendant before it has ended.
        known = dict.fromkeys([*found, *descendants(os.getpid())])
        running = [pid for pid in known if pid not in but and is_running(pid)]
        if not running:
            break
        found += [pid for pid in running if pid not in found]
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for pid in found:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found
