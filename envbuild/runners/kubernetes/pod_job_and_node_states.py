"""Parses and explains the state of pods, nodes and Jobs. Pure.

The cluster's objects are not trusted: any field may have a type other than the documented one.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.runners.kubernetes.job_manifest import GPU, PRODUCT, Object
from envbuild.runners.runner_interface import RunnerError
from envbuild.util.errors import EngineError, EnvbuildError, NetworkError, printable

_AGAIN = "run it again"


class Unknown(RunnerError):
    """The state of the job is unknown. It may still run, so nothing of it is removed."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message, ending="unknown", hint=f"when the server answers again: --resume {name}")


# The reason of a failed pod, or of its condition DisruptionTarget -> (`ending` of the error, what happened, hint)
_ENDINGS = {
    "Evicted": ("evicted", "was evicted from its node {node}", _AGAIN),
    "Preempting": ("preempted", "was preempted on its node {node}", f"{_AGAIN}, or with a priority_class"),
    "PreemptionByScheduler": ("preempted", "was preempted by another pod", f"{_AGAIN}, or with a priority_class"),
    "DeletionByTaintManager": ("node-failure", "was removed from its node {node}, which failed or is drained",
                               f"kubectl describe node {{node}}; {_AGAIN}"),
    "EvictionByEvictionAPI": ("evicted", "was evicted: its node {node} is drained", _AGAIN),
    "DeletionByPodGC": ("node-failure", "was removed because its node {node} is gone", _AGAIN),
    "TerminationByKubelet": ("evicted", "was ended by its node {node}: out of a resource, or shut down", _AGAIN),
    "NodeLost": ("node-failure", "ended because its node {node} failed", _AGAIN),
    "NodeShutdown": ("node-failure", "ended because its node {node} was shut down", _AGAIN),
    "Shutdown": ("node-failure", "ended because its node {node} was shut down", _AGAIN),
    "Terminated": ("node-failure", "ended because its node {node} was shut down", _AGAIN),
    "NodeAffinity": ("refused", "was refused by its node {node}, whose labels changed", _AGAIN),
}  # fmt: skip
DEADLINE = "DeadlineExceeded"
_TERMINATED = 143  # 128 + SIGTERM, which a kubelet sends to containers that it stops
_REFUSED = ("UnexpectedAdmissionError", "OutOf")  # rejected by the kubelet's admission check
_PULL = ("ErrImagePull", "ImagePullBackOff", "RegistryUnavailable", "ImageInspectError", "SignatureValidationFailed")
_START = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "InvalidImageName", "StartError",
          "ContainerCannotRun")  # fmt: skip


@dataclass(frozen=True)
class Ended:
    """The end of the container. `message`: the end of its stderr."""

    code: int
    reason: str
    message: str
    seconds: float


@dataclass(frozen=True)
class Pod:
    """The state of a pod. `waiting`: why its container does not run yet, as (reason, message). `unplaced`: why the pod
    has no node. `queued`: seconds from the pod's creation to its container's start, by the cluster's clocks."""

    name: str
    node: str
    reason: str
    message: str
    disrupted: str
    deleting: bool
    unplaced: str
    waiting: tuple[str, str]
    running: bool
    ended: Ended | None
    runtime: str
    image: str
    queued: float | None

    @property
    def begun(self) -> bool:
        return self.running or self.ended is not None

    def describe(self) -> str:
        """The state as text for the user."""
        where = f" on {self.node}" if self.node else ""
        if self.ended:
            return f"ended{where}"
        if self.running:
            after = f", after {self.queued:.0f} s" if self.queued is not None else ""
            return f"running{where}{after}"
        if not self.node:
            return f"waits for a node: {self.unplaced}" if self.unplaced else "waits for a node"
        reason, message = self.waiting
        return f"starts{where} ({reason}{': ' + message[:200] if message else ''})" if reason else f"starts{where}"


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(value: object, most: int = 1000) -> str:
    return printable(value[:most]) if isinstance(value, str) else ""


def _time(value: object) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(str(value))
    except ValueError:
        return None
    return found if found.tzinfo else None


