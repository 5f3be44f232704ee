"""The manifests equal golden files, are valid by the published schemas, and confine the container; some values must not
be in a manifest."""

from __future__ import annotations

import base64
import dataclasses
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from envbuild.facts import database
from envbuild.runners.kubernetes import job_manifest, kubernetes_settings
from envbuild.runners.kubernetes.kubernetes_settings import KubernetesSite
from envbuild.util.errors import UsageError
from envbuild.util.host_processes import run
from unit.regenerate import GOLDEN
from unit.runners.manifests import CASES, objects, rendered
from unit.runners.scripts import CPU, FETCHED, ID, JOB


@pytest.mark.parametrize("case", CASES)
def test_the_manifests_are_as_they_were(case: str) -> None:
    assert rendered(case) == (GOLDEN / "kubernetes" / f"{case}.yaml").read_text(encoding="utf-8")


def test_the_goldens_are_these() -> None:
    assert {file.stem for file in (GOLDEN / "kubernetes").iterdir()} == set(CASES)


@pytest.mark.parametrize("version", ["1.25", "1.31", "1.37"])
@pytest.mark.parametrize("case", CASES)
def test_the_published_schemas_know_every_field(case: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for one in objects(case):
        validate.validate(one, version, strict=True)


def test_the_schemas_refuse_an_unknown_field() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    work = objects("cpu")[1]
    work["spec"]["template"]["spec"]["containers"][0]["comand"] = ["x"]
    with pytest.raises(validate.ValidationError):
        validate.validate(work, "1.31", strict=True)


@pytest.mark.parametrize("case", CASES)
def test_the_container_is_confined_as_far_as_a_pod_can(case: str) -> None:
    config, work = objects(case)
    job, spec = CASES[case][0], work["spec"]["template"]["spec"]
    (one,) = spec["containers"]
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert (spec["securityContext"]["runAsNonRoot"], spec["automountServiceAccountToken"]) == (True, False)
    assert one["resources"]["limits"]["memory"] == str(job.limits.memory)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    assert {next(iter(set(volume) - {"name"})) for volume in spec["volumes"]} == {"configMap", "emptyDir"}
    assert (work["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert base64.b64decode(config["binaryData"]["payload"]) == job.stdin


@pytest.mark.parametrize("case", CASES)
def test_a_job_asks_for_its_gpus_and_no_more(case: str) -> None:
    job, _, image = CASES[case]
    spec = objects(case)[1]["spec"]["template"]["spec"]
    limits = spec["containers"][0]["resources"]["limits"]
    assert limits.get("nvidia.com/gpu") == (str(job.count) if job.gpus else None)
    assert spec["containers"][0]["image"] == image
    if case == "h20":
        assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H20"}


def test_a_gpu_with_several_names_may_have_any_of_them() -> None:
    names = job_manifest.product_labels(dataclasses.replace(JOB, models=("a100",)), KubernetesSite())
    assert len(names) > 1 and all(" " not in name for name in names)
    work = job_manifest.render(
        dataclasses.replace(JOB, models=("a100",)), KubernetesSite(registry="r"), "envbuild-x-1", FETCHED
    )[1]
    spec = work["spec"]["template"]["spec"]
    assert list(names) == spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"][0]["matchExpressions"][0]["values"]  # fmt: skip
    assert "nodeSelector" not in spec


def test_every_gpus_name_is_a_labels_value() -> None:
    jobs = {gpu: dataclasses.replace(JOB, models=(gpu,)) for gpu in database.gpus()}
    products = {gpu: list(job_manifest.product_labels(job, KubernetesSite())) for gpu, job in jobs.items()}
    assert kubernetes_settings.parse({"products": products}, {}, database.gpus().__contains__)


def test_the_container_runs_the_requested_command() -> None:
    """A kubelet expands $(NAME), and replaces $$ by $."""
    job = dataclasses.replace(CPU, argv=("python", "-c", "$(HOME) $$ $x $$(y)"))
    (one,) = job_manifest.render(job, KubernetesSite(), "envbuild-x-1", ID)[1]["spec"]["template"]["spec"]["containers"]
    assert re.fullmatch(r"(\$\$|[^$])*", "".join(one["command"]))
    assert tuple(part.replace("$$", "$") for part in one["command"][5:-1]) == job.argv


@pytest.mark.parametrize(
    ("code", "status"), [("", 0), ("sys.exit(5)", 5), ("os.kill(os.getpid(), 8)", 136), ("time.sleep(60)", 124)]
)
def test_the_wrapper_limits_the_time_and_last_output_of_the_self_test(tmp_path: Path, code: str, status: int) -> None:
    words = tmp_path / "words"
    words.write_text("of an earlier one", encoding="utf-8")
    text = f"import os, sys, time; sys.stderr.write('x' * 100000 + 'end'); sys.stderr.flush(); print('out'); {code}"
    argv = [
        sys.executable,
        "-I",
        "-c",
        job_manifest.wrapper_command(2.0, str(words)),
        sys.executable,
        "-I",
        "-u",
        "-c",
        text,
    ]
    done = run(argv, timeout=60)
    assert (done.code, done.stdout, done.stderr) == (status, "out\n", "")
    assert words.read_bytes() == b"x" * 4093 + b"end"


def test_processes_left_by_a_self_test_are_not_waited_for(tmp_path: Path) -> None:
    """Such a process holds stderr open; the container ends with its first process."""
    (words := tmp_path / "words").touch()
    text = "import subprocess, sys; subprocess.Popen(['sleep', '60'])"
    begin = time.monotonic()
    assert (
        run([sys.executable, "-I", "-c", job_manifest.wrapper_command(50, str(words)), sys.executable, "-c", text]).code
        == 0
    )
    assert time.monotonic() - begin < 30


def test_one_of_several_gpus_must_be_named() -> None:
    with pytest.raises(UsageError) as caught:
        job_manifest.render(dataclasses.replace(JOB, models=("h20", "a100")), KubernetesSite(), "envbuild-x-1", ID)
    assert caught.value.hint == "--gpu h20 or --gpu a100"


@pytest.mark.parametrize("image", ["cpu:latest", f"x y@{ID}", ID[:-1], "", f"{ID}\n"])
def test_an_image_without_a_digest_is_refused(image: str) -> None:
    with pytest.raises(UsageError):
        job_manifest.render(CPU, KubernetesSite(), "envbuild-x-1", image)


def test_a_self_test_that_no_config_map_takes_is_refused() -> None:
    with pytest.raises(UsageError, match="more than a ConfigMap can hold"):
        job_manifest.render(dataclasses.replace(CPU, stdin=bytes((1 << 20) + 1)), KubernetesSite(), "envbuild-x-1", ID)


def parsed(given: dict[str, str] | None = None, **values: Any) -> KubernetesSite:
    return kubernetes_settings.parse(values, given or {}, database.gpus().__contains__)


HOSTILE = ["x\ny: z", "a b", '"', "{}", "-x", "é", "", "\x1b[2J", None, 1.5, {"a": "b"}, "x,", "a" * 400]


@pytest.mark.parametrize("key", ["context", "namespace", "registry", "runtime_class", "priority_class", "queue",
                                 "pull_secrets", "tolerations", "cpu"])  # fmt: skip
@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_a_hostile_setting_is_refused(key: str, value: object) -> None:
    with pytest.raises(UsageError) as caught:
        kubernetes_settings.parse({key: value}, {}, database.gpus().__contains__)
    assert {fault.field for fault in caught.value.faults} == {key}
    assert "\x1b" not in str(caught.value.faults)


@pytest.mark.parametrize("value", [*HOSTILE, ["x"]], ids=repr)
def test_a_hostile_label_or_product_is_refused(value: Any) -> None:
    tried: list[dict[str, Any]] = [
        {"nodes": {"pool": value}},
        {"labels": {"pool": value}},
        {"labels": value},
        {"annotations": value},
        {"products": {"h20": value}},
        {"nodes": value},
        {"products": value},
    ]
    for settings in tried:
        if settings in (
            {"products": {"h20": ["x"]}},
            {"nodes": {"a": "b"}},
            {"labels": {"a": "b"}},
            {"annotations": {"a": "b"}},
        ):
            continue
        with pytest.raises(UsageError):
            parsed(**settings)


@pytest.mark.parametrize("value", [value for value in HOSTILE if value not in ('"', "a b", "{}", "-x", "x,")], ids=repr)
def test_a_hostile_annotation_is_refused(value: Any) -> None:
    """Any line of ASCII is allowed, as a string in the manifest."""
    if value == "a" * 400:
        value = "a" * 1001
    with pytest.raises(UsageError):
        parsed(annotations={"team": value})


@pytest.mark.parametrize("key", ["job-name", "controller-uid", "batch.kubernetes.io/job-name", "a b", "-x", "x/y/z",
                                 job_manifest.LABEL])  # fmt: skip
@pytest.mark.parametrize("map_", ["labels", "annotations"])
def test_a_label_that_is_the_clusters_own_is_refused(map_: str, key: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(**{map_: {key: "x"}})
    assert [fault.field for fault in caught.value.faults] == [map_]


@pytest.mark.parametrize("value", ["0", "500m", "1.5", 0, -1, True], ids=repr)
def test_an_invalid_number_of_processors_is_refused(value: object) -> None:
    with pytest.raises(UsageError):
        parsed(cpu=value)
    assert (parsed(cpu=8).cpu, parsed(cpu="8").cpu, parsed().cpu) == (8, 8, None)


def test_labels_of_the_command_line_go_before_those_of_the_settings() -> None:
    given = {"labels.kueue.x-k8s.io/queue-name": "mine", "annotations.a": "b: c"}
    found = parsed(given, labels={"kueue.x-k8s.io/queue-name": "team", "x": "y"})
    assert found.labels == {"kueue.x-k8s.io/queue-name": "mine", "x": "y"} and found.annotations == {"a": "b: c"}
    _, work = job_manifest.render(CPU, found, "envbuild-x-1", ID)
    for meta in (work["metadata"], work["spec"]["template"]["metadata"]):
        assert meta["labels"] == {**found.labels, job_manifest.LABEL: "envbuild"} and meta["annotations"] == {
            "a": "b: c"
        }


def test_all_faults_come_at_once_and_the_command_line_wins() -> None:
    with pytest.raises(UsageError) as caught:
        kubernetes_settings.parse(
            {"namspace": "x", "queue": "soon", "products": {"h21": "x"}}, {}, database.gpus().__contains__
        )
    assert {fault.field for fault in caught.value.faults} == {"namspace", "queue", "products"}
    given = {"namespace": "b", "products.h20": "A,B", "nodes.pool": "y", "tolerations": "spot,team=x:NoSchedule"}
    found = parsed(given, namespace="a", nodes={"pool": "x", "zone": "z"}, queue=5)
    assert (found.namespace, found.queue, found.products) == ("b", 5, {"h20": ("A", "B")})
    assert found.nodes == {"pool": "y", "zone": "z"}
    assert found.tolerations == ("spot", "team=x:NoSchedule")
