"""Describes the image of a lock: the recipes of its layers, its configuration and its manifest. Pure.

The same lock, wheels of extensions and version of the compressor give the same bytes on every machine and at any time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from envbuild.fetch.archive_spec import FOLDERS, Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.fetch.sha256_file_store import Store
from envbuild.image.image_naming import LOCK_LABEL, VARIABLES
from envbuild.image.layers.archive_layers import ArchiveLayer
from envbuild.image.layers.base_and_empty_venv_layers import BaseLayer, DifferenceLayer, VenvLayer
from envbuild.image.layers.base_image_contents import BaseContents
from envbuild.image.layers.base_image_layers import BaseImageFoldersLayer, BaseImageNvccLinksLayer, BaseImageVenvLayer
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.layers.nvcc_links import NvccLinksLayer
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.image.oci.base_image_download import BaseImage
from envbuild.image.oci.layer_order import LayerSource, SingleLayer, WheelGroup, layer_sources
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.registry import oci_types
from envbuild.registry.oci_types import Manifest
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import strict_and_canonical_json
from envbuild.util.errors import BuildError, LockError

MAX_LAYERS = 100
"""The engine's overlay store allows at most 127 layers; some are left to child images."""
FEWER_LAYERS = "remove large packages from the profile: each has its own layer"
"""The hint for an image with too many layers."""
_CREATED = "2024-01-01T00:00:00Z"  # SOURCE_DATE_EPOCH, the latest time of a file
_FROM_BASE = ("ExposedPorts", "Healthcheck", "Shell", "StopSignal", "Volumes")
"""The settings of a base image that an image on it keeps, apart from its variables, labels and working directory."""


@dataclass(frozen=True)
class ImageInputs:
    """The files that an image is made from; this module does not read them. `base`, `apt_base`: the tars of the base
    without and with the packages of `apt:`; `compiled`: the wheels of the extensions by name; `on_image`: the base
    image that the lock names, and its contents."""

    base: Path
    apt_base: Path
    wheels: Store
    archives: Store
    compiled: Mapping[str, WheelOfLayer]
    on_image: tuple[BaseImage, BaseContents] | None = None


@dataclass(frozen=True)
class DescribedLayer:
    """A layer: a short title, its entry in the image's history, its recipe, and its type in a manifest."""

    title: str
    history: str
    recipe: LayerRecipe
    media_type: str = oci_types.LAYER_GZIP


