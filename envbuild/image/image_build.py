"""Builds an image from a lock and its Dockerfile with BuildKit, and records it (build_records_and_comparison.py)."""

from __future__ import annotations

import importlib.metadata
import shutil
from collections.abc import Callable, Mapping, Sequence

from envbuild.fetch import sha256_file_store
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.locked_artifact_types import LockedWheel
from envbuild.image import (
    build_context_folders,
    build_records_and_comparison,
    buildx,
    debian_base_tar,
    dockerfile_renderer,
)
from envbuild.image.build_records_and_comparison import Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.image.image_naming import repository
from envbuild.lock.lock_file import Lock
from envbuild.util import user_folders
from envbuild.util.canonical_json import canonical_digest
from envbuild.util.errors import DiskError, EngineError

# Layer size over wheel size, measured: 3.6 for torch 2.13.0+cpu (699 of 192 MB), 1.5 for cuBLAS 12.5.2.13 (553 of 363),
# 1.8 for all of step-video; base over its Debian packages: 4.1 (201 of 49 MB).
_WHEEL_UNPACKED, _DEB_UNPACKED = 3.7, 4.5
# CUDA's Debian packages by their Installed-Size: 2.7 (5.0 of 1.88 GB). They are unpacked once, in the builder.
_TOOL_UNPACKED = 3.0


def matching_records(lock: Lock, text: str) -> list[Record]:
    """Return the records of builds from this lock and Dockerfile by this envbuild, in any engine."""
    wanted = recipe_digest(lock, text)
    return [record for record in build_records_and_comparison.all_records() if record.recipe == wanted]


def existing_image(engine: Engine, lock: Lock, text: str) -> Image | None:
    """Return the image built from this lock and Dockerfile, if the engine still has it."""
    for record in matching_records(lock, text):
        image = engine.find(record.handle)
        if image and image.id == record.image:
            return image
    return None


def recipe_digest(lock: Lock, text: str) -> str:
    """Return the sha256 of everything that determines an image: lock, Dockerfile, installers, recipe of the base."""
    tools = [tool.read_text(encoding="utf-8") for tool in dockerfile_renderer.TOOLS]
    uv = importlib.metadata.version("uv")
    return canonical_digest([lock.id, text, tools, uv, debian_base_tar.base_recipe() if lock.suite else None])


def needed_bytes(lock: Lock, compiling: bool = False) -> int:
    """Return the bytes a build takes on the engine's disk: the context, its unpacked contents, and the layers made of
    them.

    `compiling`: include the tools that compile extensions.
    """
    wheels, archives, tools = _packed(lock, compiling)
    packed_bytes = sum(wheel.bytes for wheel in wheels) + sum(archive.bytes for archive in archives)
    deb_bytes = sum(deb.bytes for deb in (*lock.base, *lock.apt))
    tool_bytes = sum(deb.bytes for deb in tools)
    debs_bytes = deb_bytes * (1 + 2 * _DEB_UNPACKED) + tool_bytes * (1 + _TOOL_UNPACKED)
    return int(packed_bytes * (1 + _WHEEL_UNPACKED) + debs_bytes)


def _packed(lock: Lock, compiling: bool) -> tuple[Sequence[LockedWheel], Sequence[Archive], Sequence[Deb]]:
    """Return the wheels, the archives, and the builder's Debian packages; with `compiling`, wheels and archives include
    the builder's."""
    tools = lock.builder
    if tools is None or not compiling:
        return lock.wheels, lock.archives, ()
    return (*lock.wheels, *tools.wheels), (*lock.archives, *tools.archives), tools.debs


def fetched_bytes(lock: Lock, compiling: bool = False) -> int:
    """Return the bytes that our own caches still need: missing wheels and archives, and the base if it is not made yet.

    `compiling`: include the tools that compile extensions.
    """
    wheels, archives, tools = _packed(lock, compiling)
    wheel_store, archive_store, deb_store = (
        sha256_file_store.wheel_store(),
        sha256_file_store.archive_store(),
        sha256_file_store.debs(),
    )
    packed_bytes = sum(w.bytes for w in wheels if not wheel_store.holds(w.wheel.sha256, w.wheel.file))
    packed_bytes += sum(a.bytes for a in archives if not archive_store.holds(a.sha256, a.name))
    packed_bytes += sum(deb.bytes for deb in tools if not deb_store.holds(deb.sha256, deb.file))
    made = debian_base_tar.tar_file(lock).is_file() or not lock.suite
    return packed_bytes + (0 if made else int(sum(deb.bytes for deb in lock.base) * (2 + _DEB_UNPACKED)))


