"""The events that a running workflow reports: their types, and their form between two processes.

`make A B C` runs each profile in processes of its own. Such a process shows nothing: it writes its events to the file
descriptor whose number it finds in the environment variable ENVBUILD_EVENTS, a pipe to the process that started it
(`events` of util.host_processes.LineListeners). Each event is an object of JSON on one line. `event` names its kind,
the other keys are the fields of the class of that kind in this module:

    {"step": "build", "event": "step-began"}
    {"text": "locked: numpy 2.1.0", "event": "note"}
    {"names": ["env.libs", "gemm.crash"], "event": "probes-planned"}
    {"result": {"probe": "env.libs", "status": "passed", ...}, "event": "probe-ended"}
    {"step": {"name": "build", "seconds": 3.2, "cached": false, "note": "..."}, "event": "step-ended"}
    {"event": "step-aborted"}

An activity is not written, because the console has no place for the activities of several profiles. Texts may contain
output of other programs, such as escape sequences: the code that shows a text must make it printable.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from envbuild.testrun.run_result import ProbeResult
from envbuild.util import host_processes


@dataclass(frozen=True)
class Step:
    """A finished step. `cached`: nothing had to be done."""

    name: str
    seconds: float
    cached: bool
    note: str


@dataclass(frozen=True)
class StepBegan:
    step: str
    event: Literal["step-began"] = "step-began"


@dataclass(frozen=True)
class Activity:
    """What a step is doing at this moment; it may change many times in a second."""

    text: str
    event: Literal["activity"] = "activity"


@dataclass(frozen=True)
class Note:
    """A message that stays visible."""

    text: str
    event: Literal["note"] = "note"


@dataclass(frozen=True)
class ProbesPlanned:
    """The probes that a self-test will run, in their order."""

    names: tuple[str, ...]
    event: Literal["probes-planned"] = "probes-planned"


@dataclass(frozen=True)
class ProbeEnded:
    """The result of one probe, as the self-test reported it."""

    result: ProbeResult
    event: Literal["probe-ended"] = "probe-ended"


@dataclass(frozen=True)
class StepEnded:
    step: Step
    event: Literal["step-ended"] = "step-ended"


@dataclass(frozen=True)
class StepAborted:
    """The step did not end, because of an error or an interruption."""

    event: Literal["step-aborted"] = "step-aborted"


@dataclass(frozen=True)
class OutputLine:
    """A line that a profile's process wrote to stderr, such as a line of a traceback. Workflows do not report this
    event: the process that reads the output creates it."""

    text: str
    event: Literal["output-line"] = "output-line"


Event = StepBegan | Activity | Note | ProbesPlanned | ProbeEnded | StepEnded | StepAborted | OutputLine
Listener = Callable[[Event], None]
_EVENTS: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


@dataclass(frozen=True)
class Progress:
    """Reports events to a listener, with a method for each kind that steps report."""

    listener: Listener

    def begin(self, step: str) -> None:
        self.listener(StepBegan(step))

    def line(self, text: str) -> None:
        self.listener(Activity(text))

    def say(self, text: str) -> None:
        self.listener(Note(text))

    def probe(self, report: tuple[str, ...] | ProbeResult) -> None:
        """Report the names of the probes that will run, or the result of one probe."""
        self.listener(ProbeEnded(report) if isinstance(report, ProbeResult) else ProbesPlanned(report))

    def end(self, step: Step) -> None:
        self.listener(StepEnded(step))

    def abort(self) -> None:
        self.listener(StepAborted())


def event_line(event: Event) -> bytes:
    return _EVENTS.dump_json(event) + b"\n"


def parse_event(line: str) -> Event:
    """Raises ValueError if the line is not an event."""
    return _EVENTS.validate_json(line)


def listener_of_parent() -> Listener | None:
    """Return a listener that writes events to the parent process; None if the parent did not request events."""
    number = os.environ.pop(host_processes.EVENTS, "")
    if not number.isdecimal():
        return None
    pipe, lock = int(number), threading.Lock()

    def write(event: Event) -> None:
        if not isinstance(event, Activity):
            with lock, os.fdopen(pipe, "wb", closefd=False) as stream:
                stream.write(event_line(event))

    return write
