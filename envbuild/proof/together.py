"""One run of the several that nodes made together, and that of a run on one node and one on several. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from envbuild.proof import reading
from envbuild.proof.testrun import RawOutput, TestRun

_ORDER = ("failed", "skipped", "passed")  # the worst first


def judge(output: RawOutput, nonce: str, require: Sequence[str]) -> TestRun:
    """What all nodes say: a probe has passed where it passed on each, and what is wrong names its node."""
    runs = []
    begin = 0
    for code, size in output.parts:
        stdout = output.stdout[begin : begin + size]
        begin += size
        late = output.timed_out and code not in (0, 5)  # such a node came to its end, and another did not
        own = replace(output, stdout=stdout, exit_code=None if late else code, timed_out=late)
        runs.append(reading.judge(own, nonce, require))
    if not runs:
        return replace(reading.judge(output, nonce, require), errors=("no node left any output",))
    names = dict.fromkeys(result["probe"] for run in runs for result in run.results)
    skipped = dict.fromkeys(name for run in runs for name in run.skipped_required)
    return replace(
        runs[0],
        results=tuple(_worst(name, runs) for name in names),
        errors=tuple(f"node {number}: {error}" for number, run in enumerate(runs) for error in run.errors),
        skipped_required=tuple(skipped),
    )


def _worst(name: str, runs: Sequence[TestRun]) -> Mapping[str, Any]:
    found = [(n, result) for n, run in enumerate(runs) for result in run.results if result["probe"] == name]
    number, worst = min(found, key=lambda one: _ORDER.index(one[1]["status"]))
    if worst["status"] == "passed":
        return worst
    return {**worst, "reason": f"node {number}: {worst['reason']}"}


def joined(alone: TestRun, across: TestRun) -> TestRun:
    """Both, as one run: what each lacked in confinement is said of it."""
    lacks = [*alone.where.get("unconfined", ()), *across.where.get("unconfined", ())]
    return replace(
        alone,
        results=(*alone.results, *across.results),
        errors=(*alone.errors, *across.errors),
        seconds=alone.seconds + across.seconds,
        skipped_required=(*alone.skipped_required, *across.skipped_required),
        log=alone.log + across.log,
        short=alone.short or across.short,
        where={**alone.where, "unconfined": lacks, "nodes": dict(across.where)},
    )
