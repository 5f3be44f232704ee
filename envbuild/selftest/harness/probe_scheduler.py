"""The harness, which is the parent process of all probes: it selects the probes to run, runs each in a process of its
own, and reports the results.

The harness imports torch, so that the forked probes need not import it again. It calls no function of torch: it creates
no tensor, runs no operation and does not use torch.cuda. The reason is that a process forked after a single CPU
operation can hang in torch's thread pool.

Up to six probes run at the same time, if processors, host memory and GPU memory suffice, and if none of these probes
measures time or uses all memory. This saves time because a probe mostly computes references, which takes one processor.
On a GPU, the processes of the next probes start CUDA in the meantime; each start took 0.5 s on an H200. The results are
reported in the order of the probe catalogue.
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
_LONGER_AT_FULL = 5  # factor of the time limits at level full, where sampled probes have ten times as many cases
_NEED_MIB = {"quick": 8 << 10, "standard": 14 << 10}  # GPU memory that the most demanding probe of each level needs
_CONTEXT_MIB = 1 << 10  # GPU memory assumed for one CUDA context; a context takes less
_HOST_MIB = 2 << 10  # host memory: the most that a probe on the CPU takes up to level standard; not measured on a GPU


class RunInterrupted(BaseException):
    """The harness received SIGTERM or SIGINT; `number` is the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def plan(probes: Sequence[Probe], job: JobDocument) -> tuple[Probe, ...]:
    """Return the probes to run, in the catalogue's order.

    If the job names probes, only these run. Otherwise the probes of the level and the required probes run.
    """
    if job.probes is not None:
        return tuple(probe for probe in probes if probe.name in job.probes)
    levels = LEVELS[: LEVELS.index(job.level) + 1]
    due = {probe.name for probe in probes if probe.level in levels and not _lacks_script(probe, job)}
    return tuple(probe for probe in probes if probe.name in due or probe.name in job.require)


def run(
    probes: Sequence[Probe], job: JobDocument, emit: Emit, terms: probe_supervisor.Terms = probe_supervisor.TERMS
) -> bool:
    """Run the planned probes, pass each result to `emit`, and return whether no probe failed.

    After SIGTERM or SIGINT, it ends all child processes and raises RunInterrupted.
    """
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
    """Return the free memory in MiB of the GPU that has the least.

    A GPU counts as having 0 if NVML does not report its free memory, or if its compute mode is not DEFAULT.
    """
    last = [window.last for window in report.gpus.values()]
    return min((now.get("free_mib", 0) if now.get("compute_mode") == 0 else 0 for now in last), default=0)


