"""Finds the image that was built from a lock, by the build records, and whether the engine has it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from envbuild.fetch.sha256_file_store import Store
from envbuild.image import (
    build_records_and_comparison,
    buildkit_build_on_base_image,
    debian_base_tar,
    dockerfile_renderer,
)
from envbuild.image.build_records_and_comparison import CompiledRecord, Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.image_naming import repository
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.image.oci import image_description
from envbuild.image.oci.image_description import ImageDescription, ImageInputs, OciImage
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders
from envbuild.util.errors import BuildError


def describe_lock(lock: Lock, compiled: Mapping[str, WheelOfLayer]) -> ImageDescription:
    """Describe the image of a lock by the paths of its files in the caches. Reads and creates no file. `compiled`: the
    wheels of its extensions by name."""
    base, apt_base = (debian_base_tar.tar_file(lock, make=False, apt=apt) for apt in (False, True))
    wheels, archives = (Store(user_folders.cache_folder(kind, make=False)) for kind in ("wheels", "archives"))
    return image_description.image_of_lock(lock, ImageInputs(base, apt_base, wheels, archives, compiled))


def recipe_digest(lock: Lock, name: str, compiled: Iterable[CompiledRecord]) -> str:
    """Return the sha256 of everything that determines the image of a lock, as in a build record. `name`: the profile's
    name; `compiled`: the wheels of the extensions."""
    if lock.image:
        return buildkit_build_on_base_image.buildkit_recipe(lock, dockerfile_renderer.render(lock, name))
    return _written_recipe(lock, compiled)


def _written_recipe(lock: Lock, compiled: Iterable[CompiledRecord]) -> str:
    return describe_lock(lock, {one.name: WheelOfLayer(Path(one.file), one.sha256) for one in compiled}).recipe


def matches(record: Record, lock: Lock, name: str) -> bool:
    """Whether this envbuild would make the recorded image from the lock, with the wheels of the record."""
    if record.lock != lock.id or {one.name for one in record.extensions} != {one.name for one in lock.extensions}:
        return False
    try:
        return record.recipe == recipe_digest(lock, name, record.extensions)
    except BuildError:  # the image of this lock cannot be described any more
        return False


def matching_records(lock: Lock, name: str) -> list[Record]:
    """Return the records of images that this envbuild makes from the lock, in any engine."""
    return [record for record in build_records_and_comparison.all_records() if matches(record, lock, name)]


def existing_image(engine: Engine, lock: Lock, name: str) -> Image | None:
    """Return the image of this lock, if the engine still has it."""
    return next(_images(engine, matching_records(lock, name)), None)


def older_image(engine: Engine, lock: Lock, name: str) -> Image | None:
    """Return an image of this lock in the engine that an older envbuild built, from a different recipe."""
    records = (record for record in build_records_and_comparison.all_records() if record.lock == lock.id)
    return next(_images(engine, (record for record in records if not matches(record, lock, name))), None)


def _images(engine: Engine, records: Iterable[Record]) -> Iterator[Image]:
    for record in records:
        image = engine.find(record.handle)
        if image and image.id == record.image:
            yield image


def layers_tag(lock: Lock, name: str) -> str:
    """Return the tag of an image before it is audited. It remains if the audit fails, so that the image can be
    inspected."""
    return f"{repository(name)}:{lock.short}-layers"


def written_record(lock: Lock, image: OciImage, handle: str, compiled: Sequence[CompiledRecord]) -> Record:
    """Return the record of an image whose layers envbuild wrote. `handle`: its id in the engine."""
    layers = tuple(layer.diff_id for layer in image.layers)
    recipe, digest = _written_recipe(lock, compiled), image.manifest.digest
    return Record(image.id, handle, lock.id, recipe, layers, builder(), tuple(compiled), digest)


def built_record(engine: Engine, lock: Lock, name: str, image: Image, compiled: Iterable[CompiledRecord]) -> Record:
    """Return the record of an image that the engine built on a base image."""
    by = f"docker {engine.version}" + (f", builder {engine.builder}" if engine.builder else "")
    recipe = recipe_digest(lock, name, ())
    return Record(image.id, image.handle, lock.id, recipe, image.layers, by, tuple(compiled))


def builder() -> str:
    """The name of the builder in the record of an image that envbuild wrote."""
    return f"envbuild {importlib.metadata.version('envbuild')}"
