"""Compresses an image's layers with zstd and uploads them to a registry. The layers come from their recipes or from the
engine, which itself only compresses with gzip.

Files in the engine's archive are identified as layer or configuration by their digest, not by their name.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.image import engine_save_stream
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import OciImage
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.layer_decompressor import Unpacked
from envbuild.registry.oci_types import Manifest
from envbuild.registry.registry_client import Repository
from envbuild.util import disk_space, temporary_files
from envbuild.util.errors import DiskError, EngineError

LAYER = "application/vnd.oci.image.layer.v1.tar+zstd"
_LEVEL = 3  # zstd's default; another level gives other digests


@dataclass(frozen=True)
class _Part:
    """A file that the engine saves. `digest` and `size` describe the uncompressed content. A layer has `packed`, the
    descriptor of its compressed form; a small file that is not a layer has `raw`, its content."""

    digest: str
    size: int
    raw: bytes = b""
    packed: dict[str, Any] = field(default_factory=dict)


def push_layers(place: Repository, image: OciImage, tag: str, on_line: Callable[[str], None]) -> None:
    """Write an image's layers again, and push it under a tag. Layers that the registry has are not sent again. The
    manifest is pushed last, and is the same for the same image and release of zstd. Raises DiskError without space for
    the largest layer, NetworkError, and what the layers' recipes raise."""
    packed = list[dict[str, Any]]()
    with temporary_files.folder("push") as folder:
        _require_space(max(layer.diff_size for layer in image.layers), folder)
        file = folder / "layer"
        for described, layer in zip(image.described, image.layers, strict=True):
            with contextlib.closing(layer_blobs.blob_blocks(described.recipe, layer.diff_id, plain=True)) as blocks:
                packed.append(_compress(blocks, file))
            place.put_file(packed[-1]["digest"], file)
            sizes = f"{packed[-1]['size'] / 1e6:.0f} of {layer.diff_size / 1e6:.0f} MB"
            on_line(f"layer {described.title}: {sizes}")
    _push_manifest(place, image.configuration, packed, tag)


def push_zstd(engine: Engine, place: Repository, image: Image, tag: str, on_line: Callable[[str], None]) -> None:
    """Push the image under a tag. Layers that the registry has are not sent again. The manifest is pushed last, and is
    the same for the same image and release of zstd. Raises DiskError without space for the largest layer, EngineError
    if the engine saves a different image, NetworkError."""
    found: dict[str, dict[str, Any]] = {}
    raw = b""
    with temporary_files.folder("push") as folder:
        _require_space(max(engine.layer_sizes(image) or (0,)), folder)
        file = folder / "layer"
        for part in _parts(engine, image, file):
            if part.digest == image.id:
                raw = part.raw
            elif part.digest in image.layers:
                place.put_file(part.packed["digest"], file)
                found[part.digest] = part.packed
                sizes = f"{part.packed['size'] / 1e6:.0f} of {part.size / 1e6:.0f} MB"
                on_line(f"layer {len(found)} of {len(image.layers)}: {sizes}")
    lacking = [layer for layer in image.layers if layer not in found]
    if lacking or not raw or image_content_reader.parse_config(image.id, raw).layers != image.layers:
        text = f"the engine exported a different image than {image.id}"
        detail = f": layer {lacking[0]} is missing" if lacking else ""
        raise EngineError(
            text + detail, hint="check the engine's disk; docker image rm, then envbuild make, builds the image again"
        )
    _push_manifest(place, raw, [found[layer] for layer in image.layers], tag)


def _push_manifest(place: Repository, configuration: bytes, layers: list[dict[str, Any]], tag: str) -> None:
    place.put_blob(configuration)
    document = {
        "schemaVersion": 2,
        "mediaType": oci_types.MANIFEST,
        "config": oci_types.descriptor(oci_types.CONFIG, configuration),
        "layers": layers,
    }
    place.put_manifest(tag, Manifest(oci_types.encoded(document), oci_types.MANIFEST))


def _require_space(largest: int, folder: Path) -> None:
    """Check the space for a compressed layer of `largest` bytes: compression makes a layer hardly ever larger."""
    if shutil.disk_usage(folder).free < largest:
        free = disk_space.free_space(folder.parent)
        text = f"a layer of {largest / 1e9:.1f} GB may be too large for the disk when it is compressed: {free}"
        raise DiskError(text, hint="free space, or choose another folder: TMPDIR=FOLDER")


def _parts(engine: Engine, image: Image, file: Path) -> Iterator[_Part]:
    """Yield each file that the engine saves; the compressed form is in `file` until the next one is requested."""
    with engine_save_stream.files(engine, image) as contents:
        for content in contents:
            begin = content.read(image_content_reader.CONFIG_BYTES)
            if (
                len(begin) < image_content_reader.CONFIG_BYTES and content.digest not in image.layers
            ):  # the whole content was read
                yield _Part(content.digest, len(begin), begin)
            else:
                yield _packed(begin, content, file)


def _packed(begin: bytes, content: Unpacked, file: Path) -> _Part:
    before = 0

    def blocks() -> Iterator[bytes]:
        nonlocal before
        for block in itertools.chain([begin], iter(partial(content.read, engine_save_stream.BLOCK), b"")):
            before += len(block)
            yield block

    packed = _compress(blocks(), file)
    return _Part(content.digest, before, packed=packed)


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
    return {"mediaType": LAYER, "digest": f"sha256:{seen.hexdigest()}", "size": after}
