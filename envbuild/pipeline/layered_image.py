"""The steps from a profile's lock to its image without an engine: download its parts, write its layers, export it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envbuild.facts.document_types import Digest
from envbuild.fetch import sha256_file_store
from envbuild.image import debian_base_tar, extension_wheel_build
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.image.oci import image_description, layer_blobs, layout_export
from envbuild.image.oci.image_description import ImageDescription, ImageInputs, OciImage
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads
from envbuild.pipeline.image_steps import load_profile, resolve_profile
from envbuild.pipeline.model import StepResult
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.step_context import StepContext
from envbuild.pipeline.workflows import exclusive_run
from envbuild.profile.loaded_profile import Source
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.errors import BuildError, some


@dataclass(frozen=True)
class ExportedImage:
    """An exported image, and the document of `export oci`. `digest`: of the manifest; `target`: the folder or file."""

    profile: str
    lock: Digest
    image: Digest
    digest: Digest
    target: str


def export_image(name: str, target: Path, listener: Listener) -> ExportedImage:
    """Write the image of a profile's lock as an OCI image layout: as one tar if `target` ends with ".tar", else as a
    folder. Needs no engine. Raises OutOfDate unless the lock is current, BuildError if an extension is not compiled."""
    context = StepContext(listener)
    with exclusive_run(context, name, dict):
        source = context.step("load profile", load_profile, name)
        plan = context.step("resolve", resolve_profile, source)
        lock = context.step("lock", _current_lock, source, plan)
        description = context.step("download", describe_image, context, source, plan, lock)
        image = context.step("export", _export, context, description, target, source.name)
    return ExportedImage(source.name, lock.id, image.id, image.manifest.digest, str(target))


def _current_lock(source: Source, plan: Plan) -> StepResult[Lock]:
    lock = lock_file.current(lock_file.read(source.known_lock), plan, source.lock_file)
    return StepResult(lock, cached=True, note=lock.short)


def describe_image(context: StepContext, source: Source, plan: Plan, lock: Lock) -> StepResult[ImageDescription]:
    """Describe the image of a lock, and download what its layers are written from."""
    description = image_description.image_of_lock(lock, image_inputs(source, lock))
    build_downloads.make_bases(lock, context.progress)
    build_downloads.fetch_image_parts(plan, lock, context.progress)
    return StepResult(description, note=some(len(description.layers), "layer"))


def image_inputs(source: Source, lock: Lock) -> ImageInputs:
    """Return the files of a lock's image. Raises BuildError if the wheel of an extension is not in the cache."""
    compiled = {}
    for extension in lock.extensions:
        wheel = extension_wheel_build.find_wheel(lock, extension)
        if wheel is None:
            raise BuildError(
                f"{extension.name} is not compiled, which needs an engine", hint=f"envbuild build {source.known}"
            )
        compiled[extension.name] = WheelOfLayer(wheel.path, wheel.sha256)
    base, apt_base = debian_base_tar.tar_file(lock), debian_base_tar.tar_file(lock, apt=True)
    wheels, archives = sha256_file_store.wheel_store(), sha256_file_store.archive_store()
    return ImageInputs(base, apt_base, wheels, archives, compiled)


def _export(context: StepContext, description: ImageDescription, target: Path, reference: str) -> StepResult[OciImage]:
    if target.suffix == ".tar":
        image = layer_blobs.learn_layers(description, context.progress.line)
        layout_export.write_file(image, target, reference)
    else:
        image = layout_export.write_folder(description, target, reference, context.progress.line)
    size = sum(layer.size for layer in image.layers)
    return StepResult(image, note=f"{target} {size / 1e6:.0f} MB {image.manifest.digest}")
