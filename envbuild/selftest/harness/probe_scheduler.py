"""The parent process: plans the probes, runs each in its own process, and reports the results.

It imports torch so that a forked probe does not have to, but calls none of its functions: no tensor, no operation, no
torch.cuda. A process forked after a single CPU operation can hang in torch's thread pool.

Two probes work at the same time where processors and memory, the GPU's included, suffice for both, unless one of them
measures time or takes all memory: most of a probe's time is references, which one processor computes. On a GPU, the
next probes also start CUDA meanwhile, an estimated 0.6 to 1 s each. Results keep the catalogue's order.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Callable, NoReturn

import torch

from envbuild.selftest.harness import host_memory, probe_supervisor, process_ending_verdict
from envbuild.selftest.harness.job_document import LEVELS, JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_outcome_and_figures import FAILED, PASSED, SKIPPED, Outcome
from envbuild.selftest.nvidia.gpu_monitor import Monitor
from envbuild.selftest.nvidia.gpu_telemetry import Report, attribute

Emit = Callable[[Mapping[str, Any]], None]

_INTERRUPTIONS = (signal.SIGTERM, signal.SIGINT)
_MOST_AHEAD = 2
_NEED_MIB = {"quick": 8 << 10, "standard": 14 << 10}  # GPU memory, for the probe of each level that needs most
_CONTEXT_MIB = 1 << 10  # more than a CUDA context takes
_PAIR_MIB = 4 << 10  # of the machine's memory: twice what a probe takes at most, up to level standard


class RunInterrupted(BaseException):
    """SIGTERM or SIGINT was received; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def plan(probes: Sequence[Probe], job: JobDocument) -> tuple[Probe, ...]:
    """The probes to run, in the catalogue's order: those requested by name, else the level's and the required ones."""
    if job.probes is not None:
        return tuple(probe for probe in probes if probe.name in job.probes)
    levels = LEVELS[: LEVELS.index(job.level) + 1]
    due = {probe.name for probe in probes if probe.level in levels and not _lacks_script(probe, job)}
    return tuple(probe for probe in probes if probe.name in due or probe.name in job.require)


def run(
    probes: Sequence[Probe], job: JobDocument, emit: Emit, terms: probe_supervisor.Terms = probe_supervisor.TERMS
) -> bool:
    """Run the planned probes; returns whether none failed. Raises RunInterrupted after ending them."""
    planned = plan(probes, job)
    counts = {PASSED: 0, FAILED: 0, SKIPPED: 0}
    before = {number: signal.signal(number, _interrupt) for number in _INTERRUPTIONS}
    processes = _Processes(job, terms)
    try:
        emit(_start(planned, job))
        processes.prepare()
        for index, probe in enumerate(planned):
            outcome, documents = processes.run(planned[index:])
            counts[outcome.status] += 1
            emit(outcome.document(probe.name, probe.level))
            for document in documents:
                emit(document)
        emit(dict(counts, kind="end", probes=len(planned)))
    finally:
        processes.end()
        for number, handler in before.items():
            signal.signal(number, handler)
    return not counts[FAILED]


def free_mib(report: Report) -> int:
    """The free memory of the GPU that has least; 0 where NVML does not report it, and where the compute mode keeps
    other processes from a GPU."""
    last = [window.last for window in report.gpus.values()]
    return min((now.get("free_mib", 0) if now.get("compute_mode") == 0 else 0 for now in last), default=0)


def works_in_pairs(job: JobDocument, memory: int, report: Report) -> bool:
    """Whether two probes may work at the same time: processors and memory suffice for both. `memory`: of the machine,
    in bytes. Not at level full and with the profile's own shapes, whose need of memory is unknown."""
    if job.level not in _NEED_MIB or job.own.shapes or job.thread_count < 2 or memory < _PAIR_MIB << 20:
        return False
    return job.device == "cpu" or free_mib(report) >= 2 * (_NEED_MIB[job.level] + _CONTEXT_MIB)


def start_ahead(job: JobDocument, report: Report, working: int) -> int:
    """How many probes may start CUDA while `working` others work: as many as processors and GPU memory are left for.

    None at level full and with the profile's own shapes, whose need of memory is unknown.
    """
    if job.level not in _NEED_MIB or job.own.shapes:
        return 0
    spare = (free_mib(report) - working * _NEED_MIB[job.level]) // _CONTEXT_MIB
    return max(0, min(_MOST_AHEAD, job.thread_count - 1, spare))


def next_in_line(waiting: Sequence[Probe], most: int) -> list[Probe]:
    """The probes that start CUDA while the first one runs, at most `most`: none after a probe that runs alone, nor
    during it.
    """
    found: list[Probe] = []
    for before, probe in zip(waiting, waiting[1:]):
        if before.alone or len(found) == most:
            break
        if probe.may_start_ahead:
            found.append(probe)
    return found


