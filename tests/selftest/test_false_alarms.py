"""The alarms of a self-test on right kernels: probes that fail, and traits that report a defect. test_run.py runs the
self-test twice, and checks that there are none."""

import pytest

from selftest.reading import Frame

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
