"""Which runner is chosen, which options exclude each other, and what is submitted to a cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import yaml

from envbuild.image import build_records, registry_push
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.pipeline import make_build_and_test, runner_selection, selftest_steps
from envbuild.pipeline.image_stores.engine_images import EngineImages
from envbuild.pipeline.model import RunnerOptions, SelfTestOrder
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry import oci_types
from envbuild.resolve import plan_resolver
from envbuild.runners.docker_runner import DockerRunner
from envbuild.runners.kubernetes.kubernetes_runner import Kubernetes
from envbuild.runners.runner_interface import Watch
from envbuild.runners.slurm.slurm_runner import Slurm
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util import user_folders
from envbuild.util.errors import EnvbuildError, NetworkError, SettingsError, UsageError
from unit.registries import Registry, serving
from unit.runners.scripts import CPU
from unit.support import (
    PROFILE,
    CommandResult,
    configure,
    envbuild,
    image_of,
    lock_for,
    plan_of,
    profile_of,
    write_profile,
)


def order(on: RunnerOptions, request: RunRequest | None = None) -> SelfTestOrder:
    loaded = cast(LoadedProfile, SimpleNamespace(name="sample"))
    return SelfTestOrder(loaded, {}, "3.11", request or RunRequest(), on)


# An engine that can do nothing.
ENGINE = EngineImages(cast(StepContext, SimpleNamespace(engine=object())))


def runner(on: RunnerOptions, request: RunRequest | None = None) -> Any:
    return runner_selection.runner(order(on, request), ENGINE, image_of(), lambda line: None)


def test_the_command_line_goes_before_the_settings() -> None:
    assert isinstance(runner(RunnerOptions()), DockerRunner)
    configure("on: kubernetes\nkubernetes: {namespace: a, queue: 5}\n")
    assert isinstance(runner(RunnerOptions()), Kubernetes)
    assert isinstance(runner(RunnerOptions("local")), DockerRunner)
    assert isinstance(runner(RunnerOptions("slurm")), Slurm)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (RunnerOptions("local", {"slurm": {"partition": "a"}}), "--slurm is for --on slurm"),
        (RunnerOptions("slurm", {"kubernetes": {"namespace": "a"}}), "--kubernetes is for --on kubernetes"),
        (RunnerOptions("kubernetes", {"slurm": {"partition": "a"}}), "--slurm is for --on slurm"),
        (RunnerOptions("kubernetes", resume="7"), "no job 7 was submitted from here"),
        (RunnerOptions("local", resume="7"), "--resume is for --on slurm"),
        (RunnerOptions("kubernetes", nodes=2), "--nodes is for --on slurm"),
        (RunnerOptions("local", nodes=2), "--nodes is for --on slurm"),
        (RunnerOptions("slurm", nodes=2), "no interface is set"),
        (RunnerOptions("slurm", resume="7", nodes=2), "--resume and --nodes exclude each other"),
        (RunnerOptions("kubernetes", {"kubernetes": {"namspace": "a"}}), "kubernetes settings"),
    ],
)  # fmt: skip
def test_options_that_exclude_each_other_are_refused(on: RunnerOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        runner(on)


CLUSTERS = """on: slurm
slurm:
  partition: a b
  gres: {nosuch: x}
kubernetes:
  nodes:
    example.com/pool: x
    example.com/zone: x y
  queue: soon
"""


def refusal_of(on: RunnerOptions) -> tuple[type[EnvbuildError], list[tuple[int | None, str | None]]]:
    """Return the kind of error, and each fault's line and field."""
    with pytest.raises(EnvbuildError) as caught:
        runner(on)
    faults = caught.value.faults
    assert {fault.file for fault in faults if fault.line} <= {str(user_folders.config_file())}
    return type(caught.value), [(fault.line, fault.field) for fault in faults]


def test_an_invalid_setting_is_reported_with_its_line() -> None:
    configure(CLUSTERS)
    assert refusal_of(RunnerOptions()) == (SettingsError, [(3, "slurm.partition"), (4, "slurm.gres")])
    expected = [(9, "kubernetes.queue"), (8, "kubernetes.nodes.example.com/zone")]
    assert refusal_of(RunnerOptions("kubernetes")) == (SettingsError, expected)