def run_together(job: JobDocument, memory: int, report: Report) -> int:
    """Return how many probes may run at the same time, limited by processors, host memory and GPU memory.

    `memory`: the available host memory in bytes. The result is 1 at level full and if the profile adds shapes, because
    the memory that the probes then need is unknown.
    """
    if _needs_unknown_memory(job):
        return 1
    most = min(_MOST_TOGETHER, job.thread_count, memory // (_HOST_MIB << 20))
    if job.device == "cuda":
        most = min(most, free_mib(report) // (_NEED_MIB[job.level] + _CONTEXT_MIB))
    return max(1, most)


def start_ahead(job: JobDocument, report: Report, working: int) -> int:
    """Return how many further probes may start CUDA while `working` probes run, limited by processors and GPU memory.

    The result is 0 at level full and if the profile adds shapes, because the memory that the probes then need is
    unknown.
    """
    if _needs_unknown_memory(job):
        return 0
    spare = free_mib(report) // _CONTEXT_MIB - working * (_NEED_MIB[job.level] // _CONTEXT_MIB + 1)
    return max(0, min(_MOST_AHEAD, job.thread_count - working, spare))


def _needs_unknown_memory(job: JobDocument) -> bool:
    return job.level not in _NEED_MIB or bool(job.own.shapes or job.own.attentions)


def time_limit(probe: Probe, job: JobDocument) -> float:
    """Return the probe's time limit in seconds: the one in the job document, else the probe's default."""
    return job.timeouts.get(probe.name, probe.timeout * (_LONGER_AT_FULL if job.level == "full" else 1))


def next_in_line(waiting: Sequence[Probe], most: int, running: Collection[str] = ()) -> list[Probe]:
    """Return the probes that start CUDA while the first probe of `waiting` runs: at most `most` probes.

    Probes in `running` are left out, and so are all probes after one that must run alone, even if that is the first.
    """
    found: list[Probe] = []
    for before, probe in zip(waiting, waiting[1:]):
        if before.alone or len(found) == most:
            break
        if probe.may_start_ahead and probe.name not in running:
            found.append(probe)
    return found


def companions(waiting: Sequence[Probe]) -> Iterator[Probe]:
    """Yield the probes that may run while the first probe of `waiting` runs: those that follow it, up to the first one
    that must not run at the same time as others. None may run if the first probe itself is such a probe."""
    for before, probe in zip(waiting, waiting[1:]):
        if not (before.may_accompany and probe.may_accompany):
            return
        yield probe


class _Processes:
    """The harness's child processes: the NVML monitor, the running probes, and probes that start CUDA in advance."""

    def __init__(self, job: JobDocument, terms: probe_supervisor.Terms) -> None:
        self._job = job
        self._terms = terms
        self._ahead = 0
        self._together = 1
        self._monitor: Monitor | None = None
        self._children: dict[str, probe_supervisor.Child] = {}
        self._reports: dict[str, Report] = {}  # name of a running probe -> NVML's report since the probe began
        self._ended: dict[str, Report] = {}  # name of an ended probe whose result is not reported yet -> NVML's report

    def prepare(self) -> None:
        """Start the GPU monitor if the job uses GPUs; decide how many probes run or start CUDA at the same time."""
        report = Report()
        if self._job.device == "cuda":
            with _uninterrupted():
                self._monitor = Monitor(self._terms.hidden)
            report = self._monitor.report()
        self._together = run_together(self._job, host_memory.available_bytes(), report)
        self._ahead = start_ahead(self._job, report, self._together)

    def run(self, waiting: Sequence[Probe]) -> tuple[Outcome, list[dict[str, Any]]]:
        """Run the first probe of `waiting` to its end, and return its outcome and the documents that it sent.

        In the meantime, start further probes that may run or start CUDA at the same time.
        """
        probe = waiting[0]
        lacking = _lacking(probe, self._job)
        if lacking:
            return Outcome(SKIPPED, reason=lacking), []
        try:
            process = self._working(probe)
        except OSError as error:
            return Outcome(FAILED, failure="exception", reason=f"no process could be started: {error}"), []
        with contextlib.suppress(OSError):  # if a process cannot be started now, run() tries again for its probe later
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
        """Let further probes run, up to the number that may run at the same time."""
        for probe in companions(waiting):
            if sum(child.works for child in self._children.values()) >= self._together:
                return
            if not _lacking(probe, self._job):
                self._working(probe)

    def _working(self, probe: Probe) -> probe_supervisor.Child:
        """Start the probe's process if necessary, let the probe run, and return the process."""
        process = self._started(probe)
        if not (process.works or process.over):
            if self._reports:  # events until now belong only to the probes that are already running
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
        """Return the outcome with NVML's report about the period in which the probe ran.

        If several probes ran in that period, each of them gets the report.
        """
        if not self._monitor:
            return outcome
        report = self._ended.pop(probe.name, None)  # there is a report even if the process died before the probe began
        return attribute(outcome, self._read_monitor() if report is None else report)

    def _close_reports(self) -> None:
        """Close the reports of the probes that have just ended, because later events do not concern these probes."""
        over = [name for name in self._reports if self._children[name].over]
        if over:
            self._read_monitor()
            self._ended.update((name, self._reports.pop(name)) for name in over)

    def _read_monitor(self) -> Report:
        """Return NVML's report about the time since the last call, and add it to the reports of all running probes."""
        latest = self._monitor.report() if self._monitor else Report()
        self._reports = {name: report.then(latest) for name, report in self._reports.items()}
        return latest


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Delay SIGTERM and SIGINT while a process is started or ended, so that no process is left running."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTIONS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _lacking(probe: Probe, job: JobDocument) -> str | None:
    """Return the requirement of the probe that this job does not meet; None if it meets all."""
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
