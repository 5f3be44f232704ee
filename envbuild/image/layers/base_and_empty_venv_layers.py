"""The layers that are made from a base's tar: the base, its packages of `apt:`, and the empty virtual environment."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envbuild.fetch import sha256_file_store
from envbuild.image import debian_base_tar
from envbuild.image.layers import gzip_members, tar_difference, venv_skeleton
from envbuild.image.layers.layer_writer import WRITER_VERSION, WrittenLayer, write_layer
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import BuildError

_BLOCK = 1 << 20


@dataclass(frozen=True)
class BaseLayer:
    """The layer with a base's tar, unchanged. The name of the tar's file is the hash of all that it is made from."""

    tar: Path
    compressor: str = gzip_members.COMPRESSOR
    keeps_blob = True

    @property
    def key(self) -> str:
        return strict_and_canonical_json.canonical_digest(["base", self.compressor, self.tar.stem])

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. Raises HashMismatch if the tar was damaged."""
        layer = write_compressed(file_blocks(self.tar), packed, plain)
        debian_base_tar.require_intact(self.tar, layer.diff_id.removeprefix("sha256:"))
        return layer


@dataclass(frozen=True)
class DifferenceLayer:
    """The layer that changes the content of `base` to that of `wanted`. Both are tars of bases."""

    base: Path
    wanted: Path
    compressor: str = gzip_members.COMPRESSOR
    keeps_blob = True

    @property
    def key(self) -> str:
        content = ["difference", tar_difference.VERSION, self.compressor, self.base.stem, self.wanted.stem]
        return strict_and_canonical_json.canonical_digest(content)

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. Raises HashMismatch if a tar was damaged, BuildError if a name in it is reserved."""
        for tar in (self.base, self.wanted):
            debian_base_tar.require_intact(tar, sha256_file_store.file_digest(tar))
        return write_compressed(tar_difference.difference_blocks(self.base, self.wanted), packed, plain)


@dataclass(frozen=True)
class VenvLayer:
    """The layer with the empty virtual environment of a base's Python. `python`: such as "3.11"; `version`: such as
    "3.11.2"."""

    base: Path
    python: str
    version: str
    keeps_blob = False

    @property
    def key(self) -> str:
        versions = [WRITER_VERSION, venv_skeleton.VERSION]
        return strict_and_canonical_json.canonical_digest(
            ["venv", versions, VENV, self.base.stem, self.python, self.version]
        )

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. Raises HashMismatch if the tar was damaged, BuildError if the tar lacks this Python or the
        module venv."""
        debian_base_tar.require_intact(self.base, sha256_file_store.file_digest(self.base))
        interpreter = f"/usr/bin/python{self.python}"
        templates: dict[str, bytes] = {}
        found = False
        folder = f"usr/lib/python{self.python}/venv/scripts"
        with tarfile.open(self.base) as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                found = found or (str(path) == interpreter.lstrip("/") and member.isreg())
                if str(path.parent) in (f"{folder}/common", f"{folder}/posix") and member.isreg():
                    stream = archive.extractfile(member)
                    assert stream
                    templates[path.name] = stream.read()
        if not found or not templates:
            raise BuildError(f"the base has no {interpreter} with the module venv", hint="add python3-venv to apt:")
        return write_layer(venv_skeleton.venv_files(interpreter, self.version, interpreter, templates), packed, plain)


def write_compressed(
    blocks: Iterable[bytes], packed: Callable[[bytes], object], plain: Callable[[bytes], object]
) -> WrittenLayer:
    """Compress the blocks of a tar as a layer."""
    packed_sha256, plain_sha256 = hashlib.sha256(), hashlib.sha256()
    packed_size = plain_size = 0

    def watched() -> Iterator[bytes]:
        nonlocal plain_size
        for block in blocks:
            plain_sha256.update(block)
            plain_size += len(block)
            plain(block)
            yield block

    for member in gzip_members.compress(watched()):
        packed_sha256.update(member)
        packed_size += len(member)
        packed(member)
    return WrittenLayer(
        f"sha256:{packed_sha256.hexdigest()}", packed_size, f"sha256:{plain_sha256.hexdigest()}", plain_size
    )


def file_blocks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            yield block
