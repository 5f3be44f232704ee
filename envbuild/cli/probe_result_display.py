"""Shows the results of a self-test: one line per probe, and in a terminal a live table while the probes run."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from envbuild.selftest.harness.probe_outcome_and_figures import result_note
from envbuild.util.errors import printable

if TYPE_CHECKING:  # imported only for a terminal
    from rich.console import Console as Rich
    from rich.table import Table

    from envbuild.testrun.run_result import ProbeResult

_MOST_LINES = 20  # maximum number of lines of a script's output that are shown without --verbose
_GAP = "  "  # after each column
_NONE = 0, 0, 0, 0
_COLOURS = {"passed": "green", "failed": "bold red", "skipped": "yellow", "running": "cyan"}


def result_line(result: ProbeResult) -> str:
    """Return the line of one probe: its largest error, or why it failed or was skipped."""
    return f"{result.status:<8} {result.probe:<20} {result.seconds:6.2f} s  {result_note(vars(result))}".rstrip()


def result_lines(result: ProbeResult, verbose: bool) -> list[str]:
    """Return the line of a probe. If it failed, also return its details and the output of its script. `verbose`: return
    the output even if the probe did not fail."""
    failed = result.status == "failed"
    detail = textwrap.indent(result.detail.rstrip(), "    ").splitlines() if failed and result.detail else []
    return [result_line(result), *detail, *(printed(result, verbose) if failed or verbose else ())]


def printed(result: ProbeResult, verbose: bool = False) -> list[str]:
    """Return the output of the profile's own script as separate lines, after a heading. Of many lines, only the last
    are returned, unless `verbose`."""
    lines = textwrap.indent(result.output or "", "      ", lambda line: True).splitlines()
    if not lines:
        return []
    which = "its last 8 kB" if result.output_cut else ""
    if len(lines) > _MOST_LINES and not verbose:
        of = f" of {which}" if which else ""
        which = f"the last {_MOST_LINES} of {len(lines)} lines{of}; all: envbuild test --verbose, or --json"
        lines = lines[-_MOST_LINES:]
    return [f"    {result.probe} printed{f' ({which})' if which else ''}:", *lines]


class Live:
    """A live table on stderr with the finished probes and the running one. `kept`: whether the table stays on the
    screen at the end."""

    def __init__(self, rich: Rich, kept: bool) -> None:
        from rich.live import Live as RichLive

        self._planned: Sequence[str] = ()
        self._done: list[ProbeResult] = []
        self._since = time.monotonic()
        self._rich = rich
        self._rows = max(4, rich.size.height - 2)
        self._live = RichLive(console=rich, get_renderable=self._table, refresh_per_second=8, transient=not kept)
        self._live.start()

    def plan(self, names: Sequence[str]) -> None:
        """Set the names of the probes that will run."""
        self._planned = names
        self._since = time.monotonic()

    def add(self, result: ProbeResult) -> None:
        self._done.append(result)
        self._since = time.monotonic()

    def stop(self) -> None:
        """Stop the live display. If the table stays, it shows only the finished probes."""
        self._planned, self._rows = (), len(self._done)
        self._live.stop()

    def _table(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        rows: list[tuple[str, str, float, str]] = [
            (one.status, one.probe, one.seconds, printable(result_note(vars(one)))) for one in self._done
        ]
        if len(rows) < len(self._planned):
            rows.append(("running", self._planned[len(rows)], time.monotonic() - self._since, ""))
        shown = rows[-self._rows :] if self._rows else []
        cells = [(f"  {status}", probe, f"{seconds:.2f} s", note) for status, probe, seconds, note in shown]
        table = Table.grid(padding=(0, len(_GAP), 0, 0))
        status_width, name_width, time_width, note_width = self._widths(cells)
        table.add_column(width=status_width, no_wrap=True)
        table.add_column(width=name_width, no_wrap=True, overflow="ellipsis")
        table.add_column(width=time_width, no_wrap=True, justify="right")
        table.add_column(width=note_width, no_wrap=True, overflow="ellipsis")
        for status, *others in cells:
            table.add_row(Text(status, style=_COLOURS[status.strip()]), *map(Text, others))
        return table

    def _widths(self, cells: Sequence[tuple[str, ...]]) -> tuple[int, int, int, int]:
        """Return the widths of the columns. In a narrow terminal the note is shortened first, then the probe's name;
        status and time are always shown in full."""
        status, name, seconds, _ = (max(map(len, column)) for column in zip(*cells, strict=True)) if cells else _NONE
        left = self._rich.width - status - seconds - 4 * len(_GAP)
        name = max(1, min(name, left))
        return status, name, seconds, max(1, left - name)
