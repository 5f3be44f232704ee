"""The console in a real pseudo-terminal, read through a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

import envbuild

pyte = pytest.importorskip("pyte")

from envbuild.pipeline.progress_events import (  # noqa: E402
    Activity,
    Event,
    Note,
    ProbeEnded,
    ProbesPlanned,
    Step,
    StepAborted,
    StepBegan,
    StepEnded,
    event_line,
)
from unit.evidence.runs import ended_probe  # noqa: E402

SHOW = """
import logging, sys
from envbuild.cli.console import Console
from envbuild.pipeline.progress_events import Note, parse_event
from envbuild.util import debug_log
if "-v" in sys.argv:
    debug_log.log_to_stderr(1)
console = Console()
for line in sys.stdin:
    event = parse_event(line)
    if "-v" in sys.argv and isinstance(event, Note):
        logging.getLogger("envbuild.x").info(event.text)
    else:
        console(event)
"""
NAMES = ("env.libs", "gemm.crash", "attention.cudnn_backward", "train.step")
LONG = "a long reason " * 20
BUILT = StepEnded(Step("build", 1.0, False, "1 layer"))
DONE = StepEnded(Step("self-test", 1.5, False, "3 passed"))
PATIENCE = 30.0


class Terminal:
    """A process that shows the events it is sent, and the screen of its terminal."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int, columns: int) -> None:
        assert process.stdin is not None
        self._process, self._events, self._fd = process, process.stdin, fd
        self._screen = pyte.Screen(columns, 24)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""

    def send(self, *events: Event) -> None:
        for event in events:
            self._events.write(event_line(event))
        self._events.flush()

    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def until(self, shown: Callable[[list[str]], object]) -> list[str]:
        """Wait until the screen is as wanted, and return its lines."""
        end = time.monotonic() + PATIENCE
        while not shown(self.lines()):
            assert time.monotonic() < end, self.lines()
            self._read(0.1)
        return self.lines()

    def end(self) -> list[str]:
        """Send no more, and return the screen that is left."""
        self._events.close()
        while self._read(PATIENCE):
            pass
        assert self._process.wait(PATIENCE) == 0
        return self.lines()

    def _read(self, seconds: float) -> bool:
        if select.select([self._fd], [], [], seconds)[0]:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:  # EIO: the other end is closed
                return False
            self.raw += data
            self._stream.feed(data)
        return True


