"""A verified image as one file for a closed site: an OCI layout with its evidence, the public key and the lock.

What the engine is given is made anew from checked blobs: it never sees the file itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from envbuild import scratch
from envbuild.attest import layers, oci, saving
from envbuild.attest.oci import Manifest
from envbuild.attest.unpacking import Unpacked
from envbuild.errors import EngineError, FileError
from envbuild.image.engine import Engine, Image
from envbuild.proof import untrusted
from envbuild.proof.reasons import Malformed, Refusal

LAYOUT, INDEX, ARCHIVE = "oci-layout", "index.json", "manifest.json"
KEY, LOCK, PROFILE = "envbuild/public-key.pem", "envbuild/lock.yaml", "envbuild/profile"
REF = "org.opencontainers.image.ref.name"
_LAYER = "application/vnd.oci.image.layer.v1.tar"
_BLOCK = 1 << 20


class Folder:
    """A layout being made, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tags: dict[str, str] = {}
        (folder / "blobs" / "sha256").mkdir(parents=True)

    def _path(self, digest: str) -> Path:
        return self.folder / "blobs" / "sha256" / digest.removeprefix("sha256:")

    def manifest(self, target: str) -> Manifest | None:
        digest = self._tags.get(target, target)
        if not oci.DIGEST.fullmatch(digest) or not self._path(digest).is_file():
            return None
        raw = self._path(digest).read_bytes()
        return Manifest(raw, json.loads(raw)["mediaType"])

    def blob(self, digest: str, limit: int = untrusted.MAX_BYTES) -> bytes:
        return self._path(digest).read_bytes()

    def blocks(self, digest: str) -> Iterator[bytes]:
        with self._path(digest).open("rb") as stream:
            while block := stream.read(_BLOCK):
                yield block

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        index = self.manifest(oci.fallback_tag(digest))
        return oci.listed(index.document, "manifests") if index else []

    def put_blob(self, raw: bytes) -> None:
        self._path(oci.digest_of(raw)).write_bytes(raw)

    def put_manifest(self, target: str, manifest: Manifest) -> bool:
        self.put_blob(manifest.raw)
        self._tags[target] = manifest.digest
        return False

    def take(self, engine: Engine, image: Image) -> Manifest:
        """An image that the engine saves, its layers as blobs, unpacked. Raises EngineError, also if it saves
        another."""
        wanted = {image.id, *image.layers}
        with saving.files(engine, image) as contents:
            taken = {self._take(content) for content in contents}
        if not wanted <= taken:
            raise EngineError(f"the engine saves another image than {image.id}")
        for digest in taken - wanted:
            self._path(digest).unlink()
        sizes = {digest: self._path(digest).stat().st_size for digest in wanted}
        document = {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST,
            "config": {"mediaType": oci.CONFIG, "digest": image.id, "size": sizes[image.id]},
            "layers": [{"mediaType": _LAYER, "digest": digest, "size": sizes[digest]} for digest in image.layers],
        }
        return Manifest(oci.encoded(document), oci.MANIFEST)

    def _take(self, content: Unpacked) -> str:
        partial = self.folder / "incoming"
        with partial.open("wb") as file:
            shutil.copyfileobj(content, file, _BLOCK)
        partial.replace(self._path(content.digest))
        return content.digest

    def write(self, file: Path, files: Mapping[str, bytes]) -> Path:
        """The whole as one tar, the same for the same content."""
        tagged = [(tag, self.manifest(tag)) for tag in sorted(self._tags) if not oci.DIGEST.fullmatch(tag)]
        manifests = [{**found.descriptor, "annotations": {REF: tag}} for tag, found in tagged if found]
        own = {
            LAYOUT: b'{"imageLayoutVersion":"1.0.0"}',
            INDEX: oci.encoded({"schemaVersion": 2, "mediaType": oci.INDEX, "manifests": manifests}),
            **files,
        }
        with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted((self.folder / "blobs" / "sha256").iterdir()):
                with path.open("rb") as stream:
                    tar.addfile(_member(_inside(path.name), path.stat().st_size), stream)
            for inner, raw in sorted(own.items()):
                tar.addfile(_member(inner, len(raw)), io.BytesIO(raw))
        return file


