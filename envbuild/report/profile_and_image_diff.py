"""Compares two profiles, locks or images: versions, layers and their sizes, environment, advisories. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packaging.utils import canonicalize_name

from envbuild.facts import database
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import Archive
from envbuild.image.oci import layer_order
from envbuild.image.oci.layer_order import LayerSource, SingleLayer, WheelGroup
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.resolve.torch_compatibility_and_advisories import STATES, Choice
from envbuild.util.errors import some
from envbuild.util.json_output_types import Digest

if TYPE_CHECKING:  # comparing profiles must not import the engine's client library
    from envbuild.audit.environment_audit import Audit
    from envbuild.image.docker_engine import Image


@dataclass(frozen=True)
class DiffLayer:
    """A layer of one side. `identity`: the same for equal layers. `bytes`: for a lock, the size of the files to fetch
    for the layer; for an image, the size of the unpacked layer; None if unknown."""

    title: str
    identity: str
    bytes: int | None


@dataclass(frozen=True)
class DiffSide:
    """One side of a comparison. `kind`: profile, lock or image. `basics`: settings such as Python and CUDA, different
    ones for each kind. `advisories`: None for a lock, which names no GPUs. `bytes`: the total size, counted as `unit`
    says (to fetch, or in the engine); None if a part is unknown. `id`: the id of an image; `lock`: the id of a lock;
    `on_image`: whether the first of `layers` stands for all layers of a base image."""

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
    lock: str | None = None
    on_image: bool = False

    @property
    def layer_count(self) -> str:
        """The number of layers, in words. Those of a base image are not counted."""
        own = some(len(self.layers) - self.on_image, "layer")
        return f"a base image and {own}" if self.on_image else own


@dataclass(frozen=True)
class ChangedValue:
    """A value that differs between the sides; None on a side that lacks it."""

    name: str
    a: str | None
    b: str | None


@dataclass(frozen=True)
class Pair:
    """The layers at the same position of two images. `layer`: the position, counted from 1. `difference`: the first
    file that differs, and how; None if only the order of the files differs."""

    layer: int
    difference: str | None


@dataclass(frozen=True)
class SideRow:
    """One side of a comparison. `image`: the id of an image. `bytes`: the size, counted as `unit` says."""

    name: str
    kind: str
    lock: Digest | None
    image: Digest | None
    bytes: int | None
    unit: str


@dataclass(frozen=True)
class DiffDocument:
    """The document of `diff`. `state`: configuration if the layers are the same and something else differs. `settings`,
    `pins`, `environment`, `advisory_states`: the values that differ. `layers`: the layers of `b` that `a` does not
    have. The base image that a lock names counts as one layer. `layers` is null if one side is an image and the other
    is not; `advisory_states` is null if one side is a lock. `new_bytes`: the size of `layers`, counted as the `unit` of
    `b` says. `files`: the result of --files."""

    state: Literal["same", "configuration", "different"]
    a: SideRow
    b: SideRow
    settings: tuple[ChangedValue, ...]
    pins: tuple[ChangedValue, ...]
    environment: tuple[ChangedValue, ...]
    advisory_states: tuple[ChangedValue, ...] | None
    layers: tuple[DiffLayer, ...] | None
    shared_layers: int | None
    new_bytes: int | None
    files: tuple[Pair, ...] | None


def _side_row(side: DiffSide) -> SideRow:
    return SideRow(side.name, side.kind, side.lock, side.id, side.bytes, side.unit)


@dataclass(frozen=True)
class Diff:
    """The result of a comparison. `layers`: the layers of `b` that `a` does not have; None if the layers cannot be
    compared. `files`: differences in the files of the layers; None if files were not compared."""

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
        return not differs and len(ids) < 2 and (self.layers is None or self._same_layers)

    @property
    def only_configuration(self) -> bool:
        """Whether the layers are the same, but something else differs."""
        return not self.same and self.layers is not None and self._same_layers

    @property
    def _same_layers(self) -> bool:
        """Whether both sides have the same layers in the same order."""
        a, b = ([layer.identity for layer in side.layers] for side in (self.a, self.b))
        return a == b

    @property
    def new_bytes(self) -> int | None:
        """The bytes that `b` needs in addition to `a`: files to fetch, or an image's unpacked layers, as `b.unit`
        says."""
        return None if self.layers is None else _total(self.layers)

    def document(self) -> DiffDocument:
        return DiffDocument(
            state="same" if self.same else "configuration" if self.only_configuration else "different",
            a=_side_row(self.a),
            b=_side_row(self.b),
            settings=self.basics,
            pins=self.versions,
            environment=self.environment,
            advisory_states=self.advisories,
            layers=self.layers,
            shared_layers=None if self.layers is None else len(self.b.layers) - len(self.layers),
            new_bytes=self.new_bytes,
            files=self.files,
        )


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
    """Return the side of a lock, or, with `choice`, of a profile. `choice`: the profile's choice of versions, checked
    against the locked versions."""
    basics: dict[str, str | None] = {"python": lock.python, "base": lock.suite or lock.image, "platform": lock.platform}
    if choice:
        known = choice.situation
        basics |= {"gpus": ", ".join(gpu.id for gpu in known.gpus) or None, "cuda": known.cuda, "driver": choice.driver}
    layers = tuple(_layers(lock))
    return DiffSide(
        name=name,
        kind="profile" if choice else "lock",
        basics=basics,
        versions={**lock.versions, **{one.name: one.digest for one in lock.extensions}},
        environment=lock.environment,
        advisories={item.id: item.state for item in choice.advisories} if choice else None,
        layers=layers,
        bytes=_total(layers),
        unit="to fetch",
        lock=lock.id,
        on_image=lock.image is not None,
    )


def side_of_image(name: str, image: Image, sizes: Sequence[int] | None, found: Audit) -> DiffSide:
    """Return the side of an image. `sizes`: the bytes of each unpacked layer, if the engine reports them; `found`: the
    audit of the image."""
    held, torch = found.held, found.held.torch
    # A library that belongs to no distribution is listed by its file name.
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


def _layers(lock: Lock) -> Iterator[DiffLayer]:
    """Yield the layers in the order of the image. The hashes of a layer's files identify it. A base image is one entry,
    because the lock does not contain the number of its layers. On a base image, the image may also have a layer with
    links for the nvcc of the base image, and a layer with the modes of the base image's folders. Whether the image has
    these two layers is not in the lock, and nothing is fetched for them, so they are left out."""
    for source in layer_order.layer_sources(lock):
        if source is not SingleLayer.BASE_NVCC:
            yield _layer(lock, source)


def _layer(lock: Lock, source: LayerSource) -> DiffLayer:
    match source:
        case WheelGroup():
            identity = " ".join(locked.wheel.sha256 for locked in source.wheels)
            return DiffLayer(source.name, identity, sum(locked.bytes for locked in source.wheels))
        case Archive():
            return _of_files(f"{source.name} {source.version}", [source])
        case LockedExtension():
            return DiffLayer(f"{source.name}, compiled from {source.digest[:12]}", source.digest, 0)
        case SingleLayer.BASE:
            return _base(lock)
        case SingleLayer.APT:
            return _of_files("Debian packages", lock.apt)
        case SingleLayer.VENV:
            return DiffLayer("virtual environment", lock.python, 0)
        case SingleLayer.OVERRIDES:
            return DiffLayer("overrides", " ".join(f"{one.name}=={one.version}" for one in lock.overrides), 0)
        case SingleLayer.NVCC | SingleLayer.BASE_NVCC:
            assert lock.nvcc
            return DiffLayer("nvcc, of torch's CUDA", f"{lock.nvcc.home} {lock.nvcc.release}", 0)


def _base(lock: Lock) -> DiffLayer:
    """Return the base layer. A base image is identified by its reference, which contains its digest. Its size is
    unknown: only its registry has it."""
    if lock.image:
        return DiffLayer(f"base {lock.image}", lock.image, None)
    return _of_files(f"base {lock.suite}", lock.base)


def _of_files(title: str, files: Sequence[Deb | Archive]) -> DiffLayer:
    return DiffLayer(title, " ".join(file.sha256 for file in files), sum(file.bytes for file in files))