@contextmanager
def terminal(columns: int, *options: str, **variables: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    env = {**kept, "TERM": "xterm", "PYTHONPATH": str(Path(envbuild.__file__).parents[1]), **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", SHOW, *options], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, env=env
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours, columns)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        stdin: IO[bytes] | None = process.stdin
        if stdin:
            stdin.close()


def begins(line: str) -> list[str]:
    return line.split()[:2]


def has(word: str) -> Callable[[list[str]], object]:
    return lambda lines: any(word in line for line in lines)


def begin_selftest(shown: Terminal) -> None:
    failed = ended_probe("gemm.crash", "failed", reason=LONG)
    shown.send(StepBegan("self-test"), ProbesPlanned(NAMES), ProbeEnded(ended_probe("env.libs")), ProbeEnded(failed))


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_status_and_time_of_every_probe_are_seen_at_every_width(columns: int) -> None:
    with terminal(columns) as shown:
        begin_selftest(shown)
        running = shown.until(has("running"))
        assert [begins(line) for line in running] == [
            ["passed", "env.libs"], ["failed", "gemm.crash"], ["running", "attention.cudnn_backward"],
        ]  # fmt: skip
        assert all(re.search(r"  +[0-9]+\.[0-9]{2} s( |$)", line) for line in running)
        assert running[1].endswith("…")
        shown.send(*(ProbeEnded(ended_probe(name)) for name in NAMES[2:]), DONE)
        left = shown.end()
    assert [begins(line) for line in left] == [
        ["passed", "env.libs"], ["failed", "gemm.crash"], ["passed", NAMES[2]], ["passed", NAMES[3]],
        ["self-test", "1.50"],
    ]  # fmt: skip
    assert all(re.search(r"  +[0-9]+\.[0-9]{2} s( |$)", line) for line in left)
    assert max(map(len, left)) <= columns


@pytest.mark.parametrize("columns", [30, 40])
def test_a_very_narrow_terminal_cuts_the_note_then_the_name(columns: int) -> None:
    with terminal(columns) as shown:
        begin_selftest(shown)
        running = shown.until(has("running"))
        times = [line for line in running if re.search(r" [0-9]+\.[0-9]{2} s( |$)", line)]
        assert [line.split()[0] for line in times] == ["passed", "failed", "running"]


@pytest.mark.slow
@pytest.mark.parametrize("columns", [60, 80, 200])
@pytest.mark.parametrize("activity", ["short", LONG, "two\nlines \x1b[2J"])
def test_a_note_is_printed_above_the_progress_and_nothing_else_is_left(columns: int, activity: str) -> None:
    with terminal(columns) as shown:
        shown.send(StepBegan("build"), Activity(activity))
        (line,) = shown.until(has(f"build: {activity[:5].split()[0]}"))
        assert len(line) <= columns
        shown.send(Note("first"))
        assert len(shown.until(has("first"))) == 2, "the activity is on the line below"
        shown.send(Note("second " + "word " * 30), BUILT)
        left = shown.end()
    without_spaces = "".join("".join(left).split())  # the terminal wraps in the middle of words
    assert without_spaces == f"firstsecond{'word' * 30}build1.00s1layer"


@pytest.mark.parametrize("options", [[], ["-v"]])
def test_notes_and_log_lines_are_printed_above_the_table(options: list[str]) -> None:
    with terminal(80, *options) as shown:
        begin_selftest(shown)
        shown.until(has("running"))
        shown.send(Note("a warning"))
        shown.until(has("a warning"))
        shown.send(*(ProbeEnded(ended_probe(name)) for name in NAMES[2:]), DONE)
        left = shown.end()
    assert left[0].endswith("a warning") and len(left) == 1 + len(NAMES) + 1, left


def test_an_aborted_run_keeps_ended_probes_and_names_the_running_one() -> None:
    with terminal(60) as shown:
        begin_selftest(shown)
        shown.until(has("running"))
        shown.send(StepAborted())
        left = shown.end()
    assert [begins(line) for line in left] == [
        ["passed", "env.libs"],
        ["failed", "gemm.crash"],
        ["interrupted", "during"],
    ]
    with terminal(60) as shown:
        shown.send(StepBegan("build"), Activity(LONG))
        shown.until(has("build"))
        shown.send(StepAborted())
        assert shown.end() == []
    assert shown.raw.endswith(b"\x1b[?25h") or b"\x1b[?25h" in shown.raw.rpartition(b"\x1b[?25l")[2], "the cursor"


COLOUR = re.compile(rb"\x1b\[[0-9;]*3[0-7]m")
MOVES = re.compile(rb"\x1b\[[0-9]*[A-HJK]")


@pytest.mark.parametrize(("variables", "coloured", "moves"), [
    ({}, True, True), ({"NO_COLOR": "1"}, False, True), ({"TERM": "dumb"}, False, False),
])  # fmt: skip
def test_colours_and_movements_are_as_the_terminal_has_them(
    variables: dict[str, str], coloured: bool, moves: bool
) -> None:
    with terminal(80, **variables) as shown:
        begin_selftest(shown)
        shown.send(*(ProbeEnded(ended_probe(name)) for name in NAMES[2:]), DONE)
        left = shown.end()
    assert (bool(COLOUR.search(shown.raw)), bool(MOVES.search(shown.raw))) == (coloured, moves)
    assert [line.split()[0] for line in left] == ["passed", "failed", "passed", "passed", "self-test"]


def test_columns_goes_before_the_terminals_own_width() -> None:
    with terminal(200, COLUMNS="60") as shown:
        begin_selftest(shown)
        assert max(map(len, shown.until(has("running")))) <= 60
