"""Writes an image of the engine as an OCI image layout with uncompressed layers: in a folder, or as one tar."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from envbuild.image import engine_save_stream
from envbuild.image.docker_engine import Engine, Image
from envbuild.registry import oci_types
from envbuild.registry.layer_decompressor import Unpacked
from envbuild.registry.oci_types import Manifest
from envbuild.util import strict_and_canonical_json, temporary_files
from envbuild.util.errors import EngineError

LAYOUT, INDEX, BLOBS = "oci-layout", "index.json", "blobs/sha256"
REF = "org.opencontainers.image.ref.name"
_BLOCK = 1 << 20


class Folder:
    """An OCI layout that is being written, in a separate folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tags: dict[str, str] = {}
        (folder / BLOBS).mkdir(parents=True)

    def _path(self, digest: str) -> Path:
        return self.folder / BLOBS / digest.removeprefix("sha256:")

    def manifest(self, target: str) -> Manifest | None:
        digest = self._tags.get(target, target)
        if not oci_types.DIGEST.fullmatch(digest) or not self._path(digest).is_file():
            return None
        raw = self._path(digest).read_bytes()
        return Manifest(raw, json.loads(raw)["mediaType"])

    def blob(self, digest: str, limit: int = strict_and_canonical_json.MAX_BYTES) -> bytes:
        return self._path(digest).read_bytes()

    def blocks(self, digest: str) -> Iterator[bytes]:
        with self._path(digest).open("rb") as stream:
            while block := stream.read(_BLOCK):
                yield block

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        index = self.manifest(oci_types.fallback_tag(digest))
        return oci_types.descriptors(index.document, "manifests") if index else []

    def put_blob(self, raw: bytes) -> None:
        self._path(oci_types.digest_of(raw)).write_bytes(raw)

    def put_blocks(self, digest: str, blocks: Iterable[bytes]) -> None:
        """Write a blob of any size. Its digest is not checked."""
        with self._path(digest).open("wb") as file:
            file.writelines(blocks)

    def put_manifest(self, target: str, manifest: Manifest) -> bool:
        self.put_blob(manifest.raw)
        self._tags[target] = manifest.digest
        return False

    def take(self, engine: Engine, image: Image) -> Manifest:
        """Save an image of the engine into the layout, with its layers as uncompressed blobs. Raises EngineError, also
        if the engine saves a different image."""
        wanted = {image.id, *image.layers}
        with engine_save_stream.files(engine, image) as contents:
            taken = {self._take(content) for content in contents}
        if not wanted <= taken:
            raise EngineError(f"the engine saved a different image than {image.id}")
        for digest in taken - wanted:
            self._path(digest).unlink()
        sizes = {digest: self._path(digest).stat().st_size for digest in wanted}
        return oci_types.image_manifest(
            {"mediaType": oci_types.CONFIG, "digest": image.id, "size": sizes[image.id]},
            [{"mediaType": oci_types.LAYER_TAR, "digest": one, "size": sizes[one]} for one in image.layers],
        )

    def _take(self, content: Unpacked) -> str:
        partial = self.folder / "incoming"
        with partial.open("wb") as file:
            shutil.copyfileobj(content, file, _BLOCK)
        partial.replace(self._path(content.digest))
        return content.digest

    def write(self, file: Path, files: Mapping[str, bytes]) -> Path:
        """Write the layout as one tar; the same content gives the same tar. `files`: other files to add, by name."""
        tagged = [(tag, self.manifest(tag)) for tag in sorted(self._tags) if not oci_types.DIGEST.fullmatch(tag)]
        manifests = [{**found.descriptor, "annotations": {REF: tag}} for tag, found in tagged if found]
        own = {
            LAYOUT: b'{"imageLayoutVersion":"1.0.0"}',
            INDEX: oci_types.encoded({"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": manifests}),
            **files,
        }
        with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as tar:
            for path in sorted((self.folder / BLOBS).iterdir()):
                with path.open("rb") as stream:
                    tar.addfile(tar_member(blob_path(path.name), path.stat().st_size), stream)
            for inner, raw in sorted(own.items()):
                tar.addfile(tar_member(inner, len(raw)), io.BytesIO(raw))
        return file


@contextlib.contextmanager
def saved(engine: Engine, image: Image) -> Iterator[Folder]:
    """Yield an image of the engine as a temporary layout. Raises EngineError."""
    with temporary_files.folder("saved") as folder:
        local = Folder(folder / "layout")
        local.take(engine, image)
        yield local


def blob_path(digest: str) -> str:
    """Return the path of a blob in a layout."""
    return f"{BLOBS}/{digest.removeprefix('sha256:')}"


def tar_member(name: str, size: int) -> tarfile.TarInfo:
    """Return the tar header of a regular file of `size` bytes, without time and owner."""
    member = tarfile.TarInfo(name)
    member.size = size
    return member
