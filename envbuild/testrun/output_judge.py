"""Judges the raw output of a self-test: converts it to probe results and errors of the run. Pure.

The output is not trusted. It is free of errors only if it has every frame of this run once, complete, and in order. A
frame is a line that begins with ENVBUILD and the nonce of the run.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from envbuild.testrun.run_result import MAX_STDOUT, ProbeResult, RawOutput, RunLocation, TestRun
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import printable


class _Frame(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, defer_build=True)


PrintableText = Annotated[str, AfterValidator(printable)]


class _Probe(ProbeResult):
    """A probe's result in a frame, with limits on the size of each field."""

    model_config = ConfigDict(extra="ignore")

    probe: str = Field(pattern=r"^[a-z0-9._]{1,60}$")
    level: PrintableText = Field(max_length=20)
    reason: PrintableText | None = Field(max_length=4000)
    failure: PrintableText | None = Field(max_length=60)
    signal: PrintableText | None = Field(max_length=20)
    at: PrintableText | None = Field(max_length=1000)
    detail: PrintableText | None = Field(max_length=20000)
    figures: list[dict[str, object]] = Field(max_length=5000)
    seconds: float
    output: PrintableText | None = Field(None, max_length=20000)


class _Start(_Frame):
    probes: list[Annotated[str, Field(pattern=r"^[a-z0-9._]{1,60}$")]] = Field(max_length=500)


class _End(_Frame):
    probes: int
    passed: int
    failed: int
    skipped: int


def frame(line: bytes, nonce: str) -> tuple[int, dict[str, object]] | None:
    """Return (sequence number, document) if the line is an undamaged frame of this run, otherwise None."""
    parts = line.rstrip(b"\n").split(b" ", 4)
    if len(parts) != 5 or parts[0] != b"ENVBUILD" or parts[1] != nonce.encode():
        return None
    try:
        if int(parts[3], 16) != zlib.crc32(parts[4]):
            return None
        document = strict_and_canonical_json.strict(parts[4], MAX_STDOUT)
        return (int(parts[2]), document) if isinstance(document, dict) else None
    except ValueError:
        return None


def progress_of(line: bytes, nonce: str) -> tuple[str, ...] | ProbeResult | None:
    """Return the progress that a line of output reports: the names of the probes that will run, or the result of one
    probe. Return None for any other line."""
    found = frame(line, nonce)
    kind = found[1].get("kind") if found else None
    try:
        if found and kind == "start":
            return tuple(_Start.model_validate(found[1]).probes)
        return _result(found[1]) if found and kind == "probe" else None
    except ValidationError:
        return None


def _result(document: object) -> ProbeResult:
    """Return the probe's result in a frame's document. Raises ValidationError if it is invalid."""
    return ProbeResult.model_validate(_Probe.model_validate(document).model_dump())


def judge_output(output: RawOutput, nonce: str, require: Sequence[str]) -> TestRun:
    """Judge the output of one self-test. Every missing, damaged or contradictory part is an error of the run.
    `require`: the probes that must be among the results."""
    ended = _ending(output)
    errors = [*ended]
    documents: list[dict[str, object]] = []
    for line in output.stdout.split(b"\n"):
        found = frame(line, nonce)
        if found is None:
            if line.startswith(b"ENVBUILD"):
                errors.append("a frame in the self-test's output is damaged or belongs to a different run")
            continue
        if found[0] != len(documents):
            errors.append(f"frame {len(documents)} of the self-test's output is missing; frame {found[0]} came instead")
            break
        documents.append(found[1])
    planned, results, shape = _results(documents)
    # If the run ended with an error before its first frame, the missing parts are not reported as further errors.
    if documents or not ended:
        errors += shape
    if output.timed_out:
        results += _hung(planned, results, output.seconds)
    if (output.exit_code == 5) != any(result.status == "failed" for result in results) and not errors:
        errors.append(f"the self-test ended with exit code {output.exit_code}, which contradicts its results")
    ran = {result.probe: result.status for result in results}
    if documents or not errors:
        errors += [f"required probe {name} is not among the results" for name in require if name not in ran]
    of_kind = {str(document.get("kind")): document for document in documents}
    return TestRun(
        results=tuple(results),
        environment=of_kind.get("environment", {}),
        start=of_kind.get("start", {}),
        errors=tuple(dict.fromkeys(errors)),
        seconds=output.seconds,
        skipped_required=tuple(name for name in require if ran.get(name) == "skipped"),
        log=output.stderr,
        fingerprint=of_kind.get("fingerprint", {}),
        where=output.where,
        short=output.out_of_memory,
    )


