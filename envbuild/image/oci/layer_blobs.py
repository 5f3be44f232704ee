"""Finds the digests of a described image's layers, and produces the bytes of each layer while they are read."""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from envbuild.image.layers import layer_cache
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.image.layers.layer_writer import WrittenLayer, require_same_layer
from envbuild.image.layers.wheel_layers import WheelLayer
from envbuild.image.oci.image_description import (
    DescribedLayer,
    ImageDescription,
    ImageToLoad,
    LayerToSend,
    OciImage,
)
from envbuild.image.oci.parallel_layer_tasks import StopSignal, run_layer_tasks
from envbuild.util import disk_space

_BLOCK = 1 << 20
_WAITING = 16  # the most blocks that wait between the writer and the reader of a layer


def write_layers_again(description: ImageDescription, on_layer: Callable[[str], None]) -> OciImage:
    """Like `learn_layers`, but write each layer, even if it is cached. Raises BuildError if a layer differs from the
    cached one, and what the recipes raise."""
    return _each_layer(description, layer_cache.write_again, on_layer)


def learn_layers(description: ImageDescription, on_layer: Callable[[str], None]) -> OciImage:
    """Find the digest and size of each layer, several layers at once. Only layers that are not cached are written.
    `on_layer` gets a line for each layer. Raises what the recipes raise."""

    def learn(recipe: LayerRecipe, watch: Callable[[bytes], None]) -> WrittenLayer:
        return layer_cache.known_layer(recipe) or layer_cache.stream_layer(recipe, watch)

    return _each_layer(description, learn, on_layer)


def find_tar_sizes(description: ImageDescription, on_layer: Callable[[str], None]) -> ImageToLoad:
    """Find the size of each layer's tar, several layers at once. A layer of wheels or of changed metadata that is
    not cached is written only when it is sent; here its size is computed from its wheels. Other layers that are not
    cached are written now. `on_layer` gets a line for each layer whose digests are known. Raises what the recipes
    raise."""

    def find(described: DescribedLayer, stop: StopSignal) -> LayerToSend:
        recipe = described.recipe
        layer = layer_cache.known_layer(recipe)
        if layer is None and isinstance(recipe, WheelLayer):
            return LayerToSend(described, recipe.tar_size(), None)
        layer = layer or layer_cache.stream_layer(recipe, lambda block: stop.check())
        on_layer(_shown(described, layer))
        return LayerToSend(described, layer.diff_size, layer)

    layers = run_layer_tasks(find, description.layers, work=_expected_work)
    return ImageToLoad(tuple(layers), description.with_layers)


def with_cached_layers(image: ImageToLoad) -> ImageToLoad:
    """Look again for layers that were not in the cache: another process may have written them since."""
    layers = (
        layer if layer.written else replace(layer, written=layer_cache.known_layer(layer.described.recipe))
        for layer in image.layers
    )
    return replace(image, layers=tuple(layers))


def write_blobs(description: ImageDescription, folder: Path, on_layer: Callable[[str], None]) -> OciImage:
    """Write the blob of each layer into `folder`, several at once. Undamaged blobs in the folder stay, if the cache
    knows their digests. Each layer is written at most once. Raises what the recipes raise."""

    def write(recipe: LayerRecipe, watch: Callable[[bytes], None]) -> WrittenLayer:
        return layer_cache.write_blob(recipe, folder, watch)

    return _each_layer(description, write, on_layer)


def _each_layer(
    description: ImageDescription,
    work: Callable[[LayerRecipe, Callable[[bytes], None]], WrittenLayer],
    on_layer: Callable[[str], None],
) -> OciImage:
    """Run `work` for each layer. If one fails, or the user interrupts, the others stop at their next block."""

    def layer_of(described: DescribedLayer, stop: StopSignal) -> WrittenLayer:
        layer = work(described.recipe, lambda block: stop.check())
        on_layer(_shown(described, layer))
        return layer

    return description.with_layers(run_layer_tasks(layer_of, description.layers, work=_expected_work))


def _expected_work(described: DescribedLayer) -> float:
    """Estimate how long a layer takes, to order the tasks: the bytes of its wheels. Layers without wheels, such as a
    base, must be compressed, which takes longest."""
    recipe = described.recipe
    if not isinstance(recipe, WheelLayer):
        return math.inf
    try:
        return sum(wheel.file.stat().st_size for wheel in recipe.wheels)
    except OSError:  # the task reports it, if it needs the file
        return 0


def _shown(described: DescribedLayer, layer: WrittenLayer) -> str:
    return f"layer {described.title}: {layer.size / 1e6:.0f} MB, {layer.diff_size / 1e6:.0f} MB unpacked"


def blob_blocks(
    recipe: LayerRecipe, digest: str, *, plain: bool = False, stop: StopSignal | None = None
) -> Generator[bytes, None, None]:
    """Yield what `layer_blocks` yields. Raises BuildError after the last block if the digest of these bytes is not
    `digest`."""
    written = yield from layer_blocks(recipe, plain=plain, stop=stop)
    require_same_layer(written.diff_id if plain else written.digest, digest)


def layer_blocks(
    recipe: LayerRecipe, *, plain: bool = False, stop: StopSignal | None = None
) -> Generator[bytes, None, WrittenLayer]:
    """Yield the blob of a layer while it is written, in blocks of about 1 MiB. Return the layer. `plain`: yield the
    uncompressed tar instead. Raises Stopped at the next block once `stop` is set, DiskError or SystemFault if a file of
    this machine cannot be read or written, and what the recipe's `write` raises, at the latest after the last block."""
    waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING)
    reader_stopped = StopSignal()
    block = bytearray()

    def send(item: bytes) -> None:
        reader_stopped.check()
        waiting.put(item)

    def receive(raw: bytes) -> None:
        block.extend(raw)
        if len(block) >= _BLOCK:
            send(bytes(block))
            block.clear()

    def write() -> WrittenLayer:
        try:
            layer = layer_cache.stream_layer(recipe, **{"plain" if plain else "packed": receive})
            if block:
                send(bytes(block))
            return layer
        except OSError as error:  # of a file here: the client that reads the blocks would report its own connection
            raise disk_space.system_fault(error) from error
        finally:
            if not reader_stopped.is_set():
                waiting.put(None)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            while (item := waiting.get()) is not None:
                if stop is not None:
                    stop.check()
                yield item
        except BaseException:
            reader_stopped.set()
            while not writing.done():  # the writer may wait until its block is taken
                with contextlib.suppress(queue.Empty):
                    waiting.get(timeout=0.05)
            raise
        return writing.result()