def test_an_invalid_option_is_reported_without_a_line_of_the_settings() -> None:
    configure("slurm: {account: team}\n")
    assert refusal_of(RunnerOptions("slurm", {"slurm": {"partition": "a b"}})) == (UsageError, [(None, "partition")])
    assert refusal_of(RunnerOptions("slurm", {"slurm": {"container": "pyxis"}})) == (UsageError, [(None, "registry")])


def test_an_option_replaces_an_invalid_setting_or_is_reported_with_it() -> None:
    configure("slurm:\n  time: soon\n  partition: a b\n")
    assert refusal_of(RunnerOptions("slurm", {"slurm": {"time": "30"}})) == (SettingsError, [(3, "slurm.partition")])
    given = {"time": "30", "partition": "c d"}
    assert refusal_of(RunnerOptions("slurm", {"slurm": given})) == (UsageError, [(None, "partition")])
    assert refusal_of(RunnerOptions("slurm", {"slurm": {"time": "now"}})) == (
        UsageError,
        [(None, "time"), (3, "slurm.partition")],
    )
    assert isinstance(runner(RunnerOptions("slurm", {"slurm": {"time": "30", "partition": "c"}})), Slurm)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("slurm", {"gres": "x"}, "gres: must be gres.GPU=NAME, as in gres.h20=gpu:h20, not 'x'"),
        ("slurm", {"partion": "x"}, "partion: unknown setting (did you mean partition?)"),
        ("kubernetes", {"nodes": "x"}, "on the command line nodes.KEY=VALUE"),
        ("kubernetes", {"namspace": "x"}, "namspace: unknown setting (did you mean namespace?)"),
        ("kubernetes", {"registry": "http://x/y"}, "registry: must be HOST/REPOSITORY, without http://"),
    ],
)  # fmt: skip
def test_an_invalid_command_line_value_is_reported_with_a_suggestion(
    name: str, given: dict[str, str], words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        runner(RunnerOptions(name, {name: given}))
    assert words in " ".join(map(str, caught.value.faults))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kubernetes", "queue=5", "--kubernetes", "namespace="], "'namespace=': write KEY=VALUE, as in namespace="),
        (["--kubernetes", "=x", "--kubernetes", "y"], "'=x', 'y': write"),
        (["--slurm", "x"], "'x': write KEY=VALUE, as in partition=gpu"),
        (["--on", "slrum"], "did you mean slurm?"),
    ],
)  # fmt: skip
def test_a_malformed_option_is_named(options: list[str], words: str) -> None:
    done: CommandResult = envbuild("test", "--record", "sample", *options)
    assert done.code == 2 and words in done.stderr


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_gpus_of_this_machine_mean_nothing_to_a_scheduler(name: str) -> None:
    with pytest.raises(UsageError, match="--gpus names GPUs") as caught:
        runner(RunnerOptions(name), RunRequest(gpus=("0",)))
    called = {"slurm": "gres", "kubernetes": "products"}[name]
    assert "--gpu MODEL" in str(caught.value.hint) and f"{name}: {{{called}: ...}}" in str(caught.value.hint)


@pytest.mark.parametrize("words", [["test"], ["test", "--record"]])
@pytest.mark.parametrize("dry", [True, False])
def test_gpus_of_this_machine_are_lost_on_no_way_to_the_runner(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], dry: bool
) -> None:
    found: list[SelfTestOrder] = []

    def select(context: object, images: object, wanted: SelfTestOrder, *_: object, **__: object) -> None:
        found.append(wanted)
        raise UsageError("seen")

    loaded = profile_of(project, {**PROFILE, "gpus": ["a100"], "torch": "2.11.0"})
    known = lock_for(plan_resolver.resolve(loaded)), image_of()
    monkeypatch.setattr(make_build_and_test, "_locked_and_image", lambda *_: known)
    monkeypatch.setattr(build_records, "all_records", lambda *_: [object()])
    monkeypatch.setattr(lock_image_lookup_and_recipe, "matches", lambda *_: True)
    monkeypatch.setattr(selftest_steps, "tags_of", lambda *_: ())
    monkeypatch.setattr(StepContext, "engine", object())
    monkeypatch.setattr(make_build_and_test, "select_runner", select)
    done = envbuild(*words, "sample", "--gpus", "0,1", "--on", "slurm", *(["--dry-run"] if dry else []))
    assert (done.code, [wanted.request.gpus for wanted in found]) == (2, [("0", "1")]), done.stderr