def _hung(planned: Sequence[str], results: Sequence[object], seconds: float) -> list[ProbeResult]:
    """Return a failed result for the probe that was running when the time limit of the whole self-test was reached, or
    an empty list if none was running."""
    running = planned[len(results) :][:1]
    reason = f"the probe did not end; the whole self-test was stopped after {seconds:.0f} s"
    return [
        ProbeResult(
            probe=name, level="", status="failed", reason=reason, failure="hang", signal=None, at=None, detail=None,
            figures=[], seconds=0.0, traits={},
        )
        for name in running
    ]  # fmt: skip


def _ending(output: RawOutput) -> list[str]:
    if output.timed_out:
        return [f"the self-test was stopped after {output.seconds:.0f} s"]
    if output.too_long:
        return ["the self-test's output was too long and was cut off"]
    if output.out_of_memory and output.exit_code != 0 and output.exit_code != 5:
        return ["the container ran out of memory"]
    if output.exit_code not in (0, 5):
        last = output.stderr.strip().splitlines()[-1:] or [""]
        return [f"the self-test ended with exit code {output.exit_code}: {printable(last[0][:300])}"]
    return []


def _results(documents: Sequence[Mapping[str, object]]) -> tuple[list[str], list[ProbeResult], list[str]]:
    """Return the planned probes, the results, and the errors in the sequence of frames. The first frame must be `start`
    and the last `end`; between them is one for each planned probe, in the planned order. Frames of other kinds, such as
    `environment`, may be anywhere between them."""
    kinds = [document.get("kind") for document in documents]
    if not kinds or kinds[0] != "start":
        return [], [], ["the self-test's output contains no frame of this run"]
    if kinds.count("start") != 1 or kinds.count("end") != 1 or kinds[-1] != "end":
        errors = ["the self-test's output is incomplete, or continues after its end"]
    else:
        errors = []
    try:
        start = _Start.model_validate(documents[0])
        results = [_result(document) for document in documents if document.get("kind") == "probe"]
        end = _End.model_validate(documents[-1]) if not errors else None
    except ValidationError as error:
        return (
            [],
            [],
            [*errors, f"invalid frame in the self-test's output: {error.errors()[0]['msg']}"],
        )
    names = [result.probe for result in results]
    if names != start.probes and end is not None:
        errors.append("the probes that ran are not the planned probes")
    counted = [sum(result.status == status for result in results) for status in ("passed", "failed", "skipped")]
    if end is not None and [end.probes, end.passed, end.failed, end.skipped] != [len(results), *counted]:
        errors.append("the self-test's last frame contradicts the probes' results")
    return start.probes, results, errors


_ORDER = ("failed", "skipped", "passed")  # worst first


def judge_nodes(output: RawOutput, nonce: str, require: Sequence[str]) -> TestRun:
    """Judge the outputs of several nodes. The result of a probe is its worst result on any node. Every error names its
    node."""
    runs = []
    begin = 0
    for code, size in output.parts:
        stdout = output.stdout[begin : begin + size]
        begin += size
        # a node that ended with 0 or 5 did not time out, even if another node did
        late = output.timed_out and code not in (0, 5)
        own = replace(output, stdout=stdout, exit_code=None if late else code, timed_out=late)
        runs.append(judge_output(own, nonce, require))
    if not runs:
        return replace(judge_output(output, nonce, require), errors=("no node left any output",))
    names = dict.fromkeys(result.probe for run in runs for result in run.results)
    skipped = dict.fromkeys(name for run in runs for name in run.skipped_required)
    return replace(
        runs[0],
        results=tuple(_worst(name, runs) for name in names),
        errors=tuple(f"node {number}: {error}" for number, run in enumerate(runs) for error in run.errors),
        skipped_required=tuple(skipped),
    )


def _worst(name: str, runs: Sequence[TestRun]) -> ProbeResult:
    found = [(n, result) for n, run in enumerate(runs) for result in run.results if result.probe == name]
    number, worst = min(found, key=lambda one: _ORDER.index(one[1].status))
    if worst.status == "passed":
        return worst
    return worst.model_copy(update={"reason": f"node {number}: {worst.reason}"})


def join_runs(alone: TestRun, across: TestRun) -> TestRun:
    """Join the run on one node and the run across nodes into one. The result lists the restrictions that were missing
    in either run."""
    return replace(
        alone,
        results=(*alone.results, *across.results),
        errors=(*alone.errors, *across.errors),
        seconds=alone.seconds + across.seconds,
        skipped_required=(*alone.skipped_required, *across.skipped_required),
        log=alone.log + across.log,
        short=alone.short or across.short,
        where=_joined(alone, across),
    )


def _joined(alone: TestRun, across: TestRun) -> RunLocation:
    parts = {"unconfined": (*alone.unconfined, *across.unconfined), "nodes": across.where or RunLocation()}
    return (alone.where or RunLocation()).model_copy(update=parts)
