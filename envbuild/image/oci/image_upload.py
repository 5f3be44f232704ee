"""Uploads a described image to a registry without an engine: only the blobs that the registry lacks, as a stream."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import DescribedLayer, OciImage
from envbuild.registry.registry_client import Repository

_AT_ONCE = 4  # blobs sent at the same time; each needs up to 32 MiB of memory


def upload_image(
    place: Repository, image: OciImage, tag: str, on_line: Callable[[str], None], mount_from: str | None = None
) -> None:
    """Upload an image under a tag, several blobs at once; the manifest is sent last. If one upload fails, or the user
    interrupts, the others stop at their next block. `mount_from`: the name of another repository of this registry,
    whose blobs need not be sent. Raises NetworkError, Refusal, and what the layers' recipes raise."""
    ended = threading.Event()

    def upload(described: DescribedLayer, layer: WrittenLayer) -> None:
        blocks = functools.partial(layer_blobs.blob_blocks, described.recipe, layer.digest, ended=ended)
        sent = place.put_blocks(layer.digest, layer.size, blocks, mount_from)
        on_line(f"layer {described.title}: {f'{layer.size / 1e6:.0f} MB' if sent else 'there already'}")

    pairs = {layer.digest: (one, layer) for one, layer in zip(image.described, image.layers, strict=True)}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        uploads = [pool.submit(upload, *pair) for pair in pairs.values()]
        try:
            for done in wait(uploads, return_when=FIRST_EXCEPTION).done:
                done.result()
        finally:
            ended.set()
            pool.shutdown(cancel_futures=True)
    place.put_blob(image.configuration)
    place.put_manifest(tag, image.manifest)
