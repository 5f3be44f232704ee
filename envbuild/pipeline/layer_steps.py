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
from envbuild.image.shared_extension_cache import SharedCache, WheelDescription
from envbuild.lock import lock_file, wheel_conflicts
from envbuild.lock.lock_entry_types import LockedExtension, RecordedWheel
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads
from envbuild.pipeline.model import Recipe, StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.resolve.plan_resolver import Plan
from envbuild.util import process_locks
from envbuild.util.errors import BuildError, EnvbuildError, FileError, HashMismatch, LockError, NetworkError, some
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
    """Return the wheels of a lock's extensions, and record them in the lock file if the recipe says so.

    A wheel is the one that the lock records, from this machine's cache or the shared cache; otherwise any wheel with
    the same inputs from these two; otherwise a new one, which the shared cache gets. The shared cache is not used if
    the recipe ignores records: a rebuild must not depend on it.

    Raises BuildError if a wheel differs from the one that the lock records, and the recipe requires that one; also if
    a wheel requires packages that the lock does not have.
    """
    shared = recipe.lock.extensions and recipe.wheel_records != "ignore"
    cache = shared_extension_cache.configured_cache() if shared else None
    shared_wheels = _SharedWheels(context, cache) if cache else None
    found = [_find_or_compile(context, recipe, shared_wheels, one, compile_one) for one in recipe.lock.extensions]
    record_wheels(context, recipe, [record for _, record in found])
    wheels = tuple(wheel for wheel, _ in found)
    extension_wheel_build.refuse_unlocked_requirements(wheels, recipe.lock)
    return wheels


def _find_or_compile(
    context: StepContext, recipe: Recipe, shared: _SharedWheels | None, one: LockedExtension, compile_one: CompileWheel
) -> tuple[BuiltWheel, RecordedWheel]:
    """Return the wheel of an extension, and the record that the lock is to have of it."""
    lock = recipe.lock
    lock_record = lock.recorded_wheel(one.name, extension_wheel_build.key(lock, one))
    local = extension_wheel_build.find_wheel(lock, one)
    if local and (lock_record is None or local.sha256 == lock_record.sha256):
        if shared and recipe.wheel_records == "write":
            shared.add_missing(lock, one, local)
        return local, local.lock_record
    fetched = shared.fetch(lock, one) if shared else None
    if isinstance(fetched, BuiltWheel):
        return fetched, fetched.lock_record
    wheel = local or compile_one(one)
    if lock_record is None or wheel.sha256 == lock_record.sha256:
        new_record = wheel.lock_record
    else:
        new_record = _accept_different(context, recipe, shared, fetched, lock_record, wheel)
    if shared and new_record == wheel.lock_record:
        shared.store(wheel)
    return wheel, new_record


def _accept_different(
    context: StepContext,
    recipe: Recipe,
    shared: _SharedWheels | None,
    fault: FileError | NetworkError | None,
    lock_record: RecordedWheel,
    wheel: BuiltWheel,
) -> RecordedWheel:
    """Note that a wheel differs from the recorded one, and return the record that the lock is to have. If a `fault` of
    the shared cache is why the recorded wheel is not used, the lock keeps its record: the cache may have this wheel.
    Raises BuildError if the recipe requires the recorded wheel."""
    differs = f"the lock records the wheel {lock_record.sha256[:12]} of {wheel.name}, but this machine has "
    differs += f"{wheel.sha256[:12]}, which was compiled from the same inputs"
    if recipe.wheel_records == "require":
        raise BuildError(
            differs,
            hint=f"{_where_to_get(recipe, shared, fault)}\n"
            f"or record this machine's wheel, {wheel.path}: envbuild build {recipe.loaded.known} (without --locked)",
        )
    if recipe.wheel_records == "ignore":
        context.note(f"{differs}. This wheel is used")
        return lock_record
    if fault:
        context.note(
            f"{differs}. This image has this machine's wheel, and the lock keeps its record, because the shared cache "
            f"may have the recorded wheel; once it can be used: envbuild build {recipe.loaded.known}"
        )
        return lock_record
    context.note(f"{differs}. The lock will record this wheel instead")
    return wheel.lock_record


def _where_to_get(recipe: Recipe, shared: _SharedWheels | None, fault: FileError | NetworkError | None) -> str:
    if fault:
        return f"correct this first, because the shared cache may have the recorded wheel: {fault.message}"
    if shared is None:
        return "set extensions.cache in config.yaml to a cache that has the recorded wheel"
    again = f"envbuild build {recipe.loaded.known} --no-cache"
    return f"store the recorded wheel in {shared.cache.location}: run {again} on a machine that has this wheel"


