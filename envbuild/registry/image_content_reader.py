"""Reads the configuration of an image, and the files of its layers in blocks. Every part that is kept in memory has a
limited size."""

from __future__ import annotations

import contextlib
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from envbuild.registry import oci_types
from envbuild.registry.layer_decompressor import Unpacked
from envbuild.registry.oci_types import BlobSource, ImageSource, Manifest
from envbuild.util.errors import printable
from envbuild.util.untrusted_input_errors import Malformed, Refusal

CONFIG_BYTES = 8 << 20
_HEADER_BYTES = 1 << 20  # the largest extended header of an entry, such as a long name
_MOST = 5_000_000  # files per layer
_LARGEST = 1 << 40  # bytes per file: tarfile continues for as long as a header claims, even after the end of the layer
_BLOCK = 1 << 20
_OF_WINDOWS = ("ArgsEscaped",)  # settings for Windows images, which some builders set in every image


@dataclass(frozen=True)
class Config:
    """An image's configuration: its id, the diff ids of its layers, labels and environment. `settings`: other non-empty
    settings of a container (user, entrypoint, command ...)."""

    id: str
    layers: tuple[str, ...]
    labels: Mapping[str, str]
    environment: Mapping[str, str]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredImage:
    """A stored image: its source (a registry or a saved image), its manifest and its configuration."""

    place: ImageSource
    manifest: Manifest
    config: Config


def read_image(place: ImageSource, manifest: Manifest) -> StoredImage:
    """Read the configuration of a manifest; raises what `config_of` raises."""
    return StoredImage(place, manifest, config_of(place, manifest))


def config_of(place: ImageSource, manifest: Manifest) -> Config:
    """Read and parse the configuration of a manifest. Raises Refusal if the content does not match the manifest,
    NetworkError."""
    found = parse_config(manifest.config, place.blob(manifest.config, CONFIG_BYTES))
    if len(found.layers) != len(manifest.layers):
        raise Malformed("the image's manifest and its configuration name different layers")
    return found


def parse_config(image_id: str, raw: bytes) -> Config:
    """Parse the bytes of a configuration. Raises Malformed."""
    document = oci_types.parse_document(raw, "the image's configuration", CONFIG_BYTES)
    try:
        inner = document.get("config") or {}
        layers = tuple(str(layer) for layer in document["rootfs"]["diff_ids"])
        labels = {str(key): str(value) for key, value in (inner.get("Labels") or {}).items()}
        variables = [str(item).partition("=")[::2] for item in inner.get("Env") or ()]
        settings = {key: value for key, value in inner.items() if value and key not in ("Labels", "Env", *_OF_WINDOWS)}
    except (KeyError, TypeError, AttributeError):
        raise Malformed("the image's configuration is invalid") from None
    if any("\0" in name or "\0" in value or not name for name, value in variables):
        raise Malformed("the image's configuration has an invalid variable")
    environment = dict(variables)
    if len(environment) != len(variables):  # runtimes differ in which one they use
        raise Malformed("the image's configuration sets a variable twice")
    return Config(image_id, layers, labels, environment, settings)


DAMAGED = (tarfile.TarError, zlib.error, EOFError, ValueError, OverflowError, RecursionError)
"""All errors that reading an invalid or hostile layer raises; the headers of its tar may contain any number.
RecursionError: tarfile calls itself for each of several extended headers in a row."""


class Member(tarfile.TarInfo):
    """A tar entry with limits. tarfile reads long names and attributes into memory, so their size is limited. Sparse
    files are refused: tarfile reads their map completely, a few bytes can expand to exabytes, and no engine writes such
    files."""

    def _bounded(self) -> None:
        if self.size > _HEADER_BYTES:
            raise Refusal("too-large", "an archive has a file header that is too large")

    def _sparse(self, *_: Any) -> Any:
        raise Refusal("layer", "an archive has a sparse file, which is not supported")

    _proc_sparse = _proc_gnusparse_00 = _proc_gnusparse_01 = _proc_gnusparse_10 = _sparse

    def _proc_pax(self, archive: tarfile.TarFile) -> Any:
        self._bounded()
        return super()._proc_pax(archive)  # type: ignore[misc]

    def _proc_gnulong(self, archive: tarfile.TarFile) -> Any:
        self._bounded()
        return super()._proc_gnulong(archive)  # type: ignore[misc]


def entries(
    place: BlobSource, digest: str, diff_id: str, watch: Callable[[bytes], object] = lambda block: None
) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """Every entry of a layer, with the archive; read an entry's content before requesting the next entry. `watch` gets
    all bytes of the tar; it may raise ValueError.

    Raises Refusal if the layer does not match its digests or cannot be inspected.
    """
    with (
        _unpacked(place, digest, diff_id, watch) as stream,
        tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK, tarinfo=Member) as archive,
    ):
        for count, member in enumerate(archive, 1):
            if count > _MOST:
                raise Refusal("too-large", f"the layer {digest} has more than {_MOST} files")
            if member.size > _LARGEST:
                raise Refusal("too-large", f"the layer {digest} claims to have a file of {member.size} bytes")
            yield member, archive
            archive.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps every entry in memory


def content(member: tarfile.TarInfo, archive: tarfile.TarFile) -> Iterator[bytes]:
    """The blocks of an entry's content; none unless it is a regular file.

    Raises Malformed if it is damaged or truncated: `entries` cannot catch an error that is raised while its caller
    reads.
    """
    try:
        stream = archive.extractfile(member) if member.isreg() else None
        while stream and (block := stream.read(_BLOCK)):
            yield block
    except DAMAGED:
        raise Malformed(f"a layer is damaged in the file {printable(member.name)[:200]}") from None


def require_layer(place: ImageSource, digest: str, diff_id: str) -> None:
    """Read a layer to its end. Raises Refusal if it does not match its digests."""
    with _unpacked(place, digest, diff_id):
        pass


@contextlib.contextmanager
def _unpacked(
    place: BlobSource, digest: str, diff_id: str, watch: Callable[[bytes], object] = lambda block: None
) -> Iterator[Unpacked]:
    """Yield the decompressed layer. At the end, read the rest of it and check the diff id."""
    stream = Unpacked(place.blocks(digest), watch)
    try:
        yield stream
        while stream.read(_BLOCK):
            pass
    except DAMAGED:
        raise Malformed(f"the layer {digest} cannot be unpacked") from None
    if stream.digest != diff_id:
        raise Refusal("digest", f"the layer {digest} does not match the image's configuration")
