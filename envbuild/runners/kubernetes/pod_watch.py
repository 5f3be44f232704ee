"""Watches the pod of a submitted job, reads the pod's log, and classifies how the pod ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from envbuild.runners.kubernetes import job_manifest, pod_job_and_node_states
from envbuild.runners.kubernetes.cluster_api import ApiRefused, Cluster, Silent
from envbuild.runners.kubernetes.job_manifest import Object
from envbuild.runners.kubernetes.kubernetes_settings import KubernetesSite
from envbuild.runners.kubernetes.pod_job_and_node_states import Lacks, Pod
from envbuild.runners.runner_interface import RunnerError, Watch
from envbuild.testrun import output_judge
from envbuild.testrun.run_result import MAX_STDOUT, RawOutput, RunLocation
from envbuild.testrun.selftest_job import Job
from envbuild.util.errors import EnvbuildError, NotProved

POLL = 1.0  # seconds between two queries
FOLLOW = 10.0  # seconds without a line before the pod's state is read again
PULLING = 60.0  # seconds for which failing image pulls are tolerated
GRACE = 30.0  # seconds that a state must last, because the cluster's components learn of changes with a delay
PATIENCE = 900.0  # seconds to wait for an API server that does not answer
CLOCK = 2.0  # seconds; the cluster's time stamps are whole seconds


def _gone(hint: str) -> RunnerError:
    return RunnerError("the pod was deleted: by a user, or because its node was drained or removed",
                       ending="cancelled", hint=hint)  # fmt: skip


class Attempt:
    """A submitted job, and what has been observed of it so far."""

    def __init__(self, cluster: Cluster, site: KubernetesSite, name: str, job: Job, work: Object, watch: Watch) -> None:
        self._cluster, self._site, self._name, self._job, self._watch = cluster, site, name, job, watch
        self._spec: Object = work["spec"]["template"]["spec"]
        self._image = str(self._spec["containers"][0]["image"])
        self._given = 0  # complete lines of the log that were forwarded
        self._pod, self._shown, self._why = "", "", ""
        self._next_look = 0.0
        self._since: dict[str, float] = {}

    def output(self) -> RawOutput:
        """Waits for the job's output. Raises the errors of Runner.run."""
        while True:
            try:
                done = self._look()
            except Silent as silent:
                self._tell("the API server does not answer; waiting for it")
                if self._lasts("silence", True) >= PATIENCE:
                    raise pod_job_and_node_states.Unknown(
                        f"the API server no longer answers: {silent}", self._name
                    ) from None
                time.sleep(POLL)
                continue
            except ApiRefused as refused:
                raise RunnerError(
                    f"the cluster refuses to report on the job: {refused}",
                    ending="unknown",
                    hint="check that this account may get jobs, and list pods and their logs",
                ) from None
            self._lasts("silence", False)
            if done:
                return done
            time.sleep(POLL)

    def _look(self) -> RawOutput | None:
        found = self._cluster.pods(self._name)
        if not found:
            self._without()
            return None
        self._lasts("no pod", False)
        pod = self._same([pod_job_and_node_states.pod(one) for one in found])
        self._tell(pod.describe())
        wrong = pod_job_and_node_states.pod_error(pod)
        if wrong:
            raise wrong
        if pod.ended or (pod.reason == pod_job_and_node_states.DEADLINE and pod.begun):
            return self._ended(pod)
        waits = pod_job_and_node_states.unpulled(pod)
        if waits and self._lasts("pulling", True) >= PULLING:
            raise waits
        if not waits:
            self._lasts("pulling", False)
        if self._lasts("deleting", pod.deleting) >= GRACE:
            raise self._deleted(pod)
        if self._lasts("unplaced", not pod.node) >= GRACE:
            self._placeable(pod)
        if self._lasts("running", pod.running) >= self._spec["activeDeadlineSeconds"] + GRACE:
            raise RunnerError(f"{pod.node} did not end the pod at its deadline: it failed, or is cut off",
                              ending="node-failure", hint=self._node(pod.node))  # fmt: skip
        if pod.running:
            self._follow(pod)
        return None

    def _same(self, found: Sequence[Pod]) -> Pod:
        """The pod that was seen first. Raises RunnerError if it no longer exists: Kubernetes before 1.26 may then start
        the job again in a second pod."""
        self._pod = self._pod or found[-1].name
        for pod in found:
            if pod.name == self._pod:
                return pod
        raise _gone("the cluster started a second pod in its place: run the command again")

    def _deleted(self, pod: Pod) -> EnvbuildError:
        """The error for a pod that still exists GRACE seconds after it was marked for deletion."""
        found = (self._nodes() or {}).get(pod.node)
        if found and not found.ready:
            return RunnerError(
                f"the pod was removed because its node {pod.node} failed, or is cut off",
                ending="node-failure",
                hint=pod_job_and_node_states.node_reasons({pod.node: found}),
            )
        return RunnerError("a user deleted the pod, or its node was drained", ending="cancelled",
                           hint=self._node(pod.node))  # fmt: skip

    # waiting

    def _lasts(self, what: str, so: bool) -> float:
        """The seconds for which the condition `so`, named `what`, has been true, by this machine's clock; 0 if it is
        false."""
        if not so:
            self._since.pop(what, None)
            return 0.0
        now = time.monotonic()
        return now - self._since.setdefault(what, now)

    def _tell(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self._watch.say(f"job {self._name}: {text}")

    def _without(self) -> None:
        """Handles a job without a pod. Raises RunnerError if the job was deleted or has ended, or if it gets no pod in
        time."""
        job = self._cluster.job(self._name)
        if job is None:
            raise RunnerError("the job was deleted, and not by this command", ending="cancelled", hint="run it again")
        ended = pod_job_and_node_states.job_ended(job)
        if ended and ended[0] == pod_job_and_node_states.DEADLINE:
            raise RunnerError("the job was ended at its deadline: it waited too long for a node", ending="time-out",
                              hint=f"{ended[1]}\nraise the limit with kubernetes: {{queue: MINUTES}}")  # fmt: skip
        if ended:
            raise _gone(ended[1])
        held = self._lasts("suspended", pod_job_and_node_states.suspended(job))
        # Kueue, for example, suspends Jobs. The Job's own deadline does not count this time.
        if pod_job_and_node_states.suspended(job):
            self._lasts("no pod", False)
            self._tell("is suspended: it waits in a queue of the cluster")
            queue = job_manifest.QUEUE if self._site.queue is None else self._site.queue
            if held >= max(queue * 60, GRACE):
                raise RunnerError(
                    f"the job waited {queue} min in a queue of the cluster (it was suspended)",
                    ending="unschedulable",
                    hint="raise the limit with kubernetes: {queue: MINUTES}",
                )
            return
        if self._lasts("no pod", True) >= GRACE:
            messages = [str(event.get("message", ""))[:500] for event in self._cluster.events(self._name)]
            raise RunnerError("the cluster creates no pod for the job", ending="refused",
                              hint="\n".join(messages) or "see kubectl describe job")  # fmt: skip

    def _nodes(self) -> dict[str, Lacks] | None:
        """The reasons why each node cannot run the pod; None if this account may not list nodes, or the API server does
        not answer."""
        try:
            nodes = self._cluster.nodes()
        except (ApiRefused, Silent):
            return None
        wanted = job_manifest.product_labels(self._job, self._site)
        return pod_job_and_node_states.by_node(nodes, self._spec, wanted, self._job.count if self._job.gpus else 0)

    def _node(self, name: str) -> str:
        found = self._nodes() or {}
        lacks = found.get(name)
        return (
            pod_job_and_node_states.node_reasons({name: lacks})
            if lacks and (lacks.ever or lacks.now)
            else "run it again"
        )

    def _placeable(self, pod: Pod) -> None:
        """Raises RunnerError if the pod got no node within the time that the setting `queue` gives. Without that
        setting, raises NotProved if no node could ever run the pod."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + GRACE
        found = self._nodes()
        why = pod_job_and_node_states.node_reasons(found) if found is not None else pod.unplaced
        queue = self._site.queue
        if queue is None and found is not None and all(lacks.ever for lacks in found.values()):
            raise NotProved(
                "no node of the cluster can take the job",
                hint=f"{why}\nkubernetes: {{queue: MINUTES}} waits for a node that is added later",
            )
        if queue is not None and self._lasts("unplaced", True) >= queue * 60:
            raise RunnerError(f"the job waited {queue} min for a node", ending="unschedulable", hint=why)
        if why != self._why:
            self._why = why
            self._watch.say(why)

    # the log
    def _follow(self, pod: Pod) -> None:
        """Forwards new lines of the log until no line arrives for FOLLOW seconds."""
        seen, rest = 0, b""
        with contextlib.suppress(Silent, ApiRefused), self._cluster.log(pod.name, FOLLOW, follow=True) as blocks:
            for block in blocks:
                rest += block
                *whole, rest = rest.split(b"\n")
                for line in whole:
                    seen += 1
                    if seen > self._given:
                        self._given = seen
                        self._watch.line(line)
                if len(rest) > MAX_STDOUT:
                    return

    def _log(self, pod: Pod) -> bytes:
        found = bytearray()
        with self._cluster.log(pod.name, GRACE, follow=False) as blocks:
            for block in blocks:
                found += block
                if len(found) > MAX_STDOUT:
                    break
        return bytes(found)

    def _ended(self, pod: Pod) -> RawOutput | None:
        ended = pod.ended
        if ended is None:  # the node has not reported the end yet
            if self._lasts("expired", True) < GRACE:
                return None
            raise self._late(pod)
        had = ended.seconds + CLOCK >= self._job.limits.timeout  # whether the self-test had its full time
        if pod.reason == pod_job_and_node_states.DEADLINE and ended.code not in (0, 5) and not had:
            raise self._late(pod)
        expired = had and (
            ended.code == job_manifest.LATE
            or (pod.reason == pod_job_and_node_states.DEADLINE and ended.code not in (0, 5))
        )
        try:
            stdout = self._log(pod)
        except ApiRefused as refused:
            raise self._truncated(pod, str(refused)) from None
        for line in stdout.split(b"\n")[self._given : -1]:
            self._given += 1
            self._watch.line(line)
        if ended.code in (0, 5) and not self._whole(stdout):
            if self._lasts("cut", True) < GRACE / 3:  # the last lines of the log may still arrive
                return None
            raise self._truncated(pod, "the end of its output is missing")
        for lack in job_manifest.UNCONFINED:
            self._watch.say(f"less confined than a container on this machine: {lack}")
        return RawOutput(
            stdout=stdout[: MAX_STDOUT + 1],
            stderr=ended.message,
            exit_code=None if expired else ended.code,
            seconds=ended.seconds,
            out_of_memory=ended.reason == "OOMKilled",
            timed_out=expired,
            too_long=len(stdout) > MAX_STDOUT,
            where=RunLocation(
                runner="kubernetes",
                job=f"{self._cluster.namespace}/{self._name}",
                node=pod.node,
                engine=pod.runtime or "unknown",
                image=self._image,
                told_image=pod.image,
                queued_seconds=pod.queued,
                restarts=0,
                unconfined=tuple(job_manifest.UNCONFINED),
            ),
        )

    def _whole(self, stdout: bytes) -> bool:
        """Whether the log contains the last frame of the run, and all lines that were forwarded before. True for a log
        that exceeds MAX_STDOUT. The collector of an audit writes a single frame."""
        if len(stdout) > MAX_STDOUT:
            return True
        frames = (output_judge.frame(line, self._job.nonce) for line in stdout.splitlines()[-50:])
        lost = stdout.count(b"\n") < self._given
        return not lost and any(
            frame and (frame[1].get("kind") == "end" or not self._job.is_selftest) for frame in frames
        )

    def _late(self, pod: Pod) -> EnvbuildError:
        return RunnerError(
            "the pod reached its deadline before the self-test's own time limit",
            ending="time-out",
            hint=f"if {pod.node or 'the node'} fetches the image slowly, it may have it now: run the command again",
        )

    def _truncated(self, pod: Pod, why: str) -> EnvbuildError:
        return RunnerError(f"the log of pod {pod.name} is incomplete: {why}", ending="truncated",
                           hint=f"does {pod.node or 'the node'} rotate logs early? run the command again")  # fmt: skip
