"""`export oci` as a list of steps: from a profile's lock to its image as files, without an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from envbuild.image.oci import layout_export
from envbuild.image.oci.image_description import ImageDescription, OciImage
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline.image_steps import load_profile, resolve_profile
from envbuild.pipeline.layer_steps import compiled_wheels, describe_image, find_layer_digests, intact_files
from envbuild.pipeline.make_build_and_test import exclusive_run
from envbuild.pipeline.model import Recipe, StepResult
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve.plan_resolver import Plan
from envbuild.util.json_output_types import Digest


@dataclass(frozen=True)
class ExportedImage:
    """An exported image, and the document of `export oci`. `digest`: the manifest's; `target`: the folder or file."""

    profile: str
    lock: Digest
    image: Digest
    digest: Digest
    target: str


def export_image(name: str, target: Path, listener: Listener) -> ExportedImage:
    """Write the image of a profile's lock as an OCI image layout: as one tar if `target` ends with ".tar", else as a
    folder. Needs no engine.

    Raises OutOfDate unless the lock is current, BuildError if an extension is not compiled, HashMismatch if a stored
    file was damaged on this disk, which is removed.
    """
    context = StepContext(listener)
    with exclusive_run(context, name, dict):
        loaded = context.step("load profile", load_profile, name)
        plan = context.step("resolve", resolve_profile, loaded)
        lock = context.step("lock", _current_lock, loaded, plan)
        wheels = compiled_wheels(context, Recipe(loaded, plan, lock))
        description = context.step("download", describe_image, context, plan, lock, wheels)
        image = context.step("export", _export, context, lock, description, target, loaded.name)
    return ExportedImage(loaded.name, lock.id, image.id, image.manifest.digest, str(target))


def _current_lock(loaded: LoadedProfile, plan: Plan) -> StepResult[Lock]:
    lock = lock_file.current_lock(loaded, plan)
    return StepResult(lock, cached=True, note=lock.short)


def _export(
    context: StepContext, lock: Lock, description: ImageDescription, target: Path, reference: str
) -> StepResult[OciImage]:
    if target.suffix == ".tar":
        image = find_layer_digests(context, lock, description)
        with intact_files(lock):
            layout_export.write_file(image, target, reference)
    else:
        with intact_files(lock):
            image = layout_export.write_folder(description, target, reference, context.progress.line)
    return StepResult(image, note=f"{target} {image.size / 1e6:.0f} MB {image.manifest.digest}")
