"""`test --record --on kubernetes` on a real Kubernetes: an image that is verified, and ways in which this can fail. If
all tests pass, benchmarks/results/kubernetes.md is written."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from envbuild.doctor import cpu_memory_and_os

from .broken import Workshop
from .onenode import NAMESPACE, NODE, OneNode
from .support import CHECKOUT, Proved, Result, Running, recorded, until

pytestmark = pytest.mark.kubernetes

AddRow = Callable[[str, Result], None]


class Place:
    """A copy of the proved project whose self-tests run on the cluster."""

    def __init__(self, cluster: OneNode, quick: Proved, folder: Path) -> None:
        self.cluster = cluster
        self.quick = quick.copy(folder)
        config = self.quick.project.config / "envbuild" / "config.yaml"
        config.parent.mkdir(exist_ok=True)
        config.write_text(yaml.safe_dump({"on": "kubernetes"}), encoding="utf-8")

    def start(self, verb: str, *arguments: str) -> Running:
        return self.quick.project.start(
            verb, self.quick.name, "--json", *arguments, KUBECONFIG=str(self.cluster.kubeconfig)
        )

    def running(self, reference: str) -> tuple[Running, str]:
        """Start a self-test that hangs on the node. Returns (the command, the pod's name)."""
        self.load(reference)
        begun = self.start("test", "--image", reference)
        begun.says(f"running on {NODE}", 120)
        return begun, self.cluster.of("pods")[0]["metadata"]["name"]

    def load(self, reference: str) -> None:
        """Load the image into the node's engine, without a registry."""
        with subprocess.Popen(["docker", "save", reference], stdout=subprocess.PIPE) as saved:
            assert saved.stdout
            subprocess.run(
                ["docker", "--host", self.cluster.engine.host, "load", "--quiet"],
                stdin=saved.stdout,
                check=True,
                timeout=300,
            )

    def left(self) -> list[str]:
        kinds = ("jobs", "pods", "configmaps", "secrets")
        names = [one["metadata"]["name"] for kind in kinds for one in self.cluster.of(kind)]
        return [name for name in names if name.startswith("envbuild-")]


@pytest.fixture(scope="session")
def figures(onenode: OneNode, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Return a row for each operation on a job. The page is written only if every operation had the expected result."""
    rows: list[str] = []
    before = os.getloadavg()[0]
    yield rows
    wanted = [item for item in request.session.items if item.get_closest_marker("kubernetes")]
    if request.session.testsfailed or len(rows) < len(wanted):
        return
    engine = onenode.docker("version", "--format", "{{.Server.Version}}").strip()
    lines = [
        "# Self-tests on a real Kubernetes of one node",
        "",
        f"Machine: {cpu_memory_and_os.read()}. Kubernetes {onenode.version()}, Docker {engine} on the node; no GPU.",
        f"Load average (1 min) {before:.1f} before, {os.getloadavg()[0]:.1f} after, partly its own.",
        "Made by `make test-kubernetes`. Seconds are of the whole command, its self-test (level quick) included.",
        "After each of them no Job, Pod, ConfigMap or Secret of it is left.",
        "",
        "| what happens | exit | s | message |",
        "|---|---|---|---|",
        *rows,
    ]
    (CHECKOUT / "benchmarks" / "results" / "kubernetes.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def add_row(figures: list[str]) -> AddRow:
    def row(what: str, done: Result) -> None:
        state = done.error["message"] if "error" in done.document else done.document["state"]
        figures.append(f"| {what} | {done.code} | {done.seconds:.0f} | {state.replace('|', '/')} |")

    return row


@pytest.fixture
def place(onenode: OneNode, quick: Proved, scratch: Path) -> Iterator[Place]:
    made = Place(onenode, quick, scratch / "place")
    made.load(quick.tag)
    yield made
    until("all of it to be gone", lambda: made.left() == [], 90)


def test_an_image_is_verified_through_kubernetes(place: Place, add_row: AddRow) -> None:
    done = place.start("test", "--record").finish(300)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert done.document["state"] == "verified"
    record, where = recorded(Path(done.document["statement"]))
    assert record["where"] == {key: where[key] for key in ("runner", "engine", "unconfined")}
    assert (where["runner"], where["node"], where["engine"]) == ("kubernetes", NODE, "docker")
    assert where["image"] == place.quick.id and record["machine"] is None
    add_row("nothing: it is proved", done)


def test_a_lost_waiting_process_is_resumed(place: Place, add_row: AddRow) -> None:
    begun = place.start("test", "--record")
    begun.says(f"running on {NODE}", 120)
    job = begun.stderr.partition("--resume ")[2].split()[0]
    begun.kill()
    done = place.start("test", "--record", "--resume", job).finish(300)
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    add_row("the waiting process is killed; --resume", done)
    again = place.start("test", "--record", "--resume", job).finish()
    assert again.code == 2 and f"no job {job} was submitted from here" in again.words


def test_an_image_that_the_node_lacks_is_reported(place: Place, add_row: AddRow) -> None:
    place.cluster.docker("image", "rm", "--force", place.quick.id)
    done = place.start("test", "--record").finish(120)
    assert done.code == 6 and f"{NODE} does not have the image" in done.words
    add_row("the node lacks the image, and no registry is named", done)


def test_a_registry_that_the_node_cannot_reach_is_reported(place: Place, figures: list[str]) -> None:
    """The job names the image by a digest that cannot be downloaded."""
    from envbuild.image.docker_engine import Image
    from envbuild.runners.kubernetes.kubernetes_runner import Kubernetes
    from envbuild.runners.kubernetes.kubernetes_settings import KubernetesSite
    from envbuild.runners.runner_interface import Watch
    from envbuild.testrun.selftest_job import Job, Limits
    from envbuild.util.errors import NetworkError

    reference = f"127.0.0.1:9/nowhere@sha256:{'1' * 64}"
    monkey = pytest.MonkeyPatch()
    monkey.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(place.cluster.kubeconfig))
    monkey.setattr("envbuild.runners.kubernetes.pod_watch.PULLING", 5.0)
    job = Job(reference, ("python",), b"x", "0" * 32, Limits(1 << 28, 30))
    try:
        begin = time.monotonic()
        with pytest.raises(NetworkError, match=f"{NODE} cannot fetch the image") as caught:
            site = KubernetesSite(registry="127.0.0.1:9/nowhere")
            Kubernetes(site, Image(reference, reference, (), {}, {}, 1), reference, "cpu").run(job, Watch())
        took, error = time.monotonic() - begin, caught.value
        figures.append(f"| the node cannot reach the registry | {error.code} | {took:.0f} | {error.message} |")
    finally:
        monkey.undo()


def test_a_job_that_no_node_can_take_says_why(place: Place, add_row: AddRow) -> None:
    done = place.start("test", "--record", "--kubernetes", "nodes.pool=other").finish(120)
    assert done.code == 4 and f"{NODE}: pool is not set, not other" in done.words
    add_row("no node fits", done)


def test_a_pod_deleted_by_another_user_is_reported(place: Place, broken: Workshop, add_row: AddRow) -> None:
    begun, pod = place.running(broken.image("hangs"))
    place.cluster.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
    done = begun.finish(120)
    assert done.code == 6 and "deleted" in done.words
    add_row("a user deletes the pod", done)


def test_an_eviction_by_the_api_is_reported(place: Place, broken: Workshop, add_row: AddRow) -> None:
    """`kubectl drain` evicts this way. Before Kubernetes 1.26, an eviction cannot be distinguished from a deletion."""
    begun, pod = place.running(broken.image("hangs"))
    eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": pod, "namespace": NAMESPACE}}
    place.cluster.ask("POST", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}/eviction", eviction)
    done = begun.finish(120)
    assert done.code == 6 and "deleted" in done.words
    add_row("its eviction is asked for, as kubectl drain does", done)


def test_a_node_that_dies_is_reported(place: Place, broken: Workshop, add_row: AddRow) -> None:
    begun, _ = place.running(broken.image("hangs"))
    with place.cluster.neighbour():
        place.cluster.daemons.end("kubelet", signal.SIGKILL)
        try:
            done = begun.finish(240)
        finally:
            place.cluster.kubelet()
            until("the node to be ready", place.cluster.ready, 90)
    assert done.code == 6 and f"its node {NODE} failed" in done.words
    add_row("kubelet is killed", done)


def test_a_job_deleted_by_another_user_is_reported(place: Place, broken: Workshop, add_row: AddRow) -> None:
    begun, _ = place.running(broken.image("hangs"))
    (job,) = place.cluster.of("jobs")
    options = {"propagationPolicy": "Background"}
    place.cluster.ask("DELETE", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{job['metadata']['name']}", options)
    done = begun.finish(120)
    assert done.code == 6 and "deleted" in done.words
    add_row("a user deletes the Job", done)


def test_an_interruption_leaves_nothing(place: Place, broken: Workshop, add_row: AddRow) -> None:
    begun, _ = place.running(broken.image("hangs"))
    done = begun.interrupt()
    assert done.code == 130
    until("nothing to be left", lambda: place.left() == [], 150)
    add_row("Ctrl-C", done)
