"""Differences between two profiles, locks or images."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.cli import diff as command
from envbuild.lock import lock_file
from envbuild.lock.lock_entry_types import Overridden
from envbuild.lock.lock_file import Lock
from envbuild.report import profile_and_image_diff
from envbuild.report.profile_and_image_diff import ChangedValue, DiffLayer, DiffSide
from envbuild.resolve import profile_reader_and_overrides
from envbuild.util.errors import EngineError
from unit.image.oci import test_image_description
from unit.saved import Engine, tar
from unit.support import PROFILE, envbuild, lock_for, plan_of

SIDE = DiffSide(
    "a", "image", {}, {}, {}, {}, (DiffLayer("one", "1", 10), DiffLayer("two", "2", 20)), 30, "in the engine"
)


def test_a_thing_is_the_same_as_itself(project: Path) -> None:
    done = envbuild("diff", "h20", "h20")
    assert (done.code, done.stdout.splitlines()[0]) == (0, "h20 and h20 are the same")
    assert "new in" not in done.stdout
    assert envbuild("diff", "h20", "h20", "--json").document["state"] == "same"


@pytest.mark.parametrize(
    ("change", "last"),
    [
        ({"environment": {"X": "1"}}, "the layers are the same: they differ only in configuration"),
        ({"id": "sha256:1"}, "the layers are the same: they differ only in configuration"),  # for example, labels
        ({"layers": SIDE.layers[:1], "bytes": 10}, "new in b: 0 MB in the engine"),
        ({"layers": (*SIDE.layers, DiffLayer("three", "3", 5_000_000))}, "new in b: 5 MB in the engine"),
    ],
)
def test_a_difference_only_in_configuration_is_reported(change: dict[str, Any], last: str) -> None:
    a = replace(SIDE, id="sha256:0")
    found = profile_and_image_diff.compare_sides(a, replace(a, **{"name": "b", **change}))
    assert list(command._lines(found))[-1] == last
    assert found.document().state == ("configuration" if last.endswith("configuration") else "different")


def test_each_kind_of_change_is_reported() -> None:
    b = replace(
        SIDE,
        name="b",
        basics={"cuda": "13.0"},
        versions={"torch": "2.11.0"},
        environment={"X": "1"},
        advisories={"cublas-k0-fpe": "noted"},
        layers=(SIDE.layers[0], DiffLayer("three", "3", 5)),
    )
    a = replace(SIDE, basics={"cuda": None}, versions={"torch": "2.7.1", "numpy": "2"}, environment={"X": "1"})
    found = profile_and_image_diff.compare_sides(a, b)
    assert found.basics == (ChangedValue("cuda", None, "13.0"),)
    assert found.versions == (ChangedValue("numpy", "2", None), ChangedValue("torch", "2.7.1", "2.11.0"))
    assert found.environment == ()
    assert found.advisories == (ChangedValue("cublas-k0-fpe", None, "noted"),)
    assert (found.layers, found.new_bytes, found.same) == ((DiffLayer("three", "3", 5),), 5, False)


def test_layers_of_a_lock_are_not_held_against_those_of_an_image() -> None:
    found = profile_and_image_diff.compare_sides(SIDE, replace(SIDE, unit="to fetch"))
    assert (found.layers, found.new_bytes) == (None, None)
    unknown = replace(SIDE, layers=(DiffLayer("one", "9", None),))
    assert profile_and_image_diff.compare_sides(SIDE, unknown).new_bytes is None


def test_a_lock_file_is_held_against_its_profile_of_now(project: Path) -> None:
    before = lock_for(plan_of(project, PROFILE))
    lock_file.write(before, project / "old.lock.yaml", "sample")
    now = lock_for(plan_of(project, {**PROFILE, "packages": ["numpy", "einops"]}))
    lock_file.write(now, project / "profiles" / "sample.lock.yaml", "sample")
    diff = envbuild("diff", "old.lock.yaml", "sample", "--json").document
    assert diff["pins"] == [{"name": "einops", "a": None, "b": "1.0"}]
    assert [layer["title"] for layer in diff["layers"]] == ["packages"]
    assert diff["new_bytes"] == 2_000_000  # numpy and einops share a layer
    assert diff["advisory_states"] is None  # a lock alone does not contain GPUs


def test_a_profile_is_the_same_as_its_own_lock(project: Path) -> None:
    """A lock does not state GPUs, CUDA and driver: this does not count as a change."""
    done = envbuild("diff", "h20", str(profile_reader_and_overrides.load("h20").known_lock))
    assert done.code == 0 and " are the same" in done.stdout
    assert not any(word in done.stdout for word in ("gpus", "cuda ", "driver"))


def test_the_bytes_of_a_lock_are_those_of_its_files(project: Path) -> None:
    made = lock_for(plan_of(project, PROFILE))
    debs = sum(deb.bytes for deb in (*made.base, *made.apt))
    assert profile_and_image_diff.of_lock("sample", made).bytes == debs + sum(locked.bytes for locked in made.wheels)


def of_all_kinds() -> Lock:
    """A lock with archives, an override, an extension and packages of its own."""
    lock = test_image_description.golden("devel-archive")
    (extension,) = test_image_description.golden("extensions").extensions[:1]
    return replace(lock, overrides=(Overridden("torch", "1", "2"),), extensions=(extension,))


@pytest.mark.parametrize("name", ["cpu", "apt-layer", "devel-wheels", "devel-archive", "extensions", "of all kinds"])
def test_the_layers_of_a_lock_are_those_of_its_image(name: str) -> None:
    lock = of_all_kinds() if name == "of all kinds" else test_image_description.golden(name)
    listed = [layer.title for layer in profile_and_image_diff.of_lock("a", lock).layers]
    assert listed[0] == f"base {lock.suite}"
    shown = [title.partition(", compiled from")[0] for title in listed[1:]]
    assert ["base", *shown] == test_image_description.titles(lock)


@pytest.mark.parametrize("with_archive", [False, True])
def test_the_layers_on_a_base_image_are_those_of_the_image(with_archive: bool) -> None:
    """All layers of the base image are listed as one. A layer with links for the base image's nvcc is not listed,
    because the base image may already have these links."""
    lock = test_image_description.toolkit_of_base()
    if with_archive:
        lock = replace(lock, archives=test_image_description.golden("devel-archive").archives)
    image = [layer.title for layer in test_image_description.on_base(lock).layers]
    listed = [layer.title for layer in profile_and_image_diff.of_lock("a", lock).layers]
    assert listed[0] == f"base {lock.image}"
    assert listed[1:] == [title for title in image[2:] if title != "nvcc, of the base image"]


def test_h20_to_step_video_names_the_override_and_the_accepted_advisory(project: Path) -> None:
    diff = envbuild("diff", "h20", "step-video", "--json").document
    assert {"name": "nccl-abort-hang", "a": None, "b": "accepted"} in diff["advisory_states"]
    assert any(change["name"] == "nvidia-cublas-cu12" for change in diff["pins"])


def test_the_unknown_size_of_a_base_image_is_not_zero(project: Path) -> None:
    made = lock_for(plan_of(project, PROFILE))
    on_image = replace(made, suite=None, image=f"registry.example/cuda@sha256:{'1' * 64}", base=(), apt=())
    found = profile_and_image_diff.compare_sides(
        profile_and_image_diff.of_lock("a", made), profile_and_image_diff.of_lock("b", on_image)
    )
    assert (found.new_bytes, found.b.bytes) == (None, None)
    assert profile_and_image_diff.compare_sides(found.b, replace(found.b, name="c")).new_bytes == 0, (
        "the base is there already"
    )
    lock_file.write(on_image, project / "b.lock.yaml", "b")
    assert (
        f"b.lock.yaml: a base image and {len(found.b.layers) - 1} layers, unknown size to fetch"
        in envbuild("diff", "h20", "b.lock.yaml").stdout
    )


def test_nothing_in_an_image_reaches_the_terminal_but_text(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = replace(SIDE, environment={"A": "\x1b[2J\x1b]0;title\x07", "B\x9b": "1"})
    monkeypatch.setattr(command, "_image", lambda name: SIDE if name == "a:1" else hostile)
    done = envbuild("diff", "a:1", "b:1")
    assert "title" in done.stdout and done.stdout.replace("\n", "").isprintable()


def test_a_missing_file_is_reported(project: Path) -> None:
    assert envbuild("diff", "h20", "nosuch").code == 3
    assert envbuild("diff", "h20", "nosuch.lock.yaml").code == 3


def test_another_commit_of_an_extension_is_a_change_and_a_layer(project: Path) -> None:
    def side(commit: str) -> DiffSide:
        kernels = {"name": "kernels", "git": "https://git.example/kernels", "commit": commit, "modules": ["kernels"]}
        card = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels]}
        return profile_and_image_diff.of_lock("sample", lock_for(plan_of(project, card)))

    found = profile_and_image_diff.compare_sides(side("a" * 40), side("b" * 40))
    assert found.versions == (ChangedValue("kernels", "a" * 40, "b" * 40),)
    assert found.layers and [layer.title for layer in found.layers] == ["kernels, compiled from bbbbbbbbbbbb"]


def image_of(*layers: bytes) -> tuple[Any, DiffSide]:
    """An engine with the image, and what diff knows about the image."""
    engine = Engine(*layers)
    parts = tuple(DiffLayer(digest[:19], digest, 1) for digest in engine.image.layers)
    return engine, replace(SIDE, layers=parts, id=engine.image.id)


def test_files_of_two_images_are_compared(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer that differs is compared, also after one in which only the order of the files differs."""
    files = [("torch/a", "1"), ("torch.dist-info/b", "2")]
    images = {
        "a:1": image_of(tar([("etc", "1")]), tar(files), tar([("c", "1")])),
        "b:1": image_of(tar([("etc", "1")]), tar(files[::-1]), tar([("c", "2")])),
        "c:1": image_of(tar([("etc", "1")])),
    }
    known = {engine.image.id: engine for engine, _ in images.values()}
    both = SimpleNamespace(get=lambda name: images[name][0].image, saved=lambda image: known[image.id].saved(image))
    monkeypatch.setattr("envbuild.image.docker_engine.Engine", lambda: both)
    monkeypatch.setattr(command, "_image", lambda name: images[name][1])
    done = envbuild("diff", "a:1", "b:1", "--files", "--json")
    assert (done.code, done.document["state"]) == (0, "different")
    assert done.document["files"] == [
        {"layer": 2, "difference": None},
        {"layer": 3, "difference": "/c differs in content"},
    ]
    result = envbuild("diff", "a:1", "b:1", "--files")
    assert "layer 2: the same files in another order" in result.stdout.splitlines()
    assert "layer 3: /c differs in content" in result.stdout and "reading layer 2 of 3" in result.stderr
    assert envbuild("diff", "a:1", "a:1", "--files", "--json").document["files"] == []
    assert envbuild("diff", "a:1", "b:1", "--json").document["files"] is None
    assert "the first has 3, the second 1" in envbuild("diff", "a:1", "c:1", "--files").stderr
    with monkeypatch.context() as packed:  # as containerd's store keeps pulled layers
        packed.setattr(Engine, "saves", staticmethod(gzip.compress))
        assert envbuild("diff", "a:1", "b:1", "--files", "--json").document["files"] == done.document["files"]
    monkeypatch.setattr(Engine, "ends", 700)
    result = envbuild("diff", "a:1", "b:1", "--files")
    assert result.code == EngineError.code and "cannot be read" in result.stderr


def test_only_images_have_files(project: Path) -> None:
    done = envbuild("diff", "h20", "a:1", "--files")
    assert done.code == 2 and "--files compares two images of the engine" in done.stderr
