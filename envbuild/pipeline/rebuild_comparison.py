"""`verify --rebuild`: rebuilds the image from the lock named in its evidence, and compares it layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

from envbuild.attest.image_verifier import Verdict
from envbuild.attest.trusted_statements import SignedBuild
from envbuild.image import dockerfile_renderer, oci_layout_writer
from envbuild.image.docker_engine import Image
from envbuild.pipeline.image_steps import discard_build, fetch_base, find_or_build_image
from envbuild.pipeline.model import BuiltImage, MakeResult, Recipe
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.step_context import PartialResult, StepContext
from envbuild.pipeline.workflows import one_run_per_profile
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry import image_content_reader, layer_archive_comparison
from envbuild.registry.image_content_reader import StoredImage
from envbuild.registry.oci_types import digest_in
from envbuild.resolve import plan_resolver
from envbuild.util import temporary_files
from envbuild.util.errors import some
from envbuild.util.untrusted_input_errors import Reason, Refusal

_NAMES = "the registry's image", "what the lock gives"


def rebuild_objections(verdict: Verdict, listener: Listener) -> list[Reason]:
    """Return why the rebuilt image differs from the verified image; an empty list if it is the same. The verdict
    records which layers hold the same files in another order.

    Another builder may write another history; the layers, and the configuration that a container receives, must be the
    same. Each layer is read from where it was verified, since its blob may differ from what the configuration says.
    Raises what a build raises. Nothing of the rebuild remains, whatever the result.
    """
    assert verdict.build and verdict.proved
    context = StepContext(listener)
    say = context.progress.say
    if verdict.base:
        say(f"building the base again, {verdict.base}: nothing above it is built or compared")
    result = PartialResult(MakeResult(f"{verdict.build.name[:55]}-rebuild", lock=verdict.build.lock))
    with one_run_per_profile(result.value.name, say):
        try:
            built = _rebuild(context, result.value.name, verdict.build)
            result.update(new_records=built.new_records)
            found = _compare(context, built.image, verdict.proved)
            if isinstance(found, Reason):
                say("the lock gives a different image")
                return [found]
            verdict.reordered = found
            same_id = built.image.id == verdict.proved.config.id
            say("the lock gives the same image" if same_id else _same(found))
            return []
        except Refusal as refusal:
            return [refusal.reason]
        finally:
            discard_build(context, result.value)


def _same(reordered: Sequence[int]) -> str:
    if not reordered:
        return "the lock gives the same layers and configuration, with a different image id"
    numbers = ", ".join(map(str, reordered))
    return (
        f"the lock gives the same files, with a different image id: the archive of layer {numbers} lists them in "
        "another order, as an engine may (docs/decisions/0019)"
    )


def _compare(context: StepContext, rebuilt: Image, proved: StoredImage) -> Reason | list[int]:
    """Return the first objection, or else the numbers of the layers whose files have another order. Raises Refusal for
    a layer that does not match its digests."""
    count, place, config = len(rebuilt.layers), proved.place, proved.config
    if len(config.layers) != count:
        return Reason("rebuild", f"it has {some(len(config.layers), 'layer')}, the lock gives {count}")
    differing = []
    for number, (layer, there, here) in enumerate(
        zip(proved.manifest.layers, config.layers, rebuilt.layers, strict=True), 1
    ):
        if there == here:
            image_content_reader.require_layer(place, digest_in(layer), there)
        else:
            differing.append((number, (place, digest_in(layer), there), here))
    if rebuilt.id == config.id:
        return []
    with oci_layout_writer.saved(context.engine, rebuilt) as local:
        for number, where, here in differing:
            if how := layer_archive_comparison.difference(where, (local, here, here), _NAMES):
                return Reason("rebuild", f"layer {number} of {count} differs: {how}")
        given = image_content_reader.parse_config(rebuilt.id, local.blob(rebuilt.id))
    differ = [what for what in ("labels", "environment", "settings") if getattr(config, what) != getattr(given, what)]
    if differ:
        return Reason("rebuild", f"the layers have the same content, the configuration differs: {', '.join(differ)}")
    return [number for number, *_ in differing]


def _rebuild(context: StepContext, name: str, build: SignedBuild) -> BuiltImage:
    """Build the image under a separate name, without the build cache."""
    with temporary_files.folder("rebuild") as folder:
        loaded = LoadedProfile(name, folder / "profiles" / f"{name}.yaml", build.profile, build.document)
        plan = plan_resolver.resolve(loaded)
        lock = fetch_base(context, plan, build.lock, lock_again=False)
        recipe = Recipe(loaded, plan, lock, dockerfile_renderer.render(lock, name))
        return find_or_build_image(context, recipe, no_cache=True)
