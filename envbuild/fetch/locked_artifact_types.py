"""What a lock names, and how each is written into it: files by version and sha256, and what is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive


@dataclass(frozen=True)
class Wheel:
    """One wheel file, wherever it is fetched from."""

    name: str
    version: str
    file: str
    sha256: str


@dataclass(frozen=True)
class LockedWheel:
    """A wheel, its size, and the layer it is installed in."""

    wheel: Wheel
    bytes: int
    layer: str

    @property
    def content(self) -> dict[str, Any]:
        return {**vars(self.wheel), "bytes": self.bytes, "layer": self.layer}


@dataclass(frozen=True)
class Overridden:
    """A library whose version replaces what torch's metadata asks for; the image's torch metadata says the new one."""

    name: str
    version: str
    replaces: str


@dataclass(frozen=True)
class StartupFile:
    """A file in site-packages that the profile lets run code whenever Python starts."""

    file: str
    sha256: str


@dataclass(frozen=True)
class AcceptedOld:
    """A version far behind the newest release of then, which a person accepted with --accept-old."""

    name: str
    version: str
    newest: str


@dataclass(frozen=True)
class Nvcc:
    """The folder of a CUDA toolkit that stays in the image, and the CUDA release that its nvcc must be of."""

    home: str
    release: str


@dataclass(frozen=True)
class LockedExtension:
    """What an extension's wheel is made from. The wheel itself is not locked: it is made, not fetched.

    `digest` is what its source is known by: the commit, or the sdist's sha256; `tree` the commit's content.
    """

    name: str
    kind: str  # git or sdist
    digest: str
    modules: tuple[str, ...]
    tree: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    @property
    def content(self) -> dict[str, Any]:
        return {
            "name": self.name,
            self.kind: self.digest,
            **({"tree": self.tree} if self.tree else {}),
            **({"env": dict(self.env)} if self.env else {}),
            **({"settings": list(self.settings)} if self.settings else {}),
            "modules": list(self.modules),
        }


@dataclass(frozen=True)
class Builder:
    """What extensions are compiled with, beside what the image holds; nothing of it stays there.

    `arch`: TORCH_CUDA_ARCH_LIST, the profile's own cards alone; `environment`: what names the host compiler, where that
    is not the base's.
    """

    arch: str
    nvcc: Nvcc
    wheels: tuple[LockedWheel, ...]
    archives: tuple[Archive, ...] = ()
    debs: tuple[Deb, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "nvcc": dict(vars(self.nvcc)),
            "wheels": [wheel.content for wheel in self.wheels],
            **({"archives": [dict(vars(a)) for a in self.archives]} if self.archives else {}),
            **({"debs": [dict(vars(deb)) for deb in self.debs]} if self.debs else {}),
            **({"environment": dict(self.environment)} if self.environment else {}),
        }
