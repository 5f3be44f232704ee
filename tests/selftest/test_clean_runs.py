"""`make clean-runs`: a failed or missing probe is a false alarm, and the page names its case."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import clean_runs
from fault_injection import records
from fault_injection.records import CleanRun

PASSED: list[dict[str, Any]] = [
    {"probe": name, "status": "passed", "failure": None, "reason": None} for name in clean_runs.PROBES
]


def test_each_probe_that_did_not_pass_is_a_fault() -> None:
    assert clean_runs.faults(PASSED) == ()
    failed = {**PASSED[0], "status": "failed", "failure": "bound", "reason": "fp16 mm: element [0]"}
    assert clean_runs.faults([failed, *PASSED[2:]]) == (
        f"{clean_runs.PROBES[0]}: bound: fp16 mm: element [0]",
        f"{clean_runs.PROBES[1]}: no result",
    )


def test_the_page_counts_runs_and_names_each_false_alarm() -> None:
    runs = [CleanRun("all", "quick", 2, 1, ()), CleanRun("all", "quick", 1, 2, ("conv.cases: bound: fp16 conv2d",))]
    text = "\n".join(clean_runs.page(runs, "a machine", "2.13.0"))
    assert "each with its own seed: 2 (1 with threads=1, 1 with threads=2)." in text
    assert "- Runs with a false alarm: 1." in text
    assert "| 2 | 1 | conv.cases: bound: fp16 conv2d |" in text


def test_a_campaign_goes_on_with_the_next_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, begun, written = tmp_path / "runs.jsonl", [], []

    def run(number: int) -> CleanRun:
        begun.append(number)
        return CleanRun("all", "quick", 1, number, ())

    monkeypatch.setattr(clean_runs, "run", run)
    monkeypatch.setattr(clean_runs, "RUNS", 3)
    monkeypatch.setattr(clean_runs, "write", lambda name, lines: written.append(lines))
    for count in ("2", "3"):
        monkeypatch.setattr(sys, "argv", ["clean_runs.py", "--runs", count, "--file", str(file)])
        assert clean_runs.main() == 0
    assert sorted(begun) == [1, 2, 3]
    assert len(list(records.Lines(file).read())) == 3
    assert ["own seed: 3 (" in "\n".join(page) for page in written] == [True], "two runs write no page"
