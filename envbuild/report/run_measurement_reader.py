"""Reads the measurements from a run record. Pure.

A container wrote the data in a record, so it is not trusted: data that does not have the self-test's format is left
out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envbuild.evidence.proof_rules import model_of
from envbuild.evidence.run_record_schema import LoadedLibrary, RunRecord
from envbuild.facts import database
from envbuild.facts.advisory_model import Advisory
from envbuild.report.run_measurement_types import (
    Blame,
    Coverage,
    KnownAdvisory,
    MeasuredFigure,
    MeasuredLibrary,
    MeasuredProbe,
    MeasuredStage,
    Run,
    Speed,
)
from envbuild.selftest.harness.probe_outcome_and_figures import check_count
from envbuild.testrun import expected_hardware
from envbuild.testrun.run_result import ProbeResult

_STAGE = re.compile(r"(?P<backend>nccl|gloo) (?P<members>\d{1,4}(\+\d{1,4}){0,63})(?P<settings>( [A-Z0-9_]+=\w+){0,8})")
_MOST_STAGES = 2000
# For each kind of speed: the probe, the unit (also the name of the trait), and the name of the minimum in the profile.
_SPEEDS = (("perf.gemm", "TFLOP/s", "gemm"), ("perf.memory", "GB/s", "memory"))


def measured_run(record: RunRecord, evidence: str) -> Run:
    """Return the measurements of a run. `evidence`: the hex sha256 of the record's bytes."""
    gpu, start, environment = record.gpu, record.start, record.environment
    staged = next((result for result in record.results if result.probe == "dist.staged"), None)
    stages = tuple(_stages(staged.traits.get("stages"))) if staged else ()
    required = set(record.selftest.require)
    return Run(
        model=model_of(record),
        gpu=gpu.name if gpu else "the CPU",
        count=gpu.count if gpu else 1,
        driver=gpu.driver if gpu else None,
        finished=record.finished,
        level=record.selftest.level,
        seconds=record.seconds,
        image=record.subject,
        evidence=evidence,
        engine=record.engine or "",
        python=_text(environment.get("python") or start.get("python")),
        torch=_text(environment.get("torch") or start.get("torch")),
        probes=tuple(_probe(result, result.probe in required) for result in record.results),
        errors=tuple(record.errors),
        speeds=tuple(_speeds(record)),
        coverage=tuple(_coverage(record.results)),
        seed=seed if isinstance(seed := start.get("seed"), int) else None,
        unit="GPU" if gpu else "process",
        members=tuple(sorted({member for stage in stages for member in stage.members})),
        stages=stages,
        verdict=staged.reason if staged and any(not stage.passed for stage in stages) else None,
        libraries=tuple(map(_measured_library, record.libraries)),
    )


def _probe(result: ProbeResult, required: bool) -> MeasuredProbe:
    figures = sorted(_figures(result.figures), key=lambda figure: figure.share)
    return MeasuredProbe(
        name=result.probe,
        status=result.status,
        required=required,
        seconds=_number(result.seconds),
        shares=tuple(figure.share for figure in figures),
        worst=figures[-1] if figures else None,
        checks=sum(figure.checks for figure in figures),
        reason=result.reason,
        failure=result.failure,
        signal=result.signal,
        at=result.at,
        detail=result.detail,
        known=_signed(result) if result.status == "failed" else None,
    )


def _figures(listed: Sequence[Mapping[str, object]]) -> Iterator[MeasuredFigure]:
    for figure in listed:
        key = "beyond_rounding" if "beyond_rounding" in figure else "ratio"
        if key in figure and (key == "ratio" or figure[key] is not None):
            share = _number(figure[key])
            yield MeasuredFigure(
                case=_text(figure.get("case")),
                dtype=_text(figure.get("dtype")),
                shape=tuple(size for size in _list(figure.get("shape")) if isinstance(size, int)),
                error=_text(figure.get("error")),
                bound=_text(figure.get("bound")),
                share=math.inf if share is None else share,
                checks=check_count(figure),
            )


def _signed(result: ProbeResult) -> KnownAdvisory | None:
    """Return the first advisory whose signature matches a failed probe's result; None if no signature matches."""
    found = next((item for item in database.advisories() if item.matches(result.document())), None)
    return known_advisory(found) if found else None


def known_advisory(advisory: Advisory) -> KnownAdvisory:
    return KnownAdvisory(advisory.id, advisory.title, advisory.remedy, advisory.cite)


def _speeds(record: RunRecord) -> Iterator[Speed]:
    """Yield each measured speed of each GPU, whether or not the profile sets a minimum."""
    demands = record.selftest.demands
    traits = {result.probe: result.traits for result in record.results}
    for probe, unit, kind in _SPEEDS:
        for index, cards in enumerate(_mappings(traits.get(probe, {}).get(unit))):
            name = _text(cards.get("card"))
            known = database.gpu_by_name(name)
            sheet = expected_hardware.sheet(known.datasheet) if known else {}
            for figure, value in cards.items():
                reached = _number(value)
                if figure != "card" and reached is not None:
                    yield Speed(name, index, figure, unit, reached, sheet.get(figure), demands.get(kind))


def _coverage(results: Sequence[ProbeResult]) -> Iterator[Coverage]:
    for result in results:
        for operation, covered in _mapping(result.traits.get("coverage")).items():
            counts = [_number(_mapping(covered).get(key)) for key in ("cases", "pairs", "of")]
            if all(count is not None and count >= 0 for count in counts) and counts[0]:
                yield Coverage(operation, *(int(count or 0) for count in counts))


def _stages(listed: Any) -> Iterator[MeasuredStage]:
    for stage in _mappings(listed)[:_MOST_STAGES]:
        match = _STAGE.fullmatch(_text(stage.get("stage")))
        if match:
            yield MeasuredStage(
                name=match[0],
                backend=match["backend"],
                members=tuple(map(int, match["members"].split("+"))),
                settings=match["settings"].strip(),
                passed=stage.get("passed") is True,
                seconds=_number(stage.get("seconds")),
                transports=tuple(map(_text, _list(stage.get("transports")))),
                blamed=tuple(_blamed(stage.get("faults"))),
            )


def _blamed(listed: Any) -> Iterator[Blame]:
    for fault in _mappings(listed):
        rank, member = fault.get("rank"), fault.get("member")
        if isinstance(rank, int) and isinstance(member, int):
            yield Blame(rank, member, _text(fault.get("step")), _text(fault.get("reason")))


def _measured_library(library: LoadedLibrary) -> MeasuredLibrary:
    return MeasuredLibrary(*map(_text, (library.name, library.version, library.owner, library.path, library.sha256)))


def _number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mappings(value: Any) -> Sequence[Mapping[str, Any]]:
    return [item for item in _list(value) if isinstance(item, dict)]
