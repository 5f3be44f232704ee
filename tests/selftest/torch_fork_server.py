"""Runs functions in processes that are forked from a process that has imported torch.

`import torch` takes about two seconds of processor time, and torch._dynamo, which torch imports for the first step of
an optimizer, as much again. A server forks all processes of a worker of the test run; it starts with the first of them.
It imports no probe, because some probes share memory with all processes that are forked after their import.
"""

from __future__ import annotations

import functools
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fork_server import ForkedProcess, Server

_LIBRARIES = "LD_LIBRARY_PATH"
_MODULES = ("torch", "torch._dynamo", "selftest.driver")


class _TorchServer:
    """A server, and the folder in which its loader looks for libraries first: the loader read LD_LIBRARY_PATH when the
    server started, so that a link points to the folder of each process before the process is forked."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="envbuild-tests-fork-"))
        self._link = self._folder / "libraries"
        (self._folder / "none").mkdir()
        self._point_to(None)
        libraries = os.pathsep.join(filter(None, (str(self._link), os.environ.get(_LIBRARIES))))
        variables = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", _LIBRARIES: libraries}
        self._server = Server(_MODULES, variables, self._folder)
        self._alive: list[tuple[ForkedProcess, str | None]] = []

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
        process = self._server.start(function, arguments, variables)
        self._alive.append((process, libraries))
        return process


@functools.cache
def _server() -> _TorchServer:
    return _TorchServer()


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
