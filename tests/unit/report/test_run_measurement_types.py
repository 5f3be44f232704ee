"""Figures, speeds and stages read from a run record; no record can break its page."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from envbuild.evidence.run_record_schema import validate_record
from envbuild.report import run_measurement_reader, run_measurement_types
from envbuild.report.run_measurement_types import Run
from unit.report import pages

JUNK: tuple[Any, ...] = (None, 7, -1.5, "text", [], {}, [[]], [{}], ["x"], {"x": [None]}, True)


@pytest.fixture
def outcome() -> dict[str, Any]:
    return pages.outcome("gpu")


@pytest.fixture
def record(project: Path, outcome: dict[str, Any]) -> dict[str, Any]:
    pages.site_facts()
    found: dict[str, Any] = json.loads(pages.record(*pages.lab(project), outcome).encoded)
    return found


def measured(record: dict[str, Any]) -> Run:
    return run_measurement_reader.measured_run(validate_record(record), "")


def result(record: dict[str, Any], probe: str) -> dict[str, Any]:
    found: dict[str, Any] = next(item for item in record["results"] if item["probe"] == probe)
    return found


def probe(run: Run, name: str) -> run_measurement_types.MeasuredProbe:
    return next(item for item in run.probes if item.name == name)


def test_the_worst_figure_is_the_one_with_the_largest_ratio(record: dict[str, Any]) -> None:
    run = measured(record)
    accuracy = probe(run, "gemm.accuracy")
    assert (accuracy.shares[-1], accuracy.worst and accuracy.worst.dtype) == (1.62, "float16")
    assert len(accuracy.shares) == len(result(record, "gemm.accuracy")["figures"])
    assert probe(run, "env.libs").worst is None


@pytest.mark.parametrize(("written", "counted"), [(40, 40), (None, 1), ("x", 1), (-3, 1), (True, 1)])
def test_a_figure_counts_as_many_checks_as_it_says(record: dict[str, Any], written: Any, counted: int) -> None:
    figures = result(record, "conv")["figures"]
    figures[0]["checks"] = written
    assert probe(measured(record), "conv").checks == len(figures) - 1 + counted


def test_errors_beyond_rounding_count_and_rounding_does_not(record: dict[str, Any]) -> None:
    figures = result(record, "conv")["figures"]
    for figure in figures:
        figure["beyond_rounding"] = 0.125
    figures[0]["beyond_rounding"] = None
    assert probe(measured(record), "conv").shares == (0.125,) * (len(figures) - 1)


@pytest.mark.parametrize("ratio", ["nan", "inf", "x", None, True, math.nan, math.inf, [1]])
def test_an_invalid_ratio_is_infinite_and_never_within_its_bound(record: dict[str, Any], ratio: Any) -> None:
    result(record, "conv")["figures"][3]["ratio"] = ratio
    assert probe(measured(record), "conv").shares[-1] == math.inf


def test_a_failure_names_the_advisory_that_it_is_the_signature_of(record: dict[str, Any]) -> None:
    run = measured(record)
    crash = probe(run, "gemm.crash")
    assert (crash.known and crash.known.id, crash.signal) == ("cublas-hopper-fpe", "SIGFPE")
    assert probe(run, "gemm.exact").known is None


def test_speeds_are_compared_with_the_datasheet_of_their_gpu(record: dict[str, Any]) -> None:
    speeds = {(item.index, item.name): item for item in measured(record).speeds}
    slow = speeds[2, "fp16"]
    assert (slow.reached, slow.promised, slow.floor) == (62.3, 148.0, 0.7)
    assert slow.part == pytest.approx(0.421, abs=1e-3)
    assert (speeds[0, "fp32"].promised, speeds[0, "fp32"].part) == (None, None)
    assert (speeds[3, "copy"].promised, speeds[3, "copy"].floor) == (4000.0, 0.6)


def test_sampled_cases_of_each_operation_are_counted(record: dict[str, Any]) -> None:
    assert (measured(record).coverage, measured(record).seed) == ((), None)
    record["start"]["seed"] = 12
    result(record, "conv")["traits"]["coverage"] = {
        "conv": {"cases": 40, "pairs": 310, "of": 400},
        "never": {"cases": 0, "pairs": 0, "of": 400},
        "broken": {"cases": -1, "pairs": "x"},
    }
    run = measured(record)
    (covered,) = run.coverage
    assert (run.seed, covered.operation, covered.cases, covered.pairs, covered.of) == (12, "conv", 40, 310, 400)
    assert covered.part == pytest.approx(0.775)


@pytest.mark.slow
@pytest.mark.parametrize("junk", JUNK)
def test_coverage_that_is_not_as_it_should_be_is_left_out(record: dict[str, Any], junk: Any) -> None:
    for outcome in (junk, {"conv": junk}, {"conv": {"cases": junk, "pairs": junk, "of": junk}}):
        result(record, "conv")["traits"]["coverage"] = outcome
        assert all(covered.cases > 0 for covered in measured(record).coverage)


def test_a_gpu_that_the_facts_do_not_know_has_no_datasheet(record: dict[str, Any]) -> None:
    for card in result(record, "perf.gemm")["traits"]["TFLOP/s"]:
        card["card"] = "another card"
    speeds = [item for item in measured(record).speeds if item.unit == "TFLOP/s"]
    assert {item.promised for item in speeds} == {None}
    assert len(speeds) == 16


def test_a_stage_says_of_each_member_whether_it_is_to_blame(record: dict[str, Any]) -> None:
    run = measured(record)
    stages = {stage.name: stage for stage in run.stages}
    assert [stages["nccl 1+3"].mark(member) for member in run.members] == ["absent", "failed", "absent", "blamed"]
    assert [stages["nccl 0+1"].mark(member) for member in run.members] == ["passed", "passed", "absent", "absent"]
    assert stages["nccl 1+3 NCCL_NVLS_ENABLE=0"].kind == "over nccl again, with fewer features"
    assert (run.unit, run.verdict) == ("GPU", result(record, "dist.staged")["reason"])


def test_stages_of_a_record_without_named_ranks_mark_all_members(record: dict[str, Any]) -> None:
    for stage in result(record, "dist.staged")["traits"]["stages"]:
        del stage["faults"]
    stage = next(item for item in measured(record).stages if item.name == "nccl 1+3")
    assert [stage.mark(member) for member in (1, 3)] == ["failed", "failed"]


@pytest.mark.parametrize(
    "name", ["", "nccl", "nccl a", "nccl 0+", "nccl 0 x", "nccl 99999", "gloo 0\n", "nccl 0 A=<b>"]
)
def test_a_stage_whose_name_is_not_the_self_tests_is_left_out(record: dict[str, Any], name: str) -> None:
    stages = result(record, "dist.staged")["traits"]["stages"]
    stages[0]["stage"] = name
    assert len(measured(record).stages) == len(stages) - 1


def places(value: Any, trail: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of a document: the first item of each list, and every key of each mapping."""
    if isinstance(value, dict):
        for key in value:
            yield (*trail, key)
            yield from places(value[key], (*trail, key))
    elif isinstance(value, list) and value:
        yield (*trail, 0)
        yield from places(value[0], (*trail, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["start", "environment", "engine", "gemm.crash", "gemm.accuracy", "perf.gemm", "dist.staged"]
)
def test_nothing_that_a_container_can_write_breaks_it(record: dict[str, Any], part: str) -> None:
    """Each value in turn is replaced by values of the wrong type."""
    name = part if part in record else "results"
    inner = {name: record[name] if part in record else [result(record, part)]}
    asked_for = ((), ("results",), ("results", 0), ("results", 0, "probe"), ("results", 0, "status"))
    for trail in places(inner):
        for junk in JUNK if trail not in asked_for else ():
            spoiled = copy.deepcopy(inner)
            target: Any = spoiled
            for key in trail[:-1]:
                target = target[key]
            target[trail[-1]] = junk
            with contextlib.suppress(ValidationError):  # it is not a run record
                measured({**record, **spoiled})


def test_the_real_run_comes_to_what_it_was_judged_to_be(project: Path) -> None:
    outcome = pages.outcome("cpu")
    run = run_measurement_reader.measured_run(pages.record(*pages.cpu(project), outcome), "")
    assert [len(run.by_status(status)) for status in ("passed", "failed", "skipped")] == [14, 0, 9]
    assert (run.gpu, run.unit, run.members) == ("the CPU", "process", (0, 1, 2, 3))
    assert all(stage.passed for stage in run.stages)
    assert json.dumps([item.shares for item in run.probes], allow_nan=False)
