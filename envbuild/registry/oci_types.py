"""Data types of registries: references, manifests, descriptors. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from envbuild.registry import image_reference_patterns
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import UsageError, some
from envbuild.util.untrusted_input_errors import Malformed, Refusal

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
EMPTY = "application/vnd.oci.empty.v1+json"
LAYER_TAR = "application/vnd.oci.image.layer.v1.tar"
LAYER_GZIP, LAYER_ZSTD = f"{LAYER_TAR}+gzip", f"{LAYER_TAR}+zstd"
_DOCKER = "application/vnd.docker.distribution.manifest"
MANIFESTS = (MANIFEST, f"{_DOCKER}.v2+json")
INDEXES = (INDEX, f"{_DOCKER}.list.v2+json")
MAX_MANIFEST = 4 << 20  # bytes; the limit of registries by the distribution specification

_NAME, _HOST = re.compile(image_reference_patterns.NAME), re.compile(image_reference_patterns.HOST)
_TAG = re.compile(image_reference_patterns.TAG)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def server_of(registry: str) -> str:
    """Return the host that serves a registry. Docker Hub has another host than its name docker.io. envbuild reads
    the registry's certificate from the folder below /etc/docker/certs.d that has the name of this host."""
    return "registry-1.docker.io" if registry == "docker.io" else registry


@dataclass(frozen=True)
class Reference:
    """An image in a registry, in docker's notation. `host`: the registry. Without tag and digest, the tag is
    `latest`."""

    host: str
    name: str
    tag: str | None = None
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Parse `[HOST/]NAME[:TAG][@sha256:...]`. Raises UsageError for anything else."""
        rest, separator, digest = text.partition("@")
        first, slash, remainder = rest.partition("/")
        is_host = bool(slash) and (first == "localhost" or any(c in first for c in ".:["))
        host, path = (first, remainder) if is_host else ("docker.io", rest)
        name, colon, tag = path.partition(":")
        if host == "docker.io" and "/" not in name:
            name = f"library/{name}"
        parts = (_HOST.fullmatch(host), image_reference_patterns.has_valid_address(host), _NAME.fullmatch(name),
                 not colon or _TAG.fullmatch(tag), not separator or DIGEST.fullmatch(digest),
                 len(text) <= 500)  # fmt: skip
        if not all(parts):
            raise UsageError(
                f"{text[:200]!r} is not a reference to an image in a registry",
                hint="write HOST/NAME:TAG or HOST/NAME@sha256:..., without http:// or https://, and without _ in HOST",
            )
        return cls(host, name, tag or None, digest or None)

    @property
    def repository(self) -> str:
        return f"{self.host}/{self.name}"

    @property
    def target(self) -> str:
        """The digest or tag for requests to the registry."""
        return self.digest or self.tag or "latest"

    def tagged(self, tag: str) -> Reference:
        return replace(self, tag=tag, digest=None)

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{self.repository}{tag}{f'@{self.digest}' if self.digest else ''}"


# The keys that an engine reads in manifests, indexes, descriptors and configurations, by the specification and Docker.
_KEYS = (
    "annotations", "architecture", "artifactType", "author", "config", "created", "data", "digest", "features",
    "history", "layers", "manifests", "mediaType", "os", "os.features", "os.version", "platform", "schemaVersion",
    "size", "subject", "urls", "variant",
    "container_config", "diff_ids", "rootfs", "type",
    "ArgsEscaped", "Cmd", "Domainname", "Entrypoint", "Env", "ExposedPorts", "Healthcheck", "Hostname", "Image",
    "Labels", "OnBuild", "Shell", "StopSignal", "StopTimeout", "User", "Volumes", "WorkingDir",
)  # fmt: skip
_SPELLED = {key.casefold(): key for key in _KEYS}
_MAPS = ("annotations", "Labels", "ExposedPorts", "Volumes")  # objects with arbitrary keys


def parse_document(raw: bytes, what: str, limit: int) -> dict[str, Any]:
    """Parse a manifest, an index or a configuration. `what`: its name in errors; `limit`: its largest size in bytes.
    Raises Malformed for an invalid document, and if an engine might parse it differently: Go's JSON decoder ignores the
    case of keys and takes the last match, so it reads `env` as `Env` (encoding/json, Unmarshal)."""
    found = strict_and_canonical_json.parse(raw, what, limit)
    level: list[Any] = [found]
    while level:
        objects = [one for one in level if isinstance(one, dict)]
        for key in (key for one in objects for key in one):
            if _SPELLED.get(key.casefold(), key) != key:
                raise Malformed(f"{what} has the key {key[:40]!r}: upper and lower case differ from the specification")
        inner = [value for one in objects for key, value in one.items() if key not in _MAPS]
        level = inner + [value for one in level if isinstance(one, list) for value in one]
    return found


def digest_of(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def encoded(document: Mapping[str, Any]) -> bytes:
    return strict_and_canonical_json.encode(document, ascii_only=True)


def descriptor(media_type: str, raw: bytes, **more: Any) -> dict[str, Any]:
    return {"mediaType": media_type, "digest": digest_of(raw), "size": len(raw), **more}


@dataclass(frozen=True)
class Manifest:
    """A manifest or an index, as the raw bytes from which its digest is computed."""

    raw: bytes
    media_type: str

    @property
    def digest(self) -> str:
        return digest_of(self.raw)

    @cached_property
    def document(self) -> dict[str, Any]:
        """The parsed JSON. Raises Malformed, also for a document that could be both an index and an image manifest."""
        found = parse_document(self.raw, "the manifest", MAX_MANIFEST)
        if "manifests" in found and {"layers", "config"} & found.keys():
            raise Malformed("the manifest is also an index")
        return found

    @property
    def is_index(self) -> bool:
        return self.media_type in INDEXES

    @property
    def descriptor(self) -> dict[str, Any]:
        return descriptor(self.media_type, self.raw)

    @property
    def config(self) -> str:
        """The digest of the image's configuration: the image id. Raises Malformed."""
        return digest_in(self.document.get("config"))

    @property
    def layers(self) -> list[dict[str, Any]]:
        return descriptors(self.document, "layers")

    @property
    def only_image(self) -> dict[str, Any]:
        """The descriptor of the only image in an index. Raises Refusal for an index without images, and for one of
        several images: engines choose by platform, and interpret platforms such as `x86_64`, `Linux/AMD64` or a missing
        one differently."""
        images = [item for item in descriptors(self.document, "manifests") if not _is_attestation(item)]
        if len(images) != 1:
            raise Refusal("index", f"the index has {some(len(images), 'image')}, not exactly one")
        return images[0]


