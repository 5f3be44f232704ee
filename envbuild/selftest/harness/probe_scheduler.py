"""The parent process: plans the probes, runs each in its own process, and reports the results.

It imports torch so that a forked probe does not have to, but calls none of its functions: no tensor, no operation, no
torch.cuda. A process forked after a single CPU operation can hang in torch's thread pool.

Up to six probes run at the same time if there are processors and memory (of the host and the GPU) for them, and if
none measures time or takes all memory. This helps because a probe spends most of its time on references, which one
processor computes. On a GPU, the next probes also start CUDA in the meantime, which took 0.5 s each on an H200. Results
are reported in the catalogue's order.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Callable, NoReturn

import torch

from envbuild.selftest.harness import host_memory, probe_supervisor, process_ending_verdict
from envbuild.selftest.harness.job_document import LEVELS, JobDocument
from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_outcome_and_figures import FAILED, PASSED, SKIPPED, Outcome
from envbuild.selftest.nvidia.gpu_monitor import Monitor
from envbuild.selftest.nvidia.gpu_telemetry import Report
from envbuild.selftest.nvidia.gpu_telemetry_verdict import attribute

Emit = Callable[[Mapping[str, Any]], None]

_INTERRUPTIONS = (signal.SIGTERM, signal.SIGINT)
_MOST_TOGETHER = 6
_MOST_AHEAD = 2
_LONGER_AT_FULL = 5  # a factor of time limits: sampled probes have ten times as many cases there
_NEED_MIB = {"quick": 8 << 10, "standard": 14 << 10}  # GPU memory for the most demanding probe of each level
_CONTEXT_MIB = 1 << 10  # more than a CUDA context takes
_HOST_MIB = 2 << 10  # host memory: the most that a CPU probe takes, up to level standard; not measured on a GPU


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
    """The smallest free memory of any GPU; 0 if NVML does not report it, or if its compute mode is not DEFAULT."""
    last = [window.last for window in report.gpus.values()]
    return min((now.get("free_mib", 0) if now.get("compute_mode") == 0 else 0 for now in last), default=0)


def run_together(job: JobDocument, memory: int, report: Report) -> int:
    """How many probes may run at the same time: there are processors and memory for so many. `memory`: of the host, in
    bytes. One at level full or with the profile's own shapes, whose need of memory is unknown."""
    if job.level not in _NEED_MIB or job.own.shapes:
        return 1
    most = min(_MOST_TOGETHER, job.thread_count, memory // (_HOST_MIB << 20))
    if job.device == "cuda":
        most = min(most, free_mib(report) // (_NEED_MIB[job.level] + _CONTEXT_MIB))
    return max(1, most)


def start_ahead(job: JobDocument, report: Report, working: int) -> int:
    """How many probes may start CUDA while `working` others run, limited by free processors and GPU memory.

    0 at level full or with the profile's own shapes, whose need of memory is unknown.
    """
    if job.level not in _NEED_MIB or job.own.shapes:
        return 0
    spare = free_mib(report) // _CONTEXT_MIB - working * (_NEED_MIB[job.level] // _CONTEXT_MIB + 1)
    return max(0, min(_MOST_AHEAD, job.thread_count - working, spare))


def time_limit(probe: Probe, job: JobDocument) -> float:
    """In seconds: what the job says, else the probe's own."""
    return job.timeouts.get(probe.name, probe.timeout * (_LONGER_AT_FULL if job.level == "full" else 1))


def next_in_line(waiting: Sequence[Probe], most: int, running: Collection[str] = ()) -> list[Probe]:
    """The probes that start CUDA while the first one runs: at most `most`, without those in `running`, and none that
    come after a probe that runs alone (the first one included).
    """
    found: list[Probe] = []
    for before, probe in zip(waiting, waiting[1:]):
        if before.alone or len(found) == most:
            break
        if probe.may_start_ahead and probe.name not in running:
            found.append(probe)
    return found


def companions(waiting: Sequence[Probe]) -> Iterator[Probe]:
    """The probes that may run while the first one runs, in order, up to the first that may not accompany others."""
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
        self._reports: dict[str, Report] = {}  # by name of a running probe: NVML's report since the probe began
        self._ended: dict[str, Report] = {}  # by name of a probe that has ended and whose result is not yet reported

    def prepare(self) -> None:
        """Start to monitor the GPUs if the job uses them; decide how many probes may run and start CUDA at a time."""
        report = Report()
        if self._job.device == "cuda":
            with _uninterrupted():
                self._monitor = Monitor(self._terms.hidden)
            report = self._monitor.report()
        self._together = run_together(self._job, host_memory.available_bytes(), report)
        self._ahead = start_ahead(self._job, report, self._together)

    def run(self, waiting: Sequence[Probe]) -> tuple[Outcome, list[dict[str, Any]]]:
        """Run the first of the remaining probes to its end, and others that may run at the same time."""
        probe = waiting[0]
        lacking = _lacking(probe, self._job)
        if lacking:
            return Outcome(SKIPPED, reason=lacking), []
        try:
            process = self._working(probe)
        except OSError as error:
            return Outcome(FAILED, failure="exception", reason=f"no process could be started: {error}"), []
        with contextlib.suppress(OSError):  # retried when the probe's turn comes
            self._accompany(waiting)
            running = [name for name, child in self._children.items() if child.works]
            for later in next_in_line(waiting, self._ahead, running):
                self._started(later)
        while not process.over:
            with contextlib.suppress(OSError):
                self._accompany(waiting)
            probe_supervisor.attend([child for child in self._children.values() if child.works])
            self._close_reports()
        ending = process.ending()
        with _uninterrupted():
            self._children.pop(probe.name).end()
        judge = process_ending_verdict.judge_script if probe.needs == "script" else process_ending_verdict.judge_ending
        outcome = self._attributed(probe, judge(ending, time_limit(probe, self._job)))
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
            if self._reports:  # events up to now belong to the probes that run already
                self._read_monitor()
            self._reports[probe.name] = Report()
            process.go(time_limit(probe, self._job), self._terms)
        return process

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
        """The outcome with NVML's report of the time in which the probe ran. If two probes ran, both get the report."""
        if not self._monitor:
            return outcome
        report = self._ended.pop(probe.name, None)  # None: it died before its turn
        return attribute(outcome, self._read_monitor() if report is None else report)

    def _close_reports(self) -> None:
        """Close the reports of the probes that have just ended: later events do not concern them."""
        over = [name for name in self._reports if self._children[name].over]
        if over:
            self._read_monitor()
            self._ended.update((name, self._reports.pop(name)) for name in over)

    def _read_monitor(self) -> Report:
        """NVML's report since the last call, which is also added to the reports of all running probes."""
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
    return "needs a script in the profile" if _lacks_script(probe, job) else None


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
