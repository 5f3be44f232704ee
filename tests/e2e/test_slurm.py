"""`test --record --on slurm` on a real Slurm and the real engine: images that are verified, and the ways in which this
can fail."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from unit.evidence.runs import located

from envbuild.facts import database
from envbuild.image.docker_engine import Image
from envbuild.profile.model import SelfTest
from envbuild.runners.runner_interface import Watch
from envbuild.runners.slurm.slurm_runner import Slurm
from envbuild.runners.slurm.slurm_settings import SlurmSite
from envbuild.testrun import output_judge, selftest_job
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import Expectations, RunRequest
from envbuild.util.errors import NetworkError, NotProved

from .broken import Workshop
from .cluster import NODES, Cluster
from .registries import Registry
from .site import NO_ENGINE
from .support import Proved, Running, docker, handle, recorded, until

# Stands in for an engine that has the requested GPU, because this one has none.
WITH_A_CARD = """#!/bin/bash
words=()
while [ $# -gt 0 ]; do
    if [ "$1" = --gpus ]; then echo "$2" >"$0.asked"; shift 2; else words+=("$1"); shift; fi
done
exec docker "${words[@]}"
"""


def containers() -> list[str]:
    return docker("ps", "--all", "--quiet", "--filter", "label=io.envbuild.slurm").split()


class Place:
    """A copy of a verified project whose self-tests run on the cluster, with only the required probes."""

    def __init__(self, cluster: Cluster, proved: Proved, folder: Path) -> None:
        self.cluster = cluster
        self.shared = folder / "shared"
        self.proved = proved.copy(folder).with_required_alone()
        self.project = self.proved.project
        config = self.project.config / "envbuild" / "config.yaml"
        config.parent.mkdir()
        config.write_text(
            yaml.safe_dump({"on": "slurm", "slurm": {"folder": str(self.shared), "grace": 3}}), encoding="utf-8"
        )

    def start(self, verb: str, *arguments: str) -> Running:
        path = os.pathsep.join([str(self.cluster.programs), self.project.environment["PATH"]])
        return self.project.start(verb, self.proved.name, "--json", *arguments, PATH=path)

    def running(self, reference: str) -> tuple[Running, str, str]:
        """Start a self-test that hangs on its node. Returns (the command, the job's id, the node)."""
        begun = self.start("test", "--image", reference)
        begun.says("running on", 120)
        until("its container", containers)
        words = next(line for line in begun.stderr.splitlines() if "running on" in line).split()
        return begun, words[1].rstrip(":"), words[4].rstrip(",")

    def left(self) -> list[str]:
        """Return leftovers of jobs, which must not exist."""
        folders = [str(path) for path in self.shared.glob("*")] if self.shared.is_dir() else []
        tickets = [str(path) for path in (self.project.state / "envbuild" / "slurm").glob("*")]
        return [*folders, *tickets, *containers(), *self.cluster.ask("squeue", "-h", "-o", "%j %T").splitlines()]


class Bare:
    """The runner alone, without a profile: for jobs that a profile for the CPU cannot request."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def run(self, site: SlurmSite, reference: str, node: str = "", *, gpus: bool = False) -> TestRun:
        """Run and judge one probe: env.identity if Slurm assigns a GPU, else env.libs."""
        names = database.gpus()["h20"].all_names if gpus else ()
        request = RunRequest(probes=("env.identity" if gpus else "env.libs",))
        known = handle(reference) or reference
        prepared = selftest_job.make_job(
            known, SelfTest(), Expectations({}, "3.11", names), request, models=("h20",) if gpus else ()
        )
        image = Image(known, known, (), {}, {}, 1)
        site = replace(site, folder=str(self.place.shared), grace=3, constraint=node or None)
        runner = Slurm(site, image, reference if site.registry else None, "bare")
        return output_judge.judge_output(runner.run(prepared, Watch()), prepared.nonce, prepared.require)


@pytest.fixture
def bare(place: Place, monkeypatch: pytest.MonkeyPatch) -> Bare:
    monkeypatch.setenv("PATH", str(place.cluster.programs), prepend=os.pathsep)
    monkeypatch.setenv("XDG_STATE_HOME", str(place.project.state))
    return Bare(place)


@pytest.fixture
def idle_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, without the jobs and containers of the test at its end."""
    yield cluster
    cluster.ask("scancel", "--user=root")
    until("all of it to be gone", lambda: not containers() and not cluster.ask("squeue", "-h").strip(), 60)


@pytest.fixture
def place(idle_cluster: Cluster, light: Proved, scratch: Path) -> Place:
    return Place(idle_cluster, light, scratch / "place")


@pytest.fixture
def slow_place(idle_cluster: Cluster, quick: Proved, scratch: Path) -> Place:
    """A place whose self-test computes with the real torch. It takes some seconds, and the command that waits for it
    asks for the state of the job every three."""
    return Place(idle_cluster, quick, scratch / "place")


def test_an_image_is_verified_through_slurm(slow_place: Place) -> None:
    done = slow_place.start("test", "--record").finish(300)
    assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    assert done.document["state"] == "verified"
    record, where = recorded(Path(done.document["statement"]))
    assert record["where"] == {key: where[key] for key in ("runner", "engine", "unconfined")}
    assert (where["runner"], where["restarts"], where["unconfined"]) == ("slurm", 0, [])
    assert where["node"] in NODES and where["engine"].startswith("docker ")
    assert where["image"] == slow_place.proved.id and record["machine"] is None
    assert f"job {where['job']}: running on {where['node']}" in done.stderr
    assert slow_place.left() == []


@pytest.fixture
def remote(place: Place, registry: Registry) -> Iterator[str]:
    """Let the place have no engine, no build record and no evidence, and let the nodes pull from a registry. Returns
    the name of the repository."""
    name = f"{registry.host}/cluster/{place.proved.name}"
    program = place.shared / "docker-that-is-logged-in"
    place.shared.mkdir()
    program.write_text(f'#!/bin/sh\nexec docker --config {registry.login} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    slurm = {"folder": str(place.shared / "jobs"), "grace": 3, "registry": name, "program": str(program)}
    config = place.project.config / "envbuild" / "config.yaml"
    config.write_text(yaml.safe_dump({"on": "slurm", "slurm": slurm}), encoding="utf-8")
    for kind in ("builds", "evidence"):
        shutil.rmtree(place.project.state / "envbuild" / kind)
    place.project = place.project.with_env(DOCKER_CONFIG=str(registry.login), **NO_ENGINE)
    yield name
    for pulled in docker("image", "ls", "--digests", "--format", "{{.Repository}}@{{.Digest}}", name).split():
        docker("image", "rm", pulled)


def tags(name: str) -> set[str]:
    """Return the tags of the images `name` in the engine, each with its image's id."""
    return set(docker("image", "ls", "--format", "{{.Tag}} {{.ID}}", f"envbuild/{name}").splitlines())


def test_an_image_is_made_and_verified_without_an_engine(place: Place, remote: str) -> None:
    """The image has the same id as the image in the engine. The nodes' engine pulls it from the registry. Then it is
    published with its evidence."""
    before = tags(place.proved.name)
    made = place.start("build").finish(600)
    assert (made.code, made.document["state"], made.document["image"]) == (0, "computed", place.proved.id), made.words
    done = place.start("make").finish(900)
    assert (done.code, done.document["state"], done.document["image"]) == (0, "verified", place.proved.id), done.words
    names = [step["name"] for step in done.document["steps"]]
    assert names[-5:] == ["build", "push", "audit", "self-test", "evidence"]
    assert done.document["tags"] == [f"{remote}:id-{place.proved.id[7:]}"]
    _, where = recorded(Path(done.document["statement"]))
    assert where["node"] in NODES and where["image"].startswith(f"{remote}@sha256:")
    again = place.start("make").finish(120)
    assert (again.code, again.document["state"], again.document["statement"]) == (0, "verified", None), again.words
    assert place.start("status").finish(120).document["state"] == "verified"
    assert tags(place.proved.name) == before, "no tag of this engine changed"
    assert list((place.shared / "jobs").glob("*")) == []
    pushed = place.start("push", f"{remote}-pushed", "--unsigned").finish(600)
    assert (pushed.code, pushed.document["image"]) == (0, place.proved.id), pushed.words


def test_a_record_without_an_engine_is_resumed(place: Place, remote: str) -> None:
    """Only the self-test can be resumed: the audit before it has ended."""
    begun = place.start("test", "--record")
    begun.says("--resume", 900)
    job = begun.stderr.partition("--resume ")[2].split()[0]
    begun.kill()
    done = place.start("test", "--record", "--resume", job).finish(300)
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    assert "audit" not in [step["name"] for step in done.document["steps"]]


def test_a_lost_waiting_process_is_resumed(slow_place: Place) -> None:
    begun = slow_place.start("test", "--record")
    begun.says("running on", 120)
    job = begun.stderr.partition("--resume ")[2].split()[0]
    begun.kill()
    done = slow_place.start("test", "--record", "--resume", job).finish(300)
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    assert slow_place.left() == []
    again = slow_place.start("test", "--record", "--resume", job).finish()
    assert again.code == 2 and f"no job {job} was submitted from here" in again.words


def test_truncated_output_is_not_proof(slow_place: Place) -> None:
    """The output of a passed run lacks a single frame."""
    begun = slow_place.start("test", "--record")
    begun.says("running on", 120)
    job = begun.stderr.partition("--resume ")[2].split()[0]
    begun.kill()
    outcome = until("its outcome", lambda: next(slow_place.shared.glob("*/attempt-0/outcome"), None), 240)
    written = outcome.with_name("stdout")
    written.write_bytes(written.read_bytes().rpartition(b"ENVBUILD")[0])
    done = slow_place.start("test", "--record", "--resume", job).finish(120)
    assert done.code == 6 and "is truncated or was changed" in done.words
    assert slow_place.left() == []


def test_a_job_that_slurm_forgot_and_that_left_nothing_is_lost(place: Place, stalling: str) -> None:
    begun, job, _ = place.running(stalling)
    begun.kill()
    place.cluster.ask("scancel", job)
    until("Slurm to forget it", lambda: not place.cluster.ask("scontrol", "show", "job", job), 120)
    done = place.start("test", "--image", stalling, "--resume", job).finish(120)
    assert done.code == 6 and f"job {job} is lost" in done.words


def test_an_interruption_cancels_the_job(place: Place, stalling: str) -> None:
    begun, _, _ = place.running(stalling)
    done = begun.interrupt()
    assert done.code == 130
    until("nothing to be left", lambda: place.left() == [], 30)


def test_a_job_cancelled_by_another_user_is_reported(place: Place, stalling: str) -> None:
    begun, job, _ = place.running(stalling)
    place.cluster.ask("scancel", job)
    done = begun.finish(120)
    assert done.code == 6 and f"job {job} was cancelled, and not by this command" in done.words
    assert place.left() == []


def test_a_node_that_dies_is_reported(place: Place, stalling: str) -> None:
    begun, job, node = place.running(stalling)
    place.cluster.daemons.end(node, signal.SIGKILL)
    try:
        done = begun.finish(180)
    finally:
        place.cluster.start(node)
    assert done.code == 6 and f"job {job} ended because its node {node} failed" in done.words


def test_a_node_whose_clock_is_off_proves_all_the_same(place: Place, bare: Bare) -> None:
    """One node's clock is ahead, the other's behind; each gets a job. The start time according to the controller
    counts."""
    place.cluster.daemons.end_all(NODES)
    try:
        place.cluster.start(*NODES, clocks=dict(zip(NODES, ("+2h", "-400d"), strict=True)))
        runs = [bare.run(SlurmSite(), place.proved.tag, node) for node in NODES]
    finally:
        place.cluster.daemons.end_all(NODES)
        place.cluster.start(*NODES)
    assert [(run.passed, located(run).node) for run in runs] == [(True, node) for node in NODES]
    assert all(0 <= float(str(located(run).queued_seconds)) < 120 and 0 <= run.seconds < 120 for run in runs)
    assert place.left() == []


def test_a_registry_that_the_node_cannot_reach_is_reported(place: Place, bare: Bare) -> None:
    """The push from here would work, but the node gets a digest that cannot be downloaded."""
    name = f"127.0.0.1:9/nowhere@sha256:{'1' * 64}"
    with pytest.raises(NetworkError, match=r"gpu-\S+ cannot fetch 127\.0\.0\.1:9/nowhere@") as caught:
        bare.run(SlurmSite(registry="127.0.0.1:9/nowhere"), name)
    assert "refused" in str(caught.value.hint)
    assert place.left() == []


def test_a_gpu_other_than_slurm_reports_is_not_proof(place: Place, bare: Bare, broken: Workshop) -> None:
    """The node reports an h20 and assigns it; in the container, the GPU is an A100."""
    image = broken.image("other-card")
    program = place.shared / "docker-with-a-card"  # because this engine has no GPU
    place.shared.mkdir()
    program.write_text(WITH_A_CARD, encoding="utf-8")
    program.chmod(0o755)
    run = bare.run(SlurmSite(program=str(program)), image, gpus=True)
    assert (program.with_name(f"{program.name}.asked")).read_text(encoding="utf-8").strip() == '"device=0"'
    assert located(run).node == "gpu-h20" and located(run).gpus == "0"
    assert not run.passed and "this is NVIDIA A100-SXM4-80GB, the profile is for NVIDIA H20" in str(run.failures())
    with pytest.raises(NotProved, match="containers on gpu-h20 have no GPU"):
        bare.run(SlurmSite(), image, gpus=True)


def test_two_jobs_for_one_digest_do_not_meet(slow_place: Place, quick: Proved, scratch: Path) -> None:
    """The two jobs run at the same time on different nodes, and each result comes only from its own output."""
    other = Place(slow_place.cluster, quick, scratch / "other")
    begun = [one.start("test", "--record") for one in (slow_place, other)]
    done = [one.finish(400) for one in begun]
    assert [(one.code, one.document["state"]) for one in done] == [(0, "verified")] * 2, [one.stderr for one in done]
    assert slow_place.left() == [] and other.left() == []


def test_a_controller_that_restarts_is_waited_for(slow_place: Place) -> None:
    begun = slow_place.start("test", "--record")
    begun.says("running on", 120)
    slow_place.cluster.daemons.end("slurmctld")
    try:
        begun.says("does not answer", 120)
    finally:
        slow_place.cluster.start("slurmctld")
    done = begun.finish(300)
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    until("the controller to know that it ended", lambda: slow_place.left() == [], 60)


def test_ranks_on_two_nodes_work_together(slow_place: Place) -> None:
    """The ranks communicate by this machine's loopback interface, which both nodes share. Only the containers of
    dist.nodes use the network of their node; all other containers have no network."""
    quiet = slow_place.start("test", "--record", "--nodes", "2").finish(120)
    assert quiet.code == 2 and "no interface is set" in quiet.words
    done = slow_place.start("test", "--record", "--nodes", "2", "--slurm", "interface=lo").finish(300)
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    record, where = recorded(Path(done.document["statement"]))
    (across,) = [result for result in record["results"] if result["probe"] == "dist.nodes"]
    assert [stage["stage"] for stage in across["traits"]["stages"]] == ["gloo nodes 0+1 x1", "gloo nodes 0+1 x2"]
    assert (across["status"], across["traits"]["interface"]) == ("passed", "lo") and len(across["figures"]) > 10
    assert record["where"]["unconfined"] == ["dist.nodes: the nodes' network, by lo"]
    assert sorted(where["nodes"]["node"].split(",")) == sorted(NODES) and where["node"] in NODES
    assert (where["nodes"]["interface"], where["nodes"]["infiniband"]) == ("lo", [False, False])
    until("the job to have left the queue", lambda: slow_place.left() == [], 60)
