"""Runs a part of the plan for half an hour on a GPU on a simulated H100. `make pretend-plan` runs the whole plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from pretend import ledger, nvidia_smi, plan_trial
from pretend.gpus import GPU
from pretend.plan_trial import PASSED, STEPS, Call, Result
from pretend.sizes import FEW, SHORT

SLICE = ("fp8-chains", "tf32-override", "memory-held", "sigterm")


@pytest.mark.slow
def test_a_slice_of_the_plan_passes_on_an_h100(tmp_path: Path) -> None:
    """Another process uses 90% of the memory; nvidia-smi reports the memory of burn's processes."""
    given = {**plan_trial.variables(tmp_path), SHORT: "1", FEW: "1"}
    out = tmp_path / "out"
    out.mkdir()
    ran = plan_trial.call(plan_trial.ROOT, out, given, "--again", "--steps", *SLICE)
    assert ran.status == 0, ran.stderr[-4000:]
    (folder,) = out.iterdir()
    results = plan_trial.StepLog(folder).results()
    assert {name: result.verdict for name, result in results.items()} == dict.fromkeys(SLICE, PASSED)
    assert results["memory-held"].saw[0] == "64.4 GiB held by another process"
    assert len(ran.files) <= plan_trial.MOST_FILES


@pytest.fixture
def whole() -> tuple[list[Call], dict[str, Result]]:
    """Return four calls with the expected results."""
    skipped = {name: f"{reason}: carry it" for name, reason in plan_trial.SKIPPED_HERE.items()}
    results = {
        step.name: Result(
            step.name, verdict="skipped" if step.name in skipped else PASSED, reason=skipped.get(step.name, "")
        )
        for step in STEPS
    }
    files = {f"gpu/block-{block}.jsonl": 1000 for block in plan_trial.BLOCKS}
    passed = [step.name for step in STEPS if step.name not in skipped]
    calls = [
        Call(0, 1.0, files, [], ""),
        Call(0, 1.0, files, [], ""),
        Call(0, 1.0, files, [], ""),
        Call(4, 1.0, files, passed, ""),
    ]
    return calls, results


def wrong(calls: list[Call], results: dict[str, Result], number: int = 1, **fields: Any) -> Iterator[str]:
    changed = [dataclasses.replace(one, **fields) if index == number else one for index, one in enumerate(calls)]
    return plan_trial.problems(changed, results)


def test_faults_of_a_whole_run_are_named(whole: tuple[list[Call], dict[str, Result]]) -> None:
    calls, results = whole
    assert list(wrong(calls, results)) == []
    assert next(wrong(calls, results, status=5)).startswith("call 2 ended with exit status 5")
    assert (
        next(wrong(calls, results, files=dict.fromkeys("abcdefghi", 1)))
        == "call 2 leaves 9 files, of which 8 come back"
    )
    assert next(wrong(calls, results, files={"a": 1 << 25})) == "call 2: a has 33554432 bytes"
    assert next(wrong(calls, results, number=3, left_out=["machine"])).startswith(
        "the last call ran again: fingerprint, "
    )
    results["full"].verdict, results["full"].reason = "skipped", "every probe was skipped"
    results["sanitizer"].reason = "every probe was skipped"
    del results["seeds"]
    found = list(wrong(calls, results))
    assert found[:3] == [
        "seeds failed: never begun",
        "full skipped: every probe was skipped",
        "sanitizer skipped: every probe was skipped",
    ]


def test_the_ledger_forgets_processes_that_ended(tmp_path: Path) -> None:
    ledger.Ledger(tmp_path).note(1 << 30)
    assert ledger.in_use(tmp_path) == ledger.CONTEXT + (1 << 30)
    (tmp_path / "4194305").write_bytes((1 << 30).to_bytes(8, "little"))  # above the largest process id
    assert ledger.in_use(tmp_path) == ledger.CONTEXT + (1 << 30)


def test_nvidia_smi_answers_what_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(GPU, "h100")
    monkeypatch.setenv(ledger.FOLDER, str(tmp_path))
    assert nvidia_smi.main(["--query-gpu=name,compute_cap,memory.used", "--format=csv,noheader,nounits"]) == 0
    assert capsys.readouterr().out == "NVIDIA H100 80GB HBM3, 9.0, 0\n"
    assert nvidia_smi.main(["--query-gpu=unknown", "--format=csv"]) == 2
