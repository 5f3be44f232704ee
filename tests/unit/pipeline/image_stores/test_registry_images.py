"""`make` and `test --record` on a cluster without an engine. The registry and the clusters are stand-ins, and the nodes
of Slurm really run the batch scripts."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import MagicMock

import pytest

from envbuild.audit import environment_audit
from envbuild.audit.environment_audit import Audit
from envbuild.audit.finding_types import Finding
from envbuild.cli import status as status_command
from envbuild.evidence import evidence_statements_and_store, image_status
from envbuild.image import build_records
from envbuild.image.build_records import Record
from envbuild.image.docker_engine import Engine
from envbuild.image.engine_endpoint_and_errors import UnusableEngine
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock import lock_file, wheel_file_hashes_and_contents
from envbuild.pipeline import image_steps, layer_steps, make_build_and_test, selftest_steps
from envbuild.pipeline.model import RunnerOptions, StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.runners.kubernetes import pod_watch
from envbuild.runners.kubernetes.kubernetes_runner import Kubernetes
from envbuild.runners.slurm import slurm_runner
from envbuild.util import process_locks, settings
from envbuild.util.errors import BuildError, CheckFailed, EngineError, HungUp, Interrupted, NetworkError, UsageError
from unit.evidence.runs import NONCE, documents, line, lines, probe
from unit.image.oci.layered_samples import sample, written
from unit.registries import Registry, serving
from unit.runners import apiserver
from unit.runners.slurmprograms import Stub
from unit.support import PROFILE, CommandResult, configure, envbuild, plan_of, profile_of, whole_lock

DOCKER = f"""#!/bin/bash
case $1 in
version) echo 26.1.5 ;;
image) exit 1 ;;
inspect) echo false ;;
run)
    cat >"$STUB/stdin"
    nonce=$(grep -ao '"nonce": "[0-9a-f]*"' "$STUB/stdin" | tail -1 | cut -d'"' -f4)
    kind=self-test
    ! grep -qa '"wheels": {{' "$STUB/stdin" || kind=audit
    for word; do [[ $word != *@sha256:* ]] || echo "$kind $word" >>"$STUB/jobs"; done
    sed "s/{NONCE}/$nonce/" "$STUB/$kind"
    ;;
esac
"""
CONTENTS: dict[str, Any] = {
    "python": {"version": "3.11.2", "executable": "/opt/venv/bin/python", "prefix": "/opt/venv", "markers": {}},
    "distributions": [], "torch": None, "libraries": [], "order": None, "apex": None, "variables": {}, "compat": [],
    "machine": {"gpus": [], "driver": None}, "cut": False, "seconds": {},
}  # fmt: skip
AUDIT = line(json.dumps(CONTENTS).encode(), 0)
STEPS = ["load profile", "resolve", "preflight", "lock", "render", "build", "push", "audit", "self-test", "evidence"]


class Nodes(Protocol):
    """The nodes of a cluster. `name`: the cluster's; `engine`: what the evidence names."""

    name: str
    engine: str

    def jobs(self) -> list[str]:
        """The jobs that ran, each as its kind and the reference of its image."""
        ...

    def test_gives(self, *probes: dict[str, Any]) -> None:
        """Set the result of the self-test."""
        ...


class SlurmNodes:
    name, engine = "slurm", "docker 26.1.5"

    def __init__(self, stub: Stub) -> None:
        self._folder = stub.folder
        stub.say(docker=DOCKER)
        (self._folder / "audit").write_bytes(AUDIT)
        self.test_gives()

    def jobs(self) -> list[str]:
        file = self._folder / "jobs"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def test_gives(self, *probes: dict[str, Any]) -> None:
        (self._folder / "self-test").write_bytes(b"".join(lines(documents(*probes))))


