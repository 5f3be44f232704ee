"""Loads a described image into the engine, as a stream and with only the layers that the engine lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection

from envbuild.image.docker_engine import Engine, Image
from envbuild.image.engine_image_to_oci_layout import REF
from envbuild.image.image_naming import PREFIX
from envbuild.image.layers.base_image_layers import BaseBlobLayer
from envbuild.image.oci import layout_export
from envbuild.image.oci.docker_archive import docker_archive
from envbuild.image.oci.image_description import ImageToLoad, OciImage
from envbuild.registry import oci_types
from envbuild.util.errors import EngineError

_CONTAINERD_NAME = "io.containerd.image.name"


def incoming_tag(tag: str) -> str:
    """The temporary tag of an image while it is loaded."""
    return f"loading-{tag}"


def load_image(
    engine: Engine, image: ImageToLoad, repository: str, tag: str, on_line: Callable[[str], None]
) -> tuple[Image, OciImage]:
    """Load an image under a tag. Return the engine's image, and the one with the digests of its layers. Only the layers
    that the engine seems to lack are sent; if the engine refuses the image then, all layers are sent.

    The image is loaded under a temporary tag first, so that an incomplete image of a failed load has only this tag.
    Raises EngineError, also if the engine has a different image afterwards, DiskError, and what the layers' recipes
    raise.
    """
    incoming = f"{repository}:{incoming_tag(tag)}"
    try:
        sent = _send_missing(engine, image, incoming, on_line)
        engine.note_id(sent.manifest.digest, sent.id)
        loaded = engine.get(incoming)
        if loaded.id != sent.id:
            raise EngineError(f"the engine has {loaded.id} instead of the image that was loaded, {sent.id}")
        engine.tag(loaded, repository, tag)
    except BaseException:
        with contextlib.suppress(EngineError):  # it may be gone
            engine.remove(incoming)
        raise
    engine.remove(incoming)
    return loaded, sent


def _send_missing(engine: Engine, image: ImageToLoad, name: str, on_line: Callable[[str], None]) -> OciImage:
    left_out = known_layers(engine, image)
    if left_out:
        try:
            return _send(engine, image, name, left_out, on_line)
        except EngineError as error:
            on_line(f"all layers are sent: {error.message}")
            engine.remove(name)
    return _send(engine, image, name, (), on_line)


def known_layers(engine: Engine, image: ImageToLoad) -> set[str]:
    """Return the diff ids of those layers that the engine probably has, because an image of envbuild in it has them.
    Graph drivers identify a layer by itself and all layers below it. The containerd store identifies a layer by its
    blob, so only layers count there that are compressed as envbuild writes them."""
    wanted = [layer.written.diff_id if layer.written else None for layer in image.layers]
    as_written = {
        layer.written.diff_id
        for layer in image.layers
        if layer.written and layer.described.media_type == oci_types.LAYER_GZIP
        if not isinstance(layer.described.recipe, BaseBlobLayer)
    }
    found: set[str] = set()
    for handle in {handle for _, handle, _ in engine.images(PREFIX)}:
        layers = engine.layers_of(handle)
        if engine.containerd_store:
            found |= as_written & set(layers)
            continue
        for own, other in zip(wanted, layers, strict=False):
            if own is None or own != other:
                break
            found.add(own)
    return found


def _send(
    engine: Engine, image: ImageToLoad, name: str, left_out: Collection[str], on_line: Callable[[str], None]
) -> OciImage:
    """Send an archive to the engine. For graph drivers, whose own decompression is slow, the layers are uncompressed.
    For the containerd store, the layers are the blobs of the manifest, so that the image can be pushed with its digest;
    all of them must already be written."""
    sent = [layer for layer in image.layers if layer.written is None or layer.written.diff_id not in left_out]
    on_line(f"loading {len(sent)} of {len(image.layers)} layers, {sum(layer.tar_size for layer in sent) / 1e6:.0f} MB")
    written: list[OciImage] = []
    if engine.containerd_store:
        complete = image.complete
        assert complete
        written.append(complete)
        annotations = {REF: name.rpartition(":")[2], _CONTAINERD_NAME: f"docker.io/{name}"}
        archive = layout_export.archive(complete, annotations, docker_tag=name, left_out=left_out)
    else:
        archive = docker_archive(image, name, left_out, written.append)
    with contextlib.closing(archive):
        engine.load(archive)
    if not written:
        raise EngineError("the engine answered before the whole image was sent")
    return written[0]
