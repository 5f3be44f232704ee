"""perf.*: what is measured is told, and held to a datasheet where there is one and the profile sets a floor."""

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.selftest.context import Context
from envbuild.selftest.job import Job
from envbuild.selftest.outcome import Skip
from envbuild.selftest.probes import perf

Measure = Callable[[Context], None]
KINDS = [(perf.gemm, "gemm", "fp32", "TFLOP/s"), (perf.memory, "memory", "copy", "GB/s")]


def context(**fields: Any) -> Context:
    return Context(Job("0" * 32, **fields))


@pytest.mark.parametrize(("measure", "kind", "name", "unit"), KINDS)
def test_without_a_datasheet_the_figures_are_told_and_skipped(
    measure: Measure, kind: str, name: str, unit: str
) -> None:
    told = context(floors={kind: 0.5}, datasheets={"another card": {name: 1.0}})
    with pytest.raises(Skip, match=rf"no datasheet's figure for the CPU has a source; measured: {name} .* {unit}"):
        measure(told)
    (figures,) = told.traits[unit]
    assert figures["card"] == "the CPU" and figures[name] > 0
    assert not told.figures


@pytest.mark.parametrize(("measure", "kind", "name", "unit"), KINDS)
@pytest.mark.parametrize(
    ("promised", "floor", "slow"), [(1e-9, 1.0, False), (1e9, None, False), (1e9, 0.6, True), (1e9, 1e-12, False)]
)
def test_a_card_below_the_floor_fails(
    measure: Measure, kind: str, name: str, unit: str, promised: float, floor: "float | None", slow: bool
) -> None:
    floors = {} if floor is None else {kind: floor}
    told = context(floors=floors, datasheets={"the CPU": {name: promised}})
    measure(told)
    assert [fault.kind for fault in told.faults] == ["bound"] * slow
    assert [figure.within for figure in told.figures] == [not slow]
    if slow:
        assert told.faults[0].reason.endswith("the profile asks for 60%: throttled, shared or not this card")


def test_one_call_is_timed_by_the_median_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, *(value for length in (1, 50, 1, 1, 1) for value in (0.0, length * 1e-3))])
    monkeypatch.setattr(perf.time, "perf_counter", lambda: next(clock))
    import torch

    assert perf.seconds(torch.device("cpu"), lambda: None) == 1e-3
