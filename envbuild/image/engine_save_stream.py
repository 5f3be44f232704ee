"""What an engine saves of an image, file by file."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import Iterator
from functools import partial

from envbuild.image.docker_engine import Engine, Image, asking
from envbuild.registry import registry_image_reader
from envbuild.registry.layer_decompressor import Unpacked
from envbuild.util.errors import EngineError

BLOCK = 1 << 20


@contextlib.contextmanager
def files(engine: Engine, image: Image) -> Iterator[Iterator[Unpacked]]:
    """Each file, to be read before the next is asked for. What it is, its digest tells, not its name; that is of it
    unpacked: an engine on containerd's store saves layers as they came.

    Raises EngineError if the engine goes away while they are read, or what it saves cannot be read.
    """
    try:
        with asking(engine), engine.saved(image) as archive:
            yield _files(archive)
    except registry_image_reader.DAMAGED as error:
        raise EngineError(f"the engine's archive of {image.id} cannot be read: {error}") from None


def _files(archive: tarfile.TarFile) -> Iterator[Unpacked]:
    for member in archive:
        stream = archive.extractfile(member) if member.isfile() else None
        if stream is not None:
            yield Unpacked(iter(partial(stream.read, BLOCK), b""))
        archive.members = []  # type: ignore[attr-defined]  # else each is kept
