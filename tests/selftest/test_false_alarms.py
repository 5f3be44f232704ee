"""The self-test on right kernels raises no alarm: nothing fails, and no trait reports a defect. test_run.py runs the
self-test twice more, with the same check."""

import json
import subprocess
import sys

import pytest

from selftest.reading import Frame, environment

pytestmark = pytest.mark.slow

pytest.importorskip("torch")

ALARM_TRAITS = ("workaround", "needs_upcast", "accumulates_in_half", "not exact on integers", "refusal", "compute_mode")


def alarms(probe: Frame) -> list[str]:
    """Return the defects that a probe reports although the environment is right."""
    findings = [name for name in ALARM_TRAITS if _is_reported(probe["traits"].get(name))]
    loose = probe["traits"].get("default flags", {}).values() if probe["probe"] == "gemm.accuracy" else ()
    if not all(flags["within"] for flags in loose):
        findings.append("default flags")
    return findings + ([probe["failure"]] if probe["status"] == "failed" else [])


def _is_reported(value: object) -> bool:
    return any(map(_is_reported, value.values())) if isinstance(value, dict) else bool(value)


def test_a_quick_run_raises_no_alarm() -> None:
    command = [sys.executable, "-m", "envbuild.selftest", "--level", "quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=150)
    found = json.loads(done.stdout)
    assert {probe["probe"]: alarms(probe) for probe in found["probes"] if alarms(probe)} == {}
    assert (done.returncode, found["end"]["failed"]) == (0, 0), done.stderr
    assert found["end"]["passed"] >= 10  # a run with only skipped probes would show nothing


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"status": "failed", "failure": "bound"}, ["bound"]),
        ({"traits": {"needs_upcast": ["fp16"]}}, ["needs_upcast"]),
        ({"traits": {"accumulates_in_half": {"fp16": ["output"], "bf16": []}}}, ["accumulates_in_half"]),
        ({"traits": {"accumulates_in_half": {"fp16": [], "bf16": []}}}, []),
        ({"traits": {"default flags": {"fp16": {"within": False}}}}, ["default flags"]),
    ],
)
def test_an_alarm_would_be_seen(change: Frame, expected: list[str]) -> None:
    assert alarms({"probe": "gemm.accuracy", "status": "passed", "failure": None, "traits": {}, **change}) == expected
