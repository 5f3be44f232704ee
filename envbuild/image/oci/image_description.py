"""Describes the image of a lock: the recipes of its layers, its configuration and its manifest. Pure.

The same lock, wheels of extensions and version of the compressor give the same bytes on every machine and at any time.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from envbuild.fetch.archive_spec import FOLDERS, Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.fetch.sha256_file_store import Store
from envbuild.image.dockerfile_renderer import ENVIRONMENT, MAX_LAYERS
from envbuild.image.image_naming import LOCK_LABEL
from envbuild.image.layers.archive_layers import ArchiveLayer
from envbuild.image.layers.base_and_empty_venv_layers import BaseLayer, DifferenceLayer, VenvLayer
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.layers.nvcc_links import NvccLinksLayer
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.lock.lock_file import PACKAGES, Lock
from envbuild.registry import oci_types
from envbuild.registry.oci_types import Manifest
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import BuildError, LockError

LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
PLAIN_LAYER = "application/vnd.oci.image.layer.v1.tar"
_CREATED = "2024-01-01T00:00:00Z"  # SOURCE_DATE_EPOCH, the latest time of a file


@dataclass(frozen=True)
class ImageInputs:
    """The files that an image is made from; this module does not read them. `base`, `apt_base`: the tars of the base
    without and with the packages of `apt:`; `compiled`: the wheels of the extensions by name."""

    base: Path
    apt_base: Path
    wheels: Store
    archives: Store
    compiled: Mapping[str, WheelOfLayer]


@dataclass(frozen=True)
class DescribedLayer:
    """A layer: a short title, its entry in the image's history, its recipe, and its type in a manifest."""

    title: str
    history: str
    recipe: LayerRecipe
    media_type: str = LAYER


@dataclass(frozen=True)
class ImageDescription:
    """An image whose layers may not be written yet. `settings`: the part `config` of its configuration."""

    platform: str
    layers: tuple[DescribedLayer, ...]
    settings: Mapping[str, Any]

    @property
    def recipe(self) -> str:
        """The sha256 of everything that determines the image, hex."""
        layers = [(layer.history, layer.recipe.key) for layer in self.layers]
        return strict_and_canonical_json.canonical_digest([_CREATED, self.platform, layers, self.settings])

    def with_layers(self, layers: Sequence[WrittenLayer]) -> OciImage:
        """Return the image with the digests and sizes of its layers."""
        system, _, architecture = self.platform.partition("/")
        history = [{"created": _CREATED, "created_by": layer.history} for layer in self.layers]
        configuration = {
            "architecture": architecture,
            "config": self.settings,
            "created": _CREATED,
            "history": history,
            "os": system,
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
        }
        return OciImage(oci_types.encoded(configuration), self.layers, tuple(layers))