def image_manifest(
    config: Mapping[str, Any], layers: Iterable[Mapping[str, Any]], annotations: Mapping[str, str] | None = None
) -> Manifest:
    """Return the manifest of an image. `config`, `layers`: the descriptors of its configuration and of its layers."""
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": list(layers)}
    if annotations:
        document["annotations"] = dict(annotations)
    return Manifest(encoded(document), MANIFEST)


def _is_attestation(item: Mapping[str, Any]) -> bool:
    """Whether an entry of an index is an attestation of buildx: its platform is unknown/unknown, which no engine
    runs."""
    platform = item.get("platform")
    return isinstance(platform, dict) and platform.get("os") == platform.get("architecture") == "unknown"


class BlobSource(Protocol):
    """A source of blobs of any size. It may return blobs that do not match their digests, as CachedBlobs does."""

    def blocks(self, digest: str) -> Iterator[bytes]: ...


class ImageSource(BlobSource, Protocol):
    """A source of manifests and blobs: a repository in a registry, or a saved image. All that it returns
    matches its digest."""

    def manifest(self, target: str) -> Manifest | None: ...
    def blob(self, digest: str, limit: int = ...) -> bytes: ...
    def referrers(self, digest: str) -> list[dict[str, Any]]: ...


class Target(ImageSource, Protocol):
    """A writable image source: a repository, or the folder of a new saved image."""

    def put_blob(self, raw: bytes) -> None: ...
    def put_manifest(self, target: str, manifest: Manifest) -> bool: ...


class TaggedSource(ImageSource, Protocol):
    """An image source that lists its tags: a repository."""

    def tags(self) -> list[str]: ...


class TaggedTarget(Target, TaggedSource, Protocol):
    """A repository that can be written to."""


def descriptors(document: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The list of descriptors under `key` in a manifest. Raises Malformed."""
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise Malformed(f"the manifest has no list {key}")
    return found


def digest_in(item: Any) -> str:
    """The digest of a descriptor. Raises Malformed."""
    found = item.get("digest") if isinstance(item, dict) else None
    if not isinstance(found, str) or not DIGEST.fullmatch(found):
        raise Malformed("a descriptor in the manifest has no sha256 digest")
    return found


def fallback_tag(digest: str) -> str:
    """The tag of the list of a manifest's referrers, for registries without the referrers API."""
    return digest.replace(":", "-")
