"""Reads an image that an engine saves, file by file."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from functools import partial

from envbuild.image.docker_engine import Engine, Image, asking
from envbuild.registry import image_content_reader
from envbuild.registry.layer_decompressor import Unpacked
from envbuild.util.errors import EngineError

BLOCK = 1 << 20


@contextlib.contextmanager
def files(engine: Engine, image: Image) -> Iterator[Iterator[Unpacked]]:
    """Yield each file of a saved image; read a file before requesting the next. Identify a file by its digest, not by
    its name. The digest is that of the uncompressed content: an engine with the containerd store saves layers in the
    form in which it received them.

    Raises EngineError if the engine stops responding, or if its archive cannot be read.
    """
    try:
        with asking(engine), engine.saved(image) as archive:
            yield _files(archive)
    except image_content_reader.DAMAGED as error:
        raise EngineError(f"the engine's archive of {image.id} cannot be read: {error}") from None


def _files(archive: tarfile.TarFile) -> Iterator[Unpacked]:
    for member in archive:
        stream = archive.extractfile(member) if member.isfile() else None
        if stream is not None:
            yield Unpacked(iter(partial(stream.read, BLOCK), b""))
        archive.members = []  # type: ignore[attr-defined]  # else every member stays in memory
