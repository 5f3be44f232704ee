"""Parses Slurm's output about a job: its state, how it ended, and whether it can ever start. Pure."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from envbuild.runners.runner_interface import RunnerError
from envbuild.util.errors import EnvbuildError, NotProved, printable

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_AGAIN = "run the command again"
# Slurm's final state -> (`ending` of the error, what happened, what to do)
_ENDINGS = {
    "CANCELLED": ("cancelled", "was cancelled, and not by this command", f"sacct -j {{id}} shows who; then {_AGAIN}"),
    "TIMEOUT": ("time-out", "was ended at its time limit", "raise the limit: --slurm time=MINUTES"),
    "DEADLINE": ("time-out", "was ended at its deadline", _AGAIN),
    "NODE_FAIL": ("node-failure", "ended because its node {node} failed", f"{_AGAIN}; scontrol show node {{node}}"),
    "BOOT_FAIL": ("node-failure", "ended because its node {node} did not boot", _AGAIN),
    "PREEMPTED": ("preempted", "was preempted by another job", f"{_AGAIN}, or with --slurm requeue=yes"),
    "OUT_OF_MEMORY": ("memory", "used more memory than Slurm allows", "raise selftest.memory_gb in the profile"),
    "REVOKED": ("cancelled", "was revoked: another cluster of the federation ran it", _AGAIN),
}  # fmt: skip
# A job has one of a few base states, but Slurm may show a flag instead, and new versions add flags. If an unknown flag
# hides the end of a job, Slurm soon forgets the job, which also ends the wait.
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
    """Parses the output of `scontrol --oneliner show job ID`; None if the output does not contain a job's state."""
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
    """The error of a job that ended without an outcome. `last`: the job's final state; None if Slurm no longer knows
    the job. `log`: the end of the job's Slurm log."""
    details = f"\n{log.strip()}" if log.strip() else ""
    if last is None:
        return RunnerError(
            f"job {job} is lost: Slurm no longer knows it, and it left no output",
            ending=LOST,
            hint=f"it is unknown how the job ended; run the command again{details}",
        )
    if last.state in _ENDINGS:
        word, what, hint = _ENDINGS[last.state]
        known = {"id": job, "node": last.node or "?"}
        return RunnerError(f"job {job} {what.format(**known)}", ending=word, hint=hint.format(**known) + details)
    return RunnerError(
        f"job {job} ended ({last.state}, {last.reason}) and left no output",
        ending="no-output",
        hint=f"is the job's folder shared with {last.node or 'the nodes'}? set it with slurm: {{folder: ...}}{details}",
    )


GRACE = 30.0  # seconds that a reason must last, because Slurm repeatedly reconsiders waiting jobs
_PENDING = WAITING - {"CONFIGURING"}  # CONFIGURING: nodes are assigned and are booting
# Slurm's reason codes for which waiting does not help -> meaning. Not included: holds that a person can release
# (JobHeldUser, JobHeldAdmin), and limits on running jobs (GrpCpuRunMinutes), which other jobs free when they end.
# Limits on past use are included, because they are not free again soon.
_NEVER = (
    ("PartitionTimeLimit", "its partition does not allow its time limit: --slurm time=MINUTES, or another partition"),
    ("PartitionNodeLimit", "its partition does not allow so many nodes, or its nodes are down"),
    ("PartitionConfig", "its partition does not accept such jobs: choose a different partition or account"),
    ("BadConstraints", "no node has the requested constraint, gres, cpus_per_task and mem"),
    (
        "AccountNotAllowed|InvalidAccount",
        "its account is invalid or not allowed in this partition: --slurm account=NAME, partition=NAME",
    ),
    ("InvalidQOS|QOSNotAllowed", "its QOS is invalid or not allowed here: --slurm qos=NAME, partition=NAME"),
    (
        r"(Assoc|QOS)Max\w*Per(Job|Node)\w*|MaxMemPerLimit",
        "it requests more than its account or QOS allows for one job",
    ),
    (r"QOSMin\w+", "it requests less than its QOS requires"),
    (r"(Assoc|QOS)Grp(?!\w*Run)\w*(Minutes|Wall)\w*", "its account or QOS has used up its limit"),
    ("Reservation(Deleted|Invalid)", "its reservation no longer exists: --slurm reservation=NAME"),
    ("DeadLine", "its deadline is over"),
    (r"JobHoldMaxRequeue|\w+_requeued_held", "Slurm holds it after failed starts: see the node's logs"),
)


class Queue:
    """Limits the time for which a job waits in the queue. `minutes`: the longest wait; None: unlimited, except for jobs
    that can never start."""

    def __init__(self, minutes: int | None) -> None:
        self._minutes = minutes
        self._since: float | None = None
        self._vain: float | None = None

    def ends(self, job: str, seen: Seen | None, now: float) -> EnvbuildError | None:
        """The error that ends the wait for the job, or None. `seen`: the job's state, None if Slurm reports nothing
        about the job now; `now`: the time in seconds."""
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
                f"job {job} waited {self._minutes} min in the queue ({seen.reason}); it is cancelled",
                ending="unschedulable",
                hint="raise the limit with slurm: {queue: MINUTES}",
            )
        why = endless_wait(seen.reason)
        self._vain = None if why is None else now if self._vain is None else self._vain
        if why is None or self._vain is None or now - self._vain < GRACE:
            return None
        return NotProved(
            f"Slurm can never start job {job} ({seen.reason}): {why}; the job is cancelled",
            hint="slurm: {queue: MINUTES} makes envbuild wait, in case this changes",
        )


def endless_wait(reason: str) -> str | None:
    """The meaning of a reason code for which waiting does not help; None for any other reason."""
    word = reason.partition(",")[0]
    return next((why for pattern, why in _NEVER if re.fullmatch(pattern, word)), None)
