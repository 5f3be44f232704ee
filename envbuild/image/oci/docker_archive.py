"""Writes an image as the archive that `docker save` writes, for the load API of an engine with a graph driver.

In this archive, layers may have any names. So a layer whose digest is not known yet is written only once: its digest is
computed while the engine receives it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from envbuild.image.layers import layer_cache
from envbuild.image.layers.layer_writer import TAR_BLOCK, WrittenLayer, require_same_layer, tar_header
from envbuild.image.layers.wheel_layers import WheelLayer
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import ImageToLoad, LayerToSend, OciImage
from envbuild.util import disk_space
from envbuild.util.errors import BuildError

DOCKER_MANIFEST = "manifest.json"


def docker_archive(
    image: ImageToLoad, tag: str, left_out: Collection[str], on_written: Callable[[OciImage], None]
) -> Generator[bytes, None, None]:
    """Yield the blocks of the archive, with uncompressed layers. `left_out`: diff ids of layers that the archive does
    not include; `on_written`: gets the image when the digests of all layers are known.

    The configuration and manifest.json come last. Without them an engine loads nothing, so that a layer that failed its
    check is never part of an image. Raises what the recipes raise, and BuildError if the digest or size of a layer
    differs from the expected one.
    """
    names: list[str] = []
    written: list[WrittenLayer] = []
    sent: dict[str, str] = {}  # diff id -> name; a base image may have the same layer twice
    with ThreadPoolExecutor(1) as pool:
        early = {
            number: pool.submit(_in_memory, layer)
            for number, layer in enumerate(image.layers, 1)
            if _needs_early_write(layer)
        }
        try:
            for number, layer in enumerate(image.layers, 1):
                name = sent.get(layer.written.diff_id) if layer.written else None
                names.append(name or f"{number}.tar")
                if layer.written and (name or layer.written.diff_id in left_out):
                    written.append(layer.written)
                    continue
                yield tar_header(names[-1], b"0", 0o644, layer.tar_size)
                written.append((yield from _tar_blocks(layer, early.pop(number, None))))
                yield b"\0" * (-layer.tar_size % TAR_BLOCK)
                sent[written[-1].diff_id] = names[-1]
        finally:
            pool.shutdown(cancel_futures=True)
    complete = image.with_layers(written)
    on_written(complete)
    config = f"{complete.id.removeprefix('sha256:')}.json"
    yield header_and_content(config, complete.configuration)
    yield header_and_content(DOCKER_MANIFEST, docker_manifest(config, tag, names))
    yield b"\0" * 2 * TAR_BLOCK


def _needs_early_write(layer: LayerToSend) -> bool:
    """Whether a layer has only changed metadata and is not cached. Its wheels must be hashed, so it is written while
    earlier layers are sent."""
    recipe = layer.described.recipe
    return layer.written is None and isinstance(recipe, WheelLayer) and bool(recipe.pins)


def _in_memory(layer: LayerToSend) -> tuple[list[bytes], WrittenLayer]:
    blocks: list[bytes] = []
    try:
        return blocks, layer_cache.stream_layer(layer.described.recipe, plain=blocks.append)
    except OSError as error:  # of a file here: the client that reads the blocks would report its own connection
        raise disk_space.system_fault(error) from error


def _tar_blocks(
    layer: LayerToSend, early: Future[tuple[list[bytes], WrittenLayer]] | None
) -> Generator[bytes, None, WrittenLayer]:
    if early:
        blocks, found = early.result()
        yield from blocks
    else:
        found = yield from layer_blobs.layer_blocks(layer.described.recipe, plain=True)
    if layer.written:
        require_same_layer(found.diff_id, layer.written.diff_id)
    if found.diff_size != layer.tar_size:
        raise BuildError(f"layer {layer.described.title} has {found.diff_size} bytes, expected {layer.tar_size}")
    return found


def docker_manifest(config: str, tag: str, layers: Sequence[str]) -> bytes:
    """Return the content of manifest.json, with the names of the other files in the archive."""
    return json.dumps([{"Config": config, "RepoTags": [tag], "Layers": layers}]).encode()


def header_and_content(name: str, raw: bytes) -> bytes:
    """Return a file as it is in a tar: its header, its content, and padding."""
    return tar_header(name, b"0", 0o644, len(raw)) + raw + b"\0" * (-len(raw) % TAR_BLOCK)
