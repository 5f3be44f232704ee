"""Progress: in a terminal a table that is updated while the probes run, else lines on stderr."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from envbuild.cli.console import Console
from envbuild.cli.probe_result_display import result_line, result_lines
from envbuild.pipeline.progress_events import Note, ProbeEnded, ProbesPlanned, Step, StepAborted, StepBegan, StepEnded
from envbuild.selftest.harness.standalone_output import Table
from envbuild.testrun.run_result import ProbeResult
from unit.evidence.runs import NAMES, ended_probe, passed_run, probe
from unit.support import envbuild

PLAN = ProbesPlanned(NAMES)
HOSTILE = "[red]x[/red]\x1b[2J\nsecond"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(text: str) -> list[str]:
    """Return the visible text, without colours and cursor movements."""
    return [part.strip() for part in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").split("\n")]


def opened(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Open stderr as a terminal. This is not a fixture, because pytest replaces stderr before each phase of a test."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("NO_COLOR", raising=False)
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def run(console: Console, *results: ProbeResult) -> None:
    console(StepBegan("self-test"))
    console(PLAN)
    for result in results:
        console(ProbeEnded(result))


DONE = StepEnded(Step("self-test", 1.5, False, "3 passed"))


def test_no_gpu_at_all_is_not_all_gpus() -> None:
    """An unset variable in a script must not take every GPU."""
    done = envbuild("test", "cpu", "--gpus", "")
    assert done.code == 2
    assert "'' is not a GPU" in done.stderr


def test_a_note_of_others_turns_no_text_round(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console(Note("a\u202eb"))
    console(StepEnded(Step("1.5", 1.0, False, "failed: \u202eb")))
    assert "\u202e" not in capsys.readouterr().err


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    run(console, ended_probe("env.libs"), ended_probe("gemm.crash", "failed", reason=HOSTILE))
    console(DONE)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [text.split()[:2] for text in captured.err.splitlines()] == [
        ["passed", "env.libs"], ["failed", "gemm.crash"], ["self-test", "1.50"],
    ]  # fmt: skip


def test_where_results_are_asked_for_each_is_a_line_on_stdout_and_nowhere_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A log of both streams contains each probe once, including a failure that is found only when the whole run is
    judged."""
    console, hung = Console(results=True), ended_probe("train.step", "failed")
    run(console, ended_probe("env.libs"), ended_probe("gemm.crash", "failed", detail="the stack"))
    live = capsys.readouterr()
    assert (live.err, [text.split()[:2] for text in live.out.splitlines()]) == (
        "", [["passed", "env.libs"], ["failed", "gemm.crash"], ["the", "stack"]],
    )  # fmt: skip
    console(DONE)
    console.results([ended_probe("env.libs"), ended_probe("gemm.crash", "failed"), hung])
    captured = capsys.readouterr()
    assert [text.split()[0] for text in captured.err.splitlines()] == ["self-test"]
    assert [text.split()[:2] for text in captured.out.splitlines()] == [["failed", "train.step"]]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_output_of_a_failed_script_is_shown_with_the_other_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    seen = opened(monkeypatch) if terminal else None
    console = Console()
    run(
        console,
        ended_probe("env.libs", output="not this"),
        ended_probe("own.script", "failed", output="loss\nis \x1b[2Jnan"),
    )
    console(DONE)
    lines = shown(seen.getvalue() if seen else capsys.readouterr().err)
    assert lines[lines.index("own.script printed:") + 1 :][:2] == ["loss", "is \ufffd[2Jnan"]
    assert "not this" not in lines


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("results", [True, False])
def test_an_interruption_keeps_ended_probes_and_names_the_running_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool, results: bool
) -> None:
    seen, out = (opened(monkeypatch), Terminal()) if terminal else (None, None)
    if out:
        monkeypatch.setattr(sys, "stdout", out)
    console = Console(results=results)
    run(console, ended_probe("env.libs"))
    console(StepAborted())
    caught = capsys.readouterr()
    on_stderr, on_stdout = (seen.getvalue() if seen else caught.err), (out.getvalue() if out else caught.out)
    left = shown(on_stderr.rpartition("\x1b[2K")[2]) + shown(on_stdout)
    assert [text.split()[:2] for text in left if text.startswith("passed")] == [["passed", "env.libs"]]
    assert [text for text in left if text.startswith("interrupted")] == ["interrupted during gemm.crash"]
    assert ("passed" in on_stdout) is results


