"""The images in the registry of a cluster, which need no engine on this machine: their layers are uploaded from here,
and their contents are audited by a job of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envbuild.audit import image_collector
from envbuild.image import lock_paths_of_built_images, registry_push
from envbuild.image.build_records import CompiledRecord, Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.oci import disk_space_needs, image_upload, lock_image_lookup_and_recipe
from envbuild.image.oci.image_description import OciImage
from envbuild.lock import wheel_file_hashes_and_contents
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads, image_steps, layer_steps
from envbuild.pipeline.model import BuiltImage, Recipe, StepResult
from envbuild.pipeline.runner_selection import SelectedCluster
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry.oci_types import Manifest
from envbuild.registry.registry_client import Repository
from envbuild.runners.runner_interface import Watch
from envbuild.util.errors import BuildError, NetworkError


def write_image(context: StepContext, recipe: Recipe, *, no_cache: bool) -> tuple[OciImage, Sequence[CompiledRecord]]:
    """Write the layers of a recipe's image without an engine. Return the image, and the records of its compiled
    extensions. Layers in the cache are not written again, unless `no_cache` is set. Raises BuildError if an extension
    is not compiled."""
    lock = recipe.lock
    wheels = layer_steps.compiled_wheels(context, recipe)
    build_downloads.fetch_base_manifest(lock, context.progress)  # its layers count for the disk space
    disk_space_needs.require_disk_space(None, lock)
    written = context.step("build", layer_steps.write_layers, context, recipe.plan, lock, wheels, again=no_cache)
    return written, [wheel.compiled_record for wheel in wheels]


class RegistryImages:
    """Implements ImageStore with the registry of a cluster. An image exists if a build record says that it was audited:
    its layers can be written again at any time. `registry`: the cluster's repository."""

    def __init__(self, context: StepContext, cluster: SelectedCluster, registry: str) -> None:
        self._context = context
        self._cluster = cluster
        self._place = Repository(registry_push.parse_repository(registry))
        self.registry: str | None = registry

    @property
    def engine(self) -> Engine:
        return self._context.engine

    def find(self, lock: Lock) -> Image | None:
        records = lock_image_lookup_and_recipe.matching_records(lock)
        return next(map(lock_image_lookup_and_recipe.recorded_image, records), None)

    def holds(self, image: Image) -> bool:
        try:
            return registry_push.find_pushed(self._place, image.id) is not None
        except NetworkError as error:
            self._context.note(f"{self._place.reference.repository} did not answer: {error.message}")
            return False

    def provide(self, recipe: Recipe, *, no_cache: bool = False) -> BuiltImage:
        """Runs those of the steps "build", "push" and "audit" that are needed. Raises BuildError before the upload if
        an extension is not compiled, which needs an engine."""
        context, lock = self._context, recipe.lock
        lock_paths_of_built_images.note_lock(recipe.loaded.known_lock)  # so that `prune` keeps its files
        audited = None if no_cache else self.find(lock)
        if audited is not None and (there := registry_push.find_pushed(self._place, audited.id)):
            layer_steps.record_wheels_of_image(context, recipe, audited.id)
            return BuiltImage(context.step("build", self._existing, audited, there), tags=self._tags(audited))
        written, compiled = write_image(context, recipe, no_cache=no_cache)
        manifest = context.step("push", self._upload, lock, written)
        record = lock_image_lookup_and_recipe.written_record(lock, written, manifest.digest, compiled)
        image = lock_image_lookup_and_recipe.recorded_image(record)
        records = lock_image_lookup_and_recipe.matching_records(lock)
        if not no_cache and image.id in {one.image for one in records}:  # audited before
            return BuiltImage(image, tags=self._tags(image))
        return context.step("audit", self._audit, recipe, image, self._reference(manifest), record)

    def push(self, place: Repository, image: Image, on_line: Callable[[str], None]) -> Manifest:
        """Only finds the image: `provide` uploads it. Raises BuildError if the registry lacks it."""
        found = registry_push.find_pushed(place, image.id)
        if found is None:
            raise BuildError(
                f"{place.reference.repository} does not have the image {image.id[:19]}",
                hint="`envbuild make` and `envbuild test --record` upload it",
            )
        return found

    def tags(self, loaded: LoadedProfile, image: Image) -> tuple[str, ...]:
        return self._tags(image)

    def mark_verified(self, loaded: LoadedProfile, image: Image) -> tuple[str, ...]:
        """Sets no tag, because a registry must have the tag `verified` only together with published evidence."""
        self._context.note(
            "no engine can be used: the tag `verified` is not set on this machine, the evidence proves the image; "
            f"to publish both: envbuild push {loaded.known} {self.registry}"
        )
        return ()

    def withdraw_verified(self, loaded: LoadedProfile, image: Image, tags: Sequence[str]) -> tuple[str, ...]:
        return tuple(tags)

    def _existing(self, image: Image, manifest: Manifest) -> StepResult[Image]:
        return StepResult(image, cached=True, note=self._reference(manifest))

    def _upload(self, lock: Lock, image: OciImage) -> StepResult[Manifest]:
        """Upload the layers that the registry lacks."""
        line = self._context.progress.line

        def send(tag: str) -> None:
            with layer_steps.intact_files(lock):
                image_upload.upload_image(self._place, image, tag, line)

        manifest, there = registry_push.push_once(self._place, image.id, send)
        return StepResult(manifest, cached=there, note=self._reference(manifest))

    def _audit(self, recipe: Recipe, image: Image, reference: str, record: Record) -> StepResult[BuiltImage]:
        """Audit the contents of an image in a job of the cluster, and write its build record. Raises CheckFailed for a
        defect or a known fault."""
        name, say = self._tags(image)[0], self._context.progress.say
        hashes = wheel_file_hashes_and_contents.wheel_hashes(recipe.lock)
        runner = self._cluster.runner_for(image, reference, None)
        held = image_collector.collect_on_cluster(runner, name, hashes, Watch(say=say))
        audit = image_steps.require_sound(recipe, name, held)
        new = image_steps.record_build(recipe.lock, record)
        return StepResult(BuiltImage(image, new, self._tags(image)), note=audit.summary)

    def _reference(self, manifest: Manifest) -> str:
        return f"{self._place.reference.repository}@{manifest.digest}"

    def _tags(self, image: Image) -> tuple[str, ...]:
        return (f"{self._place.reference.repository}:{registry_push.id_tag(image.id)}",)
