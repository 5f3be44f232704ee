"""The self-test on kernels that are right: nothing fails, and no trait reports a defect. test_run.py runs it twice
more, and finds nothing amiss either."""

import json
import subprocess
import sys

import pytest

from selftest.reading import Frame, environment

pytest.importorskip("torch")

AMISS = ("cure", "needs_upcast", "accumulates_in_half", "not exact on integers", "refusal", "compute_mode")


def amiss(probe: Frame) -> list[str]:
    """What a probe says of itself that a right environment gives no reason for."""
    findings = [name for name in AMISS if _is_said(probe["traits"].get(name))]
    loose = probe["traits"].get("default flags", {}).values() if probe["probe"] == "gemm.accuracy" else ()
    if not all(flags["within"] for flags in loose):
        findings.append("default flags")
    return findings + ([probe["failure"]] if probe["status"] == "failed" else [])


def _is_said(value: object) -> bool:
    return any(map(_is_said, value.values())) if isinstance(value, dict) else bool(value)


def test_a_quick_run_raises_no_alarm() -> None:
    command = [sys.executable, "-m", "envbuild.selftest", "--level", "quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=150)
    found = json.loads(done.stdout)
    assert {probe["probe"]: amiss(probe) for probe in found["probes"] if amiss(probe)} == {}
    assert (done.returncode, found["end"]["failed"]) == (0, 0), done.stderr
    assert found["end"]["passed"] >= 10  # a run of skips shows nothing


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"status": "failed", "failure": "bound"}, ["bound"]),
        ({"traits": {"needs_upcast": ["fp16"]}}, ["needs_upcast"]),
        ({"traits": {"accumulates_in_half": {"fp16": ["output"], "bf16": []}}}, ["accumulates_in_half"]),
        ({"traits": {"accumulates_in_half": {"fp16": [], "bf16": []}}}, []),
        ({"traits": {"default flags": {"fp16": {"within": False}}}}, ["default flags"]),
    ],
)
def test_an_alarm_would_be_seen(change: Frame, said: list[str]) -> None:
    assert amiss({"probe": "gemm.accuracy", "status": "passed", "failure": None, "traits": {}, **change}) == said
