"""Work that may crash or hang, done in a forked process: what it told until then comes back, and how it ended.

The child stays in its parent's process group, so whoever ends that group ends it too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, NoReturn

Tell = Callable[[str, Any], None]
Work = Callable[[Tell], None]

_CHUNK = 1 << 16
_MOST_TOLD = 8 << 20  # bytes
_KEPT_NOISE = 1 << 12


@dataclass(frozen=True)
class Ending:
    """`told`: the last value of each key. `failure`: None where the work came to its end, else a sentence."""

    told: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    seconds: float = 0.0


class Apart:
    """A piece of work under way."""

    def __init__(self, work: Work) -> None:
        self._begin = time.monotonic()
        told, tell = os.pipe()
        heard, noise = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            _child(work, tell, noise, (told, heard))
        os.close(tell)
        os.close(noise)
        self._streams = {told: bytearray(), heard: bytearray()}
        self._told, self._heard = told, heard

    def finish(self, limit: float) -> Ending:
        """Wait for the end, at most until `limit` seconds after the start; then the process is killed."""
        status, stopped = self._drain(limit)
        seconds = time.monotonic() - self._begin
        told: dict[str, Any] = {}
        for line in bytes(self._streams[self._told]).split(b"\n"):
            with contextlib.suppress(ValueError, TypeError):
                key, value = json.loads(line)
                told[key] = value
        return Ending(told, stopped or self._failure(status, told), seconds)

    def _drain(self, limit: float) -> tuple[int, str | None]:
        """Until both pipes are closed: the status of the process, and why it was killed, if it was."""
        streams, stopped, end = set(self._streams), None, self._begin + limit
        while streams and not stopped:
            ready, _, _ = select.select(streams, [], [], max(0.0, end - time.monotonic()))
            for fd in ready:
                data = os.read(fd, _CHUNK)
                if data:
                    self._keep(fd, data)
                else:
                    streams.discard(fd)
            if len(self._streams[self._told]) > _MOST_TOLD:
                stopped = "it told too much"
            elif time.monotonic() > end:
                stopped = f"not done after {limit:g} s"
        if stopped:
            os.kill(self._pid, signal.SIGKILL)
        status = os.waitpid(self._pid, 0)[1]
        for fd in self._streams:
            os.close(fd)
        return status, stopped

    def _keep(self, fd: int, data: bytes) -> None:
        self._streams[fd] += data
        if fd == self._heard:
            del self._streams[fd][:-_KEPT_NOISE]

    def _failure(self, status: int, told: Mapping[str, Any]) -> str | None:
        last = self._streams[self._heard].decode("utf-8", "replace").strip().splitlines()[-1:] or [""]
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
            return f"the process died of {name}"
        if "error" in told:
            return str(told["error"])
        code = os.WEXITSTATUS(status)
        return None if code == 0 else f"the process ended with status {code}: {last[0]}".rstrip(": ")


def run(work: Work, limit: float) -> Ending:
    """Start and wait; a machine that allows no further process is told as a failure."""
    try:
        return Apart(work).finish(limit)
    except OSError as error:
        return Ending(failure=f"no process could be started: {error}")


def _child(work: Work, tell: int, noise: int, not_ours: tuple[int, ...]) -> NoReturn:
    """Leaves without Python's shutdown, which could crash after all is told."""
    status = 70
    try:
        for fd in not_ours:
            os.close(fd)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (noise, 1), (noise, 2)):
            os.dup2(source, target)
        os.close(noise)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with os.fdopen(tell, "w", encoding="ascii", newline="\n") as stream:
            status = _attempt(work, lambda key, value: print(json.dumps([key, value]), file=stream, flush=True))
    finally:
        os._exit(status)


def _attempt(work: Work, tell: Tell) -> int:
    try:
        work(tell)
    except BaseException as error:
        lines = str(error).strip().splitlines() or ["no message"]
        tell("error", f"{type(error).__name__}: {lines[0][:2000]}")
        return 1
    return 0
