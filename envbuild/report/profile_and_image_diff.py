"""What changes between two profiles, locks or images: pins, layers and bytes, environment, advisories. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from packaging.utils import canonicalize_name

from envbuild.facts import database
from envbuild.image import dockerfile_renderer
from envbuild.lock.lock_file import Lock
from envbuild.resolve.torch_compatibility_and_advisories import STATES, Choice

if TYPE_CHECKING:  # profiles are compared without the engine's client
    from envbuild.audit.environment_audit import Audit
    from envbuild.image.docker_engine import Image


@dataclass(frozen=True)
class DiffLayer:
    """`identity`: the same where the layer is the same. `bytes`: of its files to fetch, or in an image unpacked; None
    where only the whole is known."""

    title: str
    identity: str
    bytes: int | None


@dataclass(frozen=True)
class DiffSide:
    """What is known of one of the two; `basics` has the keys that its kind of thing tells. None where that does not
    tell: an image has no advisories accepted, and a lock knows no cards. `bytes`: of the whole, in `unit` (to fetch, or
    in the engine); None where a part's are not known. `id`: of an image."""

    name: str
    kind: str
    basics: Mapping[str, str | None]
    versions: Mapping[str, str]
    environment: Mapping[str, str]
    advisories: Mapping[str, str] | None
    layers: tuple[DiffLayer, ...]
    bytes: int | None
    unit: str
    id: str | None = None


@dataclass(frozen=True)
class ChangedValue:
    """A value on both sides; None where it is not there."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Pair:
    """The layer of that number, from 1, of two images. `difference`: the first file that differs, and how; None where
    only their order does."""

    layer: int
    difference: str | None


@dataclass(frozen=True)
class Diff:
    """`layers` are those of `b` that `a` does not have; None where they cannot be held against each other. `files`: of
    layers that differ; None where nobody looked."""

    a: DiffSide
    b: DiffSide
    basics: tuple[ChangedValue, ...]
    versions: tuple[ChangedValue, ...]
    environment: tuple[ChangedValue, ...]
    advisories: tuple[ChangedValue, ...] | None
    layers: tuple[DiffLayer, ...] | None
    files: tuple[Pair, ...] | None = None

    @property
    def same(self) -> bool:
        differs = self.basics or self.versions or self.environment or self.advisories or self.layers
        ids = {side.id for side in (self.a, self.b) if side.id}
        return not differs and len(ids) < 2 and (self.layers is None or self._layers_alike)

    @property
    def only_configuration(self) -> bool:
        """The same layers, and something else that differs."""
        return not self.same and self.layers is not None and self._layers_alike

    @property
    def _layers_alike(self) -> bool:
        """Each of one is in the other, in the same order."""
        a, b = ([layer.identity for layer in side.layers] for side in (self.a, self.b))
        return a == b

    @property
    def new_bytes(self) -> int | None:
        """What `b` adds where `a` is there, in `b.unit`: files to fetch, or an image's layers unpacked."""
        return None if self.layers is None else _total(self.layers)

    def document(self) -> dict[str, Any]:
        sides = {
            key: {"name": side.name, "kind": side.kind, "bytes": side.bytes, "unit": side.unit}
            for key, side in (("a", self.a), ("b", self.b))
        }
        groups = {"profile": self.basics, "pins": self.versions, "environment": self.environment}
        return {
            **sides,
            **{key: [asdict(change) for change in changes] for key, changes in groups.items()},
            "advisories": None if self.advisories is None else [asdict(change) for change in self.advisories],
            "layers": None if self.layers is None else [asdict(layer) for layer in self.layers],
            "shared_layers": None if self.layers is None else len(self.b.layers) - len(self.layers),
            "new_bytes": self.new_bytes,
            "files": None if self.files is None else [asdict(pair) for pair in self.files],
            "same": self.same,
            "only_configuration": self.only_configuration,
        }


