"""benchmarks/gpu_check.py without a GPU: results are kept as they come, and the exit code says what was shown."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]
sys.path.insert(0, str(CHECKOUT / "benchmarks"))

import gpu_check  # noqa: E402
from gpu_check import FAILED, NO_GPU, Run  # noqa: E402

# A self-test that writes two results. Before the second one it reads what the first one left on disk.
SELFTEST = """
import json, os, pathlib, sys, time, zlib
job = pathlib.Path(sys.argv[1])
nonce = json.loads(job.read_text())["nonce"]
sequence = 0
def frame(**document):
    global sequence
    body = json.dumps(document)
    print(f"ENVBUILD {nonce} {sequence} {zlib.crc32(body.encode()):08x} {body}", flush=True)
    sequence += 1
def probe(name, **more):
    frame(kind="probe", probe=name, status="passed", seconds=0.1, reason=None, traits={}, figures=[], **more)
frame(kind="start", torch="2.11.0")
probe("first")
log, until = job.with_name(job.name.replace(".job.json", ".jsonl")), time.monotonic() + 60
while "first" not in log.read_text() and time.monotonic() < until:
    time.sleep(0.01)
probe("second", on_disk="first" in log.read_text())
ENDING
"""


def executed(tmp_path: Path, ending: str) -> Run:
    command = (sys.executable, "-c", SELFTEST.replace("ENDING", ending))
    return gpu_check.execute("quick-1", gpu_check.job("quick-1", None), tmp_path / "run.jsonl", command)


def test_each_result_is_on_disk_before_the_next_probe_begins(tmp_path: Path) -> None:
    run = executed(tmp_path, 'frame(kind="end")')
    assert run.outcomes["second"]["on_disk"] and run.problem == "" and gpu_check.code([run]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["run.jsonl"]


@pytest.mark.parametrize(
    ("ending", "problem"),
    [
        ("os.kill(os.getpid(), 9)", "it ended after 2 probes with exit status -9"),
        ('print("ENVBUILD cut", flush=True)', "line 4 of its output is not a valid frame"),
        ('print(f"ENVBUILD {nonce} 3 00000000 {{}}", flush=True)', "line 4 of its output is not a valid frame"),
        ("", "it ended after 2 probes with exit status 0"),
    ],
)
def test_a_run_that_is_cut_short_keeps_its_results_and_fails(tmp_path: Path, ending: str, problem: str) -> None:
    run = executed(tmp_path, ending)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.get("probe") for line in lines] == [None, "first", "second"] and run.problem == problem
    assert gpu_check.code([run]) == FAILED
    assert any(problem in line for line in gpu_check.page("NVIDIA H100", {}, [run]))


def run_of(name: str = "quick-1", **outcomes: Any) -> Run:
    base = {"kind": "probe", "seconds": 1.0, "reason": None, "figures": [], "traits": {}}
    frames = [{**base, "probe": probe.replace("_", "."), **fields} for probe, fields in outcomes.items()]
    return Run(name, [{"kind": "start", "torch": "2.11.0"}, *frames, {"kind": "end"}])


PASSED, SKIPPED, BROKEN = ({"status": status} for status in ("passed", "skipped", "failed"))


@pytest.mark.parametrize(
    ("runs", "code"),
    [
        ([run_of(gemm_exact=PASSED, conv=SKIPPED)], 0),
        ([run_of(gemm_exact=SKIPPED, conv=SKIPPED)], NO_GPU),
        ([run_of(gemm_exact=PASSED, conv=BROKEN)], FAILED),
        ([run_of(gemm_exact=PASSED), run_of("quick-2", gemm_exact=BROKEN)], FAILED),
        ([run_of(gemm_exact={**PASSED, "traits": {"sha256": "a"}})] * 2, 0),
        ([run_of(gemm_exact={**PASSED, "traits": {"sha256": value}}) for value in "ab"], FAILED),
    ],
    ids=["passed", "all skipped", "failed", "second run failed", "repeats", "differs"],
)
def test_the_exit_code_says_what_was_shown(runs: list[Run], code: int) -> None:
    assert gpu_check.code(runs) == code


def test_the_page_counts_what_was_skipped() -> None:
    lines = list(gpu_check.page("NVIDIA H100", {"driver": "580"}, [run_of(gemm_exact=PASSED, conv=SKIPPED)]))
    assert "- 1 passed, 0 failed, 1 skipped" in lines and "- failed: none" in lines


def test_the_committed_facts_are_those_of_the_package() -> None:
    """They travel to machines that lack what reads the package's own."""
    assert json.loads(gpu_check.EXPECTED.read_text(encoding="utf-8")) == gpu_check.expected()


def test_every_level_has_a_run() -> None:
    assert {"quick", "standard", "full"} <= set(gpu_check.RUNS.values())
