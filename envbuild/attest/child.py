"""An image that was built on a proved one: are the proved layers its base, and was anything locked replaced above them?

This finds what an install or a copy puts over a library or beside it. It does not vouch for all else that is added.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from packaging.utils import canonicalize_name

from envbuild.attest import oci
from envbuild.attest.oci import Manifest, Place
from envbuild.attest.trust import Build
from envbuild.blocks import Blocks
from envbuild.plan import facts
from envbuild.plan.archive import FOLDERS
from envbuild.proof import untrusted
from envbuild.proof.reasons import Malformed, Reason, Refusal

_CONFIG_BYTES = 8 << 20
_HEADER_BYTES = 1 << 20  # of a long name in a layer
_MOST = 5_000_000  # files of a layer
_BLOCK = 1 << 20
# What decides which libraries and modules a process finds first.
_DECISIVE = ("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_AUDIT", "PYTHONPATH", "PYTHONHOME")


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


def objections(
    place: Place,
    manifest: Manifest,
    child: Config,
    base: Config,
    build: Build,
    records: Sequence[Mapping[str, Any]],
) -> Iterator[Reason]:
    """Why the proof of `base`, as `records` tell it, does not hold for `child`; the layers above are read for it."""
    if child.layers[: len(base.layers)] != base.layers:
        yield Reason("base", f"the proved image {base.id} is not what this one is built on")
        return
    for name in _DECISIVE:
        if child.environment.get(name) != base.environment.get(name):
            yield Reason("environment", f"{name} is set anew above the proved layers")
    watch = _Watch(build, records)
    for item, diff_id in list(zip(manifest.layers, child.layers, strict=True))[len(base.layers) :]:
        for member in _members(place, oci.digest_in(item), diff_id):
            watch.see(member)
    yield from watch.reasons()


class _Watch:
    """Looks at each file above the proved layers. What Python compiles beside a module is none of its business."""

    def __init__(self, build: Build, records: Sequence[Mapping[str, Any]]) -> None:
        self._site = f"opt/venv/lib/python{build.lock.python}/site-packages"
        self._versions = {canonicalize_name(name): version for name, version in build.lock.versions.items()}
        self._owners = {f"{self._site}/{root}": name for name, roots in build.roots.items() for root in roots}
        self._owners |= {FOLDERS[item.name].lstrip("/"): item.name for item in build.lock.archives}
        self._cuda = {name for record in records for name in _libraries(record)}
        self._found: dict[tuple[str, str], list[str]] = {}

    def see(self, member: tarfile.TarInfo) -> None:
        path = PurePosixPath(posixpath.normpath(f"/{member.name}").lstrip("/"))
        if path.name == ".wh..wh..opq":
            self._over(str(path.parent), "emptied")
        elif path.name.startswith(".wh."):
            self._over(str(path.with_name(path.name.removeprefix(".wh."))), "removed")
        elif not member.isdir() and "__pycache__" not in path.parts:
            self._over(str(path), "replaced")
            self._beside(path)

    def _over(self, path: str, how: str) -> None:
        for root, name in self._owners.items():
            if path == root or path.startswith(f"{root}/") or root.startswith(f"{path}/"):
                self._found.setdefault(("replaced", f"{name} is {how} above the proved layers"), []).append(path)
                return

    def _beside(self, path: PurePosixPath) -> None:
        """A second one of something locked: another version's metadata, or a CUDA library before the locked one."""
        folder = path.parent.name
        if folder.endswith(".dist-info") and str(path.parent.parent) == self._site:
            name, _, version = folder.removesuffix(".dist-info").partition("-")
            locked = self._versions.get(canonicalize_name(name))
            if locked not in (None, version):
                text = f"{canonicalize_name(name)} {version} is above the proved layers, locked is {locked}"
                self._found.setdefault(("replaced", text), []).append(str(path))
        if path.name in self._cuda and "site-packages" not in path.parts and "dist-packages" not in path.parts:
            self._found.setdefault(("shadowed", f"another {path.name} is above the proved layers"), []).append(
                str(path)
            )
        if str(path) == "etc/ld.so.preload":
            self._found.setdefault(("environment", "libraries are preloaded"), []).append(str(path))

    def reasons(self) -> Iterator[Reason]:
        for (kind, text), paths in self._found.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            yield Reason(kind, f"{text}: /{paths[0]}{more}")


def _libraries(record: Mapping[str, Any]) -> Iterator[str]:
    """File names of the CUDA libraries that were measured."""
    found = record["environment"].get("libraries")
    for item in found if isinstance(found, list) else ():
        if isinstance(item, dict) and facts.library_of(str(item.get("owner")).partition("==")[0]):
            yield str(item.get("name"))


class _Member(tarfile.TarInfo):
    """Long names and attributes are read into memory: only so much of them."""

    def _bounded(self) -> None:
        if self.size > _HEADER_BYTES:
            raise Refusal("too-large", "a layer has a file header beyond all measure")

    def _proc_pax(self, archive: tarfile.TarFile) -> Any:
        self._bounded()
        return super()._proc_pax(archive)  # type: ignore[misc]

    def _proc_gnulong(self, archive: tarfile.TarFile) -> Any:
        self._bounded()
        return super()._proc_gnulong(archive)  # type: ignore[misc]


def _members(place: Place, digest: str, diff_id: str) -> Iterator[tarfile.TarInfo]:
    return (member for member, _ in entries(place, digest, diff_id))


def entries(place: Place, digest: str, diff_id: str) -> Iterator[tuple[tarfile.TarInfo, tarfile.TarFile]]:
    """Every entry of a layer, with the archive to read its content from before the next one is asked for.

    Raises Refusal if it is not the layer of its digests, or cannot be looked into.
    """
    stream = _Unpacked(place.blocks(digest))
    try:
        with tarfile.open(fileobj=stream, mode="r|", bufsize=_BLOCK, tarinfo=_Member) as archive:
            for count, member in enumerate(archive):
                if count > _MOST:
                    raise Refusal("too-large", f"the layer {digest} has more than {_MOST} files")
                yield member, archive
                archive.members = []  # type: ignore[attr-defined]  # else each is kept
    except (tarfile.TarError, zlib.error, EOFError):
        raise Malformed(f"the layer {digest} cannot be unpacked") from None
    while stream.read(_BLOCK):
        pass
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
