"""Runs `make` as a list of steps. Later steps receive the values of earlier steps; `build` and `test` use some of them.

A step that needs the engine, the signing key or the notes receives the context. `images` holds the images: the engine
or, if none answers, the registry of the cluster that runs the self-test. `partial` collects the values that are
known so far; if a step raises an error, the error carries them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from envbuild.attest import keys_and_signatures
from envbuild.evidence import profile_proofs_and_image_states
from envbuild.image import build_records, lock_paths_of_built_images
from envbuild.image.docker_engine import Image
from envbuild.image.engine_endpoint_and_errors import UnusableEngine
from envbuild.image.oci import disk_space_needs, lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import step_durations
from envbuild.pipeline.image_steps import load_profile, lock_profile, render_dockerfile, resolve_profile
from envbuild.pipeline.image_stores.engine_images import EngineImages
from envbuild.pipeline.image_stores.image_store import ImageStore
from envbuild.pipeline.image_stores.image_store_selection import find_image_store, require_image_store
from envbuild.pipeline.model import (
    AS_CONFIGURED,
    ON_THIS_MACHINE,
    BuiltImage,
    MakeDocument,
    MakeResult,
    Options,
    Recipe,
    RunnerOptions,
    SelfTestOrder,
)
from envbuild.pipeline.preflight_report import Preflight
from envbuild.pipeline.preflight_steps import Agree, examine, run_preflight
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.runner_selection import UNKNOWN_IMAGE
from envbuild.pipeline.selftest_steps import (
    cluster_jobs,
    is_proved,
    memory_limit,
    read_earlier_run,
    require_valid_jobs,
    select_runner,
    show_earlier_evidence,
    test_across_nodes,
    test_on_one_node,
    write_evidence,
)
from envbuild.pipeline.step_context import PartialResult, StepContext
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners.host_runner import HostRunner
from envbuild.runners.runner_interface import Runner, Scheduled
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import ALL, RunRequest
from envbuild.util import process_locks
from envbuild.util.errors import BuildError, CheckFailed, EngineError, EnvbuildError, Interrupted, NotProved, UsageError
from envbuild.util.json_output_types import plain
from envbuild.util.untrusted_input_errors import Reason


def make(name: str, options: Options, listener: Listener, agree: Agree = lambda question: False) -> MakeResult:
    """Make a verified image from a profile. `agree`: asks the user whether to build without a proof.

    Raises what the steps raise, and CheckFailed if the self-test fails. Raises NotProved before any download if this
    machine cannot prove the image, and after the self-test if a required probe was skipped, if no probe passed or,
    except in a trial, if a GPU model has no current evidence. With `options.unproved`, or the user's consent before
    the download, the result has the reasons instead of these two errors."""
    # `make A B` passes the passphrase of the signing key to this process in the environment. It is kept for the signer,
    # and this variable is removed from the environment, which child processes inherit.
    keys_and_signatures.take_passphrase()
    context = StepContext(listener, options.builder)
    # Only one process at a time makes a profile. A requirements file changes the profile's name.
    with exclusive_make_run(context, name, requirements=options.requirements) as partial:
        loaded = context.step("load profile", load_profile, name, options)
        partial.update(name=loaded.name)  # the user may have typed a GPU or a path
        plan = context.step("resolve", resolve_profile, loaded)
        partial.update(advisories=plan.advisories)  # those that do not refuse the profile
        found = find_image_store(context, AS_CONFIGURED, loaded.name, options.request)
        preflight = context.step("preflight", run_preflight, context, found, loaded, plan, options, agree)

        lock = context.step("lock", lock_profile, context, loaded, plan, options)
        partial.update(lock=lock)
        images = require_image_store(found)
        # on the requested GPUs, where the site's settings say: here, on Slurm or on Kubernetes
        order = SelfTestOrder(
            loaded, versions=lock.versions, python=lock.python, request=options.request, on=AS_CONFIGURED
        )
        if images.registry and preflight.proof == "elsewhere":
            require_valid_jobs(order)  # before the upload
        built = render_and_build(context, images, loaded, plan, lock, options)
        image = built.image
        partial.update(image=image, tags=built.tags)

        # for each GPU model: proved by earlier evidence, or why not
        proofs = profile_proofs_and_image_states.proofs_of(image.id, loaded.name, loaded.profile, lock)
        partial.update(proofs=proofs)
        if is_proved(proofs):  # the preflight checked this too, but this image may not have existed then
            run = context.step("self-test", read_earlier_run, image, proofs)
            partial.update(run=run)
            context.step("evidence", show_earlier_evidence, proofs)
        elif preflight.proof == "impossible":  # allowed, otherwise the preflight would have raised
            partial.update(reasons=preflight.reasons)
        else:
            test_and_record(context, images, partial, order, lock, image, trial=options.trial)  # adds reasons too
            if not options.unproved:  # the user's consent is asked for only in the branch above
                require_proved(partial.value)

        # without reasons, except in a trial, the image is proved on every GPU model
        if not partial.value.reasons and not options.trial:
            partial.update(tags=(*partial.value.tags, *images.mark_verified(loaded, image)))
    return partial.value  # now with the steps and notes


def build_only(name: str, options: Options, listener: Listener) -> MakeResult:
    """Build the layers and set the tags: the steps of `make` without preflight, self-test and evidence. Without an
    engine, only find out which image the lock gives: the result has the state `computed`, and a note. With
    `options.builder`, raises UnusableEngine instead."""
    context = StepContext(listener, options.builder)
    with exclusive_make_run(context, name, requirements=options.requirements) as partial:
        loaded = context.step("load profile", load_profile, name, options)
        partial.update(name=loaded.name)
        plan = context.step("resolve", resolve_profile, loaded)
        partial.update(advisories=plan.advisories)
        lock = context.step("lock", lock_profile, context, loaded, plan, options)
        partial.update(lock=lock)
        try:
            _ = context.engine
        except UnusableEngine as error:
            if options.builder:
                raise
            image = _write_image(context, Recipe(loaded, plan, lock, options.wheel_records), options, error)
            partial.update(image=image, is_audited=False)
        else:
            built = render_and_build(context, EngineImages(context), loaded, plan, lock, options)
            partial.update(image=built.image, tags=built.tags)
    return partial.value


def _write_image(context: StepContext, recipe: Recipe, options: Options, error: UnusableEngine) -> Image:
    """Write the Dockerfile and the layers of a lock, and note that no engine received the image. Raises BuildError if
    an extension is not compiled, which needs an engine."""
    from envbuild.pipeline.image_stores import registry_images  # loads the audit, which few commands need

    loaded, lock = recipe.loaded, recipe.lock
    lock_paths_of_built_images.note_lock(loaded.known_lock)  # so that `prune` keeps its files
    context.step("render", render_dockerfile, loaded, lock, options)
    written, _ = registry_images.write_image(context, recipe, no_cache=options.no_cache)
    if process_locks.PARALLEL not in os.environ:  # otherwise the next process of `make A B` uploads the image
        context.note(_not_loaded(error, loaded, written.manifest.digest))
    layers = tuple(one.diff_id for one in written.layers)
    return Image(written.id, written.manifest.digest, layers, {}, {}, written.size)


def _not_loaded(error: UnusableEngine, loaded: LoadedProfile, digest: str) -> str:
    return (
        f"{error.message}: the image was not loaded and not audited; its manifest is {digest}. To go on without an "
        f"engine: envbuild export oci {loaded.known} FOLDER, or, with a cluster and its registry in the settings, "
        f"envbuild make {loaded.known}"
    )


def render_and_build(
    context: StepContext, images: ImageStore, loaded: LoadedProfile, plan: Plan, lock: Lock, options: Options
) -> BuiltImage:
    """Write the Dockerfile of the lock, and find or build its image."""
    context.step("render", render_dockerfile, loaded, lock, options)
    return images.provide(Recipe(loaded, plan, lock, options.wheel_records), no_cache=options.no_cache)


def preview_make(name: str, options: Options, listener: Listener) -> Preflight:
    """Return what `make` would do. Downloads no part of an image and writes no file outside the cache, but may start a
    container to see whether the engine has a GPU."""
    context = StepContext(listener, options.builder)
    try:
        loaded = load_profile(name, options).value
    except profile_and_lock_name_lookup.UnwrittenProfile as missing:
        loaded = profile_reader_and_overrides.unwritten(missing.name, options.pins, options.requirements)
        context.note(f"{missing.note}, with the pins of {loaded.parent}")
    try:
        plan = resolve_profile(loaded).value
        if options.locked:
            lock_file.current(lock_file.read(loaded.known_lock), plan, loaded.lock_file)
        found = find_image_store(context, AS_CONFIGURED, loaded.name, options.request)
        return examine(found, loaded, plan, options)
    except EnvbuildError as error:
        error.partial = {"profile": loaded.name, **error.partial}
        raise


def prove(
    name: str,
    reference: str | None,
    listener: Listener,
    gpus: tuple[str, ...] = (),
    on: RunnerOptions = ON_THIS_MACHINE,
) -> MakeResult:
    """`test --record`: run the self-test, write evidence and set the tag for an image that this envbuild built from the
    profile's lock. Raises CheckFailed for other images, whose self-test could be forged, and if the self-test fails;
    NotProved if a required probe was skipped, or if evidence is missing."""
    context, request = StepContext(listener), RunRequest(gpus=gpus)
    with exclusive_make_run(context, name) as partial:
        loaded = context.step("load profile", load_profile, name, Options(request=request))
        partial.update(name=loaded.name)
        found = find_image_store(context, on, loaded.name, request)
        lock, image = _image_to_prove(context, found, loaded, reference, on)
        images = require_image_store(found)
        _require_own_build(loaded, lock, image, reference)
        # the status before the self-test: if it cannot run, the status does not change
        proofs = profile_proofs_and_image_states.proofs_of(image.id, loaded.name, loaded.profile, lock)
        partial.update(image=image, lock=lock, tags=images.tags(loaded, image), proofs=proofs)

        order = SelfTestOrder(loaded, lock.versions, lock.python, request, on)
        test_and_record(context, images, partial, order, lock, image)
        require_proved(partial.value)

        verified = images.mark_verified(loaded, image)
        partial.update(tags=tuple(dict.fromkeys([*partial.value.tags, *verified])))  # it may have the tag already
    return partial.value


def _image_to_prove(
    context: StepContext,
    images: ImageStore | EngineError,
    loaded: LoadedProfile,
    reference: str | None,
    on: RunnerOptions,
) -> tuple[Lock, Image]:
    """Return the lock and the image to prove.

    If the engine is used, if `reference` names an image, or if a job is resumed, the image must exist, as for
    `existing`. Otherwise the image is in the cluster's registry: the lock's image is uploaded if it is missing there,
    and audited if it was not audited before.
    """
    if isinstance(images, EngineError) or images.registry is None or reference is not None or on.resume:
        return existing(context, images, loaded, reference)
    plan = context.step("resolve", resolve_profile, loaded)
    lock = lock_file.current_lock(loaded, plan)
    require_valid_jobs(SelfTestOrder(loaded, lock.versions, lock.python, on=on))  # before the upload
    return lock, images.provide(Recipe(loaded, plan, lock)).image


def test_and_record(
    context: StepContext,
    images: ImageStore,
    partial: PartialResult[MakeResult],
    order: SelfTestOrder,
    lock: Lock,
    image: Image,
    *,
    trial: bool = False,
) -> None:
    """Run the self-test of an image and write the evidence. `partial` receives the run, the evidence, and the reasons
    why the image is not proved. If the run fails or no probe passes, the image loses the tag `verified`, except in a
    `trial`. Raises CheckFailed if the self-test fails."""
    # Load the signing key before the long self-test, because it may need a passphrase. `prove` has no preflight. The
    # preflight of `make` loads the key, except if it finds that the image is proved already.
    signer = context.signer
    runner = select_runner(context, images, order, image)  # pushes the image first, for a cluster that pulls it
    partial.update(memory_gb=memory_limit(order, runner))  # named by the error if the self-test needs more
    run = context.step("self-test", test_on_one_node, context.progress, order, runner)
    partial.update(run=run)  # now, so that it is known if the test on several nodes cannot run
    if order.on.nodes > 1 and run.passed:  # with `test --record --nodes`, if it passed on one node
        run = context.step("nodes", test_across_nodes, context.progress, order, runner, run)
        partial.update(run=run)
    try:
        written = context.step("evidence", write_evidence, context, order.loaded, lock, image, run, signer)
        partial.update(statement=written.statement, signed_statement=written.signed_statement, proofs=written.proofs)
    finally:  # the image must lose the tag `verified`, even if the evidence cannot be written
        if not run.passed and not trial:  # a trial moves no tag
            remaining_tags = images.withdraw_verified(order.loaded, image, partial.value.tags)
            partial.update(tags=remaining_tags)
    require_no_failure(partial.value)
    partial.update(reasons=reasons_not_proved(partial.value, trial=trial))


def _require_own_build(loaded: LoadedProfile, lock: Lock, image: Image, reference: str | None) -> None:
    """Raise CheckFailed unless this envbuild recorded that it built the image from the lock."""
    records = build_records.all_records(image.id)
    if not any(lock_image_lookup_and_recipe.matches(record, lock) for record in records):
        raise CheckFailed(
            f"{reference or image.id} was not built by this envbuild from the lock of {loaded.name}",
            hint=f"its self-test output could be forged; build it: envbuild build {loaded.known}, "
            f"or test it without a record: envbuild test {loaded.known}",
        )


def test(
    name: str, reference: str | None, listener: Listener, request: RunRequest = ALL, on: RunnerOptions = ON_THIS_MACHINE
) -> MakeResult:
    """Run the self-test, or the selected probes, and report; write no evidence and set no tag."""
    context = StepContext(listener)
    loaded = context.step("load profile", load_profile, name, Options(request=request))
    found = find_image_store(context, on, loaded.name, request)
    lock, image = existing(context, found, loaded, reference)
    order, images = SelfTestOrder(loaded, lock.versions, lock.python, request, on), require_image_store(found)
    runner = select_runner(context, images, order, image)
    run = run_selftest(context, order, runner)
    return MakeResult(loaded.name, lock=lock, image=image, run=run, memory_gb=memory_limit(order, runner))


def cluster_script(
    name: str,
    reference: str | None,
    listener: Listener,
    on: RunnerOptions,
    request: RunRequest = ALL,
    *,
    brief: bool = False,
) -> str:
    """Return the scripts that `test` would submit to a cluster. `brief`: as in Scheduled.script. If the image is not
    built, zeros stand for its digest. Raises UsageError if the runner uses no scheduler."""
    context = StepContext(listener)
    loaded = context.step("load profile", load_profile, name, Options(request=request))
    store = find_image_store(context, on, loaded.name, request)
    lock, found = _locked_and_image(context, store, loaded, reference)
    if found is None:
        context.progress.say(f"{loaded.name} is not built: zeros stand for its image's digest")
    image = found or UNKNOWN_IMAGE
    order = SelfTestOrder(loaded, lock.versions, lock.python, request, on)
    runner = select_runner(context, require_image_store(store), order, image, dry=True)
    if not isinstance(runner, Scheduled):
        raise UsageError(
            "--dry-run needs a cluster: it shows the job that would be submitted",
            hint="add --on slurm or --on kubernetes",
        )
    scripts = [runner.script(job, brief=brief) for job in cluster_jobs(order, runner)]
    if len(scripts) == 1:
        return scripts[0]
    what = ("the self-test, on one node", f"dist.nodes, on {on.nodes} nodes, if the first job has passed")
    # The text is only for reading: with two jobs it begins with a comment, which sbatch refuses.
    remarks = (f"# job {number} of 2: {words}" for number, words in enumerate(what, 1))
    return "\n".join(f"{remark}\n{text}" for remark, text in zip(remarks, scripts, strict=True))


def test_environment(name: str, python: str, listener: Listener, request: RunRequest = ALL) -> MakeResult:
    """Run the self-test with an interpreter of this machine; needs no engine. `python`: the interpreter, or the folder
    of a virtual environment."""
    context = StepContext(listener)
    loaded = context.step("load profile", load_profile, name, Options(request=request))
    lock = _current_lock(context, loaded)
    runner = HostRunner(python)
    order = SelfTestOrder(loaded, plan_resolver.computing(lock.versions), lock.python, request)
    run = run_selftest(context, order, runner)
    return MakeResult(loaded.name, lock=lock, interpreter=runner.python, run=run)


def run_selftest(context: StepContext, order: SelfTestOrder, runner: Runner) -> TestRun:
    """Run the self-test. If several nodes were requested and the self-test passed on one node, also run it on all nodes
    together."""
    run = context.step("self-test", test_on_one_node, context.progress, order, runner)
    if order.on.nodes > 1 and run.passed:
        run = context.step("nodes", test_across_nodes, context.progress, order, runner, run)
    return run


def _current_lock(context: StepContext, loaded: LoadedProfile) -> Lock:
    """Return the profile's lock. Raises OutOfDate if it does not match the profile."""
    plan = context.step("resolve", resolve_profile, loaded)
    return lock_file.current_lock(loaded, plan)


