"""Converts the result of a self-test run to the document of `test --json`. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild.testrun.run_result import ProbeResult, SelfTestSummary, TestRun
from envbuild.util.json_output_types import Digest


@dataclass(frozen=True)
class ProbeRow:
    """The result of one probe. `step`: the step at which the probe failed; `checks`: the largest errors and their
    tolerances; `output`: what the profile's own script printed; `output_truncated`: whether `output` is only
    its end."""

    name: str
    level: str
    state: Literal["passed", "failed", "skipped"]
    reason: str | None
    failure: str | None
    signal: str | None
    step: str | None
    detail: str | None
    checks: tuple[dict[str, object], ...]
    seconds: float
    traits: dict[str, object]
    output: str | None
    output_truncated: bool


@dataclass(frozen=True)
class TestDocument:
    """The document of `test`. `state`: skipped if nothing failed, but a required probe, or every probe, could not run.
    `interpreter`: the path of the Python that --python selects. `python`, `torch`, `device`, `level` and `seed`: as the
    self-test reported them."""

    profile: str
    state: Literal["passed", "failed", "skipped"]
    lock: Digest | None
    image: Digest | None
    interpreter: str | None
    python: str | None
    torch: str | None
    device: str | None
    level: str | None
    seed: int | None
    selftest: SelfTestSummary
    probes: tuple[ProbeRow, ...]


def document(profile: str, run: TestRun, lock: str | None, image: str | None, interpreter: Path | None) -> TestDocument:
    subject, seed = run.subject, run.start.get("seed")
    return TestDocument(
        profile=profile,
        state=_state(run),
        lock=lock,
        image=image,
        interpreter=str(interpreter) if interpreter else None,
        python=subject.get("python"),
        torch=subject.get("torch"),
        device=subject.get("device"),
        level=subject.get("level"),
        seed=seed if isinstance(seed, int) else None,
        selftest=run.summary(),
        probes=tuple(map(probe_row, run.results)),
    )


def _state(run: TestRun) -> Literal["passed", "failed", "skipped"]:
    if run.passed:
        return "skipped" if run.skipped_required else "passed"
    return "failed" if run.failures() else "skipped"


def probe_row(result: ProbeResult) -> ProbeRow:
    return ProbeRow(
        name=result.probe,
        level=result.level,
        state=result.status,
        reason=result.reason,
        failure=result.failure,
        signal=result.signal,
        step=result.at,
        detail=result.detail,
        checks=tuple(result.figures),
        seconds=result.seconds,
        traits=result.traits,
        output=result.output,
        output_truncated=result.output_cut,
    )