def require_disk_space(engine: Engine, lock: Lock, compiling: bool = False) -> None:
    """Raise DiskError, with the numbers, if a disk has no space for the downloads and the build. `compiling`: an
    extension is compiled first."""
    places = [(user_folders.cache_folder("wheels"), fetched_bytes(lock, compiling))]
    if engine.data_folder:
        places.append((engine.data_folder, needed_bytes(lock, compiling)))
    for folder, _ in places:
        device = folder.stat().st_dev
        needed = sum(size for other, size in places if other.stat().st_dev == device)
        available = shutil.disk_usage(folder).free
        if available < needed:
            raise DiskError(
                f"the build needs about {needed / 1e9:.1f} GB in {folder}, {available / 1e9:.1f} GB are free",
                hint="free space: envbuild prune; docker buildx prune; docker image prune",
            )


def start_build(engine: Engine, lock: Lock, name: str, text: str) -> None:
    """Build the part that needs no wheel, so that build_layers finds it in the engine's cache; the base must exist.
    Does nothing if an earlier build of this name already did that in this engine.

    Raises what build_layers raises, and Taken while another process builds on the same base.
    """
    _require_platform(engine, lock)
    beginning = dockerfile_renderer.beginning(text)
    made_of = debian_base_tar.tar_file(lock).stem if lock.suite else None
    key = canonical_digest([engine.identity, engine.builder, made_of, beginning])
    if build_context_folders.begun(name) == key:
        return
    build_context_folders.fill_beginning(lock, name)
    quiet: Callable[[str], None] = lambda line: None  # noqa: E731 - build_layers reports everything
    buildx.build(engine, lock, name, beginning, ["--output=type=cacheonly"], quiet, quiet, wait=False)
    build_context_folders.mark_begun(name, key)


def _require_platform(engine: Engine, lock: Lock) -> None:
    if engine.platform != lock.platform:
        raise EngineError(
            f"the engine is {engine.platform}, the image {lock.platform}", hint="use an engine of that platform"
        )


def build_layers(
    engine: Engine,
    lock: Lock,
    name: str,
    text: str,
    extensions: Sequence[BuiltWheel] = (),
    *,
    no_cache: bool = False,
    say: Callable[[str], None],
    on_line: Callable[[str], None],
) -> Image:
    """Build the image of a lock without its labels, under a separate tag, so that it can be audited.

    All its parts must be in the stores and its extensions compiled. Raises EngineError, BuildError or DiskError.
    """
    _require_platform(engine, lock)
    build_context_folders.fill_context(lock, name, {one.name: one.path for one in extensions})
    options = ["--no-cache"] if no_cache else []
    tag = layers_tag(lock, name)
    return _image(engine, lock, name, text, tag, options, say, on_line, lambda: require_disk_space(engine, lock))


def layers_tag(lock: Lock, name: str) -> str:
    """Return the tag of the layers before they are labelled. It remains if the audit fails, so that the layers can be
    inspected."""
    return f"{repository(name)}:{lock.short}-layers"


def build_labelled(
    engine: Engine,
    lock: Lock,
    name: str,
    text: str,
    labels: Mapping[str, str],
    extensions: Sequence[BuiltWheel] = (),
    *,
    say: Callable[[str], None],
    on_line: Callable[[str], None],
    note: Callable[[str], None],
) -> Image:
    """Build the same image with labels, tag it `envbuild/<name>:<12 hex of the lock id>`, and write the build record.
    `note` receives a message if a different image was recorded before.

    Runs after build_layers and uses its context and cached layers. Raises EngineError, BuildError or DiskError.
    """
    options = [f"--label={key}={value}" for key, value in sorted(labels.items())]
    image = _image(engine, lock, name, text, f"{repository(name)}:{lock.short}", options, say, on_line)
    builder = f"docker {engine.version}" + (f", builder {engine.builder}" if engine.builder else "")
    compiled = tuple(one.record for one in extensions)
    # before the record: once recorded, the image is not built again, and nothing else would remove the tag
    engine.remove(layers_tag(lock, name))
    record = Record(image.id, image.handle, lock.id, recipe_digest(lock, text), image.layers, builder, compiled)
    difference = build_records_and_comparison.difference_message(
        matching_records(lock, text), record, [layer.title for layer in dockerfile_renderer.image_layers(lock)]
    )
    if difference:
        note(
            difference
        )  # before the record: once recorded, the image is not built again, and the note would never be shown
    build_records_and_comparison.write(record)
    return image


def _image(
    engine: Engine,
    lock: Lock,
    name: str,
    text: str,
    tag: str,
    options: Sequence[str],
    say: Callable[[str], None],
    on_line: Callable[[str], None],
    ready: Callable[[], None] = lambda: None,
) -> Image:
    metadata = buildx.build(engine, lock, name, text, ["--tag", tag, "--load", *options], say, on_line, ready)
    image_id = metadata.get("containerimage.config.digest")
    image = engine.find(tag)
    if image is None or image.id != image_id:
        raise EngineError(
            f"{tag} is not the image that was just built ({image_id}): another process moved the tag, or this buildx "
            "does not report image ids, or the builder belongs to another engine, which keeps the image",
            hint="run the same command again; use buildx 0.10 or newer, and a --builder with the driver "
            "docker-container, remote or kubernetes",
        )
    return image
