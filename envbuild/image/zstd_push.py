"""Compresses the layers of an image with zstd and uploads them to a registry. Layers of a base image stay as they
are."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from envbuild.image.layers.base_image_layers import BaseBlobLayer
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import DescribedLayer, OciImage
from envbuild.registry import oci_types
from envbuild.registry.registry_client import Repository
from envbuild.util import disk_space, temporary_files
from envbuild.util.errors import DiskError

_LEVEL = 3  # zstd's default; another level gives other digests


def push_layers(place: Repository, image: OciImage, tag: str, on_line: Callable[[str], None]) -> None:
    """Compress an image's layers with zstd, and push the image under a tag. Layers that the registry has are not sent
    again. Layers of a base image keep their compression, so that a registry or machine that has the base image needs
    none of them. The manifest is pushed last, and is the same for the same image and release of zstd. Raises DiskError
    if the disk has no space for the largest layer, NetworkError, and what the layers' recipes raise."""
    packed = list[dict[str, Any]]()
    pairs = list(zip(image.described, image.layers, strict=True))
    with temporary_files.folder("push") as folder:
        _require_space(max((layer.diff_size for one, layer in pairs if not _is_of_base(one)), default=0), folder)
        file = folder / "layer"
        for described, layer in pairs:
            if _is_of_base(described):
                blob = functools.partial(layer_blobs.blob_blocks, described.recipe, layer.digest)
                sent = place.put_blocks(layer.digest, layer.size, blob)
                packed.append({"mediaType": described.media_type, "digest": layer.digest, "size": layer.size})
                on_line(f"layer {described.title}: {f'{layer.size / 1e6:.0f} MB' if sent else 'there already'}")
                continue
            with contextlib.closing(layer_blobs.blob_blocks(described.recipe, layer.diff_id, plain=True)) as blocks:
                packed.append(_compress(blocks, file))
            place.put_file(packed[-1]["digest"], file)
            sizes = f"{packed[-1]['size'] / 1e6:.0f} of {layer.diff_size / 1e6:.0f} MB"
            on_line(f"layer {described.title}: {sizes}")
    place.put_blob(image.configuration)
    config = oci_types.descriptor(oci_types.CONFIG, image.configuration)
    place.put_manifest(tag, oci_types.image_manifest(config, packed))


def _is_of_base(described: DescribedLayer) -> bool:
    return isinstance(described.recipe, BaseBlobLayer)


def _require_space(largest: int, folder: Path) -> None:
    """Raise DiskError if the disk has no space for `largest` bytes, the uncompressed size of the largest layer:
    compression hardly ever makes a layer larger."""
    if shutil.disk_usage(folder).free < largest:
        free = disk_space.free_space(folder.parent)
        text = f"a layer of {largest / 1e9:.1f} GB may be too large for the disk when it is compressed: {free}"
        raise DiskError(text, hint="free space, or choose another folder: TMPDIR=FOLDER")


def _compress(blocks: Iterable[bytes], file: Path) -> dict[str, Any]:
    """Compress a layer's tar to a file, and return the descriptor of the blob."""
    import zstandard  # imported here and for decompression only: few commands need it

    # Apart from the content, these settings determine the bytes: level, one thread, checksum, no size in the header.
    packer = zstandard.ZstdCompressor(level=_LEVEL, threads=0, write_checksum=True, write_content_size=False)
    compressor, seen = packer.compressobj(), hashlib.sha256()
    with file.open("wb") as target:
        for block in blocks:
            piece = compressor.compress(block)
            seen.update(piece)
            target.write(piece)
        last = compressor.flush()
        seen.update(last)
        target.write(last)
        after = target.tell()
    return {"mediaType": oci_types.LAYER_ZSTD, "digest": f"sha256:{seen.hexdigest()}", "size": after}