def test_both_options_reach_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[RunnerOptions] = []

    def script(
        name: str, reference: str | None, progress: object, on: RunnerOptions, *arguments: object, brief: bool
    ) -> str:
        found.append(on)
        return "a: b\n"

    monkeypatch.setattr(make_build_and_test, "cluster_script", script)
    options = ["--on", "kubernetes", "--kubernetes", "namespace=x", "--kubernetes", "nodes.pool=gpu"]
    for words in (["test"], ["test", "--record"]):
        done: CommandResult = envbuild(*words, "sample", "--dry-run", *options, "--slurm", "partition=p")
        assert (done.code, done.stdout) == (0, "a: b\n")
    given = {"kubernetes": {"namespace": "x", "nodes.pool": "gpu"}, "slurm": {"partition": "p"}}
    assert [on.given for on in found] == [given] * 2
    assert envbuild("test", "--record", "sample", "--kubernetes", "namespace").code == 2


@pytest.mark.parametrize("given", ["two", "0", "65", "-1", "3.5", ""])
def test_an_invalid_number_of_nodes_is_reported_with_the_valid_range(given: str) -> None:
    done: CommandResult = envbuild("test", "sample", "--on", "slurm", "--nodes", given)
    assert done.code == 2 and f"{given!r} is not a number of nodes; write a number from 1 to 64" in done.stderr


