"""The parent: plans the probes, runs each in a process of its own, and tells what came of them.

It imports torch, so that a forked probe need not, and calls nothing of it: no tensor, no operation, no torch.cuda. A
process forked after so much as one CPU operation can hang in torch's thread pool.
"""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Callable, NoReturn

import torch

from envbuild.selftest import verdict, watch
from envbuild.selftest.job import LEVELS, Job
from envbuild.selftest.outcome import FAILED, PASSED, SKIPPED, Outcome
from envbuild.selftest.registry import Probe

Emit = Callable[[Mapping[str, Any]], None]


class Interrupted(BaseException):
    """SIGTERM or SIGINT came; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def plan(probes: Sequence[Probe], job: Job) -> tuple[Probe, ...]:
    """The probes to run, in the catalogue's order: those asked for by name, else the level's and the required ones."""
    if job.probes is not None:
        return tuple(probe for probe in probes if probe.name in job.probes)
    levels = LEVELS[: LEVELS.index(job.level) + 1]
    due = {probe.name for probe in probes if probe.level in levels and not _lacks_script(probe, job)}
    return tuple(probe for probe in probes if probe.name in due or probe.name in job.require)


def run(probes: Sequence[Probe], job: Job, emit: Emit, terms: watch.Terms = watch.TERMS) -> bool:
    """Run the planned probes one after the other; True where none failed. Raises Interrupted after ending the child."""
    planned = plan(probes, job)
    counts = {PASSED: 0, FAILED: 0, SKIPPED: 0}
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        emit(_start(planned, job))
        for probe in planned:
            outcome, documents = _run_probe(probe, job, terms)
            counts[outcome.status] += 1
            emit(outcome.document(probe.name, probe.level))
            for document in documents:
                emit(document)
        emit(dict(counts, kind="end", probes=len(planned)))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return not counts[FAILED]


def _lacks_script(probe: Probe, job: Job) -> bool:
    return probe.needs == "script" and job.own.script is None


def _run_probe(probe: Probe, job: Job, terms: watch.Terms) -> tuple[Outcome, list[dict[str, Any]]]:
    if probe.needs == "cuda" and job.device != "cuda":
        return Outcome(SKIPPED, reason="needs a GPU"), []
    if _lacks_script(probe, job):
        return Outcome(SKIPPED, reason="needs a script of the profile's own"), []
    timeout = job.timeouts.get(probe.name, probe.timeout)
    try:
        ending = watch.run(probe, job, timeout, terms)
    except OSError as error:
        return Outcome(FAILED, failure="exception", reason=f"no process could be started: {error}"), []
    judged = verdict.judge_script if probe.needs == "script" else verdict.judge
    return judged(ending, timeout), verdict.documents(ending)


def _start(planned: Sequence[Probe], job: Job) -> dict[str, Any]:
    return {
        "kind": "start",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": job.device,
        "threads": job.thread_count,
        "level": job.level,
        "probes": [probe.name for probe in planned],
        "pid": os.getpid(),
    }


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted(number)
