"""Build records: which image a lock gives, and which images were made in another way."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from envbuild.image import build_records
from envbuild.image.build_records import CompiledRecord, Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.layers import base_image_contents, base_image_layers, venv_skeleton, wheel_layers
from envbuild.image.oci import base_image_download, image_description, lock_image_lookup_and_recipe
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders
from envbuild.util.errors import BuildError
from unit.image.oci.layered_samples import written
from unit.support import PROFILE, image_of, plan_of, sha, whole_lock

OLDER = "built by an older envbuild"


@pytest.fixture
def locked(project: Path) -> Lock:
    return whole_lock(plan_of(project, PROFILE))


def engine(*images: Image) -> Engine:
    held = {image.handle: image for image in images}
    return cast(Engine, SimpleNamespace(find=held.get, version="26.1.5", builder=None))


def record(lock: Lock, image: Image, *wheels: CompiledRecord, recipe: str = "") -> Record:
    made = recipe or lock_image_lookup_and_recipe.recipe_digest(lock, wheels)
    found = Record(image.id, image.handle, lock.id, made, image.layers, "envbuild", wheels)
    build_records.write(found)
    return found


def test_an_image_is_found_by_its_record(locked: Lock) -> None:
    image = image_of()
    assert lock_image_lookup_and_recipe.matching_records(locked) == []
    made = record(locked, image)
    assert lock_image_lookup_and_recipe.matching_records(locked) == [made]
    assert lock_image_lookup_and_recipe.existing_image(engine(image), locked) == image
    assert lock_image_lookup_and_recipe.existing_image(engine(), locked) is None
    moved = dataclasses.replace(image_of("other"), handle=image.handle)
    assert lock_image_lookup_and_recipe.existing_image(engine(moved), locked) is None
    assert lock_image_lookup_and_recipe.built_differently(locked, engine(image)) is None
    another = dataclasses.replace(locked, environment={"A": "another lock"})
    assert lock_image_lookup_and_recipe.matching_records(another) == []
    assert list(build_records.all_records(image.id)) == [made]
    assert list(build_records.all_records(image_of("other").id)) == []


def test_an_image_that_is_made_in_another_way_today_is_older(locked: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    image = image_of()
    record(locked, image)
    monkeypatch.setattr(wheel_layers, "WRITER_VERSION", 10**6)
    assert lock_image_lookup_and_recipe.existing_image(engine(image), locked) is None
    assert lock_image_lookup_and_recipe.built_differently(locked, engine(image)) == OLDER
    assert lock_image_lookup_and_recipe.built_differently(locked, engine()) is None


def test_an_image_is_of_the_wheels_that_its_record_names(project: Path) -> None:
    """The image is found even if the wheels are not in the cache any more."""
    kernels = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["k"]}
    card = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels], "toolchain": {"sha256": "a" * 64}}
    lock = whole_lock(plan_of(project, card))
    one, two = (CompiledRecord("kernels", "key", "k.whl", sha(name), ()) for name in "12")
    first, second = record(lock, image_of("1"), one), record(lock, image_of("2"), two)
    assert first.recipe != second.recipe
    assert lock_image_lookup_and_recipe.matching_records(lock) == sorted((first, second), key=lambda item: item.recipe)
    wrong = record(lock, image_of("3"), two, recipe=first.recipe)
    none = record(lock, image_of("4"), recipe=first.recipe)
    assert not any(lock_image_lookup_and_recipe.matches(item, lock) for item in (wrong, none))


def test_a_lock_that_cannot_be_described_has_no_image(locked: Lock) -> None:
    without = dataclasses.replace(locked, base=())
    record(without, image_of(), recipe="older")
    assert lock_image_lookup_and_recipe.matching_records(without) == []
    assert lock_image_lookup_and_recipe.built_differently(without, engine(image_of())) == OLDER


@pytest.mark.parametrize("on_image", [False, True])
def test_an_image_of_more_layers_than_are_allowed_today_is_older(
    locked: Lock, monkeypatch: pytest.MonkeyPatch, on_image: bool
) -> None:
    """After an upgrade that allows fewer layers, `status` and `push` say that an older envbuild built the image."""
    lock, image = on_base_image(locked) if on_image else locked, image_of()
    record(lock, image)
    monkeypatch.setattr(image_description, "MAX_LAYERS", 2)
    assert lock_image_lookup_and_recipe.existing_image(engine(image), lock) is None
    assert lock_image_lookup_and_recipe.built_differently(lock, engine(image)) == OLDER


def on_base_image(locked: Lock, digest: str = "a") -> Lock:
    return dataclasses.replace(locked, suite=None, image=f"a.example/b@sha256:{digest * 64}", base=(), apt=())


def test_the_recipe_on_a_base_image_needs_nothing_of_it(locked: Lock) -> None:
    lock = on_base_image(locked)
    recipe = lock_image_lookup_and_recipe.recipe_digest(lock, ())
    assert recipe != lock_image_lookup_and_recipe.recipe_digest(on_base_image(locked, "b"), ())
    assert lock_image_lookup_and_recipe.matches(record(lock, image_of()), lock)
    assert not user_folders.cache_folder("images", make=False).exists()


@pytest.mark.parametrize(
    ("module", "constant", "value"),
    [
        (base_image_contents, "VERSION", 10**6),
        (base_image_download, "VERSION", 10**6),
        (base_image_layers, "WRITER_VERSION", 10**6),
        (venv_skeleton, "VERSION", 10**6),
        (wheel_layers, "WRITER_VERSION", 10**6),
        (image_description, "VARIABLES", {"A": "b"}),
    ],
)
def test_an_image_on_a_base_image_that_is_made_in_another_way_today_is_older(
    locked: Lock, monkeypatch: pytest.MonkeyPatch, module: ModuleType, constant: str, value: object
) -> None:
    lock, image = on_base_image(locked), image_of()
    record(lock, image)
    monkeypatch.setattr(module, constant, value)
    assert lock_image_lookup_and_recipe.existing_image(engine(image), lock) is None
    assert lock_image_lookup_and_recipe.built_differently(lock, engine(image)) == OLDER


def test_the_recipe_on_a_base_image_names_the_wheels_of_the_extensions(project: Path) -> None:
    kernels = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["k"]}
    base = {"image": f"a.example/b@sha256:{'a' * 64}"}
    card = {**PROFILE, "base": base, "apt": [], "torch": "2.11.0", "gpus": ["h200"], "extensions": [kernels]}
    lock = whole_lock(plan_of(project, card))
    one, two = (CompiledRecord("kernels", "key", "k.whl", sha(name), ()) for name in "12")
    assert lock_image_lookup_and_recipe.recipe_digest(lock, [one]) != lock_image_lookup_and_recipe.recipe_digest(
        lock, [two]
    )


def test_a_base_image_that_is_not_in_the_cache_cannot_be_described(locked: Lock) -> None:
    with pytest.raises(BuildError, match=r"the base image a\.example/b@sha256:a+ is not in the cache"):
        lock_image_lookup_and_recipe.describe_lock(on_base_image(locked), {})


def test_the_record_of_written_layers_names_the_manifest(locked: Lock) -> None:
    image = written()
    made = lock_image_lookup_and_recipe.written_record(locked, image, "handle", ())
    assert (made.image, made.digest, made.handle) == (image.id, image.manifest.digest, "handle")
    assert (made.lock, made.recipe) == (locked.id, lock_image_lookup_and_recipe.recipe_digest(locked, ()))
    assert made.layers == tuple(layer.diff_id for layer in image.layers)
    assert made.builder.startswith("envbuild ")


@pytest.mark.parametrize("content", ["", "{", "[]", "5", "{}", '{"image": "x"}', '{"layers": 5}', "\x00", "null"])
def test_a_damaged_record_is_ignored(locked: Lock, content: str) -> None:
    record(locked, image_of())
    (file,) = user_folders.state_folder("builds").iterdir()
    file.write_text(content, encoding="utf-8")
    assert lock_image_lookup_and_recipe.matching_records(locked) == []
    assert list(build_records.all_records()) == []


def test_a_build_record_with_unknown_keys_is_ignored(locked: Lock) -> None:
    record(locked, image_of())
    (file,) = user_folders.state_folder("builds").iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "more": 1}), encoding="utf-8")
    assert list(build_records.all_records()) == []


def test_a_record_of_an_older_envbuild_is_read(locked: Lock) -> None:
    """Such a record has no digest of the manifest."""
    record(locked, image_of(), recipe="older")
    (file,) = user_folders.state_folder("builds").iterdir()
    data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    del data["digest"]
    file.write_text(json.dumps(data), encoding="utf-8")
    (found,) = build_records.all_records()
    assert (found.recipe, found.digest) == ("older", None)