def test_a_failure_before_the_probes_names_no_probe(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console()
    console(StepBegan("build"))
    console(StepAborted())
    assert capsys.readouterr().err == ""


def many(count: int, cut: bool = False) -> list[str]:
    output = "\n".join(f"line {number}" for number in range(count))
    return result_lines(ended_probe("own.script", "failed", output=output, output_cut=cut), False)[1:]


def test_the_end_of_a_long_script_output_is_shown_and_marked() -> None:
    assert many(20)[0] == "    own.script printed:" and len(many(20)) == 21
    assert many(20, cut=True)[0] == "    own.script printed (its last 8 kB):"
    lines = many(21)
    more = "envbuild test --verbose, or --json"
    assert lines[:2] == [f"    own.script printed (the last 20 of 21 lines; all: {more}):", "      line 1"]
    assert (lines[-1], len(lines)) == ("      line 20", 21)
    assert "(the last 20 of 99 lines of its last 8 kB; all: envbuild test" in many(99, cut=True)[0]
    every = result_lines(ended_probe("own.script", "failed", output="x\n" * 99, output_cut=True), True)[1:]
    assert (len(every), every[0]) == (100, "    own.script printed (its last 8 kB):")


@pytest.mark.parametrize(("status", "verbose", "here"), [
    ("passed", False, False), ("passed", True, True), ("failed", False, True), ("skipped", False, False),
])  # fmt: skip
def test_script_output_is_shown_after_a_failure_or_on_request(status: str, verbose: bool, here: bool) -> None:
    lines = result_lines(ended_probe("own.script", status, output="a word"), verbose)
    assert lines[1:] == (["    own.script printed:", "      a word"] if here else [])


def test_a_line_names_the_step_that_was_not_survived() -> None:
    died = ended_probe("gemm.crash", "failed", reason="died of SIGFPE", at="mm 3x7")
    assert result_line(died).endswith("  at mm 3x7: died of SIGFPE")
    named = ended_probe("gemm.exact", "failed", reason="mm 3x7: off by 2", at="mm 3x7")
    assert result_line(named).endswith("  mm 3x7: off by 2"), "once is enough"


@pytest.mark.parametrize(
    "result",
    [
        probe("env.libs", figures=[{"ratio": 0.25}, {"ratio": "nan"}]),
        probe("gemm.crash", "failed", reason="died of SIGFPE", at="mm 3x7", detail="the stack\n  of it\n"),
        probe("gemm.exact", "failed", reason="mm 3x7: off by 2", at="mm 3x7"),
        probe("attention.cudnn", "skipped", reason="needs a GPU", seconds=0),
    ],
)
def test_the_zip_shows_a_result_as_the_command_does(result: dict[str, Any], tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        Table(out.fileno())(result)
    assert (tmp_path / "out").read_text(encoding="utf-8").splitlines() == result_lines(
        passed_run(result).results[0], False
    )


def test_a_terminal_shows_what_ended_and_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    console = Console()
    run(console, ended_probe("env.libs"))
    console._probes._live.refresh()  # type: ignore[union-attr]
    console(StepAborted())
    assert any(re.fullmatch(r"running +gemm\.crash +0\.\d\d s", text) for text in shown(terminal.getvalue()))
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is given back"


def test_a_terminal_keeps_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    console = Console()
    run(console, *map(ended_probe, NAMES))
    console(DONE)
    last = shown(terminal.getvalue().rpartition("\x1b[2K")[2])
    assert [text.split()[:2] for text in last if text.startswith("passed")] == [["passed", name] for name in NAMES]
    assert last[-2].startswith("self-test")
    assert "1 check, largest error beyond rounding: 50% of the tolerance" in last[0]


def test_a_table_longer_than_the_terminal_shows_its_end_and_is_kept_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setenv("LINES", "8")
    names = [f"probe.n{number}" for number in range(30)]
    console = Console()
    console(StepBegan("self-test"))
    console(ProbesPlanned(tuple(names)))
    for name in names[:20]:
        console(ProbeEnded(ended_probe(name)))
    live = console._probes
    assert live is not None
    assert live._table().row_count == 6
    for name in names[20:]:
        console(ProbeEnded(ended_probe(name)))
    console(DONE)
    last = shown(terminal.getvalue().rpartition("\x1b[2K")[2])
    assert [text.split()[1] for text in last if text.startswith("passed")] == names


def test_where_results_follow_on_the_terminal_the_table_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    monkeypatch.setattr(sys, "stdout", Terminal())
    console = Console(results=True)
    run(console, *map(ended_probe, NAMES))
    console(DONE)
    erased = terminal.getvalue().rpartition("\x1b[2K")[2]
    assert "env.libs" not in erased and "self-test" in erased


def test_text_from_an_image_is_neither_markup_nor_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = opened(monkeypatch)
    console = Console()
    run(console, ended_probe("env.libs", "failed", reason="[red]x[/red]\nsecond"))
    console(DONE)
    assert any(text.endswith("[red]x[/red] second") for text in shown(terminal.getvalue()))


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([], ""),
        ([{"case": "no ratio"}], ""),
        ([{"beyond_rounding": 0.0, "ratio": 0.0, "error": 0}] * 2, "2 checks, all exact"),
        ([{"beyond_rounding": 0.0, "ratio": 0.99, "error": 0.25}], "1 check, errors of rounding only"),
        ([{"beyond_rounding": 0.08, "ratio": 0.99}], "1 check, largest error beyond rounding: 8% of the tolerance"),
        (
            [{"beyond_rounding": 0.001, "ratio": 0.9}],
            "1 check, largest error beyond rounding: below 1% of the tolerance",
        ),
        ([{"beyond_rounding": None, "ratio": 0.7}], ""),
        ([{"ratio": 0.25}, {"ratio": 0.5}], "2 checks, largest error beyond rounding: 50% of the tolerance"),
        ([{"ratio": 0.25}, {"ratio": "inf"}], "2 checks, an error above the tolerance"),
        ([{"ratio": "nan"}, {"ratio": 0.5}], "2 checks, an error above the tolerance"),
        (
            [{"beyond_rounding": 0.5, "checks": 40}, {"beyond_rounding": 0.25}, {"beyond_rounding": None, "checks": 7}],
            "41 checks, largest error beyond rounding: 50% of the tolerance",
        ),
        ([{"ratio": ["x"]}], "1 check, an error above the tolerance"),
    ],
)
def test_a_line_has_the_largest_error_beyond_rounding(figures: list[dict[str, Any]], expected: str) -> None:
    assert (
        result_line(ended_probe("env.libs", figures=figures))
        == f"passed   env.libs               0.25 s  {expected}".rstrip()
    )
