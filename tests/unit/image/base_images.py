"""Small base images: their layers as tars, in memory and in a registry."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envbuild.image.layers.base_image_contents import BaseLayerRef
from envbuild.image.layers.file_tree_of_layers import FolderOwnership
from envbuild.registry import oci_types
from unit.registries import Registry

PLATFORM = "linux/amd64"
GZIP = "application/vnd.oci.image.layer.v1.tar+gzip"
ACTIVATE = b"VIRTUAL_ENV=__VENV_DIR__\nPS1=__VENV_PROMPT__\n"
CSH = b"setenv VIRTUAL_ENV __VENV_DIR__\n"

Entry = bytes | str | FolderOwnership | None
"""The content of a file; "-> x", a symbolic link; "=> x", a hard link; None or an ownership, a folder."""
Entries = Mapping[str, Entry] | Sequence[tuple[str, Entry]]


def tar_of(entries: Entries) -> bytes:
    """Return a tar with these entries, in this order."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, entry in entries.items() if isinstance(entries, Mapping) else entries:
            member = tarfile.TarInfo(path)
            member.mode = 0o755
            if entry is None or isinstance(entry, FolderOwnership):
                member.type = tarfile.DIRTYPE
                if entry:
                    member.mode, member.uid, member.gid = entry.mode, entry.uid, entry.gid
            elif isinstance(entry, str):
                member.type = tarfile.SYMTYPE if entry.startswith("-> ") else tarfile.LNKTYPE
                member.linkname = entry[3:]
            content = entry if isinstance(entry, bytes) else b""
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def python_file(version: str) -> bytes:
    """Return a file with the version as CPython has it, after texts that only look like a version."""
    return b"\x7fELF\0lib/python3.11\0python" + version.encode() + b"\0x3.11.99\0%d.%d\0" + version.encode() + b"\0\0"


def templates(folder: str) -> dict[str, Entry]:
    return {f"{folder}/common/activate": ACTIVATE, f"{folder}/posix/activate.csh": CSH}


def debian(version: str = "3.11.2") -> dict[str, Entry]:
    """Debian's Python, behind links."""
    return {
        "bin": "-> usr/bin",
        "usr/bin": None,
        "usr/bin/python3.11": python_file(version),
        "usr/bin/python3": "-> python3.11",
        **templates("usr/lib/python3.11/venv/scripts"),
        "opt": None,
    }


def official(version: str = "3.11.9") -> dict[str, Entry]:
    """The Python of docker.io/python: the version is in its library."""
    return {
        "usr/local/bin/python3.11": b"\x7fELF libpython3.11.so.1.0\0",
        "usr/local/bin/python3": "-> python3.11",
        "usr/local/lib/libpython3.11.so": "-> libpython3.11.so.1.0",
        "usr/local/lib/libpython3.11.so.1.0": python_file(version),
        **templates("usr/local/lib/python3.11/venv/scripts"),
    }


@dataclass
class Blobs:
    """Blobs by digest, in memory. `read`: the digests of the blobs that were read."""

    held: dict[str, bytes] = field(default_factory=dict)
    read: list[str] = field(default_factory=list)

    def add(self, blob: bytes) -> str:
        self.held[oci_types.digest_of(blob)] = blob
        return oci_types.digest_of(blob)

    def blocks(self, digest: str) -> Iterator[bytes]:
        self.read.append(digest)
        yield self.held[digest]


def gzipped(tar: bytes) -> bytes:
    """Compress without a time."""
    return gzip.compress(tar, compresslevel=1, mtime=0)


def layers_in(blobs: Blobs, *layers: Entries) -> list[BaseLayerRef]:
    found = []
    for entries in layers:
        tar = tar_of(entries)
        blob = gzipped(tar)
        found.append(BaseLayerRef(blobs.add(blob), len(blob), oci_types.digest_of(tar), GZIP))
    return found


@dataclass
class PushedBase:
    """A base image for a registry. `config`, `changes`: settings of a container, and other keys of the configuration;
    `media_type`: of the layers; `pack`: makes a blob of a tar; `sizes`: returns the size in the manifest for the size
    of a blob."""

    layers: Sequence[Entries]
    config: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    media_type: Any = GZIP
    manifest_type: str = oci_types.MANIFEST
    pack: Callable[[bytes], bytes] = gzipped
    sizes: Callable[[int], Any] = int

    @property
    def tars(self) -> list[bytes]:
        return [tar_of(entries) for entries in self.layers]

    @property
    def blobs(self) -> list[bytes]:
        return [self.pack(tar) for tar in self.tars]

    @property
    def configuration(self) -> bytes:
        document = {
            "os": "linux",
            "architecture": "amd64",
            "config": dict(self.config),
            "rootfs": {"type": "layers", "diff_ids": [oci_types.digest_of(tar) for tar in self.tars]},
            **self.changes,
        }
        return json.dumps(document).encode()

    def push(self, registry: Registry, configuration: bytes | None = None) -> str:
        """Put the image into a registry. Return the digest of its manifest."""
        config = registry.add_blob(self.configuration if configuration is None else configuration)
        layers = [
            {"mediaType": self.media_type, "digest": registry.add_blob(blob), "size": self.sizes(len(blob))}
            for blob in self.blobs
        ]
        document = {
            "schemaVersion": 2,
            "mediaType": self.manifest_type,
            "config": {"mediaType": oci_types.CONFIG, "digest": config, "size": 1},
            "layers": layers,
        }
        return registry.put(self.manifest_type, document)

    def reference(self, registry: Registry) -> str:
        """Put the image into a registry. Return its name with its digest."""
        return reference_of(registry, self.push(registry))


def reference_of(registry: Registry, digest: str) -> str:
    return f"{registry.host}/team/base@{digest}"