def compare_sides(a: DiffSide, b: DiffSide) -> Diff:
    both = a.advisories is not None and b.advisories is not None
    known = {layer.identity for layer in a.layers}
    return Diff(
        a,
        b,
        tuple(change for change in _changes(a.basics, b.basics) if change.name in a.basics.keys() & b.basics.keys()),
        tuple(_changes(a.versions, b.versions)),
        tuple(_changes(a.environment, b.environment)),
        tuple(_changes(a.advisories or {}, b.advisories or {})) if both else None,
        tuple(layer for layer in b.layers if layer.identity not in known) if a.unit == b.unit else None,
    )


def _changes(a: Mapping[str, str | None], b: Mapping[str, str | None]) -> Iterator[ChangedValue]:
    for name in sorted(a.keys() | b.keys()):
        if a.get(name) != b.get(name):
            yield ChangedValue(name, a.get(name), b.get(name))


def of_lock(name: str, lock: Lock, choice: Choice | None = None) -> DiffSide:
    """A lock, and what a profile adds to it: `choice` as it holds against what was locked."""
    basics: dict[str, str | None] = {"python": lock.python, "base": lock.suite or lock.image, "platform": lock.platform}
    if choice:
        known = choice.situation
        basics |= {"gpus": ", ".join(gpu.id for gpu in known.gpus) or None, "cuda": known.cuda, "driver": choice.driver}
    layers = (_base(lock), *(_layer(layer, lock) for layer in dockerfile_renderer.image_layers(lock)))
    return DiffSide(
        name=name,
        kind="profile" if choice else "lock",
        basics=basics,
        versions={**lock.versions, **{one.name: one.digest for one in lock.extensions}},
        environment=lock.environment,
        advisories={item["id"]: item["state"] for item in choice.states} if choice else None,
        layers=layers,
        bytes=_total(layers),
        unit="to fetch",
    )


def side_of_image(name: str, image: Image, sizes: Sequence[int] | None, found: Audit) -> DiffSide:
    """An image as it is. `sizes`: bytes of its layers, unpacked, where the engine tells them."""
    held, torch = found.held, found.held.torch
    # A library that no distribution brought is known by its file alone.
    loose = {copy.name: copy.version for copy in held.libraries if copy.loaded and not copy.distribution}
    known = {item.id: STATES[item.severity] for item in database.advisories()}
    each: Sequence[int | None] = sizes if sizes is not None else [None] * len(image.layers)
    return DiffSide(
        name=name,
        kind="image",
        basics={"python": ".".join(held.python.version.split(".")[:2]), "cuda": torch.cuda if torch else None},
        versions={str(canonicalize_name(name)): version for name, version in held.installed.items()}
        | {name: version for name, version in loose.items() if version},
        environment=image.environment,
        advisories={finding.id: known[finding.id] for finding in found.findings if finding.id in known},
        layers=tuple(DiffLayer(digest[:19], digest, size) for digest, size in zip(image.layers, each, strict=True)),
        bytes=image.size,
        unit="in the engine",
        id=image.id,
    )


def _total(layers: Sequence[DiffLayer]) -> int | None:
    known = [layer.bytes for layer in layers if layer.bytes is not None]
    return sum(known) if len(known) == len(layers) else None


def _base(lock: Lock) -> DiffLayer:
    """An image that is built upon is named by its digest alone; how large it is, only its registry knows."""
    if lock.image:
        return DiffLayer(f"base {lock.image}", lock.image, None)
    packages = " ".join(deb.sha256 for deb in lock.base)
    return DiffLayer(f"base {lock.suite}", packages, sum(deb.bytes for deb in lock.base))


def _layer(layer: dockerfile_renderer.Layer, lock: Lock) -> DiffLayer:
    """The installer's input names every file by its hash, so it identifies the layer."""
    sizes = {locked.wheel.sha256: locked.bytes for locked in lock.wheels} | {a.sha256: a.bytes for a in lock.archives}
    files = {deb.file: deb.bytes for deb in lock.apt}
    total = sum(sizes.get(word.rpartition("sha256:")[2], files.get(word, 0)) for word in layer.arguments)
    return DiffLayer(layer.title, "\0".join(layer.arguments), total)
