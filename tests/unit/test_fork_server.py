"""Processes of tests/fork_server.py behave as new processes of Python do."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ForkedProcess, Server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    started = Server(["unit.test_fork_server"], os.environ, folder)
    yield started
    started.end()
    assert not folder.exists()


def describe(*words: str) -> int:
    """Print what the process sees, and end with exit status 7."""
    atexit.register(print, "at exit")
    found = {"words": words, "folder": os.getcwd(), "variables": dict(os.environ), "stdin": sys.stdin.read()}  # noqa: PTH109
    print(json.dumps(found))
    print("warning", file=sys.stderr)
    return 7


def fail() -> None:
    raise ValueError("on purpose")


def leave(status: int | str) -> None:
    sys.exit(status)


def sleep() -> None:
    print("asleep", flush=True)
    time.sleep(60)


def outputs(process: ForkedProcess) -> tuple[str, str]:
    with process:
        out, err = process.communicate()
    return out.decode(), err.decode()


def test_it_has_the_arguments_folder_variables_and_streams_of_a_new_process(server: Server, tmp_path: Path) -> None:
    variables = {"PATH": "/bin", "TMPDIR": str(tmp_path)}
    process = server.start("unit.test_fork_server:describe", ["a", "b"], variables, folder=tmp_path)
    with process:
        out, err = process.communicate(b"typed")
    document, last = out.decode().splitlines()
    expected = {"words": ["a", "b"], "folder": str(tmp_path), "variables": variables, "stdin": "typed"}
    assert (json.loads(document), last, err, process.returncode) == (expected, "at exit", b"warning\n", 7)


def test_without_input_its_stdin_is_empty(server: Server) -> None:
    with server.start("unit.test_fork_server:describe", [], {}, reads=False) as process:
        out, _ = process.communicate()
    assert json.loads(out.splitlines()[0])["stdin"] == ""
    assert process.wait(20) == process.poll() == 7


@pytest.mark.parametrize(
    ("function", "arguments", "code", "text"),
    [("fail", [], 1, "ValueError: on purpose"), ("leave", [3], 3, ""), ("leave", ["no"], 1, "no\n")],
)
def test_an_exception_ends_it_as_it_ends_python(
    function: str, arguments: list[int | str], code: int, text: str, server: Server
) -> None:
    process = server.start(f"unit.test_fork_server:{function}", arguments, {})
    _, err = outputs(process)
    assert (process.returncode, text in err) == (code, True)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_reach_it(number: signal.Signals, code: int, server: Server) -> None:
    with server.start("unit.test_fork_server:sleep", [], {}, reads=False) as process:
        assert process.stdout.readline() == "asleep\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.send_signal(number)
        assert process.wait(20) == code
        assert ("KeyboardInterrupt" in process.stderr.read()) == (number == signal.SIGINT)


def test_processes_run_at_the_same_time_and_are_killed_at_the_end_of_the_block(server: Server) -> None:
    with server.start("unit.test_fork_server:sleep", [], {}, reads=False) as first:
        assert first.stdout.readline() == "asleep\n"
        second = server.start("unit.test_fork_server:leave", [0], {}, reads=False)
        assert (second.wait(20), first.poll()) == (0, None)
    assert first.returncode == -signal.SIGKILL


def test_it_has_a_temporary_folder_of_its_own_variables(server: Server, tmp_path: Path) -> None:
    process = server.start("unit.test_fork_server:show_temporary", [], {"TMPDIR": str(tmp_path)})
    assert outputs(process)[0] == f"{tmp_path}\n"


def show_temporary() -> int:
    print(tempfile.gettempdir())
    return 0
