"""Starts programs on this machine. No other module of envbuild does.

stdout and stderr are read concurrently, so a child that writes much to stderr cannot deadlock. A child of `run` leads
its own process group, and the whole group is ended when the child ends, after a time-out, or after an interruption. If
this process is killed with SIGKILL, the kernel kills its children: a build or download that continued would conflict
with the next run.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from envbuild.util import interruption_at_process_start
from envbuild.util.errors import EnvbuildError, Interrupted

_LOG = logging.getLogger(__name__)
_GRACE_SECONDS = 10.0
# For a program that ends its own child processes first, which each have the grace period above.
_LONG_GRACE_SECONDS = 30.0


@dataclass(frozen=True)
class Completed:
    """The exit code and the output of a program. `cut`: the program was stopped because it wrote too much to stdout or
    stderr."""

    code: int
    stdout: str
    stderr: str
    cut: bool = False


class ProcessMissing(EnvbuildError):
    """The program is not installed or cannot be started."""

    code, kind = 6, "program"


class ProcessTimeout(EnvbuildError):
    """The program was stopped at its time-out. `done`: its output until then."""

    code, kind = 6, "timeout"

    def __init__(self, message: str, done: Completed) -> None:
        super().__init__(message)
        self.done = done


class Stop:
    """Lets one thread end the programs that other threads started with this object. After that, starting a program with
    it raises Interrupted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._killer: threading.Timer | None = None

    def __call__(self) -> None:
        """Send SIGTERM to the running programs, and SIGKILL after 30 s to those that still run. Does not wait for their
        end."""
        with self._lock:
            self._stopped = True
            self._signal(signal.SIGTERM)
        self._killer = threading.Timer(_LONG_GRACE_SECONDS, self._kill)
        self._killer.daemon = True
        self._killer.start()

    def lift(self) -> None:
        """Allow programs to be started again. Call it after the stopped programs have ended."""
        if self._killer:
            self._killer.cancel()
        self._stopped = False

    @contextlib.contextmanager
    def watching(self, child: subprocess.Popen[str]) -> Iterator[None]:
        with self._lock:
            self._children.add(child)
            if self._stopped:
                self._signal(signal.SIGTERM)
        try:
            yield
        finally:
            with self._lock:
                self._children.discard(child)

    def check(self) -> None:
        if self._stopped:
            raise Interrupted("interrupted")

    def _kill(self) -> None:
        with self._lock:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)


@dataclass(frozen=True)
class LineListeners:
    """Functions that receive each line of a program's output as it arrives: of stderr, of stdout, or of a separate pipe
    for events. The environment variable ENVBUILD_EVENTS names the file descriptor of this pipe."""

    stderr: Callable[[str], None] | None = None
    stdout: Callable[[str], None] | None = None
    events: Callable[[str], None] | None = None


# The environment variable that names the file descriptor to which a program writes its events.
EVENTS = "ENVBUILD_EVENTS"
# The default of `run`: stops every program that was started without a Stop of its own.
stop_all = Stop()


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str | None = None,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
    listeners: LineListeners = LineListeners(),
    limit: int | None = None,
    stop: Stop = stop_all,
) -> Completed:
    """Run a program until it ends. The caller checks the exit code.

    `env`: variables to add to this process's environment; the value None removes a variable. `limit`: the program is
    stopped if it writes more than this number of bytes to stdout, to stderr, or as events. `stop`: lets another thread
    end the program.

    Raises ProcessMissing if the program is not installed or cannot be started, ProcessTimeout after `timeout` seconds,
    Interrupted if `stop` was called before.
    """
    arguments = [str(part) for part in argv]
    stop.check()
    _LOG.info("run %s%s", shlex.join(arguments), f" in {cwd}" if cwd else "")
    if env:
        _LOG.debug("with the variables %s", ", ".join(env))
    begin = time.monotonic()
    events, event_end = _event_pipe() if listeners.events else (None, None)
    variables = {**os.environ, **(env or {}), EVENTS: None if event_end is None else str(event_end)}
    interruption_at_process_start.hold_back()
    try:
        child = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={name: value for name, value in variables.items() if value is not None},
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
            preexec_fn=_tied(),
            pass_fds=() if event_end is None else (event_end,),
        )
    except BaseException as error:
        if events:
            events.close()
        interruption_at_process_start.let_go()
        if not isinstance(error, OSError):  # for example ValueError for a NUL in an argument
            raise
        missing = isinstance(error, FileNotFoundError)
        why = "is not installed or not on PATH" if missing else f"cannot be started: {error.strerror}"
        raise ProcessMissing(f"{arguments[0]} {why}") from error
    finally:
        if event_end is not None:
            os.close(event_end)  # only the child's copy may stay open, so that the end of the events is detected
    out, err = _Pipe(child, child.stdout, listeners.stdout, limit), _Pipe(child, child.stderr, listeners.stderr, limit)
    pipes = [out, err, *([_Pipe(child, events, listeners.events, limit)] if events else [])]
    expired = False
    threads = [threading.Thread(target=pipe.drain, daemon=True) for pipe in pipes]
    threads.append(threading.Thread(target=_feed, args=(child.stdin, stdin), daemon=True))
    try:
        interruption_at_process_start.let_go()
        for thread in threads:
            thread.start()
        with stop.watching(child):
            child.wait(timeout)
    except subprocess.TimeoutExpired:
        expired = True
    finally:
        _end_group(child)
    for thread in threads:
        thread.join(_GRACE_SECONDS)  # a process that left the process group may keep the pipes open
    _LOG.info("%s ended with %d after %.2f s", arguments[0], child.returncode, time.monotonic() - begin)
    done = Completed(child.returncode, "".join(out.lines), "".join(err.lines), out.cut or err.cut)
    if expired:
        raise ProcessTimeout(f"{arguments[0]} took longer than {timeout:.0f} s and was stopped", done)
    return done