def existing(
    context: StepContext, found: ImageStore | EngineError, loaded: LoadedProfile, reference: str | None = None
) -> tuple[Lock, Image]:
    """Return a profile's current lock and an image: `reference` in the engine, else the one built from the lock. Raises
    the error that was `found`, if any, after those of the lock, and BuildError if the image does not exist."""
    lock, image = _locked_and_image(context, found, loaded, reference)
    images = require_image_store(found)
    if image is None and images.registry:
        raise BuildError(
            f"no engine can be used, and no image of {loaded.name} was uploaded to {images.registry} and audited",
            hint=f"run: envbuild make {loaded.known}, or: envbuild test {loaded.known} --record",
        )
    if image is None:
        other = lock_image_lookup_and_recipe.built_differently(lock, images.engine)
        state = f"was {other}" if other else "is not built"
        raise BuildError(f"{loaded.name} {state}", hint=f"run: envbuild build {loaded.known}")
    return lock, image


def _locked_and_image(
    context: StepContext, found: ImageStore | EngineError, loaded: LoadedProfile, reference: str | None
) -> tuple[Lock, Image | None]:
    """Like `existing`, but return None if the image that this envbuild would build from the lock does not exist. A
    missing `reference` still raises EngineError."""
    lock, images = _current_lock(context, loaded), require_image_store(found)
    if reference is not None:
        return lock, images.engine.get(reference)
    return lock, images.find(lock)