@contextlib.contextmanager
def saved(engine: Engine, image: Image) -> Iterator[Folder]:
    """An image of the engine as a layout, for as long as it is looked into. Raises EngineError."""
    with scratch.folder("saved") as folder:
        local = Folder(folder / "layout")
        local.take(engine, image)
        yield local


def _inside(digest: str) -> str:
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = size
    return member


class Bundle:
    """A bundle as it came, read where it lies; nothing is unpacked, and nothing read is other than its digest says."""

    def __init__(self, file: Path) -> None:
        """Raises Malformed unless it is a tar with an OCI layout of plain files."""
        try:
            self._tar = tarfile.open(file, "r:", tarinfo=layers.Member)  # noqa: SIM115 - as long as this object
            members = self._tar.getmembers()
        except FileNotFoundError as error:
            raise FileError(f"{file} cannot be read: {error.strerror}") from None
        except layers.DAMAGED:
            raise Malformed(f"{file} is no bundle") from None
        names = [member.name for member in members]
        plain = all(m.isreg() and ".." not in PurePosixPath(m.name).parts for m in members)
        if not plain or len(set(names)) != len(names) or INDEX not in names:
            raise Malformed(f"{file} is no bundle: it must hold each of its files once, and nothing else")
        self._members = dict(zip(names, members, strict=True))
        index = untrusted.parse(self.file(INDEX), INDEX)
        self._tags: dict[str, dict[str, Any]] = {}
        for item in oci.listed(index, "manifests"):
            noted = item.get("annotations")
            if isinstance(noted, dict) and isinstance(noted.get(REF), str):
                self._tags[noted[REF]] = item

    def file(self, name: str, limit: int = untrusted.MAX_BYTES) -> bytes:
        """Raises Refusal if it is not there, or larger than `limit`."""
        member = self._members.get(name)
        stream = self._tar.extractfile(member) if member else None
        if member is None or stream is None:
            raise Malformed(f"the bundle has no {name}")
        if member.size > limit:
            raise Refusal("too-large", f"{name} in the bundle is larger than {limit} bytes")
        return stream.read()

    def manifest(self, target: str) -> Manifest | None:
        digest = oci.digest_in(self._tags[target]) if target in self._tags else target
        if not oci.DIGEST.fullmatch(digest) or _inside(digest) not in self._members:
            return None
        raw = self.blob(digest, oci.MAX_MANIFEST)
        return Manifest(raw, str(untrusted.parse(raw, "the manifest").get("mediaType")))

    def blob(self, digest: str, limit: int = untrusted.MAX_BYTES) -> bytes:
        raw = self.file(_inside(digest), limit)
        if oci.digest_of(raw) != digest:
            raise Refusal("digest", f"the bundle holds something else as the blob {digest}")
        return raw

    def blocks(self, digest: str) -> Iterator[bytes]:
        member = self._members.get(_inside(digest))
        stream = self._tar.extractfile(member) if member else None
        if stream is None:
            raise Malformed(f"the bundle has no blob {digest}")
        seen = hashlib.sha256()
        while block := stream.read(_BLOCK):
            seen.update(block)
            yield block
        if f"sha256:{seen.hexdigest()}" != digest:
            raise Refusal("digest", f"the bundle holds something else as the blob {digest}")

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        index = self.manifest(oci.fallback_tag(digest))
        return oci.listed(index.document, "manifests") if index else []

    def loadable(self, image: Manifest, diff_ids: tuple[str, ...], name: str) -> Iterator[bytes]:
        """The image alone as an archive that an engine loads under `name`, made from checked blobs: no other file of
        the bundle is in it. Raises Refusal where a layer is not the one of its digest."""
        layers = [oci.digest_in(layer) for layer in image.layers]
        if tuple(layers) != diff_ids:
            raise Malformed("the bundle's layers are not those that the image's configuration names")
        listed = [{"Config": _inside(image.config), "RepoTags": [name], "Layers": [_inside(one) for one in layers]}]
        raw = json.dumps(listed).encode()
        yield from _entry(ARCHIVE, len(raw), iter([raw]))
        for digest in dict.fromkeys((image.config, *layers)):
            yield from _entry(_inside(digest), self._members[_inside(digest)].size, self.blocks(digest))
        yield b"\0" * 1024


def _entry(name: str, size: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield _member(name, size).tobuf(tarfile.GNU_FORMAT)
    yield from blocks
    yield b"\0" * (-size % 512)