class _SharedWheels:
    """The shared cache while the wheels of one lock are looked for. A fault of the cache is noted once. A cache that
    does not answer is not asked again, because each wait may be long."""

    def __init__(self, context: StepContext, cache: SharedCache) -> None:
        self.cache = cache
        self._context = context
        self._no_answer: NetworkError | None = None

    def fetch(self, lock: Lock, one: LockedExtension) -> BuiltWheel | FileError | NetworkError | None:
        """Fetch a wheel: the recorded one, or without a record, any with the same inputs. Return None if the cache does
        not have it. If it cannot be fetched or is refused, note why; return the error if the cache may have it."""
        progress = self._context.progress
        answer = self._ask(lock, one, lock.recorded_wheel(one.name, extension_wheel_build.key(lock, one)))
        if answer is None or isinstance(answer, FileError | NetworkError):
            return answer
        try:
            if isinstance(answer, Refusal):
                raise answer
            show = build_downloads.show_download(progress)
            wheel = shared_extension_cache.fetch_wheel(self.cache, lock, one, answer, progress.say, show)
        except CACHE_ERRORS as error:
            refused = "is refused" if isinstance(error, Refusal) else "cannot be fetched"
            self._context.note(
                f"{one.name}: the wheel in the shared cache {self.cache.location} {refused}: {error.message}"
            )
            return None if isinstance(error, Refusal) else error
        progress.say(f"{one.name}: fetched {wheel.path.name} from the shared cache {self.cache.location}")
        return wheel

    def add_missing(self, lock: Lock, one: LockedExtension, wheel: BuiltWheel) -> None:
        """Store a wheel of this machine if the cache lacks it, for example because it was compiled before the cache was
        set up, or if its entry is damaged. If the cache does not answer soon, go on without it."""
        answer = self._ask(lock, one, wheel.lock_record, CACHE_SECONDS)
        if isinstance(answer, FileError | NetworkError):
            return
        try:
            # Not limited in time: the whole wheel is read from a folder.
            if isinstance(answer, WheelDescription) and self.cache.has_wheel(wheel.key, answer):
                return
        except (FileError, NetworkError) as error:
            self._note_fault(error)
            return
        self.store(wheel)

    def _ask(
        self, lock: Lock, one: LockedExtension, lock_record: RecordedWheel | None, seconds: float | None = None
    ) -> WheelDescription | FileError | NetworkError | Refusal | None:
        """Return the description of a wheel, or the error; None if the cache lacks the wheel. `seconds`: how long to
        wait."""
        if self._no_answer:
            return self._no_answer

        def ask() -> list[WheelDescription | FileError | NetworkError | Refusal | None]:
            try:
                return [shared_extension_cache.find_description(self.cache, lock, one, lock_record)]
            except CACHE_ERRORS as error:
                return [error]

        answers = ask() if seconds is None else parallel_tasks_with_time_limit.run_in_parallel([ask], seconds)[0]
        answer = answers[0] if answers else NetworkError(f"no answer in {seconds:.0f} s")
        if isinstance(answer, NetworkError):
            self._no_answer = answer
        if isinstance(answer, FileError | NetworkError):
            self._note_fault(answer)
        return answer

    def _note_fault(self, error: FileError | NetworkError) -> None:
        if self._fault(error) not in self._context.notes:
            self._context.note(self._fault(error))

    def _fault(self, error: EnvbuildError) -> str:
        return f"the shared cache {self.cache.location} cannot be used: {error.message}"

    def store(self, wheel: BuiltWheel) -> None:
        """Store a wheel. If that is not possible, note why: most users may only read the cache."""
        if self._no_answer:
            return
        self._context.progress.line(f"storing {wheel.path.name} in the shared cache")
        try:
            shared_extension_cache.store_wheel(self.cache, wheel)
        except CACHE_ERRORS as error:
            if self._fault(error) not in self._context.notes:
                self._context.note(
                    f"{wheel.name}: not stored in the shared cache {self.cache.location}: {error.message}"
                )


def record_wheels(context: StepContext, recipe: Recipe, rows: Sequence[RecordedWheel]) -> None:
    """Record the wheels of a lock's extensions in the lock file, if the recipe says so and they are not recorded yet.
    The lock of a shipped profile is not changed."""
    if recipe.wheel_records != "write" or tuple(rows) == recipe.lock.compiled:
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
        record_wheels(context, recipe, [wheel.lock_record for wheel in wheels])


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
    engine.remove(f"{named}:{engine_load.incoming_tag(tag)}")  # of a run that was killed after its load
    return StepResult(loaded, cached=True, note=f"the engine has {loaded[1].id[:19]}")


def _in_engine(engine: Engine, image: ImageToLoad) -> tuple[Image, OciImage] | None:
    """Return the image as the engine has it, with the digests of its layers; None if the engine lacks it, or if not all
    digests are known."""
    complete = image.complete
    if complete is None:
        return None
    found = engine.find(complete.manifest.digest if engine.containerd_store else complete.id)
    return (found, complete) if found and found.id == complete.id else None