def require_passed(result: MakeResult) -> None:
    """Raise CheckFailed, naming every failure, if the self-test failed; NotProved if a required probe, or every probe,
    was skipped."""
    if result.run:
        require_no_failure(result)
        require_proved(replace(result, reasons=_skipped(result.run)))


def require_no_failure(result: MakeResult) -> None:
    """Raise CheckFailed, naming every failure, if the self-test failed."""
    if not (result.run and result.run.failures()):
        return
    failures = result.run.failures()
    named = [failure.probe for failure in failures if failure.probe]
    details = [f"{f.probe}: {f.detail}" if f.probe else f.detail for f in failures]
    # a single failure without a probe: the message already contains its detail
    hints = details if named or len(failures) > 1 else []
    if result.run.out_of_memory and result.memory_gb:
        hints.append(f"its container is limited to {result.memory_gb:g} GiB: selftest: memory_gb in the profile")
    raise CheckFailed(
        f"the self-test of {result.name} failed: {', '.join(named) or failures[0].detail}",
        hint="\n".join(hints) or None,
    )


_SKIPPED = "skipped"  # id of the reason: a probe could not run


def reasons_not_proved(result: MakeResult, *, trial: bool = False) -> tuple[Reason, ...]:
    """Return why an image whose self-test did not fail is not verified: skipped probes, or else GPU models without
    evidence. The latter do not count in a `trial`, whose image gets no tag."""
    skipped = _skipped(result.run) if result.run else ()
    if skipped or trial:
        return skipped
    missing = (proof for proof in result.proofs if proof.state != "proved")
    return tuple(Reason("evidence", profile_proofs_and_image_states.reason(result.name, proof)) for proof in missing)


