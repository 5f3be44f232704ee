"""Reads a verified image that was saved as one file for a site without network access.

The file is a tar with an OCI layout, the evidence, the public key and the lock. The engine never receives the file
itself, but only layers whose bytes are checked before and while they are sent.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from envbuild.image.engine_image_to_oci_layout import INDEX, REF, blob_path
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci.image_description import DescribedLayer, OciImage
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.layer_decompressor import Unpacked
from envbuild.registry.oci_types import Manifest
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import FileError
from envbuild.util.untrusted_input_errors import Malformed, Refusal

KEY, LOCK, PROFILE = "envbuild/public-key.pem", "envbuild/lock.yaml", "envbuild/profile"
_BLOCK = 1 << 20
_LARGEST = 64 << 30  # maximum size of an unpacked layer in bytes
_MOST_LAYERS = 127  # the limit of the engine's overlay2 driver


class SavedImage:
    """Reads a saved image in place: nothing is unpacked, and every blob is checked against its digest."""

    def __init__(self, file: Path) -> None:
        """Open the file. Raises FileError if it does not exist, Malformed unless it is a tar with an OCI layout of
        plain files."""
        try:
            self._tar = tarfile.open(file, "r:", tarinfo=image_content_reader.Member)  # noqa: SIM115 - as long as this object
            members = self._tar.getmembers()
        except FileNotFoundError as error:
            raise FileError(f"{file} cannot be read: {error.strerror}") from None
        except image_content_reader.DAMAGED:
            raise Malformed(f"{file} is not a saved image") from None
        names = [member.name for member in members]
        plain = all(m.isreg() and ".." not in PurePosixPath(m.name).parts for m in members)
        if not plain or len(set(names)) != len(names) or INDEX not in names:
            raise Malformed(f"{file} is not a saved image: it must contain each of its files once, and nothing else")
        self._members = dict(zip(names, members, strict=True))
        index = strict_and_canonical_json.parse(self.file(INDEX), INDEX)
        self._tags: dict[str, dict[str, object]] = {}
        for item in oci_types.descriptors(index, "manifests"):
            noted = item.get("annotations")
            if isinstance(noted, dict) and isinstance(noted.get(REF), str):
                if ":" in noted[REF] or noted[REF] in self._tags:  # with a colon it would be a digest, not a tag
                    text = f"invalid or duplicate name {noted[REF][:100]!r} in its index"
                    raise Malformed(f"{file} is not a saved image: {text}")
                self._tags[noted[REF]] = item

    def file(self, name: str, limit: int = strict_and_canonical_json.MAX_BYTES) -> bytes:
        """Return the content of a file in the saved image. Raises Refusal if it is missing, or larger than `limit`."""
        member = self._members.get(name)
        stream = self._tar.extractfile(member) if member else None
        if member is None or stream is None:
            raise Malformed(f"the saved image has no {name}")
        if member.size > limit:
            raise Refusal("too-large", f"{name} in the saved image is larger than {limit} bytes")
        return stream.read()

    def manifest(self, target: str) -> Manifest | None:
        digest = oci_types.digest_in(self._tags[target]) if target in self._tags else target
        if not oci_types.DIGEST.fullmatch(digest) or blob_path(digest) not in self._members:
            return None
        raw = self.blob(digest, oci_types.MAX_MANIFEST)
        return Manifest(raw, str(strict_and_canonical_json.parse(raw, "the manifest").get("mediaType")))

    def blob(self, digest: str, limit: int = strict_and_canonical_json.MAX_BYTES) -> bytes:
        raw = self.file(blob_path(digest), limit)
        if oci_types.digest_of(raw) != digest:
            raise Refusal("digest", f"the saved image has wrong content in the blob {digest}")
        return raw

    def blocks(self, digest: str) -> Iterator[bytes]:
        member = self._members.get(blob_path(digest))
        stream = self._tar.extractfile(member) if member else None
        if stream is None:
            raise Malformed(f"the saved image has no blob {digest}")
        seen = hashlib.sha256()
        while block := stream.read(_BLOCK):
            seen.update(block)
            yield block
        if f"sha256:{seen.hexdigest()}" != digest:
            raise Refusal("digest", f"the saved image has wrong content in the blob {digest}")

    def referrers(self, digest: str) -> list[dict[str, object]]:
        index = self.manifest(oci_types.fallback_tag(digest))
        return oci_types.descriptors(index.document, "manifests") if index else []

    def checked_image(self, manifest: Manifest) -> OciImage:
        """Read every layer, and return the image for an engine. Raises Refusal if a layer does not match its digest, or
        if its unpacked tar does not match the digest in the image's configuration."""
        raw = self.blob(manifest.config, image_content_reader.CONFIG_BYTES)
        diff_ids = image_content_reader.parse_config(manifest.config, raw).layers
        if len(diff_ids) != len(manifest.layers):
            raise Malformed("the saved image has a different number of layers than the image's configuration names")
        if len(diff_ids) > _MOST_LAYERS:
            raise Refusal("too-large", f"the saved image has {len(diff_ids)} layers, more than {_MOST_LAYERS}")
        recipes = [
            SavedLayer(self, oci_types.digest_in(layer), diff_id)
            for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
        ]
        written = {recipe: recipe.write(len, len) for recipe in dict.fromkeys(recipes)}
        described = (
            DescribedLayer(f"saved layer {number}", "", recipe, str(layer.get("mediaType")))
            for number, (recipe, layer) in enumerate(zip(recipes, manifest.layers, strict=True), 1)
        )
        return OciImage(raw, tuple(described), tuple(written[recipe] for recipe in recipes))


@dataclass(frozen=True)
class SavedLayer:
    """Writes a layer that it reads from a saved image. `digest`: of the layer's blob; `diff_id`: of the unpacked
    tar."""

    saved: SavedImage
    digest: str
    diff_id: str
    keeps_blob = False
    key = None

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Pass the bytes of the blob to `packed`, and those of the unpacked tar to `plain`. Raises Refusal if either
        does not match its digest."""
        size = diff_size = 0

        def blocks() -> Iterator[bytes]:
            nonlocal size
            for block in self.saved.blocks(self.digest):
                size += len(block)
                packed(block)
                yield block

        unpacked = Unpacked(blocks())
        try:
            while block := unpacked.read(_BLOCK):
                diff_size += len(block)
                if diff_size > _LARGEST:
                    raise Refusal("too-large", f"a layer of the saved image is larger than {_LARGEST >> 30} GiB")
                plain(block)
        except image_content_reader.DAMAGED as error:
            raise Refusal("layer", f"a layer of the saved image cannot be unpacked: {error}") from None
        if unpacked.digest != self.diff_id:
            raise Refusal("layer", f"a layer of the saved image has the content {unpacked.digest}, not {self.diff_id}")
        return WrittenLayer(self.digest, size, self.diff_id, diff_size)
