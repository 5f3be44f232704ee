"""How long a job may wait in Slurm's queue, and for what it would wait for ever. Pure: it is told the time."""

from __future__ import annotations

import re

from envbuild.errors import EnvbuildError, NotProved
from envbuild.proof.runners.protocol import RunnerError
from envbuild.proof.runners.slurm.states import WAITING, Seen

GRACE = 30.0  # seconds that a reason must last: Slurm looks at a job again and again
_PENDING = WAITING - {"CONFIGURING"}  # that one has its nodes, which boot
# Slurm's manual, job reason codes: those that other jobs' ends do not change -> what each means. What a person holds
# (JobHeldUser, JobHeldAdmin), a person releases; what runs now (GrpCpuRunMinutes) passes, what was used does not soon.
_NEVER = (
    ("PartitionTimeLimit", "its partition allows no such time: --slurm time=MINUTES, or another partition"),
    ("PartitionNodeLimit", "its partition does not give so many nodes, or those that it has are down"),
    ("PartitionConfig", "its partition does not take such jobs: another one, or another account"),
    ("BadConstraints", "no node has constraint, gres, cpus_per_task and mem as they are asked for"),
    ("AccountNotAllowed|InvalidAccount", "its account may not run it there: --slurm account=NAME, partition=NAME"),
    ("InvalidQOS|QOSNotAllowed", "its QOS may not run it there: --slurm qos=NAME, partition=NAME"),
    (r"(Assoc|QOS)Max\w*Per(Job|Node)\w*|MaxMemPerLimit", "no single job of its account or QOS may have so much"),
    (r"QOSMin\w+", "its QOS takes no job that asks for so little"),
    (r"(Assoc|QOS)Grp(?!\w*Run)\w*(Minutes|Wall)\w*", "what its account or QOS may use is used up"),
    ("Reservation(Deleted|Invalid)", "its reservation is gone: --slurm reservation=NAME"),
    ("DeadLine", "its deadline is over"),
    (r"JobHoldMaxRequeue|\w+_requeued_held", "it could not be started, and is held: what do the node's logs say?"),
)


class Queue:
    """What is known of a job's wait. `minutes`: as long as it may last at most; None: for ever, but not in vain."""

    def __init__(self, minutes: int | None) -> None:
        self._minutes = minutes
        self._since: float | None = None
        self._vain: float | None = None

    def ends(self, job: str, seen: Seen | None, now: float) -> EnvbuildError | None:
        """Why the job is not waited for any longer. `seen` None: Slurm says nothing of it now; `now`: in seconds."""
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
                hint="slurm: {queue: MINUTES} gives it more",
            )
        why = never(seen.reason)
        self._vain = None if why is None else now if self._vain is None else self._vain
        if why is None or self._vain is None or now - self._vain < GRACE:
            return None
        return NotProved(
            f"Slurm can never start job {job} ({seen.reason}), and it is cancelled: {why}",
            hint="slurm: {queue: MINUTES} waits all the same, for what may change",
        )


def never(reason: str) -> str | None:
    """What a reason means that does not end by itself; None for any other."""
    word = reason.partition(",")[0]
    return next((why for pattern, why in _NEVER if re.fullmatch(pattern, word)), None)
