"""Time limits of steps, and the end of every process that a step started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PATIENCE = 10.0  # seconds that killed processes are given to be gone; one that the driver holds can take seconds


class TimeUp(BaseException):
    """The time limit of a step is over. Not an Exception: no handler of errors may swallow it."""


@contextlib.contextmanager
def time_limit(seconds: float, but: frozenset[int] = frozenset()) -> Iterator[None]:
    """Raise TimeUp in the main thread after so many seconds, whatever it waits for. Before, every descendant is ended
    `but` these.

    Whoever waits for a process while TimeUp passes, as Popen does at the end of its block, then finds it ended.
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
    """Become the parent of every descendant whose own parent ends, so that none can leave our tree of processes.

    Probes live in sessions of their own: to kill a process group does not reach them.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The running processes below `pid`; those that ended and wait for their parent (zombies) are left out."""
    parents: dict[int, int] = {}
    ended = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:  # "PID (NAME) STATE PARENT ...", where NAME may hold anything
            state, parent = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:  # it ended meanwhile
            continue
        parents[int(entry.name)] = int(parent)
        if state in "ZX":
            ended.add(int(entry.name))
    below, found = {pid}, []
    while below := {child for child, parent in parents.items() if parent in below}:
        found += sorted(below - ended)
    return found


def end_descendants(but: frozenset[int] = frozenset()) -> list[int]:
    """Kill every process below this one `but` these, and collect their exit statuses. Returns those that ran."""
    found: list[int] = []
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        running = [pid for pid in descendants(os.getpid()) if pid not in but]
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
