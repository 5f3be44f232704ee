"""The harness's side of a probe's process: starts it, reads its output, enforces its time limit, reports its end.

forked_work runs functions within a probe; its docstring describes the differences.
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

_TICK = 0.02  # polling interval in seconds; the harness wakes sooner when the child's last pipe closes
_CHUNK = 1 << 16
_STREAMS = ("messages", "dump", "noise")  # the fields of probe_process.Ends
KEPT = 1 << 16  # bytes of output that are kept and passed on, for each probe
_LEFT_IN_PIPES = 1 << 20  # more than a pipe holds by default, and a limit for a process that floods it


@dataclass(frozen=True)
class Terms:
    """Settings for every child process.

    `dump`: seconds after SIGABRT to dump its stacks. `death`: seconds after SIGKILL to exit. `hidden`: the harness's
    descriptors that are closed in the child, so that no probe can write to the real stdout.
    """

    dump: float = 2.0
    death: float = 5.0
    hidden: tuple[int, ...] = ()


TERMS = Terms()


@dataclass(frozen=True)
class ProbeEnding:
    """How a probe's process ended. `status` is the wait status, None if the process could not be reaped."""

    status: int | None
    timed_out: bool
    messages: tuple[Message, ...]
    cut: bool
    dump: str
    noise: str
    seconds: float


class OutputTail:
    """The head and the tail of a stream, both limited: the head is passed on to stderr, the tail explains a crash."""

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
    """A probe's process, which starts CUDA and waits for its turn, and the harness's ends of its pipes.

    Raises OSError if no process can be started. `hidden`: the harness's descriptors that are closed in the child.
    `works`: the probe is running. `over`: the process has ended, or cannot be ended.
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
        """The descriptors that must be closed in other processes."""
        return (*self._open, *self._go)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The descriptors to read."""
        return tuple(self._open)

    def go(self, timeout: float, terms: Terms) -> None:
        """Let the probe run; from now on its time counts, limited to `timeout` seconds plus those of `terms`."""
        self.works, self._timeout, self._terms = True, timeout, terms
        self._begin = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # it died while waiting, as its status will show
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
        """Whether the process has ended; it stays a zombie, so that its process group id cannot be reused."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the process and everything it started in its session."""
        self.signal(signal.SIGKILL)  # it may not have reached setsid yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """The wait status after the process has ended, None before."""
        if self.status is None and self.exited():
            self.status = os.waitpid(self.pid, 0)[1]
        return self.status

    def attend(self) -> None:
        """Read its output; end the process after its time limit, and clean up once it has ended."""
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
        """How the process ended; valid once it is over."""
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
        """Read the available output; False if no output was available."""
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
        """End the process group, close all pipes and remove the script's folders, whatever happened."""
        if self.status is None:
            self.kill_group()
        self.close()
        self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove its temporary folders: a process killed by a signal cannot do so itself."""
        with contextlib.suppress(OSError):  # no folder for temporary files exists, so the process had none either
            for folder in Path(tempfile.gettempdir()).glob(f"{self._folders}*"):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)
        self._open.clear()
        self._go.clear()


def attend(children: Sequence[Child]) -> None:
    """Wait briefly for output of any child, then attend to each."""
    outputs = [fd for child in children for fd in child.outputs]
    if outputs:
        select.select(outputs, (), (), _TICK)
    else:
        time.sleep(_TICK)
    for child in children:
        child.attend()
