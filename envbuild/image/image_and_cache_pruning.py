"""Finds what can be removed: images of no current lock, and cached files that no lock needs. Verified images, and
images that a container uses, are never removed."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.fetch import apt_result_cache
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image import (
    build_records,
    debian_base_tar,
    extension_wheel_build,
    lock_paths_of_built_images,
)
from envbuild.image.docker_engine import Engine
from envbuild.image.image_naming import LOCK_LABEL, PREFIX, VERIFIED, repository
from envbuild.image.layers import base_image_contents, layer_cache
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.image.oci import base_image_download, lock_image_lookup_and_recipe
from envbuild.lock.lock_file import Lock
from envbuild.util import temporary_files, user_folders
from envbuild.util.errors import EnvbuildError

_DAY = 24 * 3600
# How long unneeded files of a folder are kept: they may be in use by `verify --rebuild`, `export oci` or `install`,
# whose locks are not noted. A plan of `install` and a result of apt name no lock.
_KEPT = {"images": _DAY, "image-contents": _DAY, "layers": _DAY, "layers/blobs": _DAY, "find-links": _DAY,
         "install-plans": 30 * _DAY, apt_result_cache.FOLDER: 30 * _DAY}  # fmt: skip


@dataclass(frozen=True)
class Removable:
    """An image tag, or a cached file or folder, with its size in bytes. `holds`: the contents, if the name is a
    hash."""

    kind: str
    name: str
    bytes: int
    holds: str = ""


def images(
    engine: Engine, names: Iterable[str], current: Iterable[Lock], elsewhere: Iterable[str] = ()
) -> Iterator[Removable]:
    """Yield the images of the profiles `names` that are neither verified, nor used by a container, nor tagged with a
    current lock. Of the profiles `elsewhere`, whose locks are not visible here, yield such an image only if it has a
    build record. Also yield images with a build record that no longer have a tag, unless they are used."""
    repositories, others = {repository(name) for name in names}, {repository(name) for name in elsewhere}
    made = {record.handle for record in build_records.all_records()}
    keep_tags = {lock.short for lock in current} | {VERIFIED}
    listed = engine.images(PREFIX)
    kept = {handle for tag, handle, _ in listed if tag.rpartition(":")[2] == VERIFIED} | engine.used()
    for tag, handle, size in listed:
        named = tag.rpartition(":")[0]
        mine = named in repositories or (named in others and handle in made)
        if mine and handle not in kept and tag.rpartition(":")[2] not in keep_tags:
            yield Removable("image", tag, size)
    for lock_id, handle, size in engine.untagged(LOCK_LABEL):
        if handle in made and handle not in kept:  # a child image inherits the label but is not ours
            yield Removable("image", handle, size, f"without a tag, of lock {lock_id.removeprefix('sha256:')[:12]}")


def caches(names: Iterable[str], current: Iterable[Lock]) -> Iterator[Removable]:
    """Yield cached files that no current lock names, old plans of `install`, old results of apt, files that interrupted
    runs left, and the build contexts of the profiles `names`, whose process locks the caller must hold."""
    locks = list(current)
    wheels = {locked.wheel.sha256 for lock in locks for locked in _wheels(lock)}
    debs = {deb.sha256 for lock in locks for deb in lock.debs}
    archives = {sha256 for lock in locks for sha256 in _archives(lock)}
    commits = {one.digest for lock in locks for one in lock.extensions}
    compiled = {extension_wheel_build.key(lock, one) for lock in locks for one in lock.extensions}
    tars = [debian_base_tar.tar_file(lock, make=False) for lock in locks if lock.suite]
    bases = {tar.with_suffix(end).name for tar in tars for end in (".tar", ".sha256")}
    kinds = {"wheels": wheels, "debs": debs, "archives": archives, "bases": bases}
    kinds |= {kind: {f"{sha256}.json" for sha256 in wheels} for kind in ("listings", "contents")}
    kinds |= {"sources": commits, "extensions": compiled}
    kinds |= {"find-links": {lock.short for lock in locks}, "install-plans": set(), apt_result_cache.FOLDER: set()}
    based = {lock.image: lock.platform for lock in locks if lock.image}
    kinds["images"] = {name for pair in based.items() for name in base_image_download.cached_files(*pair)}
    kinds["image-contents"] = {name for lock in locks for name in _contents_files(lock)}
    keys = {key for lock in locks for key in lock_image_lookup_and_recipe.layer_keys(lock, _compiled_wheels(lock))}
    kinds |= layer_cache.files_of_layers(keys)
    for kind, wanted in kinds.items():
        folder = user_folders.cache_folder(kind, make=False)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            # A name with a leading dot is a file in transfer, unless it is old.
            kept = _KEPT.get(kind, _DAY if path.name.startswith(".") else 0)
            if path.name not in wanted and (not kept or time.time() - path.stat().st_mtime > kept):
                listed = path.iterdir() if path.is_dir() and kind != "find-links" else ()
                inside = ", ".join(sorted(file.name for file in listed))
                yield Removable(kind, str(path), _size(path), inside)
    for name in names:
        context = user_folders.cache_folder("contexts", make=False) / name
        if context.is_dir():
            yield Removable("contexts", str(context), _size(context))


def forget_gone_locks(engine: Engine, noted: Iterable[Path]) -> None:
    """Forget the locks that no longer exist and have no image left."""
    there = {tag.rpartition(":")[0] for tag, _, _ in engine.images(PREFIX)}
    for file in noted:
        if not file.exists() and repository(lock_paths_of_built_images.name(file)) not in there:
            lock_paths_of_built_images.forget_lock(file)


def temporary() -> Iterator[Removable]:
    """Yield temporary folders that killed processes left."""
    yield from (Removable("temporary", str(path), _size(path)) for path in temporary_files.abandoned())


def _compiled_wheels(lock: Lock) -> dict[str, WheelOfLayer]:
    found = filter(None, (extension_wheel_build.find_wheel(lock, one) for one in lock.extensions))
    return {one.name: WheelOfLayer(one.path, one.sha256) for one in found}


def _contents_files(lock: Lock) -> Iterator[str]:
    """Yield the name of the file with what was read from the lock's base image, if the image is in the cache."""
    if lock.image:
        with contextlib.suppress(EnvbuildError):  # nothing was read from an image that cannot be used
            if image := base_image_download.read_base_image(lock.image, lock.platform):
                environment = image.config.environment
                yield base_image_contents.contents_file(image.layers, lock.python, environment).name


def _wheels(lock: Lock) -> tuple[LockedWheel, ...]:
    return (*lock.wheels, *(lock.builder.wheels if lock.builder else ()))


def _archives(lock: Lock) -> Iterator[str]:
    """Yield the hashes of the archives; sdists are archives too."""
    yield from (archive.sha256 for archive in (*lock.archives, *(lock.builder.archives if lock.builder else ())))
    yield from (one.digest for one in lock.extensions if one.kind == "sdist")


def remove_items(engine: Engine | None, items: Iterable[Removable]) -> None:
    for item in items:
        if item.kind == "image":
            assert engine is not None
            engine.remove(item.name)
        elif Path(item.name).is_dir():
            shutil.rmtree(item.name, ignore_errors=True)
        else:
            Path(item.name).unlink(missing_ok=True)


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