def _skipped(run: TestRun) -> tuple[Reason, ...]:
    """Return a reason for each required probe that was skipped; if there are none and no probe passed, a reason for
    each skipped probe."""
    names = run.skipped_required or (() if run.passed else run.by_status("skipped"))
    why = {probe.probe: probe.reason for probe in run.results}
    reasons = tuple(Reason(_SKIPPED, f"{name}: {why[name]}") for name in names)
    if not reasons and not run.passed:
        return (Reason(_SKIPPED, "no probe ran"),)
    return reasons


def require_proved(result: MakeResult) -> None:
    """Raise NotProved if the result has reasons why it is not proved."""
    if not result.reasons:
        return
    message = f"{result.name} is built, but not proved on all of its GPUs"
    if result.run and any(reason.id == _SKIPPED for reason in result.reasons):
        built = "built, and " if result.image else ""
        why = "a required probe was skipped" if result.run.skipped_required else "no probe could run"
        message = f"{result.name} is {built}not proved: {why}"
    raise NotProved(message, hint="\n".join(reason.detail for reason in result.reasons))


@contextlib.contextmanager
def exclusive_make_run(
    context: StepContext, name: str, requirements: Path | None = None
) -> Iterator[PartialResult[MakeResult]]:
    """Lock the profile for this process, and yield the partial result, which an error carries. `requirements`: a
    requirements file, which changes the profile's name. At the end of the `with` body, the context's steps and notes
    are added to the result, so read it only after that. The durations of the steps are kept for later estimates."""
    partial = PartialResult(MakeResult(name))

    def document() -> MakeDocument:
        return replace(partial.value, steps=context.steps, notes=context.notes).document()

    with exclusive_run(context, name, document, requirements):
        try:
            yield partial
        except EnvbuildError as error:
            if not isinstance(error, Interrupted):  # after an interruption, no file is written
                _keep_durations(context, partial.value)
            raise
        _keep_durations(context, partial.value)
    partial.update(steps=context.steps, notes=context.notes)


def _keep_durations(context: StepContext, result: MakeResult) -> None:
    if result.lock:
        step_durations.keep_durations(result.name, disk_space_needs.needed_bytes(result.lock), context.steps)


@contextlib.contextmanager
def exclusive_run(
    context: StepContext, name: str, partial: Callable[[], object], requirements: Path | None = None
) -> Iterator[None]:
    """Lock the profile for this process during the `with` body. An error of the body carries the partial result, which
    `partial` returns."""
    with one_run_per_profile(profile_and_lock_name_lookup.meant(name, requirements).name, context.progress.say):
        try:
            yield
        except EnvbuildError as error:
            error.partial = {**plain(partial()), **error.partial}
            raise


def one_run_per_profile(name: str, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Let only one process at a time work on a profile and use its build context."""
    return process_locks.exclusive(name, f"is working on {name}", say)
