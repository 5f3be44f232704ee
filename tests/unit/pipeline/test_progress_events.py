"""Events between processes: each is read from the pipe as written, also from a real process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

import envbuild
from envbuild.pipeline import progress_events
from envbuild.pipeline.progress_events import (
    Activity,
    Event,
    Note,
    ProbeEnded,
    ProbesPlanned,
    Progress,
    Step,
    StepAborted,
    StepBegan,
    StepEnded,
)
from envbuild.util import host_processes
from unit.evidence.runs import NAMES, ended_probe

EVENTS: list[Event] = [
    StepBegan("load profile"),
    Note("a\u202e \x1b[2J\nsecond line \udc80".encode(errors="replace").decode()),
    ProbesPlanned(NAMES),
    ProbeEnded(ended_probe("gemm.crash", "failed", figures=[{"ratio": 0.5, "case": None}])),
    StepEnded(Step("build", 1.25, True, "envbuild/a:0 1 MB")),
    StepAborted(),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.event)
def test_an_event_is_one_line_and_the_same_again(event: Event) -> None:
    line = progress_events.event_line(event)
    assert line.count(b"\n") == 1 and line.endswith(b"\n")
    assert progress_events.parse_event(line.decode()) == event


@pytest.mark.parametrize(
    "line", ["", "x", "[]", "{}", '{"event": "nothing"}', '{"event": "note"}', '{"event": "step-ended"}']
)
def test_another_line_is_not_an_event(line: str) -> None:
    with pytest.raises(ValueError):
        progress_events.parse_event(line)


def test_each_report_of_a_step_is_an_event() -> None:
    found: list[Event] = []
    progress = Progress(found.append)
    step, result = Step("build", 1.0, False, ""), ended_probe("env.libs")
    progress.begin("build")
    progress.line("layer 1")
    progress.say("a note")
    progress.probe(NAMES)
    progress.probe(result)
    progress.end(step)
    progress.abort()
    assert found == [
        StepBegan("build"), Activity("layer 1"), Note("a note"), ProbesPlanned(NAMES), ProbeEnded(result),
        StepEnded(step), StepAborted(),
    ]  # fmt: skip


WRITER = """
import os
from envbuild.cli.console import listener
from envbuild.pipeline.progress_events import Activity, Note
listen = listener()
for number in range(3):
    listen(Activity("fetching"))
    listen(Note(f"note {number} " + "x" * 100_000))
print(os.environ.get("ENVBUILD_EVENTS"))
"""


def test_a_process_writes_its_events_to_the_pipe_and_not_to_stderr() -> None:
    lines: list[str] = []
    root = str(Path(envbuild.__file__).parents[1])
    done = host_processes.run(
        [sys.executable, "-c", WRITER],
        listeners=host_processes.LineListeners(events=lines.append),
        env={"PYTHONPATH": root},
        timeout=60,
    )
    events = [progress_events.parse_event(line) for line in lines]
    assert [event.text[:6] for event in events if isinstance(event, Note)] == ["note 0", "note 1", "note 2"]
    assert (len(events), done.stderr) == (3, "")
    assert done.stdout == "None\n", "what it starts itself has no pipe to write to"


@pytest.mark.parametrize("number", ["", "x", "-1"])
def test_a_variable_that_names_no_pipe_asks_for_nothing(monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setenv(host_processes.EVENTS, number)
    assert progress_events.listener_of_parent() is None
    assert host_processes.EVENTS not in os.environ
