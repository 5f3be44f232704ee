"""Describes the image of a lock, and finds an image that was built from it: by the build records, and in the engine."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from envbuild.fetch.archive_spec import FOLDERS, TOOLKIT
from envbuild.fetch.sha256_file_store import Store
from envbuild.image import build_records, debian_base_tar
from envbuild.image.build_records import CompiledRecord, Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.image_naming import repository
from envbuild.image.layers import base_image_contents
from envbuild.image.layers.base_image_contents import BaseContents
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.image.oci import base_image_download, image_description
from envbuild.image.oci.base_image_download import BaseImage
from envbuild.image.oci.image_description import ImageDescription, ImageInputs, OciImage
from envbuild.lock.lock_file import Lock
from envbuild.registry.image_content_reader import Config
from envbuild.util import strict_and_canonical_json, user_folders
from envbuild.util.errors import BuildError, EnvbuildError, LockError
from envbuild.util.untrusted_input_errors import Refusal


def describe_lock(lock: Lock, compiled: Mapping[str, WheelOfLayer]) -> ImageDescription:
    """Describe the image of a lock by the paths of its files in the caches. `compiled`: the wheels of its extensions by
    name. Reads only the files of a base image. Writes only the cached contents of a base image, and removes damaged
    files of it.

    Raises what `image_of_lock` and `base_contents` raise, HashMismatch if a layer of the base image was damaged on this
    disk, and BuildError if the base image is not in the cache.
    """
    return _described(lock, compiled, _base_image(lock))


def _described(
    lock: Lock, compiled: Mapping[str, WheelOfLayer], on_image: tuple[BaseImage, BaseContents] | None
) -> ImageDescription:
    base, apt_base = (debian_base_tar.tar_file(lock, make=False, apt=apt) for apt in (False, True))
    wheels, archives = (Store(user_folders.cache_folder(kind, make=False)) for kind in ("wheels", "archives"))
    inputs = ImageInputs(base, apt_base, wheels, archives, compiled, on_image)
    return image_description.image_of_lock(lock, inputs)


def _base_image(lock: Lock) -> tuple[BaseImage, BaseContents] | None:
    if lock.image is None:
        return None
    image = base_image_download.read_base_image(lock.image, lock.platform)
    if image is None:
        raise BuildError(f"the base image {lock.image} is not in the cache", hint="run the same command again")
    blobs, environment = base_image_download.CachedBlobs(), image.config.environment
    try:
        return image, base_image_contents.base_contents(blobs, image.layers, lock.python, environment)
    except Refusal:
        base_image_download.require_intact_layers(image)
        raise


def layer_keys(lock: Lock, compiled: Mapping[str, WheelOfLayer]) -> set[str]:
    """Return the keys of the layers of a lock's image in the cache, whether the cache has them or not. `compiled`: as
    for `describe_lock`; a wheel may be missing. Reads no layer: if the contents of a base image are not in the cache,
    the result lacks the keys of the layers made from them. Empty for a lock without a valid image."""
    wheels = {one.name: compiled.get(one.name, WheelOfLayer(Path(one.name), "")) for one in lock.extensions}
    with contextlib.suppress(EnvbuildError):
        described = _described(lock, wheels, _known_base_image(lock))
        return {layer.recipe.key for layer in described.layers if layer.recipe.key is not None}
    return set()


def _known_base_image(lock: Lock) -> tuple[BaseImage, BaseContents] | None:
    """Return the base image with the contents in the cache, or a stand-in if they are not there."""
    if lock.image is None:
        return None
    image = base_image_download.read_base_image(lock.image, lock.platform)
    contents = image and base_image_contents.known_contents(image.layers, lock.python, image.config.environment)
    return (image, contents) if image and contents else _stand_in(lock, lock.image)


def recipe_digest(lock: Lock, compiled: Iterable[CompiledRecord]) -> str:
    """Return the sha256 of what determines the image of a lock. `compiled`: the wheels of the extensions.

    A base image need not be in the cache: the lock, whose id is a label of the image, names it by digest, and what is
    read from it depends only on the version of the reader.
    """
    wheels = {one.name: WheelOfLayer(Path(one.file), one.sha256) for one in compiled}
    if lock.image is None:
        return describe_lock(lock, wheels).recipe
    recipe = _described(lock, wheels, _stand_in(lock, lock.image)).recipe
    versions = [base_image_contents.VERSION, base_image_download.VERSION]
    return strict_and_canonical_json.canonical_digest([versions, recipe])


def _stand_in(lock: Lock, reference: str) -> tuple[BaseImage, BaseContents]:
    """Return a base image without layers, and contents that fit the lock."""
    image = BaseImage(reference, "", (), Config("", (), {}, {}), ())
    python, home = f"/usr/bin/python{lock.python}", FOLDERS[TOOLKIT]
    release = lock.nvcc.release if lock.nvcc else ""
    contents = BaseContents(
        interpreter=python,
        executable=python,
        version=lock.python,
        templates={},
        nvcc=release,
        library_folder=f"{home}/lib64",
        libraries=("libcudart.so.0",),
        lib64="",
        folders=dict(FOLDERS),
    )
    return image, contents


def matches(record: Record, lock: Lock) -> bool:
    """Whether this envbuild would make the recorded image from the lock, with the wheels of the record. If the lock
    records a different wheel that was compiled from the same inputs, it would not."""
    recorded = (lock.recorded_wheel(one.name, one.key) or one for one in record.extensions)
    same = all(wheel.sha256 == one.sha256 for wheel, one in zip(recorded, record.extensions, strict=True))
    return same and _has_recipe(record, lock)


def _has_recipe(record: Record, lock: Lock) -> bool:
    if record.lock != lock.id or {one.name for one in record.extensions} != {one.name for one in lock.extensions}:
        return False
    try:
        return record.recipe == recipe_digest(lock, record.extensions)
    except (BuildError, LockError):  # this envbuild refuses to describe the image; an older one described it
        return False


def matching_records(lock: Lock) -> list[Record]:
    """Return the records of images that this envbuild makes from the lock, in any engine."""
    return [record for record in build_records.all_records() if matches(record, lock)]


def existing_image(engine: Engine, lock: Lock) -> Image | None:
    """Return the image of this lock, if the engine still has it."""
    return next(_images(engine, matching_records(lock)), None)


def built_differently(lock: Lock, engine: Engine | None = None) -> str | None:
    """Return how an image was built from the lock that does not count as its image: from a different recipe, for
    example by an older envbuild, or with a different compiled wheel. None if there is no such image, in the engine or,
    without one, in the build records."""
    records = [one for one in build_records.all_records() if one.lock == lock.id and not matches(one, lock)]
    wheel = "built with a different compiled wheel than the lock records"
    for is_older, text in ((False, wheel), (True, "built by an older envbuild")):
        found = [one for one in records if _has_recipe(one, lock) is not is_older]
        if found and (engine is None or next(_images(engine, found), None)):
            return text
    return None


def recorded_image(record: Record) -> Image:
    """Return the image of a build record. Its labels, environment and size are not known without an engine."""
    return Image(record.image, record.digest or record.handle, record.layers, {}, {}, 0)


def _images(engine: Engine, records: Iterable[Record]) -> Iterator[Image]:
    for record in records:
        image = engine.find(record.handle)
        if image and image.id == record.image:
            yield image


def layers_tag(lock: Lock, name: str) -> str:
    """Return the name and tag of an image before it is audited. It remains if the audit fails, so that the image can be
    inspected."""
    return f"{repository(name)}:{lock.short}-layers"


def written_record(lock: Lock, image: OciImage, handle: str, compiled: Sequence[CompiledRecord]) -> Record:
    """Return the record of an image whose layers envbuild wrote. `handle`: its id in the engine."""
    layers = tuple(layer.diff_id for layer in image.layers)
    recipe, digest = recipe_digest(lock, compiled), image.manifest.digest
    return Record(image.id, handle, lock.id, recipe, layers, builder(), tuple(compiled), digest)


def builder() -> str:
    """The name of the builder in the record of an image that envbuild wrote."""
    return f"envbuild {importlib.metadata.version('envbuild')}"
