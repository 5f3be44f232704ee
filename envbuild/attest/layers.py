"""An image read where it is, piece by piece: its configuration, and the files of its layers. Everything is bounded."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envbuild.attest.oci import Manifest, Place
from envbuild.blocks import Blocks
from envbuild.proof import untrusted
from envbuild.proof.reasons import Malformed, Refusal

_CONFIG_BYTES = 8 << 20
_HEADER_BYTES = 1 << 20  # of a long name in a layer
_MOST = 5_000_000  # files of a layer
_LARGEST = 1 << 40  # bytes of one: tarfile goes on reading for as long as a head says, though the layer has ended
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Config:
    """An image's configuration: its id, the diff ids of its layers, and what it says of itself."""

    id: str
    layers: tuple[str, ...]
    labels: Mapping[str, str]
    environment: Mapping[str, str]


def config_of(place: Place, manifest: Manifest) -> Config:
    """Raises Refusal if the registry's answer is not what the manifest names, NetworkError."""
    raw = place.blob(manifest.config, _CONFIG_BYTES)
    document = untrusted.parse(raw, "the image's configuration", _CONFIG_BYTES)
    try:
        inner = document.get("config") or {}
        layers = tuple(str(layer) for layer in document["rootfs"]["diff_ids"])
        labels = {str(key): str(value) for key, value in (inner.get("Labels") or {}).items()}
        environment = dict(str(item).partition("=")[::2] for item in inner.get("Env") or ())
    except (KeyError, TypeError, AttributeError):
        raise Malformed("the image's configuration is not as it should be") from None
    if len(layers) != len(manifest.layers):
        raise Malformed("the image's manifest and its configuration name different layers")
    return Config(manifest.config, layers, labels, environment)


DAMAGED = (tarfile.TarError, zlib.error, EOFError, ValueError, OverflowError)
"""What tarfile raises for what is no tar, or one that lies: the numbers of its attributes may be anything."""


class Member(tarfile.TarInfo):
    """Long names and attributes are read into memory: only so much of them. The map of a sparse file is read whole, and
    says that a few bytes are exabytes; no engine writes one."""

    def _bounded(self) -> None:
        if self.size > _HEADER_BYTES:
            raise Refusal("too-large", "an archive has a file header beyond all measure")

    def _sparse(self, *_: Any) -> Any:
        raise Refusal("layer", "an archive has a sparse file: it is not looked into")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse

    def _proc_pax(self, archive: tarfile.TarFile) -> Any:
        self._bounded()
        return super()._proc_pax(archive)  # type: ignore[misc]

    def _proc_gnulong(self, archive: tarfile.TarFile) -> Any:
        self._bounded()
        return super()._proc_gnulong(archive)  # type: ignore[misc]


def entries(place: Place, digest: str, diff_id: str) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """Every entry of a layer, with the archive to read its content from before the next one is asked for.

    Raises Refusal if it is not the layer of its digests, or cannot be looked into.
    """
    stream = _Unpacked(place.blocks(digest))
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK, tarinfo=Member) as archive:
            for count, member in enumerate(archive):
                if count > _MOST:
                    raise Refusal("too-large", f"the layer {digest} has more than {_MOST} files")
                if member.size > _LARGEST:
                    raise Refusal("too-large", f"the layer {digest} says that it has a file of {member.size} bytes")
                yield member, archive
                archive.members = []  # type: ignore[attr-defined]  # else each is kept
        while stream.read(_BLOCK):
            pass
    except DAMAGED:
        raise Malformed(f"the layer {digest} cannot be unpacked") from None
    if stream.digest != diff_id:
        raise Refusal("digest", f"the layer {digest} is not the one that the image's configuration names")


class _Unpacked(Blocks):
    """A layer's tar as a file object, hashed as it is read."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        super().__init__(blocks)
        first = next(blocks, b"")
        if first.startswith(b"\x28\xb5\x2f\xfd"):
            raise Refusal("layer", "a layer above the proved ones is compressed with zstd: it cannot be looked into")
        self._inflate = zlib.decompressobj(wbits=31) if first.startswith(b"\x1f\x8b") else None
        self._packed = first if self._inflate else b""
        self._buffer += b"" if self._inflate else first
        self._seen = hashlib.sha256()

    @property
    def digest(self) -> str:
        return f"sha256:{self._seen.hexdigest()}"

    def read(self, size: int = -1) -> bytes:
        result = super().read(size)
        self._seen.update(result)
        return result

    def _more(self) -> bytes:
        if self._inflate is None:
            return super()._more()
        while self._packed or self._fetched():
            if self._inflate.eof:  # what follows is another member, as parallel gzip writes them
                self._inflate = zlib.decompressobj(wbits=31)
            block = self._inflate.decompress(self._packed, _BLOCK)
            self._packed = self._inflate.unconsumed_tail or self._inflate.unused_data
            if block:
                return block
        return b""

    def _fetched(self) -> bool:
        self._packed = super()._more()
        return bool(self._packed)