def companions(waiting: Sequence[Probe]) -> Iterator[Probe]:
    """The probes that may run while the first one does, in order: none after a probe that runs alone."""
    for before, probe in zip(waiting, waiting[1:]):
        if not (before.may_accompany and probe.may_accompany):
            return
        yield probe


class _Processes:
    """The harness's child processes: the NVML monitor, the running probes, and those that start CUDA in advance."""

    def __init__(self, job: JobDocument, terms: probe_supervisor.Terms) -> None:
        self._job = job
        self._terms = terms
        self._ahead = 0
        self._together = 1
        self._monitor: Monitor | None = None
        self._children: dict[str, probe_supervisor.Child] = {}
        self._reports: dict[str, Report] = {}  # by probe that works: what NVML reported since it began

    def prepare(self) -> None:
        """Watch the GPUs from now on, where the job has any; decide how many probes work and start CUDA at a time."""
        report = Report()
        if self._job.device == "cuda":
            with _uninterrupted():
                self._monitor = Monitor(self._terms.hidden)
            report = self._monitor.report()
        self._together = 2 if works_in_pairs(self._job, host_memory.available_bytes(), report) else 1
        self._ahead = start_ahead(self._job, report, self._together) if self._monitor else 0

    def run(self, waiting: Sequence[Probe]) -> tuple[Outcome, list[dict[str, Any]]]:
        """Run the first of the remaining probes, and others that may run at the same time."""
        probe = waiting[0]
        lacking = _lacking(probe, self._job)
        if lacking:
            return Outcome(SKIPPED, reason=lacking), []
        try:
            process = self._working(probe)
        except OSError as error:
            return Outcome(FAILED, failure="exception", reason=f"no process could be started: {error}"), []
        with contextlib.suppress(OSError):  # it is tried again when the probe's turn comes
            for later in next_in_line(waiting, self._ahead + self._together - 1 if self._ahead else 0):
                self._started(later)
        while not process.over:
            with contextlib.suppress(OSError):
                self._accompany(waiting)
            probe_supervisor.attend([child for child in self._children.values() if child.works])
        ending = process.ending()
        with _uninterrupted():
            self._children.pop(probe.name).end()
        judge = process_ending_verdict.judge_script if probe.needs == "script" else process_ending_verdict.judge_ending
        outcome = self._attributed(probe, judge(ending, self._timeout(probe)))
        return outcome, process_ending_verdict.documents(ending)

    def _accompany(self, waiting: Sequence[Probe]) -> None:
        """Start further probes, up to the number that may run together."""
        for probe in companions(waiting):
            if sum(child.works for child in self._children.values()) >= self._together:
                return
            if not _lacking(probe, self._job):
                self._working(probe)

    def _working(self, probe: Probe) -> probe_supervisor.Child:
        """The probe's process, started if necessary and released to run."""
        process = self._started(probe)
        if not (process.works or process.over):
            if self._reports:  # what NVML has to report until now is not this probe's
                self._look_at_gpus()
            self._reports[probe.name] = Report()
            process.go(self._timeout(probe), self._terms)
        return process

    def _timeout(self, probe: Probe) -> float:
        return self._job.timeouts.get(probe.name, probe.timeout)

    def end(self) -> None:
        """End all child processes."""
        with _uninterrupted():
            for process in self._children.values():
                process.end()
            if self._monitor:
                self._monitor.end()

    def _started(self, probe: Probe) -> probe_supervisor.Child:
        with _uninterrupted():
            if probe.name not in self._children:
                others = [fd for process in self._children.values() for fd in process.descriptors]
                monitor = self._monitor.descriptors if self._monitor else ()
                self._children[probe.name] = probe_supervisor.Child(
                    probe, self._job, (*self._terms.hidden, *monitor, *others)
                )
            return self._children[probe.name]

    def _attributed(self, probe: Probe, outcome: Outcome) -> Outcome:
        """The outcome with what NVML reported since the probe began: where two worked, both have it."""
        latest = self._look_at_gpus()
        report = self._reports.pop(probe.name, latest)
        return attribute(outcome, report) if self._monitor else outcome

    def _look_at_gpus(self) -> Report:
        latest = self._monitor.report() if self._monitor else Report()
        self._reports = {name: report.then(latest) for name, report in self._reports.items()}
        return latest


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Block interruptions while a process is started or ended, so that no process is left behind."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _lacking(probe: Probe, job: JobDocument) -> str | None:
    """The unmet requirement of a probe, if any."""
    if probe.needs == "cuda" and job.device != "cuda":
        return "needs a GPU"
    return "needs a script of the profile's own" if _lacks_script(probe, job) else None


def _lacks_script(probe: Probe, job: JobDocument) -> bool:
    return probe.needs == "script" and job.own.script is None


def _start(planned: Sequence[Probe], job: JobDocument) -> dict[str, Any]:
    return {
        "kind": "start",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "device": job.device,
        "threads": job.thread_count,
        "level": job.level,
        "seed": job.seed,
        "probes": [probe.name for probe in planned],
        "pid": os.getpid(),
    }


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise RunInterrupted(number)
