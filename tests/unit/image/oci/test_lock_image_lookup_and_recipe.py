"""Build records: which image a lock gives, and which images were made in another way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.image import build_records, extension_dockerfile
from envbuild.image.build_records import CompiledRecord, Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.layers import wheel_layers
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders
from unit.image.oci.layered_samples import written
from unit.support import PROFILE, image_of, plan_of, sha, whole_lock


@pytest.fixture
def locked(project: Path) -> Lock:
    return whole_lock(plan_of(project, PROFILE))


def engine(*images: Image) -> Engine:
    held = {image.handle: image for image in images}
    return cast(Engine, SimpleNamespace(find=held.get, version="26.1.5", builder=None))


def record(lock: Lock, image: Image, *wheels: CompiledRecord, recipe: str = "") -> Record:
    made = recipe or lock_image_lookup_and_recipe.recipe_digest(lock, "sample", wheels)
    found = Record(image.id, image.handle, lock.id, made, image.layers, "envbuild", wheels)
    build_records.write(found)
    return found


def test_an_image_is_found_by_its_record(locked: Lock) -> None:
    image = image_of()
    assert lock_image_lookup_and_recipe.matching_records(locked, "sample") == []
    made = record(locked, image)
    assert lock_image_lookup_and_recipe.matching_records(locked, "sample") == [made]
    assert lock_image_lookup_and_recipe.existing_image(engine(image), locked, "sample") == image
    assert lock_image_lookup_and_recipe.existing_image(engine(), locked, "sample") is None
    moved = dataclasses.replace(image_of("other"), handle=image.handle)
    assert lock_image_lookup_and_recipe.existing_image(engine(moved), locked, "sample") is None
    assert lock_image_lookup_and_recipe.older_image(engine(image), locked, "sample") is None
    another = dataclasses.replace(locked, environment={"A": "another lock"})
    assert lock_image_lookup_and_recipe.matching_records(another, "sample") == []
    assert list(build_records.all_records(image.id)) == [made]
    assert list(build_records.all_records(image_of("other").id)) == []


def test_an_image_that_is_made_in_another_way_today_is_older(locked: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_of()
    record(locked, image)
    monkeypatch.setattr(wheel_layers, "WRITER_VERSION", 10**6)
    assert lock_image_lookup_and_recipe.existing_image(engine(image), locked, "sample") is None
    assert lock_image_lookup_and_recipe.older_image(engine(image), locked, "sample") == image
    assert lock_image_lookup_and_recipe.older_image(engine(), locked, "sample") is None


def test_an_image_is_of_the_wheels_that_its_record_names(project: Path) -> None:
    """Also if they are not in the cache any more."""
    kernels = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["k"]}
    card = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels], "toolchain": {"sha256": "a" * 64}}
    lock = whole_lock(plan_of(project, card))
    one, two = (CompiledRecord("kernels", "key", "k.whl", sha(name), ()) for name in "12")
    first, second = record(lock, image_of("1"), one), record(lock, image_of("2"), two)
    assert first.recipe != second.recipe
    assert lock_image_lookup_and_recipe.matching_records(lock, "sample") == sorted(
        (first, second), key=lambda item: item.recipe
    )
    wrong = record(lock, image_of("3"), two, recipe=first.recipe)
    none = record(lock, image_of("4"), recipe=first.recipe)
    assert not any(lock_image_lookup_and_recipe.matches(item, lock, "sample") for item in (wrong, none))


def test_a_lock_that_cannot_be_described_has_no_image(locked: Lock) -> None:
    without = dataclasses.replace(locked, base=())
    record(without, image_of(), recipe="older")
    assert lock_image_lookup_and_recipe.matching_records(without, "sample") == []
    assert lock_image_lookup_and_recipe.older_image(engine(image_of()), without, "sample") == image_of()


def test_the_image_on_a_base_image_depends_on_dockerfile_and_installer(
    locked: Lock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_image = dataclasses.replace(locked, suite=None, image=f"a.example/b@sha256:{'a' * 64}", base=(), apt=())
    made = lock_image_lookup_and_recipe.built_record(engine(), on_image, "sample", image_of(), ())
    assert (made.builder, made.digest) == ("docker 26.1.5", None)
    assert lock_image_lookup_and_recipe.matches(made, on_image, "sample")
    assert not lock_image_lookup_and_recipe.matches(made, on_image, "other name, other text")
    (tmp_path / "install").write_text("#!/bin/sh\n", encoding="utf-8")
    monkeypatch.setattr(extension_dockerfile, "TOOLS", (tmp_path / "install", extension_dockerfile.TOOLS[1]))
    assert not lock_image_lookup_and_recipe.matches(made, on_image, "sample")


def test_the_record_of_written_layers_names_the_manifest(locked: Lock) -> None:
    image = written()
    made = lock_image_lookup_and_recipe.written_record(locked, image, "handle", ())
    assert (made.image, made.digest, made.handle) == (image.id, image.manifest.digest, "handle")
    assert (made.lock, made.recipe) == (locked.id, lock_image_lookup_and_recipe.recipe_digest(locked, "sample", ()))
    assert made.layers == tuple(layer.diff_id for layer in image.layers)
    assert made.builder.startswith("envbuild ")


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "{}", '{"image": "x"}', '{"layers": 5}', "\x00", "null"])
def test_a_damaged_record_is_ignored(locked: Lock, content: str) -> None:
    record(locked, image_of())
    (file,) = user_folders.state_folder("builds").iterdir()
    file.write_text(content, encoding="utf-8")
    assert lock_image_lookup_and_recipe.matching_records(locked, "sample") == []
    assert list(build_records.all_records()) == []


def test_a_build_record_with_unknown_keys_is_ignored(locked: Lock) -> None:
    record(locked, image_of())
    (file,) = user_folders.state_folder("builds").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "more": 1}), encoding="utf-8")
    assert list(build_records.all_records()) == []


def test_a_record_of_an_older_envbuild_is_read(locked: Lock) -> None:
    """It has no digest of the manifest."""
    record(locked, image_of(), recipe="older")
    (file,) = user_folders.state_folder("builds").iterdir()
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    del data["digest"]
    file.write_text(json.dumps(data), encoding="utf-8")
    (found,) = build_records.all_records()
    assert (found.recipe, found.digest) == ("older", None)


# the difference from an earlier image on a base image


def recorded(image: str, layers: str, builder: str = "docker 26", *wheels: CompiledRecord) -> Record:
    return Record(image, image, "lock", "recipe", tuple(layers), builder, wheels)


def wheel(name: str, sha256: str) -> CompiledRecord:
    return CompiledRecord(name, "key", "file", sha256, ())


NOW = recorded("now", "abcde", "docker 26", wheel("apex", "1"))
SAME_WHEEL = NOW.extensions[0]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (
            [recorded("then", "abcXe", "docker 26", SAME_WHEEL)],
            "gave then before, and now now; layer 4 (torch) of 5 differs. ",
        ),
        ([recorded("then", "aXcde", "docker 26", SAME_WHEEL)], "; layer 2 (base) of 5 differs. "),
        ([recorded("then", "XbcXe", "docker 26", SAME_WHEEL)], "; layers 1 (base), 4 (torch) of 5 differ. "),
        ([recorded("then", "abcd", "docker 26", SAME_WHEEL)], "; it had 4 layers, and has 5. "),
        ([recorded("then", "abcde", "docker 26", SAME_WHEEL)], "; its layers are the same, its labels or other"),
        (
            [recorded("then", "abcXe", "docker 24", SAME_WHEEL)],
            "differs; built by docker 24 before, by docker 26 now. ",
        ),
        (
            [recorded("then", "abcXe", "docker 26", wheel("apex", "2"))],
            "differs; recompiled, with a different wheel: apex. ",
        ),
        ([recorded("far", "XYZde"), recorded("near", "abcXe"), NOW], "gave near before, and now now; "),
    ],
)
def test_the_difference_from_the_earlier_image_is_reported(before: list[Record], message: str) -> None:
    assert message in str(build_records.difference_message(before, NOW, ["venv", "torch", "packages"]))


def test_the_same_image_is_not_reported() -> None:
    assert build_records.difference_message([], NOW, []) is None
    assert build_records.difference_message([NOW, NOW], NOW, []) is None