def _between(begin: object, end: object) -> float | None:
    one, two = _time(begin), _time(end)
    return max(0.0, (two - one).total_seconds()) if one and two else None


def pod(document: Object) -> Pod:
    """Parses an object of kind Pod with one container."""
    meta, status = _dict(document.get("metadata")), _dict(document.get("status"))
    container = next(iter(_list(status.get("containerStatuses"))), {})
    state = _dict(container.get("state"))
    waiting, running, over = (_dict(state.get(key)) for key in ("waiting", "running", "terminated"))
    started = over.get("startedAt") or running.get("startedAt")
    conditions = {_text(item.get("type")): item for item in _list(status.get("conditions"))}
    placed, disrupted = conditions.get("PodScheduled", {}), conditions.get("DisruptionTarget", {})
    code = over.get("exitCode")
    return Pod(
        name=_text(meta.get("name"), 253),
        node=_text(_dict(document.get("spec")).get("nodeName"), 253),
        reason=_text(status.get("reason"), 100),
        message=_text(status.get("message")),
        disrupted=_text(disrupted.get("reason"), 100) if disrupted.get("status") == "True" else "",
        deleting="deletionTimestamp" in meta,
        unplaced=_text(placed.get("message")) if placed.get("status") == "False" else "",
        waiting=(_text(waiting.get("reason"), 100), _text(waiting.get("message"))),
        running="running" in state,
        ended=Ended(
            code=code,
            reason=_text(over.get("reason"), 100),
            message=_text(over.get("message"), 12 << 10),
            seconds=_between(over.get("startedAt"), over.get("finishedAt")) or 0.0,
        )
        if type(code) is int
        else None,
        runtime=_text(container.get("containerID"), 200).partition("://")[0],
        image=_text(container.get("imageID"), 500),
        queued=_between(meta.get("creationTimestamp"), started),
    )


def pod_error(seen: Pod) -> EnvbuildError | None:
    """The error of a pod that gives no result, because it was stopped from outside, refused, or not started. Otherwise
    None, also if the self-test crashed or reached its time limit: the caller judges that. A self-test that ended with
    exit code 0 or 5 gives a result, whatever happened to the pod afterwards."""
    if seen.ended and seen.ended.code in (0, 5):
        return None
    what = seen.reason if seen.reason in _ENDINGS else seen.disrupted
    if what in _ENDINGS:
        word, text, hint = _ENDINGS[what]
        known = {"node": seen.node or "?"}
        details = f"\n{seen.message}" if seen.message else ""
        return RunnerError(f"the pod {text.format(**known)}", ending=word, hint=hint.format(**known) + details)
    if seen.reason.startswith(_REFUSED):
        return RunnerError(
            f"the pod was refused by its node {seen.node or '?'}", ending="refused", hint=seen.message or seen.reason
        )
    if seen.reason != DEADLINE and seen.ended and (seen.deleting or seen.ended.code == _TERMINATED):
        hint = f"a user deleted the pod, or its node {seen.node} stopped it: see kubectl get events"
        return RunnerError("the pod was stopped from outside", ending="cancelled", hint=hint)
    if seen.reason == DEADLINE and not seen.begun:
        return RunnerError("the pod did not start within its deadline", ending="time-out", hint=seen.message or _AGAIN)
    reason, message = (seen.ended.reason, seen.ended.message) if seen.ended else seen.waiting
    if reason in _START:
        return EngineError(f"{seen.node or 'the node'} cannot start the image", hint=message or reason)
    if reason == "ErrImageNeverPull":
        return EngineError(
            f"{seen.node or 'the node'} does not have the image",
            hint="kubernetes: {registry: HOST/NAME} sets where to fetch it",
        )
    return None


def unpulled(seen: Pod) -> EnvbuildError | None:
    """The error if the node has failed to fetch the image; otherwise None. The error may pass: the node tries again by
    itself."""
    reason, message = seen.waiting
    if reason not in _PULL:
        return None
    return NetworkError(
        f"{seen.node or 'the node'} cannot fetch the image",
        hint=f"{message or reason}\nis the registry reachable there, and does pull_secrets name a Secret for it?",
    )


