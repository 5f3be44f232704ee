"""Downloads a base image from its registry into the cache, without an engine, and reads it from there.

Manifest, configuration and layers are files named by their sha256. A layer that is not complete yet is a hidden file;
the next download continues at its end.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.fetch import sha256_file_store
from envbuild.image.layers.base_and_empty_venv_layers import file_blocks
from envbuild.image.layers.base_image_contents import BaseLayerRef
from envbuild.image.layers.base_image_layers import BaseBlobLayer
from envbuild.image.oci.parallel_layer_tasks import StopSignal, run_layer_tasks
from envbuild.lock.base_image_tag_lookup import registry_hint
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.image_content_reader import CONFIG_BYTES, Config
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.util import disk_space, strict_and_canonical_json, temporary_files, user_folders
from envbuild.util.errors import BuildError, EnvbuildError, NetworkError, some
from envbuild.util.untrusted_input_errors import Malformed, Refusal

VERSION = 2
"""Increment it with every change that gives another configuration or other types of layers for the same base image."""
_OCI, _DOCKER = "application/vnd.oci.image.layer.v1.tar", "application/vnd.docker.image.rootfs.diff.tar"
LAYER_TYPES = {
    **{f"{_OCI}{form}": f"{_OCI}{form}" for form in ("", "+gzip", "+zstd")},
    **{f"{_DOCKER}{form}": f"{_OCI}{form.replace('.', '+')}" for form in ("", ".gzip", ".zstd")},
}
"""Type of a layer in a manifest of OCI or Docker -> type in a manifest of OCI."""
_BLOCK = 1 << 20
_HISTORY_KEYS = ("created", "created_by", "author", "comment", "empty_layer")  # of an entry of the history


@dataclass(frozen=True)
class BaseImage:
    """A base image. `reference`: as in the lock; `manifest`: its digest; `history`: the entries of its configuration.
    Those that are not marked as empty describe the layers, in order."""

    reference: str
    manifest: str
    layers: tuple[BaseLayerRef, ...]
    config: Config
    history: tuple[Mapping[str, Any], ...]

    @property
    def file_digests(self) -> list[str]:
        """The digests of the files in the cache. The first two are the same unless the reference names an index."""
        own = [self.reference.rpartition("@")[2], self.manifest, self.config.id]
        return [*own, *(layer.digest for layer in self.layers)]

    def recipe(self, layer: BaseLayerRef) -> BaseBlobLayer:
        return BaseBlobLayer(_file(layer.digest), layer.digest, layer.diff_id)


class CachedBlobs:
    """The blobs of base images in the cache. Their digests are not checked: see `require_intact_layers`."""

    def blocks(self, digest: str) -> Iterator[bytes]:
        return file_blocks(_file(digest))


def require_intact_layers(image: BaseImage) -> None:
    """Check the layers in the cache. Raises HashMismatch for a file that was damaged, which is removed."""
    for layer in image.layers:
        file = _file(layer.digest)
        if file.is_file() and sha256_file_store.file_digest(file) != file.name:
            image.recipe(layer).refuse_damaged()


def _file(digest: str) -> Path:
    return user_folders.cache_folder("images", make=False) / digest.removeprefix("sha256:")


def cached_files(reference: str, platform: str) -> set[str]:
    """Return the names of the files of a base image, whether they are in the cache or not. If its manifest or its
    configuration is missing or invalid, return only the name of the file that `reference` names."""
    digests = [reference.rpartition("@")[2]]
    with contextlib.suppress(EnvbuildError):  # an image that cannot be used has no other files worth keeping
        if image := read_base_image(reference, platform):
            digests = image.file_digests
    return {_file(digest).name for digest in digests}


def missing_bytes(reference: str, platform: str) -> int | None:
    """Return the bytes of the layers that the cache lacks; None if the image's manifest or its configuration is not in
    the cache."""
    image = read_base_image(reference, platform)
    return _missing_bytes(image) if image else None


def _missing_bytes(image: BaseImage) -> int:
    return sum(layer.size - _part_bytes(layer) for layer in _missing_layers(image).values())


def _missing_layers(image: BaseImage) -> dict[str, BaseLayerRef]:
    """Return the layers that the cache lacks, by title. A layer that occurs twice is listed once."""
    numbered = {layer.digest: (number, layer) for number, layer in enumerate(image.layers, 1)}
    return {
        f"layer {number} of {len(image.layers)} of the base image": layer
        for number, layer in numbered.values()
        if not _is_stored(layer)
    }


def _is_stored(layer: BaseLayerRef) -> bool:
    file = _file(layer.digest)
    return file.is_file() and file.stat().st_size == layer.size


def download_base_image(reference: str, platform: str, show: Callable[[str, int], None]) -> BaseImage:
    """Download what the cache lacks of a base image, several layers at once, and return it. Only one process may do
    this at a time. `show` gets a name and a number of bytes.

    Raises NetworkError if the registry does not serve it, Refusal if it serves something else, BuildError if the image
    is not for the platform, has ONBUILD instructions or has a layer of an unknown type, and DiskError if the disk has
    no space for the layers.
    """
    with _add_image_to_errors(reference):
        place = Repository(Reference.parse(reference))
        image = _fetch_description(place, reference, platform)
        _mark_as_used(image)
        _download_layers(place, image, show)
    return image


def download_base_manifest(reference: str, platform: str) -> None:
    """Download the manifest and the configuration of a base image, which state its layers and their sizes. Raises what
    `download_base_image` raises."""
    with _add_image_to_errors(reference):
        _fetch_description(Repository(Reference.parse(reference)), reference, platform)


@contextlib.contextmanager
def _add_image_to_errors(reference: str) -> Iterator[None]:
    """Name the base image in the errors of its registry and of its content, with what to do."""
    try:
        yield
    except Refusal as error:
        hint = error.hint or "run the same command again; if it fails again, use another image or another registry"
        raise Refusal(error.reason.id, f"the base image {reference} is refused: {error.message}", hint=hint) from error
    except NetworkError as error:
        raise NetworkError(
            f"the base image {reference} cannot be fetched from its registry", hint=registry_hint(error)
        ) from error


def _fetch_description(place: Repository, reference: str, platform: str) -> BaseImage:
    manifest = _image_manifest(reference, platform, lambda digest: _fetch_manifest(place, digest))
    if not _is_intact(manifest.config):
        _write(manifest.config, place.blob(manifest.config, CONFIG_BYTES))
    return _base_image_from(reference, platform, manifest)


def _mark_as_used(image: BaseImage) -> None:
    """Set the time of the image's files and parts to now, so that `envbuild prune` keeps them for another day."""
    for digest in image.file_digests:
        for file in (_file(digest), _part_file(digest)):
            with contextlib.suppress(OSError):
                os.utime(file)


