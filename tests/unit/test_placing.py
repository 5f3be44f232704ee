"""Which runner is taken, what does not go together, and what a cluster would be given."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from envbuild import pipeline, placing
from envbuild.errors import UsageError
from envbuild.image.engine import Engine
from envbuild.making import On, Options
from envbuild.proof.job import Asked
from envbuild.proof.runners.kubernetes.runner import Kubernetes
from envbuild.proof.runners.local import Local
from envbuild.proof.runners.slurm.runner import Slurm
from unit.support import Said, configure, envbuild, image_of


def runner(on: On, asked: Asked | None = None) -> Any:
    options = Options(on=on, asked=asked or Asked())
    return placing.runner(options, cast(Engine, object()), image_of(), "sample", lambda line: None)


def test_the_command_line_goes_before_the_settings() -> None:
    assert isinstance(runner(On()), Local)
    configure("on: kubernetes\nkubernetes: {namespace: a, queue: 5}\n")
    assert isinstance(runner(On()), Kubernetes)
    assert isinstance(runner(On("local")), Local)
    assert isinstance(runner(On("slurm")), Slurm)


@pytest.mark.parametrize(
    ("on", "words"),
    [
        (On("local", {"slurm": {"partition": "a"}}), "--slurm is for --on slurm"),
        (On("slurm", {"kubernetes": {"namespace": "a"}}), "--kubernetes is for --on kubernetes"),
        (On("kubernetes", {"slurm": {"partition": "a"}}), "--slurm is for --on slurm"),
        (On("kubernetes", resume="7"), "--resume is for --on slurm"),
        (On("local", resume="7"), "--resume is for --on slurm"),
        (On("nomad"), "there is no runner 'nomad'"),
        (On("kubernetes", {"kubernetes": {"namspace": "a"}}), "settings of kubernetes"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(on: On, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        runner(on)


@pytest.mark.parametrize("name", ["slurm", "kubernetes"])
def test_gpus_of_this_machine_mean_nothing_to_a_scheduler(name: str) -> None:
    with pytest.raises(UsageError, match="--gpus names GPUs"):
        runner(On(name), Asked(gpus=("0",)))


def test_both_options_reach_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[On] = []

    def script(name: str, reference: str | None, progress: object, on: On, *asked: object) -> str:
        found.append(on)
        return "a: b\n"

    monkeypatch.setattr(pipeline, "script", script)
    options = ["--on", "kubernetes", "--kubernetes", "namespace=x", "--kubernetes", "nodes.pool=gpu"]
    for verb in ("test", "prove"):
        done: Said = envbuild(verb, "sample", "--dry-run", *options, "--slurm", "partition=p")
        assert (done.code, done.stdout) == (0, "a: b\n")
    given = {"kubernetes": {"namespace": "x", "nodes.pool": "gpu"}, "slurm": {"partition": "p"}}
    assert [on.given for on in found] == [given] * 2
    assert envbuild("prove", "sample", "--kubernetes", "namespace").code == 2


def test_the_manifests_are_shown_as_yaml(tmp_path: Path) -> None:
    made = runner(On("kubernetes"))
    from unit.proof.runners.scripts import CPU

    assert [one["kind"] for one in yaml.safe_load_all(made.script(CPU))] == ["ConfigMap", "Job"]
