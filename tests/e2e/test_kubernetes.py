"""Through a real Kubernetes: what `prove --on kubernetes` proves, and ways it can fail to."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from .broken import Workshop
from .onenode import NAMESPACE, NODE, OneNode
from .support import Proved, Running, docker, recorded, until

pytestmark = pytest.mark.kubernetes


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
        """A self-test that hangs on the node: (the command, the pod's name)."""
        self.load(reference)
        begun = self.start("test", "--image", reference)
        begun.says(f"running on {NODE}", 120)
        return begun, self.cluster.of("pods")[0]["metadata"]["name"]

    def load(self, reference: str) -> None:
        """Into the node's engine, as there is no registry."""
        with subprocess.Popen(["docker", "save", reference], stdout=subprocess.PIPE) as saved:
            assert saved.stdout
            subprocess.run(
                ["docker", "--host", self.cluster.engine, "load", "--quiet"],
                stdin=saved.stdout,
                check=True,
                timeout=300,
            )

    def left(self) -> list[str]:
        return [one["metadata"]["name"] for kind in ("jobs", "pods", "configmaps") for one in self.cluster.of(kind)
                if one["metadata"]["name"].startswith("envbuild-")]  # fmt: skip


@pytest.fixture
def place(onenode: OneNode, quick: Proved, scratch: Path) -> Iterator[Place]:
    made = Place(onenode, quick, scratch / "place")
    made.load(quick.tag)
    yield made
    until("all of it to be gone", lambda: made.left() == [], 90)


def test_an_image_is_verified_through_kubernetes(place: Place) -> None:
    done = place.start("prove").finish(300)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert done.document["status"] == "verified"
    record, where = recorded(Path(done.document["evidence"]))
    assert record["where"] == {key: where[key] for key in ("runner", "engine", "unconfined")}
    assert (where["runner"], where["node"], where["engine"]) == ("kubernetes", NODE, "docker")
    assert where["image"] == place.quick.id and record["machine"] is None
    until("nothing to be left", lambda: place.left() == [], 60)


def test_an_image_that_the_node_lacks_is_told(place: Place) -> None:
    docker("--host", place.cluster.engine, "image", "rm", "--force", place.quick.id)
    done = place.start("prove").finish(120)
    assert done.code == 6 and f"{NODE} has no such image" in done.words


def test_a_registry_that_the_node_cannot_reach_is_told(place: Place) -> None:
    """The image by a digest that nobody can fetch."""
    from envbuild.errors import NetworkError
    from envbuild.image.engine import Image
    from envbuild.proof.job import Job, Limits
    from envbuild.proof.runners.kubernetes.runner import Kubernetes
    from envbuild.proof.runners.kubernetes.site import Site
    from envbuild.proof.runners.protocol import Watch

    reference = f"127.0.0.1:9/nowhere@sha256:{'1' * 64}"
    monkey = pytest.MonkeyPatch()
    monkey.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(place.cluster.kubeconfig))
    monkey.setattr("envbuild.proof.runners.kubernetes.runner.PULLING", 5.0)
    job = Job(reference, ("python",), b"x", "0" * 32, Limits(1 << 28, 30))
    try:
        with pytest.raises(NetworkError, match=f"{NODE} cannot fetch the image"):
            Kubernetes(Site(registry="127.0.0.1:9/nowhere"), Image(reference, reference, (), {}, {}, 1), reference,
                       "cpu").run(job, Watch())  # fmt: skip
    finally:
        monkey.undo()


def test_a_job_that_no_node_can_take_says_why(place: Place) -> None:
    done = place.start("prove", "--kubernetes", "nodes.pool=other").finish(120)
    assert done.code == 4 and f"{NODE}: pool is not set, not other" in done.words


def test_a_pod_that_somebody_deletes_is_told(place: Place, broken: Workshop) -> None:
    begun, pod = place.running(broken.image("hangs"))
    place.cluster.ask("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
    done = begun.finish(120)
    assert done.code == 6 and "deleted" in done.words


def test_a_job_that_somebody_deletes_is_told(place: Place, broken: Workshop) -> None:
    begun, _ = place.running(broken.image("hangs"))
    (job,) = place.cluster.of("jobs")
    options = {"propagationPolicy": "Background"}
    place.cluster.ask("DELETE", f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{job['metadata']['name']}", options)
    done = begun.finish(120)
    assert done.code == 6 and "deleted" in done.words


def test_an_interruption_leaves_nothing(place: Place, broken: Workshop) -> None:
    begun, _ = place.running(broken.image("hangs"))
    assert begun.interrupt().code == 130
    until("nothing to be left", lambda: place.left() == [], 150)
