"""Writes a described image as an OCI image layout: a folder, or one tar with the same files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

from envbuild.image.engine_image_to_oci_layout import BLOBS, INDEX, LAYOUT, REF, blob_path
from envbuild.image.layers.layer_writer import TAR_BLOCK, tar_header
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.docker_archive import DOCKER_MANIFEST, docker_manifest, header_and_content
from envbuild.image.oci.image_description import ImageDescription, OciImage
from envbuild.registry import oci_types
from envbuild.util import atomic_files, strict_and_canonical_json, temporary_files
from envbuild.util.errors import FileError
from envbuild.util.untrusted_input_errors import Malformed

_VERSION = b'{"imageLayoutVersion":"1.0.0"}'


def write_folder(
    description: ImageDescription, folder: Path, reference: str, on_layer: Callable[[str], None]
) -> OciImage:
    """Write the image into a layout. In an existing layout, blobs that are there stay, and an image of the same
    reference name is replaced in the index, which is written last.

    Raises FileError if the folder has files and is not a layout, or if its index is damaged, and what the layers'
    recipes raise.
    """
    others = _other_images(folder, reference)
    image = layer_blobs.write_blobs(description, folder / BLOBS, on_layer)
    for raw in (image.configuration, image.manifest.raw):
        atomic_files.write_atomically(folder / blob_path(oci_types.digest_of(raw)), raw)
    atomic_files.write_atomically(folder / LAYOUT, _VERSION)
    entry = {**image.manifest.descriptor, "annotations": {REF: reference}}
    atomic_files.write_atomically(folder / INDEX, _index([*others, entry]))
    return image


def _other_images(folder: Path, reference: str) -> list[dict[str, Any]]:
    """Return the entries of a layout's index for other reference names; none if the folder is new or empty, or has no
    index."""
    index = folder / INDEX
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    if not (folder / LAYOUT).is_file() and not (folder / "blobs").is_dir():
        raise FileError(f"{folder} is not an OCI image layout", hint="name a new folder, or a file that ends with .tar")
    if not index.is_file():
        return []
    try:
        found = oci_types.descriptors(strict_and_canonical_json.parse(index.read_bytes(), str(index)), "manifests")
        return [item for item in found if (item.get("annotations") or {}).get(REF) != reference]
    except (Malformed, AttributeError):
        raise FileError(f"{index} is damaged", hint="remove the folder, or name another one") from None


def _index(manifests: list[dict[str, Any]]) -> bytes:
    return oci_types.encoded({"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": manifests})


def write_file(image: OciImage, file: Path, reference: str) -> None:
    """Write the image as one tar; the same image and `reference` give the same bytes. Raises what the layers' recipes
    raise."""
    with (
        temporary_files.file(file.parent) as (stream, made),
        contextlib.closing(archive(image, {REF: reference})) as blocks,
    ):
        stream.writelines(blocks)
        stream.flush()
        made.chmod(0o644)
        made.replace(file)


def archive(
    image: OciImage,
    annotations: dict[str, str],
    *,
    docker_tag: str | None = None,
    left_out: Collection[str] = (),
) -> Generator[bytes, None, None]:
    """Yield the blocks of a layout as a tar. `annotations`: those of the image in the index; `docker_tag`: add the file
    manifest.json of `docker save` with this tag; `left_out`: diff ids of layers that the tar does not include."""
    entry = {**image.manifest.descriptor, "annotations": annotations}
    yield header_and_content(LAYOUT, _VERSION)
    yield header_and_content(INDEX, _index([entry]))
    if docker_tag:
        layers = [blob_path(layer.digest) for layer in image.layers]
        yield header_and_content(DOCKER_MANIFEST, docker_manifest(blob_path(image.id), docker_tag, layers))
    written = set()
    for raw in (image.configuration, image.manifest.raw):
        yield header_and_content(blob_path(oci_types.digest_of(raw)), raw)
    for described, layer in zip(image.described, image.layers, strict=True):
        if layer.digest in written or layer.diff_id in left_out:
            continue
        written.add(layer.digest)
        yield tar_header(blob_path(layer.digest), b"0", 0o644, layer.size)
        yield from layer_blobs.blob_blocks(described.recipe, layer.digest)
        yield b"\0" * (-layer.size % TAR_BLOCK)
    yield b"\0" * 2 * TAR_BLOCK
