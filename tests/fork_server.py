"""Runs functions in processes that are forked from a process that has imported modules.

A test whose subject is not the start of Python saves the processor time of the imports: the process that `Server.start`
returns has the environment variables, folder, streams and exit status of a new one, and the modules of its server are
imported in it. Signals have their usual effects.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
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
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

_TESTS = Path(__file__).parent
_MOST_BYTES = 1 << 17  # of a request


class ForkedProcess:
    """A process that a server forked, with the interface of subprocess.Popen that the tests use."""

    def __init__(self, stdin: int | None, outputs: Sequence[int], answers: socket.socket) -> None:
        self._stdin = stdin
        self.stdout, self.stderr = (os.fdopen(fd, encoding="utf-8") for fd in outputs)
        self._answers = answers
        self.returncode: int | None = None
        self.pid = self._answer(None)

    def _answer(self, timeout: float | None) -> int:
        self._answers.settimeout(timeout)
        line = self._answers.recv(64)
        assert line, "the server has ended"
        return int(line)

    def __enter__(self) -> ForkedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the process if it has not been waited for, and close its streams."""
        self.kill()
        self.wait()
        self._close_stdin()
        for stream in (self.stdout, self.stderr):
            stream.close()

    def _close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def poll(self) -> int | None:
        """Return the exit status; None if the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            try:
                status = self._answer(timeout)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0) from None
            self.returncode = os.waitstatus_to_exitcode(status)
            self._answers.close()
        return self.returncode

    def communicate(self, input: bytes = b"", timeout: float = 600) -> tuple[bytes, bytes]:
        """Write `input`, which must fit into a pipe, to stdin if the process reads one. Return what the process wrote
        to stdout and stderr.

        Raises subprocess.TimeoutExpired; the process is then killed at the end of the `with` block.
        """
        deadline = time.monotonic() + timeout
        found = {stream.fileno(): bytearray() for stream in (self.stdout, self.stderr)}
        if self._stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._stdin, input)
        self._close_stdin()
        with selectors.DefaultSelector() as selector:
            for fd in found:
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
        self.wait()
        out, err = (bytes(data) for data in found.values())
        return out, err


class Server:
    """A process that imports these modules once. `variables`: its environment variables, except PYTHONPATH. `folder`:
    a folder that it removes at its end, also if this process was killed."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str], folder: Path | None = None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join((str(_TESTS.parent), str(_TESTS)))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fork_server", str(theirs.fileno()), str(folder or ""), *modules],
                cwd=_TESTS, env={**variables, "PYTHONPATH": path}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        atexit.register(self.end)

    def start(
        self, function: str, arguments: Sequence[Any], variables: Mapping[str, str], *, folder: Path | None = None,
        reads: bool = True,
    ) -> ForkedProcess:  # fmt: skip
        """Start a process that calls `function` ("module:name") with these arguments, which JSON can hold; its exit
        status is what the function returns.

        `variables`: all its environment variables. Those that the modules or Python read when they start have no
        effect. `folder`: its working folder; None: the present one. `reads`: whether its stdin is a pipe, which
        `communicate` writes; if not, its stdin is empty.
        """
        stdin, written = os.pipe() if reads else (os.open(os.devnull, os.O_RDONLY), None)
        read, outputs = zip(os.pipe(), os.pipe(), strict=True)
        answers, reply = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        wanted = {"function": function, "arguments": arguments, "variables": dict(variables),
                  "folder": str(folder or Path.cwd())}  # fmt: skip
        request = json.dumps(wanted).encode()
        assert len(request) <= _MOST_BYTES
        with reply:
            socket.send_fds(self._control, [request], [stdin, *outputs, reply.fileno()])
        for fd in (stdin, *outputs):
            os.close(fd)
        return ForkedProcess(written, read, answers)

    def end(self) -> None:
        self._control.close()
        self._process.wait()


# the server's side


def _serve(control: socket.socket) -> None:
    """Fork a process for each request, and report its id and its wait status, until the client has ended."""
    gc.freeze()
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
                replies[pid].sendall(b"%d" % pid)


def _report(replies: dict[int, socket.socket]) -> None:
    while replies:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with replies.pop(pid) as reply, contextlib.suppress(BrokenPipeError):
            reply.sendall(b"%d" % status)


def _call(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    """Become the requested process."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        if status and status is not error.code:
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined] # what Python does at its end
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)


if __name__ == "__main__":
    descriptor, removed, *names = sys.argv[1:]
    try:
        for module in names:
            importlib.import_module(module)
        _serve(socket.socket(fileno=int(descriptor)))
    finally:
        if removed:
            shutil.rmtree(removed, ignore_errors=True)
