"""`verify --rebuild`: makes an image again from the lock in its evidence, and compares the two layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from envbuild.attest.image_verifier import Verdict
from envbuild.attest.trusted_statements import SignedBuild
from envbuild.image import build_context_folders, engine_image_to_oci_layout
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import DescribedLayer
from envbuild.pipeline.image_steps import compile_extensions, fetch_base
from envbuild.pipeline.layer_steps import write_layers
from envbuild.pipeline.make_build_and_test import one_run_per_profile
from envbuild.pipeline.model import Recipe
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry import image_content_reader, layer_archive_comparison
from envbuild.registry.image_content_reader import Config, StoredImage
from envbuild.registry.oci_types import digest_in
from envbuild.resolve import plan_resolver
from envbuild.util import temporary_files
from envbuild.util.errors import some
from envbuild.util.untrusted_input_errors import Reason, Refusal

_NAMES = "the registry's image", "what the lock gives"


def rebuild_objections(verdict: Verdict, listener: Listener) -> list[Reason]:
    """Make the image again, and return why the result differs from the verified image; an empty list if it does not.

    The layers are written again, without an engine; only an engine can compile extensions. Raises what a build raises.
    Only cached files of the rebuild remain, whatever the result.
    """
    assert verdict.build and verdict.proved
    context = StepContext(listener)
    say = context.progress.say
    if verdict.base:
        say(f"building the base again, {verdict.base}: nothing above it is built or compared")
    name = f"{verdict.build.name[:55]}-rebuild"
    with one_run_per_profile(name, say), temporary_files.folder("rebuild") as folder:
        try:
            recipe = _recipe(context, name, verdict.build, folder)
            objection = _compare_written(context, recipe, verdict.proved)
        except Refusal as refusal:
            return [refusal.reason]
        finally:
            build_context_folders.discard(name)  # the contexts in which extensions were compiled
    say(f"the lock gives {'a different' if objection else 'the same'} image")
    return [objection] if objection else []


def _recipe(context: StepContext, name: str, build: SignedBuild, folder: Path) -> Recipe:
    """The recipe for the image of the signed lock, under a separate name."""
    loaded = LoadedProfile(name, folder / "profiles" / f"{name}.yaml", build.profile, build.document)
    plan = plan_resolver.resolve(loaded)
    lock = fetch_base(context, plan, build.lock, lock_again=False)
    return Recipe(loaded, plan, lock, wheel_records="ignore")


def _compare_written(context: StepContext, recipe: Recipe, proved: StoredImage) -> Reason | None:
    """Write all layers again and return the first objection. A layer is downloaded only if another program compressed
    it, or if it differs. Raises Refusal for a layer that does not match its digests."""
    wheels = context.step("extensions", compile_extensions, context, recipe) if recipe.lock.extensions else ()
    image = context.step("build", write_layers, context, recipe.plan, recipe.lock, wheels, again=True)
    place, config, count = proved.place, proved.config, len(image.layers)
    if objection := _count_objection(config, count):
        return objection
    layers = zip(proved.manifest.layers, config.layers, image.described, image.layers, strict=True)
    for number, (blob, diff_id, described, layer) in enumerate(layers, 1):
        if diff_id != layer.diff_id:
            with _stored(described, layer.diff_id) as local:
                there, here = (place, digest_in(blob), diff_id), (local, layer.diff_id, layer.diff_id)
                how = layer_archive_comparison.difference(there, here, _NAMES) or "its files have another order"
            return Reason("rebuild", f"layer {number} of {count}, {described.title}, differs: {how}")
        if digest_in(blob) != layer.digest:
            image_content_reader.require_layer(place, digest_in(blob), diff_id)
    given = image_content_reader.parse_config(image.id, image.configuration)
    return _configuration_objection(config, given)


@contextlib.contextmanager
def _stored(described: DescribedLayer, diff_id: str) -> Iterator[engine_image_to_oci_layout.Folder]:
    """A temporary layout with one layer, uncompressed."""
    with temporary_files.folder("rebuild") as folder:
        local = engine_image_to_oci_layout.Folder(folder / "layout")
        local.put_blocks(diff_id, layer_blobs.blob_blocks(described.recipe, diff_id, plain=True))
        yield local


def _count_objection(config: Config, count: int) -> Reason | None:
    if len(config.layers) == count:
        return None
    return Reason("rebuild", f"the image has {some(len(config.layers), 'layer')}, the lock gives {count}")


def _configuration_objection(config: Config, given: Config) -> Reason | None:
    differ = [what for what in ("labels", "environment", "settings") if getattr(config, what) != getattr(given, what)]
    if not differ:
        return None
    return Reason("rebuild", f"the layers have the same content, the configuration differs: {', '.join(differ)}")
