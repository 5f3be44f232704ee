"""The harness's side of a probe's process: starts the process, reads its output, enforces its time limit, and reports
how the process ended.

The docstring of forked_work, which runs functions within a probe, describes the differences.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.selftest.harness import probe_process
from envbuild.selftest.harness.frame_and_message_streams import Message, Unpacker
from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.script_tracebacks import FOLDER

_TICK = 0.02  # polling interval in seconds; output of a child wakes the harness sooner
_CHUNK = 1 << 16
_STREAMS = ("messages", "dump", "noise")  # names of fields of probe_process.Ends
KEPT = 1 << 16  # bytes of a probe's output: the first are copied to stderr, the last are kept to explain a crash
_LEFT_IN_PIPES = 1 << 20  # bytes read after a probe's end: more than a pipe holds by default, but limited


@dataclass(frozen=True)
class Terms:
    """Settings for every child process.

    `dump`: seconds that a child has to dump its stacks after SIGABRT. `death`: seconds that it has to exit after
    SIGKILL. `hidden`: descriptors of the harness that are closed in the child, so that no probe can write frames.
    """

    dump: float = 2.0
    death: float = 5.0
    hidden: tuple[int, ...] = ()


TERMS = Terms()


@dataclass(frozen=True)
class ProbeEnding:
    """How a probe's process ended.

    `status`: the wait status; None if the process did not end even after SIGKILL. `timed_out`: whether the process
    exceeded its time limit. `messages`: its valid messages. `cut`: whether the stream of messages ended with an
    incomplete or invalid message. `dump`: faulthandler's stacks. `noise`: the end of its stdout and stderr.
    """

    status: int | None
    timed_out: bool
    messages: tuple[Message, ...]
    cut: bool
    dump: str
    noise: str
    seconds: float


class OutputTail:
    """Keeps the last KEPT bytes of a stream, which explain a crash.

    With `passed_on`, it also copies the first KEPT bytes of the stream to stderr.
    """

    def __init__(self, passed_on: bool) -> None:
        self._kept = bytearray()
        self._left = KEPT if passed_on else 0

    def feed(self, data: bytes) -> None:
        if self._left > 0:
            with contextlib.suppress(OSError):
                os.write(2, data[: self._left])
            self._left -= len(data)
        self._kept += data
        del self._kept[:-KEPT]

    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


class Child:
    """A probe's process, and the harness's ends of its pipes. The process waits until `go` lets the probe run.

    Raises OSError if no process can be started. `hidden`: descriptors of the harness that are closed in the child.
    `works`: whether the probe is running. `over`: whether the process has ended, or cannot be killed.
    """

    def __init__(self, probe: Probe, job: JobDocument, hidden: Sequence[int]) -> None:
        self.works = self.over = False
        self._begin = time.monotonic()
        self._seconds = self._timeout = 0.0
        self._terms = TERMS
        self._aborted = self._killed = False
        self.messages: list[Message] = []
        self.unpacker = Unpacker()
        self.dump = OutputTail(passed_on=False)
        self.noise = OutputTail(passed_on=True)
        self.status: int | None = None
        self._open: dict[int, str] = {}
        self._folders = f"{FOLDER}{secrets.token_hex(8)}-"
        turn, go = os.pipe()
        self._go = [go]
        try:
            self.pid = self._start(probe, job, turn, hidden)
        finally:
            os.close(turn)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The harness's descriptors for this child, which must be closed in all other children."""
        return (*self._open, *self._go)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The descriptors from which the harness reads the child's output."""
        return tuple(self._open)

    def go(self, timeout: float, terms: Terms) -> None:
        """Let the probe run for at most `timeout` seconds from now; `terms` limits how long killing it takes."""
        self.works, self._timeout, self._terms = True, timeout, terms
        self._begin = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # the process died while it waited, as its wait status will show
            os.write(self._go[0], b"g")

    def _start(self, probe: Probe, job: JobDocument, turn: int, hidden: Sequence[int]) -> int:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # otherwise the child would write the buffered output again
        pipes = [os.pipe() for _ in _STREAMS]
        for (read, _), name in zip(pipes, _STREAMS):
            os.set_blocking(read, False)
            self._open[read] = name
        try:
            pid = os.fork()
            if pid == 0:
                messages, dump, noise = (write for _, write in pipes)
                ends = probe_process.Ends(messages, dump, noise, turn, self._folders)
                probe_process.main(probe, job, ends, not_ours=(*self.descriptors, *hidden))
        except OSError:
            self.close()
            raise
        finally:
            for _, write in pipes:
                os.close(write)
        return pid

    def exited(self) -> bool:
        """Return whether the process has ended. It remains a zombie, so that its process group id is not reused."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and all processes of its process group."""
        self.signal(signal.SIGKILL)  # if the process has not called setsid yet, its process group does not exist
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """Return the wait status of the process; None if it has not ended."""
        if self.status is None and self.exited():
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status

    def attend(self) -> None:
        """Read the child's output, enforce its time limit, and clean up if its process has ended."""
        self._drain()
        elapsed = time.monotonic() - self._begin
        if self.exited() or elapsed > self._timeout + self._terms.dump + self._terms.death:
            self._conclude()
        elif not self._aborted and elapsed > self._timeout:
            self.signal(signal.SIGABRT)  # faulthandler dumps the stack of every thread
            self._aborted = True
        elif not self._killed and elapsed > self._timeout + self._terms.dump:
            self.kill_group()
            self._killed = True

    def _conclude(self) -> None:
        self.kill_group()
        left = _LEFT_IN_PIPES // _CHUNK
        while left and self._drain():
            left -= 1
        self.reap()
        self._seconds = time.monotonic() - self._begin
        self.over, self.works = True, False

    def ending(self) -> ProbeEnding:
        """Return how the process ended. Call this only when `over` is true."""
        return ProbeEnding(
            status=self.status,
            timed_out=self._aborted,
            messages=tuple(self.messages),
            cut=self.unpacker.cut,
            dump=self.dump.text(),
            noise=self.noise.text(),
            seconds=self._seconds,
        )

    def _drain(self) -> bool:
        """Read the available output, and return whether any was available."""
        ready, _, _ = select.select(self.outputs, (), (), 0)
        for fd in ready:
            self._take(fd, os.read(fd, _CHUNK))
        return bool(ready)

    def _take(self, fd: int, data: bytes) -> None:
        name = self._open[fd]
        if not data:
            del self._open[fd]
            os.close(fd)
        elif name == "messages":
            self.messages += self.unpacker.feed(data)
        else:
            (self.dump if name == "dump" else self.noise).feed(data)

    def end(self) -> None:
        """Kill the process group if the process has not ended, close all pipes and remove the temporary folders."""
        if self.status is None:
            self.kill_group()
        self.close()
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove the probe's temporary folders, because a killed process cannot remove them itself."""
        with contextlib.suppress(OSError):  # gettempdir() found no usable folder, so the probe could not create one
            for folder in Path(tempfile.gettempdir()).glob(f"{self._folders}*"):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)
        self._open.clear()
        self._go.clear()


def attend(children: Sequence[Child]) -> None:
    """Wait briefly for output of any child, then call `attend` of every child."""
    outputs = [fd for child in children for fd in child.outputs]
    if outputs:
        select.select(outputs, (), (), _TICK)
    else:
        time.sleep(_TICK)
    for child in children:
        child.attend()