class KubernetesNodes(apiserver.Server):
    name, engine = "kubernetes", "containerd"
    log_of = b""

    def jobs(self) -> list[str]:
        made = [one for one in self.created if one["kind"] == "Job"]
        inputs = [one for one in self.created if one["kind"] == "ConfigMap"]
        images = [one["spec"]["template"]["spec"]["containers"][0]["image"] for one in made]
        return [f"{_kind(given)} {image}" for given, image in zip(inputs, images, strict=True)]

    def test_gives(self, *probes: dict[str, Any]) -> None:
        self.log_of = b"".join(lines(documents(*probes)))

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: apiserver.Object) -> tuple[int, Any]:
        if method == "GET" and path.endswith("/log"):
            (config,) = [one for key, one in self.stored.items() if key.startswith("configmaps")]
            output = AUDIT if _kind(config) == "audit" else self.log_of
            return 200, output.replace(NONCE.encode(), _nonce(config))
        return super().answer(method, path, query, body)


def _input(config: apiserver.Object) -> bytes:
    return base64.b64decode(config["binaryData"]["payload"])


def _kind(config: apiserver.Object) -> str:
    return "audit" if b'"wheels": {' in _input(config) else "self-test"


def _nonce(config: apiserver.Object) -> bytes:
    nonces: list[bytes] = re.findall(rb'"nonce": "([0-9a-f]+)"', _input(config))
    return nonces[-1]


class NoEngine:
    def __get__(self, context: StepContext, owner: object) -> Engine:
        raise UnusableEngine("no Docker Engine answers at unix:///nowhere", hint="start one")


@dataclasses.dataclass
class Place:
    """A locked profile, a registry, and a cluster without an engine here."""

    nodes: Nodes
    registry: Registry
    findings: list[Finding]

    @property
    def repository(self) -> str:
        return f"{self.registry.host}/team/sample"

    @property
    def reference(self) -> str:
        return f"{self.repository}@{written().manifest.digest}"

    @property
    def tag(self) -> str:
        return f"id-{written().id[7:]}"

    def make(self, *arguments: str) -> CommandResult:
        return envbuild("make", "sample", "--json", *arguments)

    def prove(self, *arguments: str) -> CommandResult:
        return envbuild("test", "sample", "--record", "--json", "--on", self.nodes.name, *arguments)


def slurm_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> SlurmNodes:
    stub = Stub(folder)
    monkeypatch.setenv("STUB", str(stub.folder))
    monkeypatch.setenv("PATH", str(stub.folder), prepend=os.pathsep)
    for name, value in {"POLL": 0.05, "ASK": 0.1, "LEAVING": 1.0, "PATIENCE": 1.0}.items():
        monkeypatch.setattr(slurm_runner, name, value)
    return SlurmNodes(stub)


def kubernetes_nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> KubernetesNodes:
    pytest.importorskip("kubernetes", reason="the extra `kubernetes` is not installed")
    for name, value in {"POLL": 0.02, "FOLLOW": 1.0, "PULLING": 0.3, "GRACE": 0.3, "PATIENCE": 0.5}.items():
        monkeypatch.setattr(pod_watch, name, value)
    nodes = KubernetesNodes()
    nodes.test_gives()
    return nodes