@dataclass(frozen=True)
class Lacks:
    """The reasons why a node cannot run a pod. `ever`: permanent reasons; `now`: reasons that depend on the node's
    current state. `ready`: whether the node is ready."""

    ever: tuple[str, ...]
    now: tuple[str, ...]
    ready: bool = True


# Kubernetes' own taints describe a node's current state: not ready, cordoned, short of memory.
_PASSING = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/")


def node_lacks(node: Object, spec: Object, wanted: Sequence[str], count: int) -> Lacks:
    """Return the reasons why a node cannot run a pod of this `spec`. `wanted`: the accepted values of the product
    label; `count`: the number of GPUs."""
    meta, status = _dict(node.get("metadata")), _dict(node.get("status"))
    labels = _dict(meta.get("labels"))
    found: list[str] = []
    now: list[str] = []
    ready = next((item for item in _list(status.get("conditions")) if item.get("type") == "Ready"), {})
    here = ready.get("status") == "True"
    if not here:
        now.append(f"is not ready ({_text(ready.get('reason'), 100) or 'no reason given'})")
    if _dict(node.get("spec")).get("unschedulable") is True:
        now.append("is cordoned")
    if wanted and labels.get(PRODUCT) not in wanted:
        found.append(f"{PRODUCT} is {_text(labels.get(PRODUCT), 100) or 'not set'}")
    for key, value in _dict(spec.get("nodeSelector")).items():
        if key != PRODUCT and labels.get(key) != value:
            found.append(f"{key} is {_text(labels.get(key), 100) or 'not set'}, not {value}")
    free = _text(_dict(status.get("allocatable")).get(GPU), 20)
    if count and (int(free) if free.isascii() and free.isdigit() else 0) < count:
        # A node that becomes ready again reports its state before its device plugin reports the GPUs.
        (found if here else now).append(f"{GPU}: {free or 'none'} of {count}")
    taints = [taint for taint in _list(_dict(node.get("spec")).get("taints")) if not _tolerated(taint, spec)]
    keys = [_text(taint.get("key"), 100) for taint in taints]
    found += [f"taint {key}" for key in keys if not key.startswith(_PASSING)]
    return Lacks(tuple(found), tuple(now or [f"taint {key}" for key in keys if key.startswith(_PASSING)]), here)


def _tolerated(taint: Mapping[str, Any], spec: Object) -> bool:
    if taint.get("effect") not in ("NoSchedule", "NoExecute"):
        return True
    return any(
        one["key"] == taint.get("key")
        and one.get("effect") in (None, taint.get("effect"))
        and (one["operator"] == "Exists" or one.get("value") == taint.get("value"))
        for one in spec.get("tolerations", ())
    )


def by_node(nodes: Iterable[Object], spec: Object, wanted: Sequence[str], count: int) -> dict[str, Lacks]:
    """For each node, the reasons why it cannot run the pod. A node has no reasons if only other running pods prevent
    the pod from running there."""
    return {
        _text(_dict(node.get("metadata")).get("name"), 253): node_lacks(node, spec, wanted, count) for node in nodes
    }


def node_reasons(found: Mapping[str, Lacks], most: int = 20) -> str:
    """One line for each node, with its reasons; at most `most` lines, and then the number of further nodes."""
    reasons = {name: ", ".join([*what.now, *what.ever]) for name, what in found.items()}
    lines = [f"{name}: {words or 'in use by other pods, or too little memory left'}" for name, words in reasons.items()]
    more = [f"and {len(lines) - most} more"] if len(lines) > most else []
    return "\n".join([*lines[:most], *more]) or "the cluster has no nodes"


def suspended(document: Object) -> bool:
    """Whether a Job is suspended, so that it has no pod yet."""
    return _dict(document.get("spec")).get("suspend") is True


def job_ended(document: Object) -> tuple[str, str] | None:
    """(reason, message) of a failed Job; None if it did not fail."""
    for item in _list(_dict(document.get("status")).get("conditions")):
        if item.get("type") == "Failed" and item.get("status") == "True":
            return _text(item.get("reason"), 100), _text(item.get("message"))
    return None