def _download_layers(place: Repository, image: BaseImage, show: Callable[[str, int], None]) -> None:
    missing = _missing_layers(image)
    disk_space.require_free(user_folders.cache_folder("images"), _missing_bytes(image), "the base image")

    def download(title: str, stop: StopSignal) -> None:
        _download_layer(place, missing[title], functools.partial(show, title), stop)

    run_layer_tasks(download, missing, place.abort)


def _download_layer(place: Repository, layer: BaseLayerRef, on_bytes: Callable[[int], None], stop: StopSignal) -> None:
    """Download a layer, or the rest of it. A part with wrong content is discarded, and the layer is downloaded from its
    beginning. `on_bytes` gets the number of bytes of each block. Raises Stopped if `stop` is set (the part stays), and
    Refusal if a download from the beginning has wrong content."""
    part = _part_file(layer.digest)
    while True:
        begin = _part_bytes(layer)
        try:
            _append_rest(place, layer, part, begin, on_bytes, stop)
            part.chmod(0o644)
            part.replace(_file(layer.digest))
            return
        except Refusal:
            part.unlink(missing_ok=True)
            if not begin:
                raise
        except OSError as error:
            if disk_space.is_disk_full(error):
                part.unlink(missing_ok=True)
            raise
        finally:
            if part.is_file() and not part.stat().st_size:
                part.unlink()


def _append_rest(
    place: Repository, layer: BaseLayerRef, part: Path, begin: int, on_bytes: Callable[[int], None], stop: StopSignal
) -> None:
    """Append the rest of a layer to its first `begin` bytes in `part`. Raises Refusal if the layer is too large or its
    digest is wrong, Stopped if `stop` is set."""
    with part.open("r+b" if begin else "wb") as stream:
        seen = hashlib.sha256()
        for block in iter(functools.partial(stream.read, _BLOCK), b"") if begin else ():
            stop.check()
            seen.update(block)
        for block in place.unchecked_blocks(layer.digest, begin, layer.size):
            stop.check()
            stream.write(block)
            seen.update(block)
            on_bytes(len(block))
        stream.flush()
        os.fsync(stream.fileno())
    if f"sha256:{seen.hexdigest()}" != layer.digest:
        raise place.wrong_content(layer.digest)


def _part_file(digest: str) -> Path:
    """The file of a layer that is not complete yet. `envbuild prune` removes hidden files after a day."""
    file = _file(digest)
    return file.with_name(f".{file.name}.part")


def _part_bytes(layer: BaseLayerRef) -> int:
    """The bytes of a layer that an interrupted download left; 0 if they are more than the layer has."""
    with contextlib.suppress(FileNotFoundError):
        size = _part_file(layer.digest).stat().st_size
        return size if size <= layer.size else 0
    return 0


def read_base_image(reference: str, platform: str) -> BaseImage | None:
    """Return a base image by its files in the cache; None if its manifest or its configuration is missing there. Its
    layers may be missing. Raises what `download_base_image` raises, except NetworkError and DiskError."""
    with contextlib.suppress(FileNotFoundError), _add_image_to_errors(reference):
        return _base_image_from(reference, platform, _image_manifest(reference, platform, _cached_manifest))
    return None


