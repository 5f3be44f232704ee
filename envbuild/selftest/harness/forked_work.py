"""Runs functions that may crash or hang in forked processes, and returns what each reported and how it ended.

A probe uses this module to run parts of itself, such as the ranks of a distributed test. Several functions can run at
the same time. After one function fails, the others have limited time left. The children stay in their parent's process
group, so that killing this group also kills them.

probe_supervisor, in contrast, runs one whole probe in a process group of its own. A probe's process may start before
its turn, and reports by messages with checksums. When the probe ends, the whole group is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, NoReturn

from envbuild.selftest.harness.frame_and_message_streams import write_all
from envbuild.selftest.harness.probe_outcome_and_figures import signal_name

# The signals sent to a process that exceeded a limit, and the seconds that it has to exit after each signal. On
# SIGABRT, faulthandler dumps the stack. A process that survives SIGKILL is blocked in the kernel, and is abandoned.
_MEASURES = ((signal.SIGABRT, 1.0), (signal.SIGKILL, 5.0))
_TICK = 0.02  # polling interval in seconds while a process has closed its pipes but not exited
_CHUNK = 1 << 16
_RAISED = "raised at"
_MOST_REPORTED = 8 << 20  # bytes
_KEPT_NOISE = 1 << 14  # bytes: enough for a stack and the list of modules that faulthandler writes after the stack


class Tell:
    """Sends (key, value) pairs to the parent process, through the descriptor `fd`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __call__(self, key: str, value: Any) -> None:
        write_all(self.fd, (json.dumps([key, value]) + "\n").encode("ascii"))


Work = Callable[[Tell], None]


@dataclass(frozen=True)
class ForkEnding:
    """How a forked function ended and what it reported.

    `reported`: the last reported value of each key. `failure`: a sentence; None if the function returned.
    `signal`: the name of the signal that killed the process, unless the parent sent it. `stopped`: whether the parent
    ended the process. `noise`: the last 16 KiB that the process wrote to stdout and stderr; they include the stack if
    faulthandler dumped it. `moment`: the time at which the process ended, or at which the function raised an exception.
    The time is that of time.monotonic(), a clock that all processes share.
    """

    reported: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    seconds: float = 0.0
    signal: str | None = None
    stopped: bool = False
    noise: str = ""
    moment: float = 0.0


class ForkedWork:
    """A function running in a forked process."""

    def __init__(self, work: Work) -> None:
        self._begin = time.monotonic()
        self._deadline = math.inf
        self._limit = math.inf
        self._measures = iter(_MEASURES)
        self._stopped: str | None = None
        self._status: int | None = None
        self._seconds: float | None = None
        reports, tell = os.pipe()
        heard, noise = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._streams = {reports: bytearray(), heard: bytearray()}
        self._reports, self._heard = reports, heard
        self.open_ends = {reports, heard}
        try:
            self._pid = os.fork()
            if self._pid == 0:
                _child(work, tell, noise, (reports, heard))
        except OSError:
            self._close()
            raise
        finally:
            os.close(tell)
            os.close(noise)

    def finish(self, limit: float) -> ForkEnding:
        """Wait until the process ends. If it still runs `limit` seconds after its start, kill it."""
        return _attend([[self]], limit, math.inf)[0][0]

    @property
    def over(self) -> bool:
        """Whether the process has exited or was abandoned."""
        return self._seconds is not None

    @property
    def broke_off(self) -> bool:
        return self.over and self._status != 0

    def allow(self, limit: float) -> None:
        """Limit the run time to `limit` seconds, counted from the start. If an earlier deadline is set, keep it."""
        if self._begin + limit < self._deadline:
            self._limit, self._deadline = limit, self._begin + limit

    def elapsed(self) -> float:
        return time.monotonic() - self._begin

    def patience(self) -> float:
        """Return how many seconds the caller may wait for output before it must call `attend`."""
        return max(0.0, self._deadline - time.monotonic()) if self.open_ends else _TICK

    def attend(self, ready: Sequence[int]) -> None:
        """Read the available output, check whether the process has exited, and enforce its limits."""
        for fd in self.open_ends.intersection(ready):
            self._take(fd, os.read(fd, _CHUNK))
        if not self.open_ends and os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self._status = os.waitpid(self._pid, 0)[1]
            self._seconds = self.elapsed()
        elif len(self._streams[self._reports]) > _MOST_REPORTED and not self._stopped:
            self._press("it reported more than the limit")
        elif time.monotonic() >= self._deadline:
            self._press(f"not done after {self._limit:.3g} s")

    def _take(self, fd: int, data: bytes) -> None:
        if not data:
            self.open_ends.discard(fd)
            os.close(fd)
        elif fd == self._heard:
            self._streams[fd] += data
            del self._streams[fd][:-_KEPT_NOISE]
        elif not self._stopped:
            self._streams[fd] += data

    def _press(self, why: str) -> None:
        self._stopped = self._stopped or why
        number, seconds = next(self._measures, (None, 0.0))
        if number is None:
            self._stopped += ", and it could not be killed: the driver or the kernel holds it"
            self._seconds = self.elapsed()
            self._close()
        else:
            os.kill(self._pid, number)
            self._deadline = time.monotonic() + seconds

    def _close(self) -> None:
        while self.open_ends:
            os.close(self.open_ends.pop())

    def ending(self) -> ForkEnding:
        reported: dict[str, Any] = {}
        for line in bytes(self._streams[self._reports]).split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):
                key, value = json.loads(line)
                reported[key] = value
        noise = self._streams[self._heard].decode("utf-8", "replace").strip()
        died_of = None if self._stopped or self._status is None else _died_of(self._status)
        failure = self._stopped or self._failure(died_of, reported, noise)
        seconds = self._seconds or 0.0
        moment = float(reported.pop(_RAISED, self._begin + seconds))
        return ForkEnding(reported, failure, seconds, died_of, bool(self._stopped), noise, moment)

    def _failure(self, died_of: str | None, reported: Mapping[str, Any], noise: str) -> str | None:
        if died_of:
            return f"the process died of {died_of}"
        if "error" in reported:
            return str(reported["error"])
        code = os.WEXITSTATUS(self._status or 0)
        last = noise.splitlines()[-1:] or [""]
        return None if code == 0 else f"the process ended with status {code}: {last[0]}".rstrip(": ")