@pytest.fixture(params=["slurm", "kubernetes"])
def place(
    request: pytest.FixtureRequest, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    findings: list[Finding] = []
    loaded, plan = profile_of(project, PROFILE), plan_of(project, PROFILE)
    lock_file.write(whole_lock(plan), loaded.lock_file, "sample")
    monkeypatch.setattr(StepContext, "engine", NoEngine())
    monkeypatch.setattr(image_steps, "fetch_base", lambda context, plan, lock, **_: lock)
    monkeypatch.setattr(layer_steps, "describe_image", lambda *_: StepResult(sample()[1]))
    monkeypatch.setattr(lock_image_lookup_and_recipe, "describe_lock", lambda *_: sample()[1])
    monkeypatch.setattr(wheel_file_hashes_and_contents, "wheel_hashes", lambda lock: {"torch==1": {"torch.py": "0"}})
    monkeypatch.setattr(environment_audit, "assess", lambda *given: Audit(given[0], given[2], given[1], (*findings,)))
    with serving(Registry()) as registry:
        address = f"{registry.host}/team/sample"
        if request.param == "slurm":
            configure(f"on: slurm\nslurm: {{registry: {address}, folder: {tmp_path}/shared, grace: 1}}\n")
            yield Place(slurm_nodes(tmp_path, monkeypatch), registry, findings)
            return
        configure(f"on: kubernetes\nkubernetes: {{registry: {address}}}\n")
        nodes = kubernetes_nodes(tmp_path, monkeypatch)
        with apiserver.serving(nodes):
            monkeypatch.setattr(
                "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION",
                str(apiserver.kubeconfig(nodes.address, tmp_path / "kubeconfig")),
            )
            yield Place(nodes, registry, findings)


def names(document: dict[str, Any]) -> list[str]:
    return [step["name"] for step in document["steps"]]


def records() -> list[Record]:
    return list(build_records.all_records())


def test_an_image_is_uploaded_audited_and_proved(place: Place) -> None:
    done = place.make()
    document = done.document
    assert done.code == 0, document["error"]
    assert (document["state"], document["image"], names(document)) == ("verified", written().id, STEPS)
    assert document["tags"] == [f"{place.repository}:{place.tag}"], "no tag of an engine"
    assert place.nodes.jobs() == [f"audit {place.reference}", f"self-test {place.reference}"]
    assert place.registry.manifests[place.tag][1] == written().manifest.raw
    assert "verified" not in place.registry.manifests, "without its evidence"
    assert [(one.image, one.digest) for one in records()] == [(written().id, written().manifest.digest)]
    ((_, record),) = evidence_statements_and_store.stored(written().id)
    stored = json.loads(record.encoded)
    assert (stored["engine"], stored["machine"], stored["where"]["runner"]) == (
        place.nodes.engine, None, place.nodes.name,
    )  # fmt: skip
    assert f"envbuild push sample {place.repository}" in document["notes"][-1]
    assert f"it is uploaded to {place.repository}, and audited and tested on {place.nodes.name}" in done.stderr


def test_a_repeated_run_finds_the_image_and_its_evidence(place: Place) -> None:
    place.make()
    place.registry.requests.clear()
    done = place.make()
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    assert {step["name"]: step["cached"] for step in done.document["steps"]}["build"] is True
    assert place.registry.written() == [] and len(place.nodes.jobs()) == 2
    assert done.document["tags"] == [f"{place.repository}:{place.tag}"]


def test_an_image_that_the_registry_lost_is_uploaded_without_another_audit(place: Place) -> None:
    place.make()
    assert place.make("--dry-run").document["fetch_bytes"] == 0
    place.registry.manifests.clear()
    place.registry.blobs.clear()
    assert place.make("--dry-run").document["fetch_bytes"] > 0, "the layers are written again"
    assert place.make().code == 0 and place.tag in place.registry.manifests
    assert len(place.nodes.jobs()) == 2


def test_the_layers_are_written_and_audited_again_without_the_cache(place: Place) -> None:
    place.make()
    assert place.make("--no-cache").code == 0
    assert [job.split()[0] for job in place.nodes.jobs()] == ["audit", "self-test", "audit"]


def test_test_record_uploads_and_audits_too(place: Place) -> None:
    done = place.prove()
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    assert names(done.document) == ["load profile", "resolve", *STEPS[5:]]
    again = place.prove()
    assert (again.code, again.document["tags"]) == (0, [f"{place.repository}:{place.tag}"])
    assert [job.split()[0] for job in place.nodes.jobs()] == ["audit", "self-test", "self-test"]
    report = envbuild("test", "sample", "--on", place.nodes.name, "--json")
    assert (report.code, report.document["image"]) == (0, written().id), report.stderr


def test_an_image_that_is_not_audited_is_not_tested_without_a_record(place: Place) -> None:
    done = envbuild("test", "sample", "--on", place.nodes.name)
    assert done.code == BuildError.code and f"uploaded to {place.repository} and audited" in done.stderr
    assert place.nodes.jobs() == [] and place.registry.written() == []


def test_a_finding_stops_before_the_self_test(place: Place) -> None:
    place.findings.append(Finding("two-copies", "defect", "m", "r"))
    done = place.make()
    assert (done.code, done.document["state"], done.document["image"]) == (CheckFailed.code, "failed", None)
    assert [finding["id"] for finding in done.document["findings"]] == ["two-copies"]
    assert f"{place.repository}:{place.tag}: 1 defect" in done.document["error"]["message"]
    assert place.nodes.jobs() == [f"audit {place.reference}"] and records() == []
    place.findings.clear()
    assert place.make().code == 0, "it is audited again"
    assert [job.split()[0] for job in place.nodes.jobs()] == ["audit", "audit", "self-test"]


def test_a_failed_self_test_is_evidence(place: Place) -> None:
    place.nodes.test_gives(probe("env.libs", "failed"))
    done = place.make()
    assert (done.code, done.document["state"]) == (CheckFailed.code, "failed"), done.stderr
    assert done.document["evidence"][0]["state"] == "failed"
    assert "withdrawn" not in done.stderr, "no engine has the tag"


def test_an_upload_that_fails_runs_no_job(place: Place) -> None:
    place.registry.refuse = "PUT .*/manifests/id-.*"
    done = place.make()
    assert (done.code, place.nodes.jobs(), records()) == (NetworkError.code, [], [])
    place.registry.refuse = ""
    place.registry.requests.clear()
    assert place.make().code == 0
    assert [line.split()[0] for line in place.registry.written()] == ["PUT"], "only the manifest was missing"


def test_an_interrupted_self_test_is_resumed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang_up(*_: object) -> None:
        raise HungUp

    with monkeypatch.context() as patched:
        patched.setattr(selftest_steps, "_show_probe", hang_up)
        lost = place.make()
    assert lost.code == Interrupted.code
    job = lost.document["error"]["hint"].rpartition("--resume ")[2]
    done = place.prove("--resume", job)
    assert (done.code, done.document["state"]) == (0, "verified"), done.stderr
    assert [one.split()[0] for one in place.nodes.jobs()] == ["audit", "self-test"]


def test_a_job_is_not_resumed_without_its_image(place: Place) -> None:
    done = place.prove("--resume", "7")
    assert done.code == BuildError.code and place.registry.written() == []


def test_an_invalid_job_is_reported_before_the_upload(place: Place, project: Path) -> None:
    data = {**PROFILE, "gpus": ["a100", "h200"], "torch": "2.11.0"}
    lock_file.write(whole_lock(plan_of(project, data)), profile_of(project, data).lock_file, "sample")
    done = place.prove()
    assert (done.code, done.document["error"]["message"]) == (UsageError.code, "a job can request only one GPU model")
    assert place.registry.written() == []


def test_an_extension_that_is_not_compiled_is_reported_before_the_upload(place: Place, project: Path) -> None:
    kernels = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["k"]}
    data = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels], "toolchain": {"sha256": "a" * 64}}
    lock_file.write(whole_lock(plan_of(project, data)), profile_of(project, data).lock_file, "sample")
    for done in (place.make(), place.prove(), envbuild("build", "sample", "--json")):
        message = "kernels is not compiled yet; compiling needs an engine"
        assert (done.code, done.document["error"]["message"]) == (BuildError.code, message)
    assert place.registry.written() == [] and place.nodes.jobs() == []


