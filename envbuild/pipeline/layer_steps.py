"""The steps that make an image from its layers: find its compiled wheels, download the parts of the layers, write them,
load them into the engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from envbuild.doctor import parallel_tasks_with_time_limit
from envbuild.image import build_records, buildx, extension_wheel_build, shared_extension_cache
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.image.image_naming import repository
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.image.oci import disk_space_needs, engine_load, layer_blobs, lock_image_lookup_and_recipe
from envbuild.image.oci.image_description import ImageDescription, ImageToLoad, OciImage
from envbuild.image.shared_extension_cache import SharedCache
from envbuild.lock import lock_file, wheel_conflicts
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads
from envbuild.pipeline.model import Recipe, StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.resolve.plan_resolver import Plan
from envbuild.util import process_locks
from envbuild.util.errors import BuildError, FileError, HashMismatch, LockError, NetworkError, some
from envbuild.util.strict_and_canonical_json import canonical_digest
from envbuild.util.untrusted_input_errors import Refusal
from envbuild.util.yaml_and_project_paths import display

CompileWheel = Callable[[LockedExtension], BuiltWheel]
CACHE_ERRORS = (FileError, NetworkError, Refusal)
"""The errors of a shared cache that cannot be used, or whose entry is refused."""
CACHE_SECONDS = 5.0
"""The longest wait for the shared cache if nothing is fetched from it."""


def compiled_wheels(context: StepContext, recipe: Recipe) -> tuple[BuiltWheel, ...]:
    """Return the wheels of a lock's extensions without an engine, as `find_or_compile_wheels` does. Raises BuildError
    if one would have to be compiled."""

    def refuse(one: LockedExtension) -> BuiltWheel:
        hint = f"with an engine: envbuild build {recipe.loaded.known}"
        if shared_extension_cache.configured_cache() is None:
            hint += "; or set extensions.cache in config.yaml to a cache that has the wheel"
        raise BuildError(f"{one.name} is not compiled yet; compiling needs an engine", hint=hint)

    return find_or_compile_wheels(context, recipe, refuse)


def find_or_compile_wheels(context: StepContext, recipe: Recipe, compile_one: CompileWheel) -> tuple[BuiltWheel, ...]:
    """Return the wheels of a lock's extensions: the one that the lock records, from this machine's cache or the shared
    cache; otherwise any wheel with the same inputs from these two; otherwise a new one, which the shared cache gets.
    The shared cache is not used if the recipe ignores records: a rebuild must not depend on it.

    Raises BuildError if a wheel differs from the one that the lock records, and the recipe requires that one.
    """
    shared = recipe.lock.extensions and recipe.wheel_records != "ignore"
    cache = shared_extension_cache.configured_cache() if shared else None
    return tuple(_find_or_compile(context, recipe, cache, one, compile_one) for one in recipe.lock.extensions)


def _find_or_compile(
    context: StepContext, recipe: Recipe, cache: SharedCache | None, one: LockedExtension, compile_one: CompileWheel
) -> BuiltWheel:
    lock = recipe.lock
    recorded = lock.recorded_wheel(one.name, extension_wheel_build.key(lock, one))
    local = extension_wheel_build.find_wheel(lock, one)
    if local and (recorded is None or local.sha256 == recorded.sha256):
        if cache and recipe.wheel_records == "write" and _lacks(context, cache, lock, one, local):
            _store(context, cache, local)
        return local
    if fetched := _fetched(context, lock, cache, one):
        return fetched
    wheel = local or compile_one(one)
    if recorded is None or wheel.sha256 == recorded.sha256:
        _store(context, cache, wheel)
        return wheel
    differs = f"the lock records the wheel {recorded.sha256[:12]} of {one.name}, but this machine has "
    differs += f"{wheel.sha256[:12]}, which was compiled from the same inputs"
    if recipe.wheel_records == "require":
        raise BuildError(
            differs,
            hint=f"{_where_to_get(recipe, cache)}\n"
            f"or record this machine's wheel, {wheel.path}: envbuild build {recipe.loaded.known} (without --locked)",
        )
    if recipe.wheel_records == "write":
        context.note(f"{differs}. The lock will record this wheel instead")
        _store(context, cache, wheel)
    else:
        context.note(f"{differs}. This wheel is used")
    return wheel


def _where_to_get(recipe: Recipe, cache: SharedCache | None) -> str:
    if cache is None:
        return "set extensions.cache in config.yaml to a cache that has the recorded wheel"
    again = f"envbuild build {recipe.loaded.known} --no-cache"
    return f"store the recorded wheel in {cache.where}: run {again} on a machine that has this wheel"


def _fetched(context: StepContext, lock: Lock, cache: SharedCache | None, one: LockedExtension) -> BuiltWheel | None:
    """Fetch a wheel from the shared cache. If that is not possible, report why, and return None."""
    if cache is None:
        return None
    try:
        show = build_downloads.show_download(context.progress)
        wheel = shared_extension_cache.fetch_wheel(cache, lock, one, context.progress.say, show)
    except CACHE_ERRORS as error:
        refused = "is refused" if isinstance(error, Refusal) else "cannot be fetched"
        context.note(f"{one.name}: the wheel in the shared cache {cache.where} {refused}: {error.message}")
        return None
    if wheel:
        context.progress.say(f"{one.name}: fetched {wheel.path.name} from the shared cache {cache.where}")
    return wheel


def _lacks(context: StepContext, cache: SharedCache, lock: Lock, one: LockedExtension, wheel: BuiltWheel) -> bool:
    """Whether the shared cache does not have a wheel of this machine, for example because it was compiled before the
    cache was set up. False, with a note, if the cache does not answer."""

    def ask() -> str:
        try:
            return "present" if shared_extension_cache.find_description(cache, lock, one, wheel.recorded) else "missing"
        except Refusal:
            return "missing"  # a damaged entry is replaced
        except CACHE_ERRORS as error:
            return error.message

    (answer,) = parallel_tasks_with_time_limit.run_in_parallel([ask], CACHE_SECONDS)
    if answer not in ("present", "missing"):
        why = answer or f"no answer in {CACHE_SECONDS:.0f} s"
        context.note(f"{one.name}: the shared cache {cache.where} cannot be used: {why}")
    return answer == "missing"


def _store(context: StepContext, cache: SharedCache | None, wheel: BuiltWheel) -> None:
    """Store a wheel in the shared cache. If that is not possible, report why: most users may only read the cache."""
    if cache is not None:
        context.progress.line(f"storing {wheel.path.name} in the shared cache")
        try:
            shared_extension_cache.store_wheel(cache, wheel)
        except CACHE_ERRORS as error:
            context.note(f"{wheel.name}: not stored in the shared cache {cache.where}: {error.message}")


def record_wheels(context: StepContext, recipe: Recipe, wheels: Sequence[BuiltWheel]) -> None:
    """Record the wheels of a lock's extensions in the lock file, if the recipe says so and they are not recorded yet.
    The lock of a shipped profile is not changed."""
    rows = tuple(wheel.recorded for wheel in wheels)
    if recipe.wheel_records != "write" or rows == recipe.lock.compiled:
        return
    file = recipe.loaded.lock_file
    if not file.exists():
        context.progress.say(
            f"the compiled wheels are not recorded, because {display(file)} does not exist: "
            f"envbuild lock {recipe.loaded.cli_words} writes it"
        )
        return
    try:
        lock_file.record_compiled(file, recipe.lock, rows)
    except (OSError, FileError, LockError) as error:
        context.note(f"the compiled wheels are not recorded in {display(file)}: {error}")
        return
    for row in rows:
        if row not in recipe.lock.compiled:
            context.progress.say(f"recorded in {display(file)}: {row.file} {row.sha256[:12]}")


def record_wheels_of_image(context: StepContext, recipe: Recipe, image_id: str) -> None:
    """Record the wheels of an image that was built before, if the lock records none and this machine's cache still has
    them."""
    lock = recipe.lock
    if recipe.wheel_records != "write" or len(extension_wheel_build.current_records(lock)) == len(lock.extensions):
        return
    found = (extension_wheel_build.find_wheel(lock, one) for one in lock.extensions)
    wheels = tuple(filter(None, found))
    inside = {one.sha256 for record in build_records.all_records(image_id) for one in record.extensions}
    if {wheel.sha256 for wheel in wheels} == inside:
        record_wheels(context, recipe, wheels)


def require_describable_image(context: StepContext, lock: Lock) -> None:
    """Download the base image of a lock, if it names one, and raise the errors of `describe_image` that do not depend
    on its compiled extensions: an unsuitable base image, too many layers. Compiling extensions may take hours, so this
    comes first."""
    uncompiled = {one.name: WheelOfLayer(Path(one.name), "") for one in lock.extensions}
    _fetch_base_and_describe(context, lock, uncompiled)


def _fetch_base_and_describe(
    context: StepContext, lock: Lock, compiled: Mapping[str, WheelOfLayer]
) -> ImageDescription:
    build_downloads.fetch_base_image(lock, context.progress)
    if lock.image:
        context.progress.line("reading the base image")
    return lock_image_lookup_and_recipe.describe_lock(lock, compiled)


def describe_image(
    context: StepContext, plan: Plan, lock: Lock, wheels: Sequence[BuiltWheel]
) -> StepResult[ImageDescription]:
    """Describe the image of a lock, and download the files from which its layers are written. `wheels`: the wheels of
    its extensions."""
    files = {one.name: WheelOfLayer(one.path, one.sha256) for one in wheels}
    description = _fetch_base_and_describe(context, lock, files)
    build_downloads.make_bases(lock, context.progress)
    build_downloads.fetch_image_parts(plan, lock, context.progress)
    if wheels:
        wheel_conflicts.refuse_stored(lock.wheels, lock.startup, {one.name: one.path for one in wheels})
    return StepResult(description, note=some(len(description.layers), "layer"))


def write_layers(
    context: StepContext, plan: Plan, lock: Lock, wheels: Sequence[BuiltWheel], *, again: bool = False
) -> StepResult[OciImage]:
    """Download the parts of an image, and find the digest and size of each layer. Only layers that are not in the cache
    are written. `again`: write all layers, and raise BuildError if one differs from the cached one."""
    description = describe_image(context, plan, lock, wheels).value
    image = find_layer_digests(context, lock, description, again=again)
    return StepResult(image, note=f"{some(len(image.layers), 'layer')}, {image.size / 1e6:.0f} MB")


def find_layer_digests(
    context: StepContext, lock: Lock, description: ImageDescription, *, again: bool = False
) -> OciImage:
    """Find the digest and size of each layer of a described image. Only layers that are not in the cache are written,
    or all with `again`. Raises what `write_layers` raises, and HashMismatch after removing a file that was damaged."""
    learn = layer_blobs.write_layers_again if again else layer_blobs.learn_layers
    with _one_writer(context), intact_files(lock):
        return learn(description, context.progress.line)


def _one_writer(context: StepContext) -> contextlib.AbstractContextManager[None]:
    """Let only one process write layers at a time, so that layers that two images share are written once. Layers that
    are written while an engine receives them are shared in the same way by `load_layers`."""
    return process_locks.exclusive("_layers", "writes layers", context.progress.say)


@contextlib.contextmanager
def intact_files(lock: Lock) -> Iterator[None]:
    """If the `with` body raises because a file is damaged, remove that file from its store, and raise an error that
    names it."""
    try:
        yield
    except (HashMismatch, LockError):
        buildx.require_intact_files(lock)
        raise


def prepare_load(
    context: StepContext, plan: Plan, lock: Lock, wheels: Sequence[BuiltWheel], *, again: bool = False
) -> StepResult[ImageToLoad]:
    """Download the parts of an image for the engine, and find the sizes of its layers. For a graph driver, layers of
    wheels that are not in the cache are written only when they are sent; the containerd store names layers by digest,
    so it needs all digests first. `again`: as for `write_layers`. Raises what `write_layers` raises."""
    if again or context.engine.containerd_store:
        result = write_layers(context, plan, lock, wheels, again=again)
        return StepResult(result.value.to_load, note=result.note)
    description = describe_image(context, plan, lock, wheels).value
    with _one_writer(context), intact_files(lock):
        image = layer_blobs.find_tar_sizes(description, context.progress.line)
    size = sum(layer.tar_size for layer in image.layers)
    return StepResult(image, note=f"{some(len(image.layers), 'layer')}, {size / 1e6:.0f} MB unpacked")


def load_layers(context: StepContext, recipe: Recipe, image: ImageToLoad) -> StepResult[tuple[Image, OciImage]]:
    """Load an image into the engine under the tag for images that are not audited yet. Only layers that the engine
    lacks are sent. Return the image as the engine has it, and with the digests of its layers."""
    engine, lock, named = context.engine, recipe.lock, repository(recipe.name)
    disk_space_needs.require_platform(engine, lock)
    tag = lock_image_lookup_and_recipe.layers_tag(lock, recipe.name).rpartition(":")[2]
    loaded = _in_engine(engine, image)
    if loaded is None:
        # Images that share layers are loaded one after the other: a shared layer is written and sent only once.
        lock_name = f"_load-{canonical_digest(engine.identity)[:16]}"
        with process_locks.exclusive(lock_name, "loads an image", context.progress.say), intact_files(lock):
            image = layer_blobs.with_cached_layers(image)
            loaded = _in_engine(engine, image)
            if loaded is None:
                known = engine_load.known_layers(engine, image)
                sizes = sum(one.tar_size for one in image.layers if not one.written or one.written.diff_id not in known)
                disk_space_needs.require_load_space(engine, sizes)
                sent = engine_load.load_image(engine, image, named, tag, context.progress.line)
                return StepResult(sent, note=f"{sizes / 1e6:.0f} MB unpacked")
    engine.tag(loaded[0], named, tag)
    return StepResult(loaded, cached=True, note=f"the engine has {loaded[1].id[:19]}")


def _in_engine(engine: Engine, image: ImageToLoad) -> tuple[Image, OciImage] | None:
    """Return the image as the engine has it, with the digests of its layers; None if the engine lacks it, or if not all
    digests are known."""
    complete = image.complete
    if complete is None:
        return None
    found = engine.find(complete.manifest.digest if engine.containerd_store else complete.id)
    return (found, complete) if found and found.id == complete.id else None
