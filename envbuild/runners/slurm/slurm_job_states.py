"""Reads a job's state from Slurm's output: its state, how it ended, and whether it can ever start. Pure."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from envbuild.runners.runner_interface import RunnerError
from envbuild.util.errors import EnvbuildError, NotProved, printable

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
# Slurm's final state -> (our name for it, what happened, what to do)
_AGAIN = "run it again"
_ENDINGS = {
    "CANCELLED": ("cancelled", "was cancelled, and not by this command", "who did: sacct -j {id}; then run it again"),
    "TIMEOUT": ("time-out", "was ended at its time limit", "raise the limit: --slurm time=MINUTES"),
    "DEADLINE": ("time-out", "was ended at its deadline", _AGAIN),
    "NODE_FAIL": ("node-failure", "ended because its node {node} failed", f"{_AGAIN}; scontrol show node {{node}}"),
    "BOOT_FAIL": ("node-failure", "ended because its node {node} did not boot", _AGAIN),
    "PREEMPTED": ("preempted", "was preempted by another job", f"{_AGAIN}, or with --slurm requeue=yes"),
    "OUT_OF_MEMORY": ("memory", "used more memory than Slurm allows", "raise selftest.memory_gb in the profile"),
    "REVOKED": ("cancelled", "was revoked: another cluster of the federation ran it", _AGAIN),
}  # fmt: skip
# Slurm's manual: there are few base states, but flags hide them, and new flags are added. If an unknown flag hides the
# end of a job, Slurm soon forgets the job, which ends the waiting.
_OVER = {*_ENDINGS, "COMPLETED", "FAILED"}
LOST = "lost"


@dataclass(frozen=True)
class Seen:
    """The state of a job. `queued`: seconds from its submission to its start, both by the controller's clock; None
    before the start."""

    state: str
    reason: str
    node: str
    restarts: int
    queued: float | None

    @property
    def over(self) -> bool:
        return self.state in _OVER

    def describe(self) -> str:
        """The state as text for the user."""
        if self.state in WAITING:
            again = f", for the {_ordinal(self.restarts + 1)} time" if self.restarts else ""
            return f"queued{again} ({self.reason})"
        node = f" on {self.node}" if self.node else ""
        after = f", after {self.queued:.0f} s in the queue" if self.queued is not None else ""
        return f"{self.state.lower()}{node}{after}"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def seen(text: str) -> Seen | None:
    """Parses the output of `scontrol --oneliner show job ID`; None if it is not such a line."""
    found = {}
    for key in ("JobState", "Reason", "NodeList", "Restarts", "SubmitTime", "StartTime"):
        match = re.search(rf"(?:^|\s){key}=(\S*)", text)
        found[key] = printable(match[1][:200]) if match else ""
    if not re.fullmatch("[A-Z_]{1,40}", found["JobState"]):
        return None
    node = found["NodeList"] if found["NodeList"] not in ("", "(null)") else ""
    restarts = int(found["Restarts"]) if re.fullmatch("[0-9]{1,6}", found["Restarts"]) else 0
    queued = None
    if found["JobState"] not in WAITING:
        begin, end = _time(found["SubmitTime"]), _time(found["StartTime"])
        queued = max(0.0, (end - begin).total_seconds()) if begin and end else None
    return Seen(found["JobState"], found["Reason"], node, restarts, queued)


def _time(text: str) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        return None


def ending(job: str, last: Seen | None, log: str) -> RunnerError:
    """The error of a job that ended without an outcome. `last` None: Slurm no longer knows the job. `log`: the
    end of its Slurm log."""
    details = f"\n{log.strip()}" if log.strip() else ""
    if last is None:
        return RunnerError(
            f"job {job} is lost: Slurm no longer knows it, and it left no output",
            ending=LOST,
            hint=f"it is unknown how it ended; run it again{details}",
        )
    if last.state in _ENDINGS:
        word, what, hint = _ENDINGS[last.state]
        known = {"id": job, "node": last.node or "?"}
        return RunnerError(f"job {job} {what.format(**known)}", ending=word, hint=hint.format(**known) + details)
    return RunnerError(
        f"job {job} ended ({last.state}, {last.reason}) and left no output",
        ending="no-output",
        hint=f"is the folder shared with {last.node or 'the nodes'}? set another: slurm: {{folder: ...}}{details}",
    )


GRACE = 30.0  # seconds that a reason must last, because Slurm reconsiders jobs repeatedly
_PENDING = WAITING - {"CONFIGURING"}  # CONFIGURING: nodes are assigned and are booting
# Job reason codes of Slurm's manual that do not change when other jobs end -> meaning. Left out: jobs that a person
# holds and can release (JobHeldUser, JobHeldAdmin), and limits on running jobs (GrpCpuRunMinutes), which free up.
# Limits on past use are included, because they do not free up soon.
_NEVER = (
    ("PartitionTimeLimit", "its partition does not allow its time limit: --slurm time=MINUTES, or another partition"),
    ("PartitionNodeLimit", "its partition does not allow so many nodes, or its nodes are down"),
    ("PartitionConfig", "its partition does not accept such jobs: choose a different partition or account"),
    ("BadConstraints", "no node has the requested constraint, gres, cpus_per_task and mem"),
    ("AccountNotAllowed|InvalidAccount", "its account may not run it there: --slurm account=NAME, partition=NAME"),
    ("InvalidQOS|QOSNotAllowed", "its QOS may not run it there: --slurm qos=NAME, partition=NAME"),
    (
        r"(Assoc|QOS)Max\w*Per(Job|Node)\w*|MaxMemPerLimit",
        "it requests more than its account or QOS allows for one job",
    ),
    (r"QOSMin\w+", "it requests less than its QOS requires"),
    (r"(Assoc|QOS)Grp(?!\w*Run)\w*(Minutes|Wall)\w*", "its account or QOS has used up its limit"),
    ("Reservation(Deleted|Invalid)", "its reservation is gone: --slurm reservation=NAME"),
    ("DeadLine", "its deadline is over"),
    (r"JobHoldMaxRequeue|\w+_requeued_held", "it could not be started, and is held: see the node's logs"),
)


class Queue:
    """The waiting time of a job. `minutes`: the longest wait; None: unlimited, except for jobs that can never start."""

    def __init__(self, minutes: int | None) -> None:
        self._minutes = minutes
        self._since: float | None = None
        self._vain: float | None = None

    def ends(self, job: str, seen: Seen | None, now: float) -> EnvbuildError | None:
        """The reason to stop waiting for the job, or None. `seen` None: Slurm reports nothing about it now; `now`: in
        seconds."""
        if seen is None:
            return None
        if seen.state not in _PENDING:
            self._since = self._vain = None
            return None
        self._since = now if self._since is None else self._since
        if self._minutes is not None:
            if now - self._since < max(self._minutes * 60, GRACE):
                return None
            return RunnerError(
                f"job {job} waited {self._minutes} min in the queue ({seen.reason}), and is cancelled",
                ending="unschedulable",
                hint="raise the limit with slurm: {queue: MINUTES}",
            )
        why = endless_wait(seen.reason)
        self._vain = None if why is None else now if self._vain is None else self._vain
        if why is None or self._vain is None or now - self._vain < GRACE:
            return None
        return NotProved(
            f"Slurm can never start job {job} ({seen.reason}), and it is cancelled: {why}",
            hint="slurm: {queue: MINUTES} waits in case that changes",
        )


def endless_wait(reason: str) -> str | None:
    """The meaning of a reason that does not go away by itself; None for any other reason."""
    word = reason.partition(",")[0]
    return next((why for pattern, why in _NEVER if re.fullmatch(pattern, word)), None)
