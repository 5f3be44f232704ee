"""What Slurm says of a job, and what its script left, as data; and what an ending means. Pure."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from envbuild.errors import printable
from envbuild.proof.runners.protocol import RunnerError

WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
# Slurm's own ending -> (our word for it, what happened, what to do)
_AGAIN = "run it again"
_ENDINGS = {
    "CANCELLED": ("cancelled", "was cancelled, and not by this command", "who did: sacct -j {id}; then run it again"),
    "TIMEOUT": ("time-out", "was ended at its time limit", "give it more: --slurm time=MINUTES"),
    "DEADLINE": ("time-out", "was ended at its deadline", _AGAIN),
    "NODE_FAIL": ("node-failure", "ended because its node {node} failed", f"{_AGAIN}; scontrol show node {{node}}"),
    "BOOT_FAIL": ("node-failure", "ended because its node {node} did not boot", _AGAIN),
    "PREEMPTED": ("preempted", "was preempted by another job", f"{_AGAIN}, or with --slurm requeue=yes"),
    "OUT_OF_MEMORY": ("memory", "had more memory than Slurm allows it", "selftest.memory_gb says how much"),
    "REVOKED": ("cancelled", "was revoked: another cluster of the federation ran it", _AGAIN),
}  # fmt: skip
# Slurm's manual: base states are few, and flags, which hide them, become more. Where one that is not known here hides
# an end, Slurm forgets the job soon.
_OVER = {*_ENDINGS, "COMPLETED", "FAILED"}
LOST = "lost"


@dataclass(frozen=True)
class Seen:
    """`queued`: seconds from its submission to its start, both by the controller's clock; None before."""

    state: str
    reason: str
    node: str
    restarts: int
    queued: float | None

    @property
    def over(self) -> bool:
        return self.state in _OVER

    def told(self) -> str:
        """For whoever waits."""
        if self.state in WAITING:
            again = f", for the {_ordinal(self.restarts + 1)} time" if self.restarts else ""
            return f"queued{again} ({self.reason})"
        node = f" on {self.node}" if self.node else ""
        after = f", after {self.queued:.0f} s in the queue" if self.queued is not None else ""
        return f"{self.state.lower()}{node}{after}"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")


def seen(text: str) -> Seen | None:
    """Of `scontrol --oneliner show job ID`; None where that is no such line."""
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


@dataclass(frozen=True)
class Outcome:
    """What a script left at its end. `stage`: what it came to, gpu, program, image, network or run; `size` and
    `sha256` of its stdout. `parts`: of several nodes, each one's exit code and the bytes of its stdout, which follow
    each other; `fabric`: whether each had InfiniBand's devices."""

    stage: str
    exit: int
    seconds: float
    oom: bool
    job: str
    node: str
    gpus: str
    engine: str
    image: str
    size: int
    sha256: str
    parts: tuple[tuple[int, int], ...] = ()
    fabric: tuple[bool, ...] = ()


_SHAPE = {
    "stage": "program|image|gpu|network|run", "exit": "[0-9]{1,3}", "seconds": "[0-9]{1,7}", "oom": "true|false",
    "job": "[0-9]{1,12}", "node": "[A-Za-z0-9._,-]{0,16000}",
    "gpus": "[A-Za-z0-9,:/_.-]{0,1000}", "engine": "[A-Za-z0-9._ -]{0,80}",
    "image": "[ -~]{0,500}", "bytes": "[0-9]{1,12}", "sha256": "[0-9a-f]{64}",
    "parts": "([0-9]{1,3}:[0-9]{1,12}( |$)){0,64}", "fabric": "((yes|no)( |$)){0,64}",
}  # fmt: skip


def outcome(text: str) -> Outcome | None:
    """Of the file `outcome`; None where it is not as the script writes it."""
    found = dict(line.partition("=")[::2] for line in text.splitlines())
    if set(found) != set(_SHAPE) or not all(re.fullmatch(_SHAPE[key], value) for key, value in found.items()):
        return None
    return Outcome(
        stage=found["stage"],
        exit=int(found["exit"]),
        seconds=float(found["seconds"]),
        oom=found["oom"] == "true",
        job=found["job"],
        node=found["node"],
        gpus=found["gpus"],
        engine=found["engine"].strip(),
        image=found["image"],
        size=int(found["bytes"]),
        sha256=found["sha256"],
        parts=tuple((int(code), int(size)) for code, _, size in (one.partition(":") for one in found["parts"].split())),
        fabric=tuple(word == "yes" for word in found["fabric"].split()),
    )


def ending(job: str, last: Seen | None, log: str) -> RunnerError:
    """A job that is over and left no outcome. `last` None: Slurm does not know it any longer. `log`: its own words."""
    said = f"\n{log.strip()}" if log.strip() else ""
    if last is None:
        return RunnerError(
            f"job {job} is lost: Slurm knows it no longer, and it left no output",
            ending=LOST,
            hint=f"nothing is known of how it ended; run it again{said}",
        )
    if last.state in _ENDINGS:
        word, what, hint = _ENDINGS[last.state]
        known = {"id": job, "node": last.node or "?"}
        return RunnerError(f"job {job} {what.format(**known)}", ending=word, hint=hint.format(**known) + said)
    return RunnerError(
        f"job {job} ended ({last.state}, {last.reason}) and left no output",
        ending="no-output",
        hint=f"is the folder shared with {last.node or 'the nodes'}? slurm: {{folder: ...}} names another one{said}",
    )
