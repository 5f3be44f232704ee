"""Uploads a described image to a registry without an engine: only the blobs that the registry lacks, as a stream."""

from __future__ import annotations

import functools
from collections.abc import Callable

from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import DescribedLayer, OciImage
from envbuild.image.oci.parallel_layer_tasks import StopSignal, run_layer_tasks
from envbuild.registry.registry_client import Repository


def upload_image(
    place: Repository, image: OciImage, tag: str, on_line: Callable[[str], None], mount_from: str | None = None
) -> None:
    """Upload an image under a tag, several blobs at once; the manifest is sent last. If one upload fails, or the user
    interrupts, the others stop at their next block. `mount_from`: the name of another repository of this registry,
    whose blobs need not be sent. Raises NetworkError, Refusal, and what the layers' recipes raise."""

    def upload(pair: tuple[DescribedLayer, WrittenLayer], stop: StopSignal) -> None:
        described, layer = pair
        blocks = functools.partial(layer_blobs.blob_blocks, described.recipe, layer.digest, stop=stop)
        sent = place.put_blocks(layer.digest, layer.size, blocks, mount_from, stop.pause)
        on_line(f"layer {described.title}: {f'{layer.size / 1e6:.0f} MB' if sent else 'there already'}")

    pairs = {layer.digest: (one, layer) for one, layer in zip(image.described, image.layers, strict=True)}
    run_layer_tasks(upload, pairs.values(), place.abort, lambda pair: pair[1].size)
    place.put_blob(image.configuration)
    place.put_manifest(tag, image.manifest)