def run_attached(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str | None] | None = None,
    on_start: Callable[[int], None] | None = None,
) -> int:
    """Run a program until it ends, with the stdin, stdout and stderr of this process. Return its exit code, or 128 plus
    the number of the signal that ended it.

    `env`: variables to add to this process's environment; the value None removes a variable. `on_start` receives the
    process id. SIGTERM and SIGHUP are passed on to the program; Ctrl-C in the terminal reaches it directly. Raises
    ProcessMissing if the program cannot be started.
    """
    arguments = [str(part) for part in argv]
    variables = {**os.environ, **(env or {})}
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        if child is not None and number != signal.SIGINT:
            child.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        child = subprocess.Popen(
            arguments,
            env={name: value for name, value in variables.items() if value is not None},
            preexec_fn=_tied(),
        )
        if on_start:
            on_start(child.pid)
        code = child.wait()
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = "is not installed or not on PATH" if missing else f"cannot be started: {error.strerror}"
        raise ProcessMissing(f"{arguments[0]} {why}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _event_pipe() -> tuple[IO[str], int]:
    """Create a pipe. Return the end to read, and the file descriptor of the end to write."""
    read, write = os.pipe()
    return os.fdopen(read, encoding="utf-8", errors="replace"), write


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _tied() -> Callable[[], None] | None:
    """Return a function that the child runs before exec; None on other systems than Linux. The function makes the
    kernel send SIGKILL to the child when the thread that started the child ends.

    The function must not allocate memory or import modules: at the fork, another thread may have held a lock.
    """
    if sys.platform != "linux":
        return None
    prctl, parent, kill = ctypes.CDLL(None).prctl, os.getpid(), int(signal.SIGKILL)

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, kill)
        if os.getppid() != parent:  # the parent has ended already
            os.kill(os.getpid(), kill)

    return tie


class _Pipe:
    """Collects what a child writes to one pipe. If it writes more than `limit` bytes, the child is killed."""

    def __init__(
        self,
        child: subprocess.Popen[str],
        pipe: IO[str] | None,
        on_line: Callable[[str], None] | None,
        limit: int | None,
    ) -> None:
        assert isinstance(pipe, io.TextIOWrapper)
        pipe.reconfigure(errors="surrogateescape", newline="")  # lines from which the original bytes can be restored
        self._child, self._pipe, self._on_line = child, pipe, on_line
        self._left = limit
        self._name = Path(str(child.args[0])).name if isinstance(child.args, list) else ""
        self.lines: list[str] = []
        self.cut = False

    def drain(self) -> None:
        while line := self._pipe.readline(-1 if self._left is None else self._left + 1):
            raw = line.encode(self._pipe.encoding, "surrogateescape")
            line = raw.decode(self._pipe.encoding, "replace").replace("\r\n", "\n").replace("\r", "\n")
            if self._left is not None:
                self._left -= len(raw)
                if self._left < 0:
                    self.cut = True
                    self._child.kill()
                    return
            self.lines.append(line)
            _LOG.debug("%s: %s", self._name, line.rstrip("\n"))
            if self._on_line:
                with contextlib.suppress(Exception):  # an error in the callback must not stop the reading
                    self._on_line(line.rstrip("\n"))


def _feed(pipe: IO[str] | None, text: str | None) -> None:
    if pipe is None or text is None:
        return
    with contextlib.suppress(BrokenPipeError):  # a child that stops reading early shows the reason by its exit code
        pipe.write(text)
        pipe.close()


def _end_group(child: subprocess.Popen[str]) -> None:
    """End the whole process group of a child. If the child still runs, send SIGTERM first, so that it can clean up;
    then send SIGKILL to the group."""
    with contextlib.suppress(ProcessLookupError):
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_GRACE_SECONDS)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