def test_without_a_registry_the_error_names_the_setting(place: Place) -> None:
    configure(f"on: {place.nodes.name}\n")
    for done in (place.make(), place.prove()):
        error = done.document["error"]
        assert (done.code, error["message"]) == (EngineError.code, "no Docker Engine answers at unix:///nowhere")
        assert error["hint"].startswith("start one\n")
        assert f"{place.nodes.name}: {{registry: HOST/NAME}}" in error["hint"]


def test_without_a_cluster_the_engines_error_stays(place: Place) -> None:
    assert place.make("--allow-unproved").code == 0
    configure("")
    assert place.make().code == EngineError.code
    with pytest.raises(UnusableEngine):
        make_build_and_test.prove("sample", None, MagicMock(), on=RunnerOptions("local"))


def test_dry_runs_send_nothing(place: Place) -> None:
    preview = envbuild("make", "sample", "--dry-run", "--json")
    assert (preview.code, preview.document["proof"]) == (0, "elsewhere")
    assert preview.document["registry"] == place.repository
    assert preview.document["disk_bytes"] == preview.document["fetch_bytes"] > 0
    script = envbuild("test", "sample", "--record", "--on", place.nodes.name, "--dry-run")
    assert script.code == 0 and f"{place.repository}@sha256:{'0' * 64}" in script.stdout
    place.make()
    script = envbuild("test", "sample", "--record", "--on", place.nodes.name, "--dry-run")
    assert place.reference in script.stdout


