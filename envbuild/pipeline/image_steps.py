"""The steps from a profile to its image: load, resolve, lock, render, compile extensions, build, load and audit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envbuild.facts import database
from envbuild.fetch import apt_resolution_and_download, sha256_file_store
from envbuild.image import (
    build_context_folders,
    build_records,
    container_definition_export,
    debian_base_tar,
    extension_dockerfile,
    extension_wheel_build,
    lock_paths_of_built_images,
)
from envbuild.image.build_records import Record
from envbuild.image.buildx import BuildOrder
from envbuild.image.docker_engine import Image
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.image.image_naming import repository
from envbuild.image.oci import disk_space_needs, engine_load, lock_image_lookup_and_recipe
from envbuild.lock import lock_changes, lock_creation_and_update, lock_file, wheel_file_hashes_and_contents
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads, layer_steps
from envbuild.pipeline.layer_steps import load_layers, prepare_load, require_describable_image
from envbuild.pipeline.model import BuiltImage, MakeResult, Options, Recipe, StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners import docker_runner
from envbuild.util import atomic_files
from envbuild.util.errors import CheckFailed, OutOfDate, UsageError
from envbuild.util.json_output_types import plain
from envbuild.util.yaml_and_project_paths import display

if TYPE_CHECKING:
    from envbuild.audit.collected_environment import Holdings
    from envbuild.audit.environment_audit import Audit

_AS_WRITTEN = Options()


def load_profile(name: str, options: Options = _AS_WRITTEN) -> StepResult[LoadedProfile]:
    """Read the profile, with the changes that `options` make to it. Raises UsageError if the options select GPUs for
    the self-test of a profile that is tested on the CPU."""
    loaded = profile_reader_and_overrides.load(name, options.pins, options.requirements)
    if options.tolerant:
        loaded = loaded.accepting((item.id for item in database.advisories()), "only tried")
    if options.script:
        loaded = loaded.bringing(options.script)
    if options.request.gpus and not loaded.profile.gpus:
        error = UsageError(f"--gpus: {loaded.name} is tested on the CPU", hint="its profile names no gpus")
        error.partial = {"profile": loaded.name}
        raise error
    return StepResult(loaded, note=display(loaded.file))


def resolve_profile(loaded: LoadedProfile) -> StepResult[Plan]:
    """Combine the profile with the facts. Raises ProfileError if the profile contradicts itself or the facts, or if an
    advisory refuses it."""
    plan = plan_resolver.resolve(loaded)
    return StepResult(plan, note=", ".join([*plan.core[1:], *plan.packages[:4]]))


def lock_profile(context: StepContext, loaded: LoadedProfile, plan: Plan, options: Options) -> StepResult[Lock]:
    """Return the lock that matches the plan: the existing lock, or a new one, which is written unless this is a trial
    of pins. Download the packages of its base."""
    before = lock_file.read(loaded.known_lock)
    if options.locked:
        after = lock_file.current(before, plan, loaded.lock_file)
    else:
        accepted = {lock_file.EVERYTHING} if options.tolerant else set(options.accept_old)
        show = build_downloads.show_download(context.progress)
        similar = lock_file.similar_lock(loaded) if before is None else None
        after = lock_creation_and_update.update_lock(
            plan, before, progress=show, accept_old=frozenset(accepted), say=context.note,
            similar=similar[1] if similar else None,
        )  # fmt: skip
    after = fetch_base(context, plan, after, lock_again=not options.locked)
    if after is not before:
        after = extension_wheel_build.with_current_records(after)
        for note in (*profile_reader_and_overrides.ignored_uv_settings([loaded]), *loaded.notes):
            context.note(note)
        if not options.trial:
            lock_file.write(after, loaded.lock_file, loaded.name, loaded.origin)
        for change in lock_changes.version_changes(before, after):
            context.progress.say(f"locked: {change}")
    return StepResult(after, cached=after is before, note=f"{after.short} {display(loaded.lock_file)}")


def fetch_base(context: StepContext, plan: Plan, lock: Lock, *, lock_again: bool) -> Lock:
    """Download the missing Debian packages of a lock's base, and return the lock. If no mirror has a package any
    longer: with `lock_again`, lock the base again and return the new lock; otherwise raise AptUnavailable."""
    has_tar = debian_base_tar.tar_file(lock).is_file()  # then only the packages of `apt:` are needed
    if lock.suite is None or (has_tar and not lock.apt):  # without a suite, the base is an image
        return lock
    packages = lock.apt if has_tar else (*lock.base, *lock.apt)
    try:
        with build_downloads.one_fetch_at_a_time(context.progress):
            apt_resolution_and_download.fetch_debs(packages, lock.suite, sha256_file_store.debs(), lock.made)
        return lock
    except apt_resolution_and_download.AptUnavailable as gone:
        if not lock_again:
            raise
        context.progress.say(f"locking the base again, because {gone.message}")
    again = lock_creation_and_update.update_lock(plan, lock, frozenset({lock_creation_and_update.BASE}))
    with build_downloads.one_fetch_at_a_time(context.progress):
        apt_resolution_and_download.fetch_debs(
            (*again.base, *again.apt), lock.suite, sha256_file_store.debs(), again.made
        )
    return again


def render_dockerfile(loaded: LoadedProfile, lock: Lock, options: Options) -> StepResult[str]:
    """Return the Dockerfile of the lock, and write it unless this is a trial of pins. With --locked, raise OutOfDate if
    the existing Dockerfile differs."""
    text = container_definition_export.standalone_dockerfile(lock, loaded.name)
    same = atomic_files.holds_text(loaded.dockerfile, text)
    if options.locked and loaded.dockerfile.is_file() and not same:
        raise OutOfDate(
            f"{display(loaded.dockerfile)} does not match the lock", hint=f"run: envbuild lock {loaded.known}"
        )
    if not same and not options.trial:
        atomic_files.write_within(loaded.project, loaded.dockerfile, text)
    return StepResult(text, cached=same, note=display(loaded.dockerfile))


def find_or_build_image(context: StepContext, recipe: Recipe, *, no_cache: bool = False) -> BuiltImage:
    """Return the image of a recipe: an existing one, or a new one, which is audited before it gets its tag.
    `no_cache`: write its layers again."""
    # This comes first, because `prune` may run at any time and removes images whose locks are not noted.
    lock_paths_of_built_images.note_lock(recipe.loaded.known_lock)
    lock = recipe.lock
    found = None if no_cache else lock_image_lookup_and_recipe.existing_image(context.engine, lock)
    if found is not None:
        image = context.step("build", tag_existing_image, context, recipe, found)
        layer_steps.record_wheels_of_image(context, recipe, image.id)
        return BuiltImage(image, tags=(image_tag(recipe.loaded, lock),))
    build_downloads.fetch_base_manifest(lock, context.progress)  # its layers count for the disk space
    wheels = context.step("extensions", compile_extensions, context, recipe) if lock.extensions else ()
    compiled = [wheel.compiled_record for wheel in wheels]
    disk_space_needs.require_disk_space(context.engine, lock)
    to_load = context.step("build", prepare_load, context, recipe.plan, lock, wheels, again=no_cache)
    image, written = context.step("load", load_layers, context, recipe, to_load)
    record = lock_image_lookup_and_recipe.written_record(lock, written, image.handle, compiled)
    return context.step("audit", audit_image, context, recipe, image, record)


def _record_image(context: StepContext, recipe: Recipe, image: Image, record: Record) -> BuiltImage:
    """Set the tag of an audited image, and write its build record."""
    engine, lock, name = context.engine, recipe.lock, recipe.name
    engine.tag(image, repository(name), lock.short)
    # before the record: once recorded, the image is not made again, and nothing else would remove the tag
    engine.remove(lock_image_lookup_and_recipe.layers_tag(lock, name))
    return BuiltImage(image, record_build(lock, record), (image_tag(recipe.loaded, lock),))


def record_build(lock: Lock, record: Record) -> tuple[Record, ...]:
    """Write the build record of an audited image. Return the record in a tuple, which is empty if the image had a
    record before."""
    before = lock_image_lookup_and_recipe.matching_records(lock)
    build_records.write(record)
    return () if record.image in {one.image for one in before} else (record,)


def image_tag(loaded: LoadedProfile, lock: Lock) -> str:
    return f"{repository(loaded.name)}:{lock.short}"


def tag_existing_image(context: StepContext, recipe: Recipe, image: Image) -> StepResult[Image]:
    """Set the tag of an image that exists already, unless the tag names this image. If an earlier run was interrupted
    while it loaded or audited the image, remove what that run left in the engine."""
    engine, named = context.engine, repository(recipe.name)
    tags = engine.tags(named)
    audited = lock_image_lookup_and_recipe.layers_tag(recipe.lock, recipe.name).rpartition(":")[2]
    if tags.get(recipe.lock.short) != image.handle:
        engine.tag(image, named, recipe.lock.short)
    left = [tag for tag in (engine_load.incoming_tag(audited), audited) if tag in tags]
    for tag in left:
        engine.remove(f"{named}:{tag}")
    if left:
        docker_runner.sweep_containers(engine)
    return StepResult(image, cached=True, note=f"{image_tag(recipe.loaded, recipe.lock)} {image.size / 1e6:.0f} MB")


def compile_extensions(context: StepContext, recipe: Recipe) -> StepResult[tuple[BuiltWheel, ...]]:
    """Return the wheels of the extensions: from a cache, or else compiled from source. Raises what
    `require_describable_image` raises before anything is compiled, and what `find_or_compile_wheels` raises."""
    compiled: list[str] = []

    def compile_one(extension: LockedExtension) -> BuiltWheel:
        compiled.append(extension.name)
        return _compile_extension(context, recipe, extension)

    wheels = layer_steps.find_or_compile_wheels(context, recipe, compile_one)
    note = ", ".join(f"{one.name} {one.path.stat().st_size / 1e6:.0f} MB {one.sha256[:12]}" for one in wheels)
    return StepResult(wheels, cached=not compiled, note=note)


def _compile_extension(context: StepContext, recipe: Recipe, extension: LockedExtension) -> BuiltWheel:
    lock, progress = recipe.lock, context.progress
    disk_space_needs.require_disk_space(context.engine, lock, compiling=True)
    require_describable_image(context, lock)
    build_downloads.fetch_image_parts(recipe.plan, lock, progress)
    build_downloads.fetch_compiler_and_sources(recipe.plan, lock, extension, progress)
    build_downloads.make_bases(lock, progress)
    return extension_wheel_build.compile_wheel(_build_order(context, recipe), extension)


def _build_order(context: StepContext, recipe: Recipe) -> BuildOrder:
    progress = context.progress
    return BuildOrder(
        context.engine, recipe.lock, recipe.name, extension_dockerfile.render(recipe.lock), progress.say, progress.line
    )


def audit_image(context: StepContext, recipe: Recipe, image: Image, record: Record) -> StepResult[BuiltImage]:
    """Audit the actual contents of an image, set its tag, and write its build record. Raises CheckFailed for a defect
    or a known fault; then the image keeps the tag for images that are not audited, so that it can be inspected."""
    from envbuild.audit import image_collector  # not needed for an image that exists

    lock = recipe.lock
    target = lock_image_lookup_and_recipe.layers_tag(lock, recipe.name)
    held = image_collector.collect_from_image(
        context.engine, image, target, wheel_file_hashes_and_contents.wheel_hashes(lock)
    )
    done = require_sound(recipe, target, held)
    return StepResult(_record_image(context, recipe, image, record), note=done.summary)


def require_sound(recipe: Recipe, target: str, held: Holdings) -> Audit:
    """Compare the contents of a new image with its recipe. Raises CheckFailed, with the findings, for a defect or a
    known fault. `target`: the image's name in messages."""
    from envbuild.audit import environment_audit  # not needed for an image that exists

    expected = environment_audit.expected_contents(recipe.loaded, recipe.lock, claimed=True)
    done = environment_audit.assess(target, held, expected)
    try:
        done.require()
    except CheckFailed as error:
        error.partial = {"findings": plain(done.findings)}  # the other keys are those of the build's document
        raise
    return done


def discard_build(context: StepContext, result: MakeResult, *, image: bool = True) -> None:
    """Remove the build context, and the image's tags unless the image existed before this build. If the image is gone
    then, remove its new build record too. If `image` is False, image and record stay."""
    build_context_folders.discard(result.name)
    if not image:
        return
    existed = any(step.name == "build" and step.cached for step in context.steps)
    if result.lock and not existed:
        tag = f"{repository(result.name)}:{result.lock.short}"
        for reference in (tag, lock_image_lookup_and_recipe.layers_tag(result.lock, result.name)):
            context.engine.remove(reference)
    for record in result.new_build_records:
        if context.engine.find(record.handle) is None:  # the image has no other name and no container keeps it
            build_records.remove_record(record)