@dataclass(frozen=True)
class OciImage:
    """An image whose layers are known. `configuration`: bytes, whose sha256 is the image id; `described`: the layers'
    recipes; `layers`: their digests and sizes, in the same order."""

    configuration: bytes
    described: tuple[DescribedLayer, ...]
    layers: tuple[WrittenLayer, ...]

    @property
    def id(self) -> str:
        return oci_types.digest_of(self.configuration)

    @property
    def size(self) -> int:
        """The bytes of all blobs."""
        return sum(layer.size for layer in self.layers)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest with the blobs of the layers, as their recipes write them."""
        types = [described.media_type for described in self.described]
        return self._manifest(types, [(layer.digest, layer.size) for layer in self.layers])

    @cached_property
    def plain_manifest(self) -> Manifest:
        """The manifest with the uncompressed layers, for engines that store these."""
        types = [PLAIN_LAYER] * len(self.layers)
        return self._manifest(types, [(layer.diff_id, layer.diff_size) for layer in self.layers])

    def _manifest(self, media_types: Sequence[str], layers: Sequence[tuple[str, int]]) -> Manifest:
        document = {
            "schemaVersion": 2,
            "mediaType": oci_types.MANIFEST,
            "config": oci_types.descriptor(oci_types.CONFIG, self.configuration),
            "layers": [
                {"mediaType": media_type, "digest": digest, "size": size}
                for media_type, (digest, size) in zip(media_types, layers, strict=True)
            ],
        }
        return Manifest(oci_types.encoded(document), oci_types.MANIFEST)


def image_of_lock(lock: Lock, inputs: ImageInputs) -> ImageDescription:
    """Describe the image of a lock. The layers that most images share come first, those of this profile last.

    Raises BuildError if the lock names a base image (its layers cannot be read here), LockError if the image would have
    too many layers.
    """
    if lock.image:
        raise BuildError(
            f"the layers of the base image {lock.image} cannot be read without an engine",
            hint="use envbuild build, or name a bootstrap base in the profile",
        )
    groups = [(name, tuple(group)) for name, group in itertools.groupby(lock.wheels, key=lambda locked: locked.layer)]
    overridden = {override.name for override in lock.overrides}
    own = [group for group in groups if group[0] in overridden]
    last = [group for group in groups if group[0] == PACKAGES]
    shared = [group for group in groups if group not in own and group not in last]
    layers = [
        DescribedLayer("base", f"envbuild: {lock.suite}, {len(lock.base)} packages", BaseLayer(inputs.base)),
        *_apt(lock, inputs),
        _venv(lock, inputs),
        *(_wheels(lock, inputs, *group) for group in shared),
        *(_archive(lock, inputs, archive) for archive in lock.archives),
        *(_wheels(lock, inputs, *group) for group in own),
        *(_extension(lock, inputs, one.name, one.digest) for one in lock.extensions),
        *(_wheels(lock, inputs, *group) for group in last),
        *_overrides(lock, inputs),
        *_nvcc(lock, inputs),
    ]
    if len(layers) > MAX_LAYERS:
        raise LockError(
            f"the lock needs {len(layers)} layers; an image can have at most {MAX_LAYERS}", hint="name fewer packages"
        )
    return ImageDescription(lock.platform, tuple(layers), _settings(lock))


def _settings(lock: Lock) -> dict[str, Any]:
    variables = sorted({**ENVIRONMENT, **lock.environment}.items())
    return {
        "Cmd": ["python"],
        "Env": [f"{key}={value}" for key, value in variables],
        "Labels": {LOCK_LABEL: lock.id},
        "WorkingDir": "/",
    }


def _apt(lock: Lock, inputs: ImageInputs) -> list[DescribedLayer]:
    if not lock.apt:
        return []
    packages = " ".join(f"{deb.name}={deb.version}" for deb in lock.apt)
    recipe = DifferenceLayer(inputs.base, inputs.apt_base)
    return [DescribedLayer("Debian packages", f"envbuild: apt {packages}", recipe)]


def _venv(lock: Lock, inputs: ImageInputs) -> DescribedLayer:
    """The layer of the virtual environment. The version of its Debian package gives Python's version: for
    3.11.2-6+deb12u9, this is 3.11.2."""
    name = f"python{lock.python}"
    version = next((deb.version for deb in (*lock.base, *lock.apt) if deb.name == name), "")
    if not version:
        raise BuildError(f"the lock's base has no package {name}", hint="lock again: envbuild lock")
    upstream = re.split(r"[-+~]", version.rpartition(":")[2], maxsplit=1)[0]
    tar = inputs.base if any(deb.name == name for deb in lock.base) else inputs.apt_base
    return DescribedLayer(
        "virtual environment", f"envbuild: venv of Python {upstream}", VenvLayer(tar, lock.python, upstream)
    )


def _wheels(lock: Lock, inputs: ImageInputs, name: str, wheels: Sequence[LockedWheel]) -> DescribedLayer:
    texts = (f"{one.wheel.name}=={one.wheel.version} --hash=sha256:{one.wheel.sha256}" for one in wheels)
    return DescribedLayer(name, f"envbuild: wheels {' '.join(texts)}", WheelLayer(lock.python, _files(inputs, wheels)))


def _files(inputs: ImageInputs, wheels: Sequence[LockedWheel]) -> tuple[WheelOfLayer, ...]:
    return tuple(WheelOfLayer(inputs.wheels.path(one.wheel.sha256, one.wheel.file), one.wheel.sha256) for one in wheels)


def _archive(lock: Lock, inputs: ImageInputs, archive: Archive) -> DescribedLayer:
    title, folder = f"{archive.name} {archive.version}", FOLDERS[archive.name]
    release = lock.nvcc.release if lock.nvcc and lock.nvcc.home == folder else ""
    if release and not archive.version.startswith(f"{release}."):
        raise LockError(f"{title} is not for CUDA {release}", hint="lock again: envbuild lock")
    file = inputs.archives.path(archive.sha256, archive.name)
    history = f"envbuild: archive {title} sha256:{archive.sha256} in {folder}"
    return DescribedLayer(title, history, ArchiveLayer(file, archive.name, archive.sha256, release))


def _extension(lock: Lock, inputs: ImageInputs, name: str, source: str) -> DescribedLayer:
    wheel = inputs.compiled[name]
    history = f"envbuild: {name} compiled from {source} --hash=sha256:{wheel.sha256}"
    return DescribedLayer(name, history, WheelLayer(lock.python, (wheel,)))


def _overrides(lock: Lock, inputs: ImageInputs) -> list[DescribedLayer]:
    """The layer with the changed metadata of all wheels that require a different version of an overridden library."""
    if not lock.overrides:
        return []
    pins = tuple(sorted((override.name, override.version) for override in lock.overrides))
    history = f"envbuild: metadata requires {' '.join(f'{name}=={version}' for name, version in pins)}"
    return [DescribedLayer("overrides", history, WheelLayer(lock.python, _files(inputs, lock.wheels), pins))]


def _nvcc(lock: Lock, inputs: ImageInputs) -> list[DescribedLayer]:
    """The layer with the links for an nvcc from wheels. For an nvcc from an archive, the archive's layer has them."""
    if lock.nvcc is None or not lock.nvcc.home.startswith(f"{VENV}/"):
        return []
    recipe = NvccLinksLayer(lock.python, _files(inputs, lock.wheels), lock.nvcc.home, lock.nvcc.release)
    history = f"envbuild: links of nvcc {lock.nvcc.release} in {lock.nvcc.home}"
    return [DescribedLayer("nvcc, of torch's CUDA", history, recipe)]