@dataclass(frozen=True)
class ImageDescription:
    """An image whose layers may not be written yet. `settings`: the part `config` of its configuration;
    `base_history`: the entries of the base image's history, which describe the first layers."""

    platform: str
    layers: tuple[DescribedLayer, ...]
    settings: Mapping[str, Any]
    base_history: tuple[Mapping[str, Any], ...] = ()

    @property
    def recipe(self) -> str:
        """The sha256 of everything that determines the image, hex. The history of a base image follows from the lock,
        whose id is one of the labels."""
        layers = [(layer.history, layer.recipe.key) for layer in self.layers]
        return strict_and_canonical_json.canonical_digest([_CREATED, self.platform, layers, self.settings])

    def with_layers(self, layers: Sequence[WrittenLayer]) -> OciImage:
        """Return the image with the digests and sizes of its layers."""
        system, _, architecture = self.platform.partition("/")
        own = self.layers[sum(not entry.get("empty_layer") for entry in self.base_history) :]
        history = [*self.base_history, *({"created": _CREATED, "created_by": layer.history} for layer in own)]
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
        """The bytes of the layers' blobs together."""
        return sum(layer.size for layer in self.layers)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest with the blobs of the layers, as their recipes write them."""
        return oci_types.image_manifest(
            oci_types.descriptor(oci_types.CONFIG, self.configuration),
            [
                {"mediaType": described.media_type, "digest": layer.digest, "size": layer.size}
                for described, layer in zip(self.described, self.layers, strict=True)
            ],
        )

    @property
    def to_load(self) -> ImageToLoad:
        pairs = zip(self.described, self.layers, strict=True)
        return ImageToLoad(tuple(LayerToSend(one, layer.diff_size, layer) for one, layer in pairs), lambda _: self)


@dataclass(frozen=True)
class LayerToSend:
    """A layer for an engine. `tar_size`: of its uncompressed tar, in bytes; `written`: its digests and sizes, or None
    for a layer that is written only when it is sent."""

    described: DescribedLayer
    tar_size: int
    written: WrittenLayer | None


@dataclass(frozen=True)
class ImageToLoad:
    """An image for an engine. `with_layers`: returns the image when the digests of all layers are known."""

    layers: tuple[LayerToSend, ...]
    with_layers: Callable[[Sequence[WrittenLayer]], OciImage]

    @property
    def complete(self) -> OciImage | None:
        """The image, or None if a layer is not written yet."""
        written = [layer.written for layer in self.layers if layer.written]
        return self.with_layers(written) if len(written) == len(self.layers) else None


def image_of_lock(lock: Lock, inputs: ImageInputs) -> ImageDescription:
    """Describe the image of a lock, with its layers in the order of `layer_sources`, and then the layer of the base
    image's folders, if one is needed.

    Raises LockError if the image would have too many layers or an archive is for another CUDA release, and BuildError
    if its base does not fit the lock.
    """
    layers = [
        *(layer for source in layer_sources(lock) for layer in _layers_of(lock, inputs, source)),
        *_folders_of_base(lock, inputs),
    ]
    if len(layers) > MAX_LAYERS:
        of_base = f", {len(inputs.on_image[0].layers)} of them of the base image" if inputs.on_image else ""
        hint = FEWER_LAYERS + ("; or name a base image with fewer layers" if of_base else "")
        raise LockError(
            f"the lock needs {len(layers)} layers{of_base}; an image can have at most {MAX_LAYERS}", hint=hint
        )
    if inputs.on_image is None:
        return ImageDescription(lock.platform, tuple(layers), _settings(lock, {}))
    image, _ = inputs.on_image
    base = image.config
    settings = {
        **{key: base.settings[key] for key in _FROM_BASE if key in base.settings},
        **_settings(lock, base.environment),
        "Labels": {**base.labels, LOCK_LABEL: lock.id},
        "User": "0",
        "WorkingDir": base.settings.get("WorkingDir", "/"),
    }
    return ImageDescription(lock.platform, tuple(layers), settings, image.history)


def _settings(lock: Lock, base_environment: Mapping[str, str]) -> dict[str, Any]:
    variables = sorted({**base_environment, **VARIABLES, **lock.environment}.items())
    return {
        "Cmd": ["python"],
        "Env": [f"{key}={value}" for key, value in variables],
        "Labels": {LOCK_LABEL: lock.id},
        "WorkingDir": "/",
    }


def _layers_of(lock: Lock, inputs: ImageInputs, source: LayerSource) -> Sequence[DescribedLayer]:
    match source:
        case WheelGroup():
            return [_wheels(lock, inputs, source)]
        case Archive():
            return [_archive(lock, inputs, source)]
        case LockedExtension():
            return [_extension(lock, inputs, source)]
        case SingleLayer.BASE:
            return _base(lock, inputs)
        case SingleLayer.APT:
            return [_apt(lock, inputs)]
        case SingleLayer.VENV:
            return [_venv(lock, inputs)]
        case SingleLayer.OVERRIDES:
            return [_overrides(lock, inputs)]
        case SingleLayer.NVCC:
            return [_nvcc(lock, inputs)]
        case SingleLayer.BASE_NVCC:
            return _base_nvcc(lock, inputs)


def _base(lock: Lock, inputs: ImageInputs) -> list[DescribedLayer]:
    if inputs.on_image is None:
        return [DescribedLayer("base", f"envbuild: {lock.suite}, {len(lock.base)} packages", BaseLayer(inputs.base))]
    image, _ = inputs.on_image
    return [
        DescribedLayer(f"base image, layer {number}", image.reference, image.recipe(layer), layer.media_type)
        for number, layer in enumerate(image.layers, 1)
    ]


def _apt(lock: Lock, inputs: ImageInputs) -> DescribedLayer:
    packages = " ".join(f"{deb.name}={deb.version}" for deb in lock.apt)
    recipe = DifferenceLayer(inputs.base, inputs.apt_base)
    return DescribedLayer("Debian packages", f"envbuild: apt {packages}", recipe)


def _venv(lock: Lock, inputs: ImageInputs) -> DescribedLayer:
    """The layer of the virtual environment. A base image's Python states its version. On Debian, the version of the
    package gives it: for 3.11.2-6+deb12u9, this is 3.11.2."""
    if inputs.on_image:
        _, held = inputs.on_image
        recipe = BaseImageVenvLayer(held.interpreter, held.executable, held.version, held.templates)
        return DescribedLayer("virtual environment", f"envbuild: venv of Python {held.version}", recipe)
    name = f"python{lock.python}"
    version = next((deb.version for deb in (*lock.base, *lock.apt) if deb.name == name), "")
    if not version:
        raise BuildError(f"the lock's base has no package {name}", hint="lock again: envbuild lock NAME --upgrade base")
    upstream = re.split(r"[-+~]", version.rpartition(":")[2], maxsplit=1)[0]
    tar = inputs.base if any(deb.name == name for deb in lock.base) else inputs.apt_base
    return DescribedLayer(
        "virtual environment", f"envbuild: venv of Python {upstream}", VenvLayer(tar, lock.python, upstream)
    )


def _wheels(lock: Lock, inputs: ImageInputs, group: WheelGroup) -> DescribedLayer:
    pins = " ".join(one.wheel.hashed_pin() for one in group.wheels)
    recipe = WheelLayer(lock.python, _files(inputs, group.wheels))
    return DescribedLayer(group.name, f"envbuild: wheels {pins}", recipe)


def _files(inputs: ImageInputs, wheels: Sequence[LockedWheel]) -> tuple[WheelOfLayer, ...]:
    return tuple(WheelOfLayer(inputs.wheels.path(one.wheel.sha256, one.wheel.file), one.wheel.sha256) for one in wheels)


def _archive(lock: Lock, inputs: ImageInputs, archive: Archive) -> DescribedLayer:
    title, folder = f"{archive.name} {archive.version}", FOLDERS[archive.name]
    release = lock.nvcc.release if lock.nvcc and lock.nvcc.home == folder else ""
    if release and not archive.version.startswith(f"{release}."):
        raise LockError(f"{title} is not for CUDA {release}", hint="lock again: envbuild lock NAME --upgrade")
    file = inputs.archives.path(archive.sha256, archive.name)
    history = f"envbuild: archive {title} sha256:{archive.sha256} in {folder}"
    real = inputs.on_image[1].folders[archive.name] if inputs.on_image else folder
    moved = real if real != folder else ""
    return DescribedLayer(title, history, ArchiveLayer(file, archive.name, archive.sha256, release, moved))


def _extension(lock: Lock, inputs: ImageInputs, extension: LockedExtension) -> DescribedLayer:
    wheel = inputs.compiled[extension.name]
    history = f"envbuild: {extension.name} compiled from {extension.digest} --hash=sha256:{wheel.sha256}"
    return DescribedLayer(extension.name, history, WheelLayer(lock.python, (wheel,)))


def _overrides(lock: Lock, inputs: ImageInputs) -> DescribedLayer:
    """The layer with the changed metadata of all wheels that require a different version of an overridden library."""
    pins = tuple(sorted((override.name, override.version) for override in lock.overrides))
    history = f"envbuild: metadata requires {' '.join(f'{name}=={version}' for name, version in pins)}"
    return DescribedLayer("overrides", history, WheelLayer(lock.python, _files(inputs, lock.wheels), pins))


def _nvcc(lock: Lock, inputs: ImageInputs) -> DescribedLayer:
    """The layer with the links for an nvcc from wheels."""
    assert lock.nvcc
    recipe = NvccLinksLayer(lock.python, _files(inputs, lock.wheels), lock.nvcc.home, lock.nvcc.release)
    history = f"envbuild: links of nvcc {lock.nvcc.release} in {lock.nvcc.home}"
    return DescribedLayer("nvcc, of torch's CUDA", history, recipe)


def _base_nvcc(lock: Lock, inputs: ImageInputs) -> list[DescribedLayer]:
    """The layer with the links that the nvcc of a base image lacks, if it lacks any."""
    assert lock.nvcc and inputs.on_image
    nvcc, held = lock.nvcc, inputs.on_image[1]
    if held.nvcc != nvcc.release:
        found = f"is of CUDA {held.nvcc}" if held.nvcc else "is missing or of an unknown release"
        raise BuildError(
            f"{nvcc.home}/bin/nvcc of the base image {found}; torch needs CUDA {nvcc.release}",
            hint=f"name a devel image of CUDA {nvcc.release} as base",
        )
    recipe = BaseImageNvccLinksLayer(held.library_folder, held.libraries, held.lib64)
    if not recipe.links():
        return []
    history = f"envbuild: links of nvcc {nvcc.release} in {nvcc.home}"
    return [DescribedLayer("nvcc, of the base image", history, recipe)]


def _folders_of_base(lock: Lock, inputs: ImageInputs) -> list[DescribedLayer]:
    """The layer with those folders of a base image whose mode or owner the layers that envbuild adds would change.
    Folders inside an archive are not among them."""
    if inputs.on_image is None:
        return []
    held = inputs.on_image[1]
    nvcc = [held.library_folder, held.lib64] if SingleLayer.BASE_NVCC in layer_sources(lock) else []
    written = [VENV, *(held.folders[archive.name] for archive in lock.archives), *nvcc]
    folders = tuple(one for one in held.odd_folders if any(f"{path}/".startswith(f"{one.path}/") for path in written))
    if not folders:
        return []
    history = "envbuild: modes and owners of folders of the base image"
    return [DescribedLayer("folders of the base image", history, BaseImageFoldersLayer(folders))]
