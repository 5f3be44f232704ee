"""Layers made in memory, and an engine that saves an image of them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from typing import Any

from envbuild.image.docker_engine import Image
from envbuild.registry import oci_types
from unit.site import config_of


def layer(**files: str) -> bytes:
    return tar((name, content) for name, content in files.items())


def tar(files: Iterable[tuple[str, str]], **attributes: Any) -> bytes:
    """Return a tar of files with these names and contents. The content "-> x" makes a hard link to x, and "run" an
    executable file. `attributes`: set in each header."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.mode = 0o755 if content == "run" else 0o644
            for key, value in attributes.items():
                setattr(member, key, value)
            if content.startswith("-> "):
                member.type, member.linkname = tarfile.LNKTYPE, content[3:]
                archive.addfile(member)
            else:
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content.encode()))
    return buffer.getvalue()


class Engine:
    """A simulated engine with a built image. `saves`: a function that changes a layer when the layer is saved; `ends`:
    the number of bytes after which the saved tar is cut off."""

    saves: Callable[[bytes], bytes] = staticmethod(bytes)
    ends: int | None = None

    def __init__(self, *layers: bytes) -> None:
        self.layers = layers
        self.config = config_of([oci_types.digest_of(one) for one in layers], {})
        self.removed: list[str] = []

    @property
    def image(self) -> Image:
        ids = tuple(oci_types.digest_of(one) for one in self.layers)
        return Image(oci_types.digest_of(self.config), "handle", ids, {}, {"PATH": "/bin"}, 1)

    def saved(self, image: Image) -> tarfile.TarFile:
        names = [f"{index}/layer.tar" for index, _ in enumerate(self.layers)]
        listed = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            rest = (("c.json", self.config), ("manifest.json", listed))
            for name, raw in (*zip(names, map(self.saves, self.layers), strict=True), *rest):
                member = tarfile.TarInfo(name)
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))
        return tarfile.open(fileobj=io.BytesIO(buffer.getvalue()[: self.ends]), mode="r|")

    def remove(self, reference: str) -> None:
        self.removed.append(reference)