def run_forked(work: Work, limit: float) -> ForkEnding:
    """Run the function in a forked process and wait for its end. If the fork fails, the result is a failure."""
    return run_groups([[work]], limit, math.inf)[0][0]


def run_groups(groups: Sequence[Sequence[Work]], limit: float, grace: float) -> list[list[ForkEnding]]:
    """Run all functions of all groups at the same time, for at most `limit` seconds.

    The functions of a group may wait for each other. Therefore, after one function fails, the other functions of its
    group have `grace` seconds left. If a process cannot be started, every result is a failure.
    """
    processes: list[list[ForkedWork]] = [[] for _ in groups]
    try:
        for works, started in zip(groups, processes):
            for work in works:
                started.append(ForkedWork(work))
    except OSError as error:
        _attend(processes, 0, 0)
        return [[ForkEnding(failure=f"no process could be started: {error}") for _ in works] for works in groups]
    return _attend(processes, limit, grace)


def _attend(groups: Sequence[Sequence[ForkedWork]], limit: float, grace: float) -> list[list[ForkEnding]]:
    left = [process for group in groups for process in group]
    for process in left:
        process.allow(limit)
    while left:
        open_ends = [fd for process in left for fd in process.open_ends]
        ready, _, _ = select.select(open_ends, [], [], min(process.patience() for process in left))
        for process in left:
            process.attend(ready)
        for group in groups:
            if any(process.broke_off for process in group):
                for process in group:
                    process.allow(process.elapsed() + grace)
        left = [process for process in left if not process.over]
    return [[process.ending() for process in group] for group in groups]


def limit_memory(more: int) -> None:
    """Limit this process's address space to its present size plus `more` bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _died_of(status: int) -> str | None:
    return signal_name(os.WTERMSIG(status)) if os.WIFSIGNALED(status) else None


def _child(work: Work, tell: int, noise: int, not_ours: tuple[int, ...]) -> NoReturn:
    """Run the function, then exit without Python's shutdown, which could crash although the function has succeeded."""
    status = 70
    try:
        for fd in not_ours:
            os.close(fd)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (noise, 1), (noise, 2)):
            os.dup2(source, target)
        os.close(noise)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.enable(file=2, all_threads=False)
        status = attempt(work, Tell(tell))
    finally:
        os._exit(status)


def attempt(work: Work, tell: Tell) -> int:
    """Run the function and return the exit status for this process. An exception is reported to the parent process."""
    try:
        work(tell)
    except BaseException as error:
        lines = str(error).strip().splitlines() or ["no message"]
        tell(_RAISED, time.monotonic())
        tell("error", f"{type(error).__name__}: {lines[0][:2000]}")
        return 1
    return 0
