"""perf.*: measurements are reported, and compared with a datasheet if there is one and the profile sets a floor."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.probes.hardware import perf

Measure = Callable[[Context], None]
KINDS = [(perf.perf_gemm, "gemm", "fp32", "TFLOP/s"), (perf.perf_memory, "memory", "copy", "GB/s")]


def context(**fields: Any) -> Context:
    return Context(JobDocument("0" * 32, **fields))


@pytest.mark.parametrize(("measure", "kind", "name", "unit"), KINDS)
def test_without_a_datasheet_the_figures_are_reported_and_the_probe_is_skipped(
    measure: Measure, kind: str, name: str, unit: str
) -> None:
    probe_context = context(floors={kind: 0.5}, datasheets={"another card": {name: 1.0}})
    with pytest.raises(Skip, match=rf"no datasheet figure with a source for the CPU; measured: {name} .* {unit}"):
        measure(probe_context)
    (figures,) = probe_context.traits[unit]
    assert figures["card"] == "the CPU" and figures[name] > 0
    assert not probe_context.figures


@pytest.mark.slow
@pytest.mark.parametrize(("measure", "kind", "name", "unit"), KINDS)
@pytest.mark.parametrize(("promised", "floor", "slow"), [(1e-9, 1.0, False), (1e9, 0.6, True), (1e9, 1e-12, False)])
def test_a_gpu_below_the_floor_fails(
    measure: Measure, kind: str, name: str, unit: str, promised: float, floor: float, slow: bool
) -> None:
    probe_context = context(floors={kind: floor}, datasheets={"the CPU": {name: promised}})
    measure(probe_context)
    assert [fault.kind for fault in probe_context.faults] == ["bound"] * slow
    assert [figure.within for figure in probe_context.figures] == [not slow]
    if slow:
        assert probe_context.faults[0].reason.endswith(
            "the profile requires 60%: the GPU is throttled, shared or of a different model"
        )


@pytest.mark.parametrize(("measure", "kind", "name", "unit"), KINDS)
def test_without_a_floor_no_speed_is_a_pass(measure: Measure, kind: str, name: str, unit: str) -> None:
    probe_context = context(datasheets={"the CPU": {name: 1e9}})
    with pytest.raises(Skip, match=rf"no minimum set in the profile; measured: {name} .* {unit}"):
        measure(probe_context)
    assert probe_context.traits[unit][0][name] > 0 and not probe_context.figures


def test_one_call_is_timed_by_the_median_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call takes 2 s and the next three 50 ms, as while an algorithm is chosen and clock rates rise."""
    now, calls = 0.0, 0

    def work() -> None:
        nonlocal now, calls
        calls += 1
        now += 2.0 if calls == 1 else 0.05 if calls < 5 else 1e-3

    monkeypatch.setattr(perf, "SECONDS_CPU", 0.5)
    monkeypatch.setattr(perf.time, "perf_counter", lambda: now)
    assert perf.seconds(torch.device("cpu"), work) == pytest.approx(1e-3)
    assert calls > 5 * 90
