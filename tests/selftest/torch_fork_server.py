"""Runs functions in processes that are forked from a process that has imported torch.

`import torch` takes about two seconds of processor time, and torch._dynamo, which torch imports for the first step of
an optimizer, as much again. A test whose subject is not the start of Python saves them: the process that `start`
returns has the environment variables, streams and exit status of a new one, and torch is imported in it, but not used.
A server forks all processes of a worker of the test run; it starts with the first of them. It imports no probe, because
some probes share memory with all processes that are forked after their import.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_TESTS = Path(__file__).parents[1]
_LIBRARIES = "LD_LIBRARY_PATH"
_MOST_BYTES = 1 << 17  # of a request


class ForkedProcess:
    """A process that the server forked, with the interface of subprocess.Popen that the tests use."""

    def __init__(self, streams: Sequence[int], answers: socket.socket) -> None:
        self._stdin, *self._outputs = streams
        self._answers = answers
        self._lines = answers.makefile("r", encoding="ascii")
        self.returncode: int | None = None
        self.pid = self._answer()

    def _answer(self) -> int:
        line = self._lines.readline()
        assert line, "the server has ended"
        return int(line)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process if it has not been waited for."""
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self._wait()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, input: bytes = b"", timeout: float = 600) -> tuple[bytes, bytes]:
        """Write `input`, which must fit into a pipe, to stdin. Return what the process wrote to stdout and stderr.

        Raises subprocess.TimeoutExpired; the process is then killed at the end of the `with` block.
        """
        deadline = time.monotonic() + timeout
        found = {fd: bytearray() for fd in self._outputs}
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stdin, input)
        os.close(self._stdin)
        with selectors.DefaultSelector() as selector:
            for fd in self._outputs:
                selector.register(fd, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise subprocess.TimeoutExpired("a forked process", timeout)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    found[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
        self._wait()
        out, err = (bytes(data) for data in found.values())
        return out, err

    def _wait(self) -> None:
        self.returncode = os.waitstatus_to_exitcode(self._answer())
        self._lines.close()
        self._answers.close()
        for fd in self._outputs:
            os.close(fd)


class _Server:
    """The client's side of the server. `link`: the folder in which the server's loader looks for libraries first: it
    read LD_LIBRARY_PATH when it started, so each process points the link to its own folder before it is forked."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="envbuild-tests-fork-"))
        self._link = self._folder / "libraries"
        (self._folder / "none").mkdir()
        self._point_to(None)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join((str(_TESTS.parent), str(_TESTS)))
        libraries = os.pathsep.join(filter(None, (str(self._link), os.environ.get(_LIBRARIES))))
        variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": path, _LIBRARIES: libraries}
        with theirs:
            command = [sys.executable, "-m", "selftest.torch_fork_server", str(theirs.fileno()), str(self._folder)]
            self._process = subprocess.Popen(
                command, cwd=_TESTS, env=variables, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._alive: list[tuple[ForkedProcess, str | None]] = []
        atexit.register(self.end)

    def _point_to(self, libraries: str | None) -> None:
        new = self._folder / "new"
        new.symlink_to(libraries or self._folder / "none")
        new.replace(self._link)

    def start(self, function: str, arguments: Sequence[Any], variables: Mapping[str, str]) -> ForkedProcess:
        libraries = variables.get(_LIBRARIES)
        libraries = None if libraries == os.environ.get(_LIBRARIES) else libraries
        self._alive = [(process, its) for process, its in self._alive if process.returncode is None]
        if any(its != libraries for _, its in self._alive):
            raise AssertionError("processes with different libraries at the same time")
        self._point_to(libraries)
        stdin, written = os.pipe()
        read, outputs = zip(os.pipe(), os.pipe(), strict=True)
        answers, reply = socket.socketpair()
        wanted = {"function": function, "arguments": arguments, "variables": dict(variables), "folder": str(Path.cwd())}
        request = json.dumps(wanted).encode()
        assert len(request) <= _MOST_BYTES
        with reply:
            socket.send_fds(self._control, [request], [stdin, *outputs, reply.fileno()])
        for fd in (stdin, *outputs):
            os.close(fd)
        process = ForkedProcess([written, *read], answers)
        self._alive.append((process, libraries))
        return process

    def end(self) -> None:
        self._control.close()
        self._process.wait()


@functools.cache
def _server() -> _Server:
    return _Server()


def start(function: str, arguments: Sequence[Any], variables: Mapping[str, str]) -> ForkedProcess:
    """Start a process that calls `function` ("module:name") with these arguments, which JSON can hold; its exit status
    is what the function returns. `variables`: all its environment variables.

    Variables that torch or Python reads when it starts have no effect, except LD_LIBRARY_PATH.
    """
    return _server().start(function, arguments, variables)


def run(
    function: str, arguments: Sequence[Any], variables: Mapping[str, str], *, input: bytes = b"", timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run such a process to its end. Raises subprocess.TimeoutExpired."""
    with start(function, arguments, variables) as process:
        out, err = process.communicate(input, timeout)
    assert process.returncode is not None
    return subprocess.CompletedProcess([function], process.returncode, out.decode(), err.decode())


def execute(source: str) -> int:
    """Execute Python source, for tests that run a script in such a process."""
    exec(source, {"__name__": "__main__"})
    return 0


# the server's side


def _serve(control: socket.socket) -> None:
    """Fork a process for each request, and report its id and its wait status, until the client has ended."""
    for name in ("torch", "torch._dynamo", "selftest.driver"):
        importlib.import_module(name)
    assert not any(name.startswith("envbuild.selftest.probes.") for name in sys.modules), "see the module's docstring"
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake)
    replies: dict[int, socket.socket] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if ended in ready:
                os.read(ended, 1 << 12)
                _report(replies)
            if control in ready:
                request, fds, _, _ = socket.recv_fds(control, _MOST_BYTES, 4)
                if not request:
                    return
                *streams, reply = fds
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for own in (control, *replies.values()):
                        own.close()
                    for fd in (ended, wake, reply):
                        os.close(fd)
                    _call(json.loads(request), streams)
                for fd in streams:
                    os.close(fd)
                replies[pid] = socket.socket(fileno=reply)
                replies[pid].sendall(b"%d\n" % pid)


def _report(replies: dict[int, socket.socket]) -> None:
    while replies:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with replies.pop(pid) as reply, contextlib.suppress(BrokenPipeError):
            reply.sendall(b"%d\n" % status)


def _call(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Become the requested process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, fd in enumerate(streams):
            os.dup2(fd, number)
            os.close(fd)
        os.environ.clear()
        os.environ.update(request["variables"])
        os.chdir(request["folder"])
        tempfile.tempdir = None
        module, _, name = request["function"].partition(":")
        status = getattr(importlib.import_module(module), name)(*request["arguments"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(bool(error.code))
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


if __name__ == "__main__":
    try:
        _serve(socket.socket(fileno=int(sys.argv[1])))
    finally:  # also if the client was killed
        shutil.rmtree(sys.argv[2], ignore_errors=True)