@pytest.mark.parametrize(("given", "nodes"), [([], 1), (["--nodes", "1"], 1), (["--nodes", "64"], 64)])
def test_the_number_of_nodes_reaches_the_runner(monkeypatch: pytest.MonkeyPatch, given: list[str], nodes: int) -> None:
    found: list[RunnerOptions] = []

    def script(
        name: str, reference: str | None, progress: object, on: RunnerOptions, *arguments: object, brief: bool
    ) -> str:
        found.append(on)
        return ""

    monkeypatch.setattr(make_build_and_test, "cluster_script", script)
    assert envbuild("test", "--record", "sample", "--dry-run", "--on", "slurm", *given).code == 0
    assert [on.nodes for on in found] == [nodes]


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_of_several_scripts_has_a_title(project: Path, monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    """A single script is printed as sbatch accepts it; sbatch cannot accept two."""
    cluster = runner(RunnerOptions("slurm", {"slurm": {"interface": "ib0"}}))
    write_profile(project, PROFILE)
    found = SimpleNamespace(versions={}, python=""), object()
    monkeypatch.setattr(make_build_and_test, "find_image_store", lambda *_: ENGINE)
    monkeypatch.setattr(make_build_and_test, "_locked_and_image", lambda *_: found)
    monkeypatch.setattr(make_build_and_test, "select_runner", lambda *_, **__: cluster)
    monkeypatch.setattr(selftest_steps, "job_for", lambda *arguments: dataclasses.replace(CPU, nodes=arguments[-1]))
    text = make_build_and_test.cluster_script(
        "sample", None, cast(Any, mock.MagicMock()), RunnerOptions("slurm", nodes=nodes)
    )
    begun = [line for line in text.splitlines() if line.startswith(("#!", "# job"))]
    first, second = "# job 1 of 2: the self-test, on one node", "# job 2 of 2: dist.nodes, on 2 nodes, "
    if nodes == 1:
        assert text.startswith("#!/bin/bash\n") and len(begun) == 1
    else:
        assert begun == [first, "#!/bin/bash", f"{second}if the first job has passed", "#!/bin/bash"]
        assert text.startswith(first)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", ["kubernetes", "slurm"])
def test_a_dry_run_does_not_push(registry: Registry, name: str, there: bool) -> None:
    image = image_of()
    messages: list[str] = []
    document = {"schemaVersion": 2, "mediaType": oci_types.MANIFEST, "config": {"digest": image.id}, "layers": []}
    raw = json.dumps(document).encode()
    if there:
        registry.manifests[f"id-{image.id[7:]}"] = (oci_types.MANIFEST, raw)
    wanted = order(RunnerOptions(name, {name: {"registry": f"{registry.host}/team/x"}}))
    made = runner_selection.runner(wanted, ENGINE, image, messages.append, dry=True)
    digest = oci_types.digest_of(raw) if there else f"sha256:{'0' * 64}"
    assert made.image == f"{registry.host}/team/x@{digest}"
    assert any("zeros stand for its digest" in text for text in messages) != there
    if not there:
        with pytest.raises(AttributeError):  # otherwise the engine would push
            runner_selection.runner(wanted, ENGINE, image, messages.append)


@pytest.mark.parametrize("words", [["test"], ["test", "--record"]])
@pytest.mark.parametrize("name", ["kubernetes", "slurm"])
@pytest.mark.parametrize(
    ("options", "message"),
    [(["--gpu", "h20"], "is not for h20"), ([], "a job can request only one GPU model")],
)
def test_a_refusal_comes_before_the_push(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str, options: list[str], message: str
) -> None:
    loaded = profile_of(project, {**PROFILE, "gpus": ["a100", "h200"], "torch": "2.11.0"})
    locked, pushed = lock_for(plan_resolver.resolve(loaded)), list[object]()
    monkeypatch.setattr(make_build_and_test, "existing", lambda *_: (locked, image_of()))
    monkeypatch.setattr(build_records, "all_records", lambda *_: [object()])
    monkeypatch.setattr(lock_image_lookup_and_recipe, "matches", lambda *_: True)
    monkeypatch.setattr(selftest_steps, "tags_of", lambda *_: ())
    monkeypatch.setattr(StepContext, "engine", object())
    monkeypatch.setattr(registry_push, "push_from_engine", lambda *arguments: pushed.append(arguments))
    given = ["--on", name, f"--{name}", "registry=registry.example/team/x"]
    done: CommandResult = envbuild(*words, "sample", *given, *options)
    assert (done.code, pushed) == (2, []) and message in done.stderr


@pytest.mark.parametrize("registry", [None, "127.0.0.1:9/team/x"])
@pytest.mark.parametrize("dry", [True, False])
def test_an_image_that_no_node_pulls_is_reported(
    monkeypatch: pytest.MonkeyPatch, registry: str | None, dry: bool
) -> None:
    messages: list[str] = []
    settings_ = {"registry": registry} if registry else {}
    wanted = order(RunnerOptions("kubernetes", {"kubernetes": {"namespace": "a", **settings_}}))
    monkeypatch.setattr(
        runner_selection, "_pushed_reference", lambda place, *_: f"r/x@{image_of().id}" if place else None
    )
    made = runner_selection.runner(wanted, ENGINE, image_of(), messages.append, dry=dry)
    if not dry:

        def unreachable(*_: object) -> None:
            raise NetworkError("no cluster")

        monkeypatch.setattr("envbuild.runners.kubernetes.kubernetes_runner.Cluster", unreachable)
        with pytest.raises(NetworkError):
            made.run(CPU, Watch(say=messages.append))
    assert any("imagePullPolicy: Never" in text for text in messages) is (registry is None)


def test_a_dry_run_works_without_a_registry() -> None:
    messages: list[str] = []
    wanted = order(RunnerOptions("kubernetes", {"kubernetes": {"registry": "127.0.0.1:9/team/x"}}))
    made = runner_selection.runner(wanted, ENGINE, image_of(), messages.append, dry=True)
    assert "@sha256:000" in made.image and "did not answer" in messages[0]


@pytest.mark.parametrize("name", ["kubernetes", "slurm"])
@pytest.mark.parametrize("words", [["test"], ["test", "--record"]])
def test_a_dry_run_works_for_a_profile_that_is_only_locked(
    project: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], name: str
) -> None:
    loaded = profile_of(project, PROFILE)
    lock_file.write(lock_for(plan_of(project, PROFILE)), loaded.lock_file, "sample")
    monkeypatch.setattr(StepContext, "engine", object())
    done: CommandResult = envbuild(*words, "sample", "--on", name, "--dry-run")
    assert done.code == 0, done.stderr
    assert f"sha256:{'0' * 64}" in done.stdout
    assert "sample is not built: zeros stand for its image's digest" in done.stderr
    without = envbuild(*words, "sample", "--on", name)
    assert (without.code, "sample is not built" in without.stderr) == (6, True)


def test_the_manifests_are_shown_as_yaml(tmp_path: Path) -> None:
    made = runner(RunnerOptions("kubernetes"))
    assert [one["kind"] for one in yaml.safe_load_all(made.script(CPU))] == ["ConfigMap", "Job"]
