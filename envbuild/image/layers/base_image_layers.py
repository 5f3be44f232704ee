"""The layers of an image on a base image: the base's own layers (as they are in its registry), the empty virtual
environment of its Python, the links of its nvcc, and its folders."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from envbuild.image.layers import nvcc_links, venv_skeleton
from envbuild.image.layers.base_and_empty_venv_layers import file_blocks
from envbuild.image.layers.base_image_contents import BaseFolder
from envbuild.image.layers.layer_writer import WRITER_VERSION, LayerFolder, LayerLink, WrittenLayer, write_layer
from envbuild.registry.image_content_reader import DAMAGED
from envbuild.registry.layer_decompressor import Unpacked
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import BuildError, HashMismatch

_BLOCK = 1 << 20


@dataclass(frozen=True)
class BaseBlobLayer:
    """A layer of a base image. `file`: its blob; `digest`, `diff_id`: of the blob and of the tar in it."""

    file: Path
    digest: str
    diff_id: str
    keeps_blob = False

    @property
    def key(self) -> str:
        return strict_and_canonical_json.canonical_digest(["blob", self.digest, self.diff_id])

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. Raises HashMismatch if the file was damaged, after removing the file, and BuildError if the
        tar in the file is not the tar that the base image's configuration names."""
        seen = hashlib.sha256()
        sizes = [0, 0]

        def blocks() -> Iterator[bytes]:
            for block in file_blocks(self.file):
                seen.update(block)
                sizes[0] += len(block)
                packed(block)
                yield block

        def watch(block: bytes) -> None:
            sizes[1] += len(block)
            plain(block)

        raw = blocks()
        unpacked = Unpacked(raw, watch)
        fault = None
        try:
            while unpacked.read(_BLOCK):
                pass
        except DAMAGED as error:
            fault = str(error)
        for _ in raw:  # the rest, so that a damaged file is recognized
            pass
        if f"sha256:{seen.hexdigest()}" != self.digest:
            self.refuse_damaged()
        if fault is not None or unpacked.digest != self.diff_id:
            raise BuildError(
                f"the layer {self.digest} of the base image does not match its configuration",
                hint="the base image is damaged in its registry: push it again, or name another one",
            )
        return WrittenLayer(self.digest, sizes[0], self.diff_id, sizes[1])

    def refuse_damaged(self) -> NoReturn:
        """Raise HashMismatch, after removing the file."""
        self.file.unlink(missing_ok=True)
        raise HashMismatch(
            f"a layer of the base image was damaged on this disk: {self.digest}",
            hint="it was removed: run the same command again, which downloads it again",
        )


@dataclass(frozen=True)
class BaseImageVenvLayer:
    """The empty virtual environment of a base image's Python. The fields are the parameters of
    `venv_skeleton.venv_files`, which explains them."""

    interpreter: str
    executable: str
    version: str
    templates: Mapping[str, str]
    keeps_blob = False

    @property
    def key(self) -> str:
        versions = [WRITER_VERSION, venv_skeleton.VERSION]
        python = [self.interpreter, self.executable, self.version, dict(self.templates)]
        return strict_and_canonical_json.canonical_digest(["venv of a base image", versions, VENV, python])

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        texts = {name: text.encode() for name, text in self.templates.items()}
        entries = venv_skeleton.venv_files(self.interpreter, self.version, self.executable, texts)
        return write_layer(entries, packed, plain)


@dataclass(frozen=True)
class BaseImageFoldersLayer:
    """The layer with folders of a base image, which gives them back their own modes and owners. Every other layer that
    envbuild writes lists the parents of its files with mode 0755 and owner root, so that images share these layers.
    Therefore this layer comes last."""

    folders: tuple[BaseFolder, ...]
    keeps_blob = False

    @property
    def key(self) -> str:
        folders = [asdict(folder) for folder in self.folders]
        return strict_and_canonical_json.canonical_digest(["folders of a base image", WRITER_VERSION, folders])

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        entries = (LayerFolder(one.path.lstrip("/"), **asdict(one.ownership)) for one in self.folders)
        return write_layer(entries, packed, plain)


@dataclass(frozen=True)
class BaseImageNvccLinksLayer:
    """Adds the links that linkers look for to `folder`, the folder of CUDA's libraries in a base image. `libraries`:
    the names in `folder`; `lib64`: the path of a missing link to `folder`, or empty."""

    folder: str
    libraries: tuple[str, ...]
    lib64: str
    keeps_blob = False

    @property
    def key(self) -> str:
        content = ["nvcc of a base image", WRITER_VERSION, self.folder, list(self.libraries), self.lib64]
        return strict_and_canonical_json.canonical_digest(content)

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        return write_layer(self.links(), packed, plain)

    def links(self) -> list[LayerLink]:
        folder = self.folder.lstrip("/")
        found = [
            LayerLink(f"{folder}/{name}", target) for name, target in nvcc_links.missing_links(self.libraries).items()
        ]
        return found + ([LayerLink(self.lib64.lstrip("/"), "lib")] if self.lib64 else [])
