"""Prints the output of commands: results and JSON documents on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from envbuild.util.errors import printable

if TYPE_CHECKING:  # importing the steps would import the engine's client, which `show` does not need
    from envbuild.cli.probe_result_display import Live
    from envbuild.pipeline.progress_events import Event, Listener, Step
    from envbuild.testrun.run_result import ProbeResult

VERBOSITY = "envbuild.verbosity"  # in a click context's `meta`: how often -v was given


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Return lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip()


def emit(document: object) -> None:
    """Print a document of `--json`: a dataclass or a mapping."""
    from envbuild.util.json_output_types import plain  # not for --help

    click.echo(json.dumps(plain(document), indent=2))


def listener() -> Listener:
    """Return a console. In a child process of `make A B C`, return the pipe to the parent process instead."""
    from envbuild.pipeline import progress_events  # not for --help

    return progress_events.listener_of_parent() or Console()


class Console:
    """Shows events as lines on stderr: steps, and the probes of a self-test. In a terminal, the running step also shows
    its current activity.

    `results`: whether the results of the probes are the output of the command. If so, each is printed on stdout as soon
    as its probe has ended. stderr then shows no results, except in a terminal, where it shows a live table while the
    probes run. If stdout is a terminal too, the table disappears at the end, so that each probe is shown once. `write`:
    a function that receives each line instead of stderr; there is then no live display."""

    def __init__(
        self, results: bool = False, verbose: bool = False, write: Callable[[str], None] | None = None
    ) -> None:
        self._results, self._verbose = results, verbose
        self._write = write or partial(click.echo, err=True)
        self._shown = 0
        self._planned: tuple[str, ...] = ()
        self._ended: list[ProbeResult] = []
        self._live: Any = None
        self._probes: Live | None = None
        self._kept = not (results and sys.stdout.isatty())
        self._name = ""
        if write is None and sys.stderr.isatty():
            from rich.console import Console as Rich

            self._rich = Rich(stderr=True, highlight=False)
            self._live = self._rich.status("")
            self._write = self._print_above

    def __call__(self, event: Event) -> None:
        from envbuild.pipeline import progress_events as kinds  # not for --help

        match event:
            case kinds.StepBegan():
                self._begin(event.step)
            case kinds.Activity():
                self._show_activity(event.text)
            case kinds.Note():
                self.say(event.text)
            case kinds.OutputLine():
                self._write(printable(event.text))
            case kinds.ProbesPlanned():
                self._planned = event.names
                if live := self._probe_table():
                    live.plan(event.names)
            case kinds.ProbeEnded():
                self._show_probe(event.result)
            case kinds.StepEnded():
                self._end(event.step)
            case kinds.StepAborted():
                self._abort()

    def say(self, text: str) -> None:
        self._write(f"  {'':<13} {printable(text)}")

    def results(self, judged: Sequence[ProbeResult]) -> None:
        """Print every result of the run on stdout, except those that were printed when their probe ended."""
        for result in judged[self._shown :]:
            self._print_result(result)

    def _print_above(self, line: str) -> None:
        """Print a line above the live display. A long line is wrapped by the terminal."""
        from rich.text import Text

        self._rich.print(Text(line), soft_wrap=True)

    def _begin(self, step: str) -> None:
        self._name = step
        if self._live:
            self._show_live(step)
            self._live.start()

    def _show_activity(self, text: str) -> None:
        if self._live:
            self._show_live(f"{self._name}: {text[:500]}")

    def _show_live(self, text: str) -> None:
        """Show the current activity in one line after the spinner."""
        from rich.text import Text

        shown = Text(" ".join(printable(text).split()))
        shown.truncate(max(1, self._rich.width - len("* ")), overflow="ellipsis")
        self._live.update(shown)

    def _probe_table(self) -> Live | None:
        """Return the live table of probes, which replaces the line with the current activity. Return None if stderr is
        not a terminal."""
        if self._live and not self._probes:
            from envbuild.cli import probe_result_display  # not for --help

            self._live.stop()
            self._probes = probe_result_display.Live(self._rich, self._kept)
        return self._probes

    def _show_probe(self, result: ProbeResult) -> None:
        from envbuild.cli import probe_result_display  # not for --help

        self._ended.append(result)
        if table := self._probe_table():
            table.add(result)
        elif self._results:
            self._print_result(result)
        else:
            self.say(probe_result_display.result_line(result))

    def _print_result(self, result: ProbeResult) -> None:
        from envbuild.cli.probe_result_display import result_lines

        self._shown += 1
        for text in result_lines(result, self._verbose):
            click.echo(printable(text))

    def _end(self, step: Step) -> None:
        self._give_back()
        self._planned, self._ended = (), []
        done = "up to date" if step.cached else f"{step.seconds:6.2f} s"
        self._write(f"  {step.name:<13} {done:>10}  {printable(step.note)}")

    def _abort(self) -> None:
        """Stop the display of a step that failed. Before the error is printed, print the results of the finished
        probes, and name the probe that was running."""
        self._give_back()
        if self._results:
            self.results(self._ended)
        running = self._planned[len(self._ended) :][:1]
        self._planned, self._ended = (), []
        for name in running:
            self.say(f"interrupted during {name}")

    def _give_back(self) -> None:
        """Stop the live display, and print the output of a failed script, which does not fit into the table."""
        if self._live:
            self._live.stop()
        if self._probes:
            self._probes.stop()
            self._probes = None
        for result in () if self._results else self._ended:
            from envbuild.cli.probe_result_display import printed

            for text in printed(result) if result.status == "failed" else ():
                self.say(text)
