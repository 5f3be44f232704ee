"""`verify --rebuild`: makes an image again from the lock in its evidence, and compares the two layer by layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.attest.image_verifier import Verdict
from envbuild.attest.trusted_statements import SignedBuild
from envbuild.image import build_context_folders, dockerfile_renderer, engine_image_to_oci_layout
from envbuild.image.docker_engine import Image
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import DescribedLayer
from envbuild.pipeline.image_steps import compile_extensions, discard_build, fetch_base, find_or_build_image
from envbuild.pipeline.layer_steps import write_layers
from envbuild.pipeline.make_build_and_test import one_run_per_profile
from envbuild.pipeline.model import MakeResult, Recipe
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.step_context import PartialResult, StepContext
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

    The layers are written again, without an engine. Only an engine can compile extensions and build on a base image; in
    that build it may order the files of a layer differently, which the verdict records. Raises what a build raises.
    Nothing of the rebuild remains, whatever the result.
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
            if recipe.lock.image:
                found = _compare_built(context, recipe, verdict.proved)
            else:
                found = _compare_written(context, recipe, verdict.proved)
        except Refusal as refusal:
            return [refusal.reason]
        finally:
            build_context_folders.discard(name)  # of compiled extensions
    if isinstance(found, Reason):
        say("the lock gives a different image")
        return [found]
    verdict.reordered = found.reordered
    say(_described(found, verdict.proved.config.id))
    return []


@dataclass(frozen=True)
class _Equal:
    """The rebuilt image has the same layers and configuration. `id`: its image id, which may differ; `reordered`:
    numbers, from 1, of the layers whose files have a different order."""

    id: str
    reordered: list[int] = field(default_factory=list)


def _described(found: _Equal, proved_id: str) -> str:
    if found.id == proved_id:
        return "the lock gives the same image"
    if not found.reordered:
        return "the lock gives the same layers and configuration, with a different image id"
    numbers = ", ".join(map(str, found.reordered))
    return (
        f"the lock gives the same files, with a different image id: the archive of layer {numbers} lists them in "
        "another order, as an engine may (docs/decisions/0019)"
    )


def _recipe(context: StepContext, name: str, build: SignedBuild, folder: Path) -> Recipe:
    """The recipe for the image of the signed lock, under a separate name."""
    loaded = LoadedProfile(name, folder / "profiles" / f"{name}.yaml", build.profile, build.document)
    plan = plan_resolver.resolve(loaded)
    lock = fetch_base(context, plan, build.lock, lock_again=False)
    return Recipe(loaded, plan, lock, dockerfile_renderer.render(lock, name))


def _compare_written(context: StepContext, recipe: Recipe, proved: StoredImage) -> Reason | _Equal:
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
    return _configuration_objection(config, given) or _Equal(image.id)


@contextlib.contextmanager
def _stored(described: DescribedLayer, diff_id: str) -> Iterator[engine_image_to_oci_layout.Folder]:
    """A temporary layout with one layer, uncompressed."""
    with temporary_files.folder("rebuild") as folder:
        local = engine_image_to_oci_layout.Folder(folder / "layout")
        local.put_blocks(diff_id, layer_blobs.blob_blocks(described.recipe, diff_id, plain=True))
        yield local


def _compare_built(context: StepContext, recipe: Recipe, proved: StoredImage) -> Reason | _Equal:
    """Build the image again without the build cache and return the first objection.

    A different builder may write a different history. But the layers, and the configuration that a container receives,
    must be the same. Each layer is read from the verified source, since its blob may differ from what the configuration
    says.
    """
    result = PartialResult(MakeResult(recipe.name, lock=recipe.lock))
    try:
        built = find_or_build_image(context, recipe, no_cache=True)
        result.update(new_build_records=built.new_build_records)
        return _compare_in_engine(context, built.image, proved)
    finally:
        discard_build(context, result.value)


def _compare_in_engine(context: StepContext, rebuilt: Image, proved: StoredImage) -> Reason | _Equal:
    """Compare the rebuilt image in the engine with the proved image, and return the first objection. Raises Refusal for
    a layer that does not match its digests."""
    count, place, config = len(rebuilt.layers), proved.place, proved.config
    if objection := _count_objection(config, count):
        return objection
    differing = []
    for number, (layer, there, here) in enumerate(
        zip(proved.manifest.layers, config.layers, rebuilt.layers, strict=True), 1
    ):
        if there == here:
            image_content_reader.require_layer(place, digest_in(layer), there)
        else:
            differing.append((number, (place, digest_in(layer), there), here))
    if rebuilt.id == config.id:
        return _Equal(rebuilt.id)
    with engine_image_to_oci_layout.saved(context.engine, rebuilt) as local:
        for number, where, here in differing:
            if how := layer_archive_comparison.difference(where, (local, here, here), _NAMES):
                return Reason("rebuild", f"layer {number} of {count} differs: {how}")
        given = image_content_reader.parse_config(rebuilt.id, local.blob(rebuilt.id))
    return _configuration_objection(config, given) or _Equal(rebuilt.id, [number for number, *_ in differing])


def _count_objection(config: Config, count: int) -> Reason | None:
    if len(config.layers) == count:
        return None
    return Reason("rebuild", f"the image has {some(len(config.layers), 'layer')}, the lock gives {count}")


def _configuration_objection(config: Config, given: Config) -> Reason | None:
    differ = [what for what in ("labels", "environment", "settings") if getattr(config, what) != getattr(given, what)]
    if not differ:
        return None
    return Reason("rebuild", f"the layers have the same content, the configuration differs: {', '.join(differ)}")
