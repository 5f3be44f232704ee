"""Defines the steps of the plan, and runs them: each within its time limit, with results recorded as they are produced,
and with a verdict."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_plan import selftests
from gpu_plan.limits import TimeUp, descendants, end_descendants, time_limit
from gpu_plan.selftests import ROOT, Order, Run
from gpu_plan.steplog import FAILED, PASSED, SKIPPED, StepLog

BLOCK_SECONDS = 540.0  # nine minutes: a remote machine may kill a command after ten
LEAST_SECONDS = 5.0  # a step is not started with less time left
# The sources that determine a result. A result made with different sources counts as incomplete.
_SOURCES = ("envbuild/selftest", "benchmarks/gpu_plan", "tests/selftest/seeds")


class StepFailed(Exception):
    """The step found a fault; the message describes it."""


class StepSkipped(Exception):
    """The step cannot run here; the message gives the reason."""


@dataclass
class Bench:
    """The input of a step. `gpu`: the name that the driver prints, None for a trial on the CPU; `scratch`: a temporary
    folder; `folder`: the folder of this GPU's results; `wheels`, `apex`: folders that exist if they were copied to this
    machine."""

    gpu: str | None
    folder: Path
    scratch: Path
    wheels: Path = ROOT / ".gpu-wheels"
    apex: Path = ROOT / ".gpu-apex"
    log: StepLog = field(init=False)
    _at: tuple[str, int] = field(init=False, default=("", 0))
    _until: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.log = StepLog(self.folder)

    @property
    def device(self) -> str:
        return "cuda" if self.gpu else "cpu"

    @property
    def seconds_left(self) -> float:
        """Return the seconds until the step's time limit."""
        return self._until - time.monotonic()

    def begin(self, step: Step, limit: float) -> None:
        self._at, self._until = (step.name, step.block), time.monotonic() + limit
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.log.begin(*self._at, at=now, sources=sources())

    def record(self, kind: str, **fields: Any) -> None:
        self.log.append(*self._at, kind, **fields)

    def saw(self, text: str) -> None:
        """Note an observation of the step for the page."""
        self.record("saw", text=text)
        print(f"{self._at[0]}: {text}", file=sys.stderr, flush=True)

    def order(
        self,
        name: str,
        module: str | None = None,
        *,
        before: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Order:
        """Return the order for a run of the self-test, or, with `module`, for a run of that module's PROBES. `before`:
        a command to put before the command of the run; `fields`: keys of the job document."""
        document = selftests.job(self.gpu, **{"level": "quick", **fields})
        file = self.scratch / f"{name}.job.json"
        file.write_text(json.dumps(document), encoding="utf-8")
        ours = (
            selftests.program("selftest.driver", module, file.read_text(encoding="utf-8"), "/dev/stdout")
            if module
            else selftests.program("envbuild.selftest", "--job", str(file))
        )
        return Order(name, [*before, *ours], document["nonce"], environment or {})

    def run(self, *orders: Order) -> list[Run]:
        """Start these runs at the same time, and record their frames as they arrive."""
        runs = selftests.follow(orders, self.scratch, self._frame)
        for run in runs:
            self.record("run", run=run.name, seconds=run.seconds, problem=run.problem)
        return runs

    def _frame(self, run: str, frame: selftests.Frame) -> None:
        self.record("frame", run=run, frame=frame)
        if frame["kind"] == "probe":
            text = f"{self._at[0]}: {run}: {frame['probe']} {frame['status']} {frame['seconds']:.2f} s"
            print(text, file=sys.stderr, flush=True)

    def output(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
        """Run a program of the plan and return its stdout. Raises StepFailed with its last line if its exit status is
        not 0."""
        done = subprocess.run(
            command, cwd=ROOT, env=selftests.environment(environment), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
        if done.returncode:
            self.record("measured", command=list(command), status=done.returncode, stderr=done.stderr[-20000:])
            raise StepFailed(f"{' '.join(command[3:5])} ended with exit status {done.returncode}: {last_line(done)}")
        return done.stdout


@dataclass(frozen=True)
class Step:
    """A step. `limit`: seconds; `about`: what the step does, for --list and the page."""

    name: str
    block: int
    limit: float
    about: str
    function: Callable[[Bench], None]


def judge(runs: Iterable[Run]) -> None:
    """Raise StepFailed if a run did not complete or a probe failed; raise StepSkipped if all probes were skipped."""
    faults = [f"{run.name}: {run.problem}" for run in runs if run.problem]
    faults += [f"{run.name}: {probe} failed: {reason(run, probe)}" for run in runs for probe in run.with_status(FAILED)]
    if faults:
        raise StepFailed("; ".join(faults))
    if not any(run.with_status(PASSED) for run in runs):
        raise StepSkipped("every probe was skipped")


def reason(run: Run, probe: str) -> str:
    """Return why the probe did not pass, in a line of at most 200 characters."""
    return (str(run.outcomes[probe]["reason"]).splitlines() or [""])[0][:200]


def run_step(step: Step, bench: Bench, seconds: float) -> None:
    """Run the step for at most this number of seconds, and record its verdict. Raises only if the plan itself is
    interrupted."""
    bench.begin(step, seconds)
    begin = time.monotonic()
    verdict, why, complete = PASSED, "", True
    others = frozenset(descendants(os.getpid()))
    try:
        with time_limit(seconds, others):
            step.function(bench)
        left = end_descendants(others)
        if left:
            verdict, why = FAILED, f"{len(left)} processes were left running"
    except TimeUp:
        verdict, why, complete = FAILED, f"no end within {seconds:.0f} s", False
    except StepSkipped as skip:
        verdict, why = SKIPPED, str(skip)
    except Exception as error:
        verdict, why = FAILED, str(error) if isinstance(error, StepFailed) else f"{type(error).__name__}: {error}"
    finally:
        end_descendants(others)
    spent = time.monotonic() - begin
    bench.record("end", verdict=verdict, reason=why, seconds=round(spent, 2), complete=complete and verdict != SKIPPED)
    print(f"{step.name}: {verdict} after {spent:.1f} s" + (f": {why}" if why else ""), file=sys.stderr, flush=True)


def last_line(done: subprocess.CompletedProcess[str]) -> str:
    """Return the last line that a command printed (on stderr, else on stdout), at most 300 characters."""
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def skip_step(step: Step, bench: Bench, why: str) -> None:
    """Record that the step was not started."""
    bench.begin(step, 0)
    bench.record("end", verdict=SKIPPED, reason=why, seconds=0.0, complete=False)


def sources() -> str:
    """Return the first digits of the sha256 of the sources that determine the results."""
    whole = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted((ROOT / folder).rglob("*.py")):
            whole.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return whole.hexdigest()[:12]
