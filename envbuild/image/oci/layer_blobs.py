"""The layers of a described image: their descriptors, and their bytes, which are produced when they are read."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from envbuild.image.layers import layer_cache
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci.image_description import DescribedLayer, ImageDescription, OciImage
from envbuild.util.errors import BuildError

_AT_ONCE = 4  # layers
_WAITING = 16  # blocks of at most 4 MiB


class _Abandoned(Exception):
    """Nobody reads the rest."""


def learn_layers(description: ImageDescription, on_layer: Callable[[str], None]) -> OciImage:
    """Learn digest and size of each layer, several at once; those that were written before are remembered. `on_layer`
    gets a line for each layer that was written. Raises what the recipes raise."""

    def learn(layer: DescribedLayer) -> WrittenLayer:
        known = layer_cache.known_layer(layer.recipe)
        if known:
            return known
        written = layer_cache.stream_layer(layer.recipe)
        on_layer(f"layer {layer.title}: {written.size / 1e6:.0f} MB, {written.diff_size / 1e6:.0f} MB unpacked")
        return written

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return OciImage(description, tuple(pool.map(learn, description.layers)))


def blob_blocks(recipe: LayerRecipe, digest: str, *, plain: bool = False) -> Iterator[bytes]:
    """Yield the blob of a layer while it is written, block by block. `plain`: the uncompressed tar. Raises what the
    recipe's `write` raises; BuildError after the last block if it is not the blob or tar of this digest."""
    waiting: queue.Queue[bytes | None] = queue.Queue(_WAITING)
    abandoned = threading.Event()

    def receive(block: bytes | None) -> None:
        while not abandoned.is_set():
            try:
                waiting.put(block, timeout=1)
                return
            except queue.Full:
                continue
        raise _Abandoned

    def write() -> WrittenLayer:
        try:
            receivers = {"plain" if plain else "packed": receive}
            return layer_cache.stream_layer(recipe, **receivers)
        finally:
            if not abandoned.is_set():
                receive(None)

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        try:
            while (block := waiting.get()) is not None:
                if block:
                    yield block
        finally:
            abandoned.set()
        written = writing.result()
    found = written.diff_id if plain else written.digest
    if found != digest:
        raise BuildError(f"a layer is {found}, and was {digest} before", hint="report this: layers are reproducible")
