"""Estimates the disk space that the image of a lock needs: in envbuild's cache, and where the engine keeps images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from envbuild.fetch import sha256_file_store
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image import debian_base_tar
from envbuild.image.docker_engine import Engine
from envbuild.image.layers import layer_cache
from envbuild.image.layers.base_image_contents import BaseLayerRef
from envbuild.image.oci import base_image_download
from envbuild.image.oci.base_image_download import BaseImage
from envbuild.lock.lock_file import Lock
from envbuild.registry import oci_types
from envbuild.util import disk_space, user_folders
from envbuild.util.errors import EngineError

# Layer size over wheel size, measured: 3.6 for torch 2.13.0+cpu (699 of 192 MB), 1.5 for cuBLAS 12.5.2.13 (553 of 363),
# 1.8 for all of step-video; base over its Debian packages: 4.1 (201 of 49 MB).
_WHEEL_UNPACKED, _LIBRARY_UNPACKED, _DEB_UNPACKED = 3.7, 2.0, 4.5
# CUDA's Debian packages by their Installed-Size: 2.7 (5.0 of 1.88 GB). They are unpacked once, in the builder.
_TOOL_UNPACKED = 3.0
# Layer over its blob, measured: 2.8 for Debian bookworm's base (201 of 72 MB).
_BLOB_UNPACKED = 2.8
_COPIES = 2  # the engine keeps an archive that it loads until its layers are unpacked


def needed_bytes(lock: Lock, compiling: bool = False) -> int:
    """Estimate the bytes that an image takes on the engine's disk while it is loaded or built. The layers of a base
    image count only if its manifest was downloaded.

    `compiling`: include the tools that compile extensions.
    """
    wheels, archives, tools = _packed(lock, compiling)
    unpacked = sum(wheel.bytes * _unpacked(wheel) for wheel in wheels)
    unpacked += sum(archive.bytes for archive in archives) * _WHEEL_UNPACKED
    unpacked += sum(deb.bytes for deb in (*lock.base, *lock.apt)) * _DEB_UNPACKED
    unpacked += _base_image_unpacked(lock)
    return int(unpacked * _COPIES + sum(deb.bytes for deb in tools) * (1 + _TOOL_UNPACKED))


def _unpacked(wheel: LockedWheel) -> float:
    return _LIBRARY_UNPACKED if wheel.wheel.name.startswith("nvidia-") else _WHEEL_UNPACKED


def _base_image_unpacked(lock: Lock) -> float:
    image = base_image_download.read_base_image(lock.image, lock.platform) if lock.image else None
    return sum(_layer_unpacked(image, layer) for layer in image.layers) if image else 0


def _layer_unpacked(image: BaseImage, layer: BaseLayerRef) -> float:
    """The unpacked size of a base image's layer: known after the layer was read once, otherwise estimated."""
    if known := layer_cache.known_layer(image.recipe(layer)):
        return known.diff_size
    return layer.size * (1 if layer.media_type == oci_types.LAYER_TAR else _BLOB_UNPACKED)


def lacks_base_image(lock: Lock) -> bool:
    """Whether the estimates of this module lack the base image of a lock, because its manifest was not downloaded."""
    return bool(lock.image) and base_image_download.read_base_image(str(lock.image), lock.platform) is None


def _packed(lock: Lock, compiling: bool) -> tuple[Sequence[LockedWheel], Sequence[Archive], Sequence[Deb]]:
    """Return the wheels, the archives, and the builder's Debian packages; with `compiling`, wheels and archives include
    the builder's."""
    tools = lock.builder
    if tools is None or not compiling:
        return lock.wheels, lock.archives, ()
    return (*lock.wheels, *tools.wheels), (*lock.archives, *tools.archives), tools.debs


def fetched_bytes(lock: Lock, compiling: bool = False) -> int:
    """Estimate the bytes that envbuild's caches still need: missing wheels, archives and Debian packages, the bases
    that are not made yet, and the missing layers of a base image, if its manifest was downloaded.

    `compiling`: include the tools that compile extensions.
    """
    wheels, archives, tools = _packed(lock, compiling)
    wheel_store, archive_store, deb_store = (
        sha256_file_store.wheel_store(),
        sha256_file_store.archive_store(),
        sha256_file_store.debs(),
    )
    bases = _missing_bases(lock)
    debs = {deb.sha256: deb for deb in (*tools, *(lock.apt if lock.suite else ()), *chain(*bases))}
    packed_bytes = sum(w.bytes for w in wheels if not wheel_store.holds(w.wheel.sha256, w.wheel.file))
    packed_bytes += sum(a.bytes for a in archives if not archive_store.holds(a.sha256, a.name))
    packed_bytes += sum(deb.bytes for deb in debs.values() if not deb_store.holds(deb.sha256, deb.file))
    if lock.image:
        packed_bytes += base_image_download.missing_bytes(lock.image, lock.platform) or 0
    # mmdebstrap reads a copy of the packages
    return packed_bytes + int(sum(deb.bytes for deb in chain(*bases)) * (1 + _DEB_UNPACKED))


def _missing_bases(lock: Lock) -> list[tuple[Deb, ...]]:
    """Return the packages of each base that is not made yet: without the packages of `apt:`, and with them if there are
    any."""
    bases = [(lock.base, False), ((*lock.base, *lock.apt), True)] if lock.apt else [(lock.base, False)]
    return [
        debs for debs, apt in bases if lock.suite and not debian_base_tar.tar_file(lock, make=False, apt=apt).is_file()
    ]


def require_disk_space(engine: Engine | None, lock: Lock, compiling: bool = False) -> None:
    """Raise DiskError, with the numbers, if a disk has no space for the downloads and the image. `engine`: the one that
    receives the image, if any; `compiling`: an extension is compiled first."""
    places = [(user_folders.cache_folder("wheels"), fetched_bytes(lock, compiling))]
    if engine and engine.data_folder:
        places.append((engine.data_folder, needed_bytes(lock, compiling)))
    for folder, _ in places:
        device = folder.stat().st_dev
        needed = sum(size for other, size in places if other.stat().st_dev == device)
        disk_space.require_free(folder, needed, "the build")


def require_load_space(engine: Engine, unpacked: int) -> None:
    """Raise DiskError if the engine's disk has no space to load layers of `unpacked` bytes."""
    if engine.data_folder:
        disk_space.require_free(engine.data_folder, unpacked * _COPIES, "the build")


def require_platform(engine: Engine, lock: Lock) -> None:
    """Raise EngineError if the platforms of the engine and of the image differ."""
    if engine.platform != lock.platform:
        raise EngineError(
            f"the engine is {engine.platform}, the image {lock.platform}", hint="use an engine of that platform"
        )