def _image_manifest(reference: str, platform: str, read: Callable[[str], Manifest]) -> Manifest:
    """Return the manifest of the image; of an index, the one of the platform."""
    digest = Reference.parse(reference).digest
    assert digest  # a lock names its base image by digest
    found = read(digest)
    if not found.is_index:
        return found
    images = [item for item in oci_types.descriptors(found.document, "manifests") if _is_for_platform(item, platform)]
    if len(images) != 1:
        raise BuildError(
            f"the base image {reference} has {some(len(images), 'image')} for {platform}",
            hint="name one image by its tag or digest: docker buildx imagetools inspect shows them",
        )
    return read(oci_types.digest_in(images[0]))


def _is_for_platform(item: Mapping[str, Any], platform: str) -> bool:
    named = item.get("platform")
    return (
        isinstance(named, dict)
        and f"{named.get('os')}/{named.get('architecture')}" == platform
        and not named.get("variant")
    )


def _fetch_manifest(place: Repository, digest: str) -> Manifest:
    if not _is_intact(digest):
        found = place.manifest(digest)
        if found is None:
            login = f"if the image is private: docker login {place.reference.host}"
            raise NetworkError(f"{place.reference.repository} has no manifest {digest}", hint=login)
        _write(digest, found.raw)
    return _cached_manifest(digest)


def _cached_manifest(digest: str) -> Manifest:
    raw = _read_intact(digest)
    document = oci_types.parse_document(raw, "the manifest", oci_types.MAX_MANIFEST)
    return Manifest(raw, oci_types.INDEX if "manifests" in document else oci_types.MANIFEST)


def _is_intact(digest: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        _read_intact(digest)
        return True
    return False


def _read_intact(digest: str) -> bytes:
    """Return a manifest or a configuration. Raises FileNotFoundError, also after removing a file that was damaged."""
    raw = _file(digest).read_bytes()
    if oci_types.digest_of(raw) != digest:
        _file(digest).unlink()
        raise FileNotFoundError(digest)
    return raw


def _base_image_from(reference: str, platform: str, manifest: Manifest) -> BaseImage:
    raw = _read_intact(manifest.config)
    config = image_content_reader.parse_config(manifest.config, raw)
    document = oci_types.parse_document(raw, "the image's configuration", CONFIG_BYTES)
    strict_and_canonical_json.require_unicode(document, "the base image's configuration has a text that is not Unicode")
    if f"{document.get('os')}/{document.get('architecture')}" != platform:
        raise BuildError(f"the base image {reference} is not for {platform}", hint="name an image of this platform")
    if config.settings.get("OnBuild"):
        raise BuildError(
            f"the base image {reference} has ONBUILD instructions, which envbuild does not run",
            hint="name a base image without them",
        )
    if len(config.layers) != len(manifest.layers):
        raise Malformed("the base image's manifest and its configuration name different layers")
    layers = tuple(_layer(item, diff_id) for item, diff_id in zip(manifest.layers, config.layers, strict=True))
    if len({layer.digest for layer in layers}) != len({(layer.digest, layer.size) for layer in layers}):
        raise Malformed("the base image's manifest names one layer with two sizes")
    return BaseImage(
        reference, manifest.digest, layers, config, _history(document.get("history"), len(layers), reference)
    )


def _layer(item: Mapping[str, Any], diff_id: str) -> BaseLayerRef:
    media_type, size = LAYER_TYPES.get(str(item.get("mediaType"))), item.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Malformed("the base image's manifest has a layer without a size")
    if media_type is None:
        raise BuildError(
            f"the base image has a layer of the type {str(item.get('mediaType'))[:100]!r}, which is not supported",
            hint="use a base image whose layers are plain tar, gzip or zstd",
        )
    if not oci_types.DIGEST.fullmatch(diff_id):
        raise Malformed("the base image's configuration has an invalid diff id")
    return BaseLayerRef(oci_types.digest_in(item), size, diff_id, media_type)


def _history(found: Any, layers: int, reference: str) -> tuple[Mapping[str, Any], ...]:
    """Return the history, or one entry for each layer if it is missing or invalid."""
    entries = found if isinstance(found, list) and all(map(_is_history_entry, found)) else []
    if sum(not item.get("empty_layer") for item in entries) != layers:
        return tuple({"created_by": reference} for _ in range(layers))
    return tuple({key: item[key] for key in _HISTORY_KEYS if key in item} for item in entries)


def _is_history_entry(item: Any) -> bool:
    return isinstance(item, dict) and all(
        isinstance(item[key], bool if key == "empty_layer" else str) for key in _HISTORY_KEYS if key in item
    )


def _write(digest: str, raw: bytes) -> None:
    """Write a manifest or a configuration."""
    file = _file(digest)
    file.parent.mkdir(parents=True, exist_ok=True)
    with temporary_files.file(file.parent) as (stream, made):
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
        made.chmod(0o644)
        made.replace(file)