def test_hashes_that_do_not_fit_are_left_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit then compares the files with RECORD, and says so."""
    hashes = {"torch==1": {f"torch/{number}.py": "0" * 64 for number in range(20_000)}}
    monkeypatch.setattr(wheel_file_hashes_and_contents, "wheel_hashes", lambda lock: hashes)
    done = place.make()
    assert done.code == 0, done.stderr
    assert ("compares files with RECORD" in done.stderr) is (place.nodes.name == "kubernetes")
    assert Kubernetes.max_input == 1 << 20


def test_status_needs_no_engine(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such.sock")
    assert envbuild("status", "sample").code == BuildError.code
    place.make()
    done = envbuild("status", "sample", "--json")
    assert (done.code, done.document["state"], done.document["image"]) == (0, "verified", written().id), done.stderr
    assert (done.document["tags"], done.document["tag"]) == ([], None)
    assert done.document["next_command"] == "envbuild push sample HOST/NAME"
    assert "no Docker Engine answers" in done.stderr and "without tags" in done.stderr
    (every,) = [row for row in envbuild("status", "--json").document["profiles"] if row["profile"] == "sample"]
    assert every == done.document
    assert envbuild("show", "sample", "--json").document["state"] == "verified"
    place.nodes.test_gives(probe("env.libs", "failed"))
    place.prove()
    assert envbuild("status", "sample").code == CheckFailed.code


def test_several_profiles_are_made_without_an_engine(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """`build` runs first for each profile; its note is left out, because `make` uploads the image afterwards."""
    monkeypatch.setenv(process_locks.PARALLEL, "1")
    assert envbuild("build", "sample", "--json").document["notes"] == []
    assert place.make().document["state"] == "verified"


def test_build_finds_the_image_of_the_lock(place: Place) -> None:
    done = envbuild("build", "sample", "--json")
    assert (done.code, done.document["state"], done.document["image"]) == (0, "computed", written().id), done.stderr
    assert (done.document["tags"], names(done.document)[-2:]) == ([], ["render", "build"])
    assert written().manifest.digest in done.document["notes"][-1] and "not audited" in done.document["notes"][-1]
    assert (place.registry.written(), place.nodes.jobs(), records()) == ([], [], [])
    assert envbuild("build", "sample").stdout == f"computed {written().id}\n"


def test_a_builder_needs_its_engine(place: Place) -> None:
    done = envbuild("build", "sample", "--builder", "remote", "--json")
    assert (done.code, done.document["error"]["kind"]) == (EngineError.code, "engine")


def test_the_switch_to_the_registry_is_noted(place: Place) -> None:
    notes = place.make().document["notes"]
    assert any("no Docker Engine answers" in note and place.repository in note for note in notes)


def test_make_validates_the_jobs_before_the_upload(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def invalid(order: object) -> None:
        raise UsageError("a job can request only one GPU model")

    monkeypatch.setattr(make_build_and_test, "require_valid_jobs", invalid)
    assert place.make().code == UsageError.code
    assert (place.registry.written(), place.nodes.jobs(), records()) == ([], [], [])


def test_status_asks_an_engine_that_make_cannot_use_only_without_a_cluster(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make` sees no engine if it cannot limit containers, and neither does `status` then."""

    class Unlimited:
        def require_bounds(self) -> None:
            raise UnusableEngine("the engine cannot limit a container's memory", hint="see docker info")

    place.make()
    monkeypatch.setattr(status_command, "Engine", Unlimited)
    assert envbuild("status", "sample").code == 0
    monkeypatch.setattr(settings, "setting", lambda name: None)
    asked = list[object]()
    monkeypatch.setattr(image_status, "compute", lambda engine, loaded: asked.append(engine))
    with pytest.raises(AttributeError):  # from the missing result of `compute`
        envbuild("status", "sample")
    assert isinstance(asked[0], Unlimited)
