"""Types of a lock's entries: overridden versions, versions accepted as old, the inputs of extensions, and the wheels
that were compiled from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.fetch.locked_wheel_types import LockedWheel


@dataclass(frozen=True)
class Overridden:
    """A library version that replaces the one that torch's metadata requires (`replaces`). In the image, that metadata
    is changed to require this version."""

    name: str
    version: str
    replaces: str


@dataclass(frozen=True)
class AcceptedOld:
    """A version that was far behind the newest release when locked, and was accepted with --accept-old."""

    name: str
    version: str
    newest: str


@dataclass(frozen=True)
class Nvcc:
    """The folder of a CUDA toolkit, and the CUDA release that its nvcc must have."""

    home: str
    release: str


@dataclass(frozen=True)
class LockedExtension:
    """The inputs of an extension's wheel. The wheel itself is a RecordedWheel, once it was compiled.

    `digest` identifies the source: the commit, or the sdist's sha256. `tree`: the id of the commit's git tree; None for
    an sdist.
    """

    name: str
    kind: str  # git or sdist
    digest: str
    modules: tuple[str, ...]
    tree: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()

    @property
    def content(self) -> dict[str, object]:
        return {
            "name": self.name,
            self.kind: self.digest,
            **({"tree": self.tree} if self.tree else {}),
            **({"env": dict(self.env)} if self.env else {}),
            **({"settings": list(self.settings)} if self.settings else {}),
            "modules": list(self.modules),
        }


@dataclass(frozen=True)
class RecordedWheel:
    """The wheel of an extension as it was compiled. `key`: the sha256 of all inputs of that compilation. If the inputs
    have changed since, the record does not count."""

    name: str
    key: str
    file: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Builder:
    """The tools for compiling extensions, in addition to the image's content; they do not stay in the image.

    `arch`: TORCH_CUDA_ARCH_LIST, with the architectures of the profile's GPUs; `environment`: variables that select the
    host compiler, if it is not the default one.
    """

    arch: str
    nvcc: Nvcc
    wheels: tuple[LockedWheel, ...]
    archives: tuple[Archive, ...] = ()
    debs: tuple[Deb, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def content(self) -> dict[str, object]:
        return {
            "arch": self.arch,
            "nvcc": dict(vars(self.nvcc)),
            "wheels": [wheel.content for wheel in self.wheels],
            **({"archives": [dict(vars(a)) for a in self.archives]} if self.archives else {}),
            **({"debs": [dict(vars(deb)) for deb in self.debs]} if self.debs else {}),
            **({"environment": dict(self.environment)} if self.environment else {}),
        }
