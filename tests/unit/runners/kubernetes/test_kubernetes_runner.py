"""The Kubernetes runner over real HTTP, with a server that simulates a cluster."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from envbuild.image.docker_engine import Image
from envbuild.runners.kubernetes import pod_job_and_node_states, pod_watch
from envbuild.runners.kubernetes.kubernetes_runner import Kubernetes
from envbuild.runners.kubernetes.kubernetes_settings import KubernetesSite
from envbuild.runners.runner_interface import RunnerError, Watch
from envbuild.testrun import output_judge
from envbuild.testrun.run_result import RawOutput
from envbuild.testrun.selftest_job import Job, Limits
from envbuild.util.errors import (
    EngineError,
    EnvbuildError,
    HungUp,
    Interrupted,
    NetworkError,
    NotProved,
    SettingsError,
    SystemFault,
    UsageError,
)
from envbuild.util.host_processes import ProcessMissing
from unit.evidence.runs import NONCE, documents, lines, located, probe
from unit.runners.apiserver import Object, Server, ended, kubeconfig, node, pod, running, serving, unplaced, waiting

pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")

IMAGE = Image(f"sha256:{'1' * 64}", f"sha256:{'2' * 64}", (), {}, {}, 1)
REFERENCE = f"registry.example/team/cpu@sha256:{'3' * 64}"
SITE = KubernetesSite(registry="registry.example/team/cpu")
JOB = Job(REFERENCE, ("python",), b"the payload", NONCE, Limits(1 << 30, 30))
GPU_JOB = dataclasses.replace(JOB, gpus=True, models=("h20",))
FRAMES = b"".join(lines(documents()))


class Place:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.notes: list[str] = []
        self.lines: list[bytes] = []

    def run(
        self, job: Job = JOB, site: KubernetesSite = SITE, watch: Watch | None = None, resume: str | None = None
    ) -> RawOutput:
        runner = Kubernetes(site, IMAGE, REFERENCE, "cpu", resume)
        return runner.run(job, watch or Watch(self.lines.append, self.notes.append))

    def fails(self, kind: type[EnvbuildError] = RunnerError, job: Job = JOB, site: KubernetesSite = SITE) -> Any:
        with pytest.raises(kind) as caught:
            self.run(job, site)
        assert self.server.stored == {}
        return caught.value


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in {"POLL": 0.02, "FOLLOW": 1.0, "PULLING": 0.3, "GRACE": 0.3, "PATIENCE": 0.5}.items():
        monkeypatch.setattr(pod_watch, name, value)
    with serving(Server(log=FRAMES)) as server:
        monkeypatch.setattr(
            "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
            str(kubeconfig(server.address, tmp_path / "kubeconfig")),
        )
        yield Place(server)


def test_the_output_comes_back_and_nothing_stays(place: Place) -> None:
    place.server.pods = [unplaced(), waiting("ContainerCreating"), running(), ended(5, message="a word\n")]
    output = place.run()
    assert output.stdout == FRAMES == b"".join(line + b"\n" for line in place.lines)
    assert (output.stderr, output.exit_code, output.seconds) == ("a word\n", 5, 12.0)
    assert (located(output).node, located(output).engine, located(output).image) == ("gpu-7", "containerd", REFERENCE)
    assert located(output).queued_seconds == 7.0 and located(output).unconfined
    assert output_judge.judge_output(output, NONCE, ()).errors == () or output.exit_code == 5
    work, config = place.server.created
    assert (config["kind"], work["kind"]) == ("ConfigMap", "Job")
    assert place.server.stored == {}
    assert any("running on gpu-7, after 7 s" in notes for notes in place.notes)


def test_the_namespace_is_the_contexts_unless_the_site_names_one(place: Place) -> None:
    place.run()
    place.run(site=dataclasses.replace(SITE, namespace="other"))
    created = [line for line in place.server.requests if line.startswith("POST") and line.endswith("/jobs")]
    assert created == [f"POST /apis/batch/v1/namespaces/{name}/jobs" for name in ("proofs", "other")]


def test_the_config_map_belongs_to_the_job(place: Place) -> None:
    """The ConfigMap belongs to the Job from its creation on, so that both are removed if envbuild is gone: the cluster
    removes a finished Job with everything that belongs to the Job."""
    place.server.refuse = {("DELETE", "/"): (403, "may not delete")}
    place.run()
    (config,) = [one for key, one in place.server.stored.items() if key.startswith("configmaps")]
    assert config["metadata"]["ownerReferences"][0]["uid"] == "uid-of-jobs"
    assert any("could not be removed" in notes and "kubectl" in notes for notes in place.notes)
    work, created = place.server.created
    assert created["metadata"]["ownerReferences"] == config["metadata"]["ownerReferences"]
    assert work["spec"]["ttlSecondsAfterFinished"] and work["spec"]["activeDeadlineSeconds"]


@pytest.mark.parametrize(
    ("seen", "ending"),
    [
        (pod("Failed", reason="Evicted", message="The node was low on resource: memory."), "evicted"),
        (pod("Failed", reason="Preempting"), "preempted"),
        (pod("Failed", reason="NodeLost"), "node-failure"),
        (pod("Failed", reason="UnexpectedAdmissionError", message="no devices left"), "refused"),
        (pod("Failed", reason="OutOfnvidia.com/gpu"), "refused"),
        (pod("Failed", reason="DeadlineExceeded"), "time-out"),
        (ended(137, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}]),
         "node-failure"),
        (ended(143, conditions=[{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]),
         "preempted"),
    ],
)  # fmt: skip
def test_a_stopped_pod_is_reported_and_not_as_a_failed_test(place: Place, seen: Object, ending: str) -> None:
    place.server.pods = [running(), seen]
    error = place.fails()
    assert (error.ending, error.code) == (ending, 6)
    if seen["status"].get("message"):
        assert seen["status"]["message"] in error.hint


def test_a_finished_self_test_counts_with_any_state_of_the_pod(place: Place) -> None:
    disrupted = [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}]
    place.server.pods = [running(), ended(0, conditions=disrupted)]
    assert place.run().exit_code == 0


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff"])
def test_an_image_that_cannot_be_fetched_is_the_networks_fault(place: Place, reason: str) -> None:
    place.server.pods = [waiting(reason, "dial tcp 10.0.0.1:443: connect: connection refused")]
    error = place.fails(NetworkError)
    assert "gpu-7 cannot fetch the image" in error.message and "connection refused" in error.hint


def test_an_image_that_comes_at_the_second_try_is_waited_for(place: Place) -> None:
    place.server.pods = [waiting("ErrImagePull"), waiting("ImagePullBackOff"), running(), ended(0)]
    assert place.run().exit_code == 0


@pytest.mark.parametrize(
    "seen",
    [waiting("ErrImageNeverPull"), waiting("CreateContainerConfigError", "no configmap"),
     waiting("RunContainerError", "no runtime"), ended(128, "StartError", "exec: python: not found")],
)  # fmt: skip
def test_an_image_that_does_not_start_is_not_a_failed_test(place: Place, seen: Object) -> None:
    place.server.pods = [seen]
    place.fails(EngineError)


def test_a_job_that_no_node_can_run_is_not_proof_and_has_a_reason_per_node(place: Place) -> None:
    place.server.pods = [unplaced()]
    place.server.nodes = [
        node("a", "NVIDIA-A100-SXM4-80GB"), node("b", gpus="0"), node("c", "NVIDIA-L4", unschedulable=True),
        node("d", taints=[{"key": "team", "value": "x", "effect": "NoSchedule"}]), {"metadata": {"name": "e"}},
    ]  # fmt: skip
    error = place.fails(NotProved, GPU_JOB)
    assert error.hint.splitlines()[:4] == [
        "a: nvidia.com/gpu.product is NVIDIA-A100-SXM4-80GB",
        "b: nvidia.com/gpu: 0 of 1",
        "c: is cordoned, nvidia.com/gpu.product is NVIDIA-L4",
        "d: taint team",
    ]
    assert "e: is not ready" in error.hint and "{queue: MINUTES}" in error.hint


NOT_READY = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
UNREACHABLE = {"key": "node.kubernetes.io/unreachable", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("spec", "status", "words"),
    [
        ({"unschedulable": True, "taints": [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]}, {},
         "gpu-7: is cordoned"),
        ({"taints": [UNREACHABLE]}, {"conditions": NOT_READY, "allocatable": {}},
         "gpu-7: is not ready (NodeStatusUnknown), nvidia.com/gpu: none of 1"),
        ({"taints": [{"key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule"}]}, {},
         "gpu-7: taint node.kubernetes.io/memory-pressure"),
    ],
)  # fmt: skip
def test_a_node_that_may_come_back_is_waited_for(place: Place, spec: Object, status: Object, words: str) -> None:
    away = node(**spec)
    away["status"] |= status
    place.server.nodes = [away]
    place.server.pods = [*[unplaced()] * 40, running(), ended(0)]
    assert place.run(GPU_JOB).exit_code == 0
    assert words in place.notes


def test_every_node_of_a_large_cluster_is_looked_at(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.runners.kubernetes.cluster_api._PAGE", 2)
    place.server.pods = [unplaced()]
    place.server.nodes = [node(f"n{number}", gpus="0") for number in range(5)]
    assert len(place.fails(NotProved, GPU_JOB).hint.splitlines()) == 5 + 1


def test_a_too_long_list_of_nodes_is_not_a_fault(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envbuild.runners.kubernetes.cluster_api._MAX", 20_000)
    place.server.nodes = [node(f"n{number}", gpus="0") for number in range(200)]
    place.server.pods = [*[unplaced()] * 40, running(), ended(0)]
    assert place.run(GPU_JOB).exit_code == 0
    assert not any("does not answer" in notes for notes in place.notes)


def test_gpus_that_are_in_use_are_waited_for(place: Place) -> None:
    place.server.pods = [*[unplaced("Insufficient nvidia.com/gpu")] * 40, running(), ended(0)]
    assert place.run(GPU_JOB).exit_code == 0
    assert "gpu-7: in use by other pods, or too little memory left" in place.notes


def test_a_queue_ends_where_the_site_says(place: Place) -> None:
    place.server.pods = [unplaced()]
    error = place.fails(RunnerError, GPU_JOB, dataclasses.replace(SITE, queue=0))
    assert error.ending == "unschedulable" and "gpu-7" in error.hint
    place.server.pods, place.server.conditions = (
        [None],
        [
            {
                "type": "Failed",
                "status": "True",
                "reason": "DeadlineExceeded",
                "message": "longer than specified deadline",
            }
        ],
    )
    assert place.fails().ending == "time-out"


def test_a_job_that_a_queue_of_the_cluster_holds_back_is_waited_for(place: Place) -> None:
    """Kueue suspends jobs this way; a label names the queue."""
    place.server.answers = {("GET", "/jobs/"): {"spec": {"suspend": True}}}
    place.server.pods = [*[None] * 40, running(), ended(0)]
    assert place.run().exit_code == 0
    assert any("is suspended" in notes for notes in place.notes)
    place.server.pods = [None]
    assert place.fails(site=dataclasses.replace(SITE, queue=0)).ending == "unschedulable"


def test_nodes_that_may_not_be_listed_are_not_a_fault(place: Place) -> None:
    place.server.refuse = {("GET", "/nodes"): (403, "nodes is forbidden")}
    place.server.pods = [*[unplaced("0/3 nodes: 3 Insufficient nvidia.com/gpu")] * 40, running(), ended(0)]
    assert place.run(GPU_JOB).exit_code == 0
    assert "0/3 nodes: 3 Insufficient nvidia.com/gpu" in place.notes


def test_a_job_deleted_by_another_user_is_reported(place: Place) -> None:
    place.server.pods = [running(), None]
    place.server.refuse = {("GET", "/jobs/"): (404, "not found")}
    assert place.fails().ending == "cancelled"


def test_a_pod_deleted_by_another_user_is_reported(place: Place) -> None:
    place.server.pods = [running(), None]
    place.server.conditions = [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]
    error = place.fails()
    assert error.ending == "cancelled" and "the pod was deleted" in error.message


def test_a_pod_that_hangs_on_a_dead_node_is_not_waited_for(place: Place) -> None:
    """The taint manager deletes the pod, but no kubelet is left to report its end."""
    dead = running()
    dead["metadata"]["deletionTimestamp"] = "2026-11-21T10:06:00Z"
    place.server.pods = [running(), dead]
    lost = node()
    lost["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
    place.server.nodes = [lost]
    assert "gpu-7: is not ready (NodeStatusUnknown)" in place.fails().hint


def test_a_node_that_dies_alone_is_not_waited_for_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all nodes of a zone stop responding, Kubernetes deletes none of their pods, so no event reports the end."""
    monkeypatch.setattr("envbuild.runners.kubernetes.job_manifest._FETCHING", 0)
    place.server.pods = [running()]
    lost = node()
    lost["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "NodeStatusUnknown"}]
    place.server.nodes = [lost]
    error = place.fails(job=dataclasses.replace(JOB, limits=Limits(1 << 30, 1)))
    assert error.ending == "node-failure" and "gpu-7: is not ready (NodeStatusUnknown)" in error.hint


def test_a_job_without_a_pod_has_the_message_of_the_cluster(place: Place) -> None:
    place.server.pods = [None]
    place.server.events = [{"message": "exceeded quota: team, requested: requests.nvidia.com/gpu=1"}]
    error = place.fails()
    assert error.ending == "refused" and "exceeded quota" in error.hint


@pytest.mark.parametrize("cut", [lambda log: log.rpartition(b"ENVBUILD")[0], lambda log: log[:-30], lambda log: b""])
def test_a_truncated_log_is_neither_proof_nor_a_failed_test(place: Place, cut: Any) -> None:
    place.server.log = cut(FRAMES)
    assert place.fails().ending == "truncated"


def test_a_log_whose_beginning_was_rotated_away_is_truncated(place: Place) -> None:
    place.server.logs = [FRAMES]  # while it ran
    place.server.log = FRAMES[FRAMES.index(b"\n") + 1 :]
    assert place.fails().ending == "truncated"


def test_a_log_that_cannot_be_read_is_truncated(place: Place) -> None:
    place.server.refuse = {("GET", "/log"): (400, "previous terminated container not found")}
    assert place.fails().ending == "truncated"


def test_a_log_that_comes_in_two_parts_is_given_on_once(place: Place) -> None:
    half = FRAMES.index(b"\n", len(FRAMES) // 2) + 1
    place.server.pods = [running(), running(), ended(0)]
    place.server.logs = [FRAMES[:half], FRAMES[: half + 10]]
    assert place.run().stdout == FRAMES == b"".join(line + b"\n" for line in place.lines)


def test_lines_that_are_still_on_their_way_are_waited_for(place: Place) -> None:
    place.server.pods, place.server.logs = [ended(0)], [FRAMES[:-30]]
    assert place.run().stdout == FRAMES == b"".join(line + b"\n" for line in place.lines)


@pytest.mark.parametrize(("code", "deleting"), [(143, False), (143, True), (137, True), (1, True)])
def test_a_self_test_that_was_stopped_from_outside_did_not_fail(place: Place, code: int, deleting: bool) -> None:
    stopped = ended(code)
    if deleting:
        stopped["metadata"]["deletionTimestamp"] = "2026-11-21T10:06:00Z"
    place.server.pods = [running(), stopped]
    assert place.fails().ending == "cancelled"


def test_another_jobs_output_does_not_count(place: Place) -> None:
    place.server.log = FRAMES.replace(NONCE.encode(), b"f" * 32)
    assert place.fails().ending == "truncated"


def test_a_wrong_gpu_is_caught_by_the_identity_probe(place: Place) -> None:
    """A label is only a claim about the node; the container sees the real GPU."""
    reason = "the card is NVIDIA A100-SXM4-80GB, not NVIDIA H20"
    frames = documents(probe("env.identity", "failed", failure="wrong", signal=None, reason=reason), probe("env.libs"))
    place.server.log, place.server.pods = b"".join(lines(frames)), [running(), ended(5)]
    judged = output_judge.judge_output(place.run(GPU_JOB), NONCE, ("env.identity", "env.libs"))
    assert not judged.passed and reason in judged.failures()[0].detail


def test_too_little_memory_is_reported(place: Place) -> None:
    place.server.pods = [running(), ended(137, "OOMKilled")]
    output = place.run()
    assert output.out_of_memory and output.exit_code == 137


def test_a_self_test_that_does_not_end_is_stopped(place: Place) -> None:
    """The wrapper in the pod stops the self-test; if that fails, the node stops the pod after the deadline."""
    job = dataclasses.replace(JOB, limits=Limits(1 << 30, 12))
    late = ended(137)
    late["status"]["reason"] = "DeadlineExceeded"
    for seen in (ended(124), late):
        place.server.pods = [running(), seen]
        output = place.run(job)
        assert (output.timed_out, output.exit_code) == (True, None)
    place.server.pods = [running(), ended(124)]  # the self-test's own exit code, before the time limit
    output = place.run()
    assert (output.timed_out, output.exit_code) == (False, 124)


@pytest.mark.parametrize("seen", [ended(137), running()], ids=["ended", "unknown"])
def test_a_self_test_that_had_not_its_time_did_not_fail(place: Place, seen: Object) -> None:
    """The pod's deadline includes the download of its image, which took most of the time."""
    seen["status"]["reason"] = "DeadlineExceeded"
    place.server.pods = [running(), seen]
    error = place.fails()
    assert error.ending == "time-out" and "fetches the image slowly" in error.hint


def test_too_much_output_is_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_watch, "MAX_STDOUT", 100)
    output = place.run()
    assert output.too_long and len(output.stdout) == 101


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_a_rejection_by_the_cluster_is_reported_in_its_words(place: Place, status: int) -> None:
    place.server.refuse = {("POST", "/jobs"): (status, "jobs.batch is \x1b[2Jforbidden")}
    error = place.fails()
    assert (error.ending, error.code) == ("refused", 6)
    assert "forbidden" in error.message and "\x1b" not in error.message


def test_a_silent_api_server_is_waited_for_but_not_for_ever(place: Place) -> None:
    place.server.refuse = {("GET", "/pods"): (503, "etcd has no leader")}
    with pytest.raises(RunnerError) as caught:
        place.run()
    assert caught.value.ending == "unknown" and "503" in caught.value.message
    assert len(place.server.stored) == 2  # it may continue
    place.server.refuse = {}
    assert place.run(resume=str(caught.value.hint).partition("--resume ")[2]).exit_code == 0
    assert place.server.stored == {}


def test_an_api_server_that_paused_is_not_a_fault(place: Place) -> None:
    def line(text: str) -> None:
        place.notes.append(text)
        if "waiting for it" in text:
            place.server.refuse = {}

    place.server.refuse = {("GET", "/pods"): (500, "leader changed")}
    assert place.run(watch=Watch(place.lines.append, line)).exit_code == 0


def test_an_unreachable_api_server_is_reported(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = kubeconfig("http://127.0.0.1:9", tmp_path / "other")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    assert place.fails(NetworkError).code == 7
    assert place.notes == []  # no message about a job: none can exist


def test_a_job_that_may_be_there_is_removed_and_one_that_cannot_be_is_not_spoken_of(place: Place) -> None:
    place.server.refuse = {("POST", "/jobs"): (403, "no"), ("DELETE", "/"): (403, "no")}
    place.fails(RunnerError)
    assert place.notes == [] and not any(line.startswith("DELETE") for line in place.server.requests)
    place.server.refuse[("POST", "/jobs")] = (504, "its answer is lost")
    place.fails(NetworkError)
    assert "could not be removed" in place.notes[-1]
    place.server.refuse = {("POST", "/configmaps"): (403, "no")}
    place.fails(RunnerError)
    assert len(place.server.created) == 1  # and fails() checked that it was removed


def logged_in_by(folder: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a kubectl configuration that gets its token from a program."""
    file = kubeconfig("https://127.0.0.1:9", folder / "exec")
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    document["users"][0]["user"] = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": command}}
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))


def test_a_failed_login_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])  # as without pytest
        logged_in_by(tmp_path, "no-such-auth-plugin", patch)
        with pytest.raises(ProcessMissing) as missing:
            Kubernetes(SITE, IMAGE, REFERENCE, "cpu").run(JOB, Watch())
        logged_in_by(tmp_path, "false", patch)
        with pytest.raises(SystemFault, match="logs in to the cluster failed: exec: process returned 1"):
            Kubernetes(SITE, IMAGE, REFERENCE, "cpu").run(JOB, Watch())
    assert missing.value.message.startswith("no-such-auth-plugin is not installed") and missing.value.code == 6
    assert capsys.readouterr().err == ""


def test_an_interruption_removes_all_of_it(place: Place) -> None:
    def interrupted(line: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place.run(watch=Watch(interrupted))
    assert place.server.stored == {} and len(place.server.created) == 2


def test_an_error_of_a_watcher_is_not_reported_as_the_api_servers(place: Place) -> None:
    """For example, stderr may be a file on a disk that is temporarily full."""

    def full(line: bytes) -> None:
        place.lines.append(line)
        if len(place.lines) == 1:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        place.run(watch=Watch(full))
    assert place.server.stored == {}


def test_a_terminal_that_is_gone_leaves_the_job_to_be_resumed_once_and_only_by_the_same(place: Place) -> None:
    def gone(line: bytes) -> None:
        raise HungUp

    with pytest.raises(Interrupted) as caught:
        place.run(watch=Watch(gone))
    name = str(caught.value.hint).partition("--resume ")[2]
    assert len(place.server.stored) == 2 and name.startswith("envbuild-cpu-")
    with pytest.raises(UsageError, match="was submitted with a different image"):
        place.run(dataclasses.replace(JOB, stdin=b"another"), resume=name)
    place.server.pods = [running(), ended(0)]
    assert place.run(resume=name).stdout == FRAMES
    assert place.server.stored == {}
    with pytest.raises(UsageError, match=f"no job {name}"):
        place.run(resume=name)


@pytest.mark.parametrize("there", [False, True], ids=["gone", "another"])
def test_a_job_that_the_cluster_forgot_is_lost(place: Place, there: bool) -> None:
    """The Job is lost even if another user has created a new Job with its name."""

    def gone(line: bytes) -> None:
        raise HungUp

    with pytest.raises(Interrupted) as caught:
        place.run(watch=Watch(gone))
    name = str(caught.value.hint).partition("--resume ")[2]
    if there:
        place.server.stored[f"jobs/{name}"]["metadata"]["uid"] = "another"
    else:
        place.server.stored.clear()
    with pytest.raises(RunnerError) as lost:
        place.run(resume=name)
    assert lost.value.ending == "lost"


def test_a_pod_that_the_cluster_restarts_is_not_the_deleted_one(place: Place) -> None:
    """Before 1.26, a Job may create another pod in place of a pod that was deleted before that pod had failed."""
    other = ended(0)
    other["metadata"] = {**other["metadata"], "name": "pod-2"}
    place.server.pods = [running(), other]
    error = place.fails()
    assert error.ending == "cancelled" and "in its place" in error.hint


@pytest.mark.parametrize(("ready", "ending"), [("True", "cancelled"), ("Unknown", "node-failure")])
def test_a_deleted_pod_that_still_runs_is_reported_by_the_state_of_its_node(
    place: Place, ready: str, ending: str
) -> None:
    going = running()
    going["metadata"] = {**going["metadata"], "deletionTimestamp": "2026-11-21T10:00:30Z"}
    place.server.pods = [running(), going]
    place.server.nodes[0]["status"]["conditions"][0]["status"] = ready
    assert place.fails().ending == ending


def test_a_shown_script_is_short_and_complete_on_request() -> None:
    runner = Kubernetes(SITE, IMAGE, REFERENCE, "cpu")
    job = dataclasses.replace(JOB, stdin=b"x" * 100_000)
    assert len(runner.script(job, brief=True)) < 10_000 and "--json shows them" in runner.script(job, brief=True)
    assert len(runner.script(job)) > 100_000


def test_without_a_configuration_nothing_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="no cluster is configured"):
        Kubernetes(SITE, IMAGE, REFERENCE, "cpu").run(JOB, Watch())


@pytest.mark.parametrize("text", ["a: [", "- a\n", "hello", "\0", "contexts: 5\ncurrent-context: a\n"])
def test_a_malformed_configuration_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = tmp_path / "kubeconfig"
    file.write_text(text, encoding="utf-8")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(file))
    with pytest.raises(SettingsError, match="kubectl's configuration is malformed"):
        Kubernetes(SITE, IMAGE, REFERENCE, "cpu").run(JOB, Watch())


@pytest.mark.parametrize("answer", [{}, {"metadata": 5}, {"metadata": {"name": "x", "uid": 7}}, []], ids=str)
def test_an_answer_without_a_job_is_reported(place: Place, answer: object) -> None:
    place.server.answers = {("POST", "/jobs"): answer}
    assert "contains no Job" in place.fails(NetworkError).message


def test_a_malformed_list_of_nodes_counts_as_no_nodes(place: Place) -> None:
    place.server.answers = {("GET", "/nodes"): {"metadata": [], "items": 5}}
    place.server.pods = [unplaced()]
    assert "the cluster has no nodes" in place.fails(NotProved, GPU_JOB).hint


def test_a_terminal_that_is_gone_before_there_is_a_ticket_leaves_nothing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a ticket, the user could not resume the job."""

    def gone(*_: object) -> None:
        raise HungUp

    monkeypatch.setattr("envbuild.runners.job_resume_tickets.keep", gone)
    with pytest.raises(HungUp):
        place.run()
    assert len(place.server.created) == 2 and place.server.stored == {}


def test_without_the_client_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ProcessMissing) as caught:
        Kubernetes(SITE, IMAGE, REFERENCE, "cpu").run(JOB, Watch())
    assert str(caught.value.hint).startswith("install envbuild again from the same source, with its extra `kubernetes`")
    assert "envbuild[" not in str(caught.value.hint), "a stranger could publish a package of that name"


@pytest.mark.parametrize(
    "hostile",
    [{}, {"metadata": None, "status": []}, {"status": {"containerStatuses": "x", "conditions": [1]}},
     {"status": {"containerStatuses": [{"state": {"terminated": {"exitCode": "0"}}}]}},
     {"status": {"containerStatuses": [{"state": {"terminated": {"exitCode": True}}}]}}],
)  # fmt: skip
def test_a_pod_of_another_shape_has_not_ended(hostile: Object) -> None:
    found = pod_job_and_node_states.pod(hostile)
    assert (
        found.ended is None and pod_job_and_node_states.pod_error(found) is None and isinstance(found.describe(), str)
    )


def test_two_jobs_of_one_image_have_names_of_their_own() -> None:
    names = {Kubernetes(SITE, IMAGE, REFERENCE, "cpu").script(JOB).split("name: ")[1].split()[0] for _ in range(2)}
    assert len(names) == 2


def test_a_job_that_is_not_a_self_test_ends_with_the_terminal(place: Place) -> None:
    """Its result is of no use to a later process."""
    audit = dataclasses.replace(JOB, is_selftest=False)

    def line(_: bytes) -> None:
        raise HungUp

    with pytest.raises(HungUp):
        place.run(audit, watch=Watch(line, place.notes.append))
    assert place.server.stored == {}
    assert place.notes[0].endswith("is submitted")


def test_a_lost_api_server_is_no_reason_to_resume_another_job(place: Place) -> None:
    place.server.refuse = {("GET", "/pods"): (503, "no")}
    with pytest.raises(pod_job_and_node_states.Unknown) as caught:
        place.run(dataclasses.replace(JOB, is_selftest=False))
    assert "--resume" not in str(caught.value.hint)
