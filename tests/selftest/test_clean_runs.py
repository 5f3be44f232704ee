"""`make clean-runs`: a failed or missing probe is a false alarm; runs are kept for each version of a probe."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import clean_runs
from clean_runs import Done, Runs

from envbuild.selftest.probes.training import optimizer_sampled_cases, other_optimizer_cases

VERSIONS = clean_runs.read_versions()


def result(probe: str, **changes: Any) -> dict[str, Any]:
    return {"probe": probe, "status": "passed", "failure": None, "reason": None, **changes}


def test_each_probe_that_did_not_pass_is_a_false_alarm() -> None:
    probes = ("gemm.cases", "conv.cases", "repeat")
    failed = result("gemm.cases", status="failed", failure="bound", reason="fp16 mm: element [0]")
    assert clean_runs.failures(probes, [failed, result("repeat")]) == {
        "gemm.cases": "bound: fp16 mm: element [0]",
        "conv.cases": "no result",
        "repeat": None,
    }


@pytest.mark.slow
def test_the_worker_runs_the_probes_with_their_seed() -> None:
    done = clean_runs.run(["gemm.fp8", "tf32.mode"], 8)
    assert done == Done(8, 1, {"gemm.fp8": None, "tf32.mode": None})


def test_each_probe_runs_at_a_level_at_which_it_samples_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    levels: dict[str, str] = {}

    def answer(*_: Any, input: bytes, **__: Any) -> Any:
        document = json.loads(input)
        levels.update(dict.fromkeys(document["probes"], document["level"]))
        found = [result(probe) for probe in document["probes"]]
        return SimpleNamespace(stdout=json.dumps({"probes": found}))

    monkeypatch.setattr(clean_runs.subprocess, "run", answer)
    assert clean_runs.run(clean_runs.PROBES, 8) == Done(8, 1, dict.fromkeys(clean_runs.PROBES))
    assert levels == {**dict.fromkeys(clean_runs.PROBES, "quick"), "optim.torch": "standard"}
    of_optimizers = (*optimizer_sampled_cases.OPERATIONS, *other_optimizer_cases.OPERATIONS)
    assert all(operation.counts.get(levels["optim.torch"]) for operation in of_optimizers)


def test_the_page_counts_runs_and_names_each_false_alarm() -> None:
    new = VERSIONS["conv.cases"]
    found = (
        Runs("conv.cases", new, "2.13.0", "a machine", 1, 3),
        Runs("conv.cases", new, "2.13.0", "another machine", 2, 4, {"17": "bound: fp16 | conv2d"}),
        Runs("conv.cases", new - 1, "2.13.0", "a machine", 1, 900, {"3": "of the version before"}),
        Runs("conv.cases", new, "2.12.0", "a machine", 1, 900, {"3": "of another torch"}),
    )
    text = "\n".join(clean_runs.report(found, VERSIONS, "2.13.0"))
    assert f"| conv.cases | {new} | 7 | 3 | 4 | 1 |" in text
    assert f"| repeat | {VERSIONS['repeat']} | 0 | 0 | 0 | 0 |" in text
    assert "- Machine: a machine.\n- Machine: another machine.\n" in text
    assert "| conv.cases | 17 | 2 | bound: fp16 / conv2d |" in text
    assert "of the version before" not in text and "of another torch" not in text


def test_a_campaign_goes_on_with_the_next_seed_and_the_probes_that_lack_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, begun = tmp_path / "runs.json", []

    def run(probes: Sequence[str], seed: int) -> Done:
        begun.append((seed, tuple(probes)))
        return Done(seed, 1 + seed % 2, dict.fromkeys(probes, "bound: wrong" if seed == 4 else None))

    def ran(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", ["clean_runs.py", "--file", str(file), "--processes", "1", *options])
        begun.clear()
        return clean_runs.main()

    monkeypatch.setattr(clean_runs, "run", run)
    assert ran("--runs", "2", "--probe", "repeat") == 0
    assert begun == [(1, ("repeat",)), (2, ("repeat",))]
    assert ran("--runs", "3") == 1  # seed 4 failed
    others = tuple(probe for probe in clean_runs.PROBES if probe != "repeat")
    assert begun == [(3, clean_runs.PROBES), (4, others), (5, others)]
    assert ran("--runs", "3") == 1
    assert begun == []
    monkeypatch.setattr(clean_runs, "read_versions", lambda: {**VERSIONS, "repeat": VERSIONS["repeat"] + 1})
    assert ran("--runs", "1") == 1
    assert begun == [(6, ("repeat",))]


def test_runs_that_ended_before_an_interruption_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "runs.json"

    def run(probes: Sequence[str], seed: int) -> Done:
        if seed == 3:
            raise KeyboardInterrupt
        return Done(seed, 1, dict.fromkeys(probes))

    monkeypatch.setattr(clean_runs, "run", run)
    monkeypatch.setattr(sys, "argv", ["clean_runs.py", "--file", str(file), "--processes", "1"])
    with pytest.raises(KeyboardInterrupt):
        clean_runs.main()
    seed, found, notes = clean_runs.read(file)
    assert (seed, notes) == (3, [])
    assert {runs.probe: runs.count for runs in found} == dict.fromkeys(clean_runs.PROBES, 2)
