"""The page of host times: its calculations, without a run."""

from __future__ import annotations

from envbuild.selftest.harness.probe import Probe
from pretend.host_time import in_pairs


def probes(*names: str) -> list[Probe]:
    return [Probe(name, "quick", "cpu", 60, lambda context: None, alone=name.startswith("alone")) for name in names]


def test_two_probes_run_at_a_time_and_one_alone() -> None:
    seconds = {"a": 3.0, "b": 1.0, "c": 1.0, "d": 4.0, "alone": 2.0, "e": 1.0, "f": 2.0}
    assert in_pairs(probes("a", "b", "c"), seconds) == 3
    assert in_pairs(probes("a", "b", "c", "d"), seconds) == 6, "d begins when c ends"
    assert in_pairs(probes("a", "alone", "e", "f"), seconds) == 3 + 2 + 2
    assert in_pairs(probes("a"), seconds) == 3
