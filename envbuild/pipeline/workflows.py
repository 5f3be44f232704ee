"""`make` as a list of steps, each passing its value to the next; `build` and `test` use some of these steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from envbuild.attest import keys_and_signatures
from envbuild.evidence import profile_proofs
from envbuild.facts.document_types import plain
from envbuild.image import build_records_and_comparison
from envbuild.image.docker_engine import Image
from envbuild.image.oci import disk_space_needs, recorded_images
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import step_durations
from envbuild.pipeline.image_steps import (
    find_or_build_image,
    image_tag,
    load_profile,
    lock_profile,
    render_dockerfile,
    resolve_profile,
)
from envbuild.pipeline.model import HERE, MakeDocument, MakeResult, On, Options, Recipe, SelfTestOrder
from envbuild.pipeline.preflight import Preflight
from envbuild.pipeline.preflight_steps import Agree, connect, examine, run_preflight
from envbuild.pipeline.progress_events import Listener
from envbuild.pipeline.selftest_steps import (
    cluster_jobs,
    is_proved,
    read_earlier_run,
    select_runner,
    show_earlier_evidence,
    tag_verified,
    tags_of,
    test_across_nodes,
    test_on_one_node,
    withdraw_verified,
    write_evidence,
)
from envbuild.pipeline.step_context import PartialResult, StepContext
from envbuild.profile import profile_name_lookup
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners.host_runner import Here
from envbuild.runners.runner_interface import Runner, Scheduled
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import ALL, RunRequest
from envbuild.util import process_locks
from envbuild.util.errors import BuildError, CheckFailed, EnvbuildError, Interrupted, NotProved, UsageError


def make(name: str, options: Options, listener: Listener, agree: Agree = lambda question: False) -> MakeResult:
    """Make a verified image from a profile. `agree`: asks the user whether to build without a proof.

    Raises what the steps raise; CheckFailed if the self-test fails; NotProved before anything is fetched if the
    self-test cannot verify the image here, unless the options allow that or the user agrees, and after the build if the
    image is not verified on every GPU model."""
    keys_and_signatures.take_passphrase()  # from `make A B`, before a child process could inherit it
    context = StepContext(listener, options.builder)
    with _result_of_run(context, name, options.requirements) as result:
        source, plan = _load_and_resolve(context, name, options, result)
        preflight = context.step("preflight", run_preflight, context, source, plan, options, agree)
        lock, image = _lock_and_build(context, source, plan, options, result)
        proofs = profile_proofs.proofs_of(image.id, source.name, source.profile, lock)
        result.update(proofs=proofs)
        if is_proved(proofs):
            result.update(run=context.step("self-test", read_earlier_run, image, proofs))
            context.step("evidence", show_earlier_evidence, proofs)
        elif preflight.proof == "impossible":  # and building without a proof was allowed
            result.update(reasons=preflight.reasons)
            return result.value
        else:
            where = On()  # as configured in the site's settings
            order = SelfTestOrder(source, lock.versions, lock.python, options.request, where)
            _test_and_record(context, result, order, lock, image, may_withdraw=not options.trial)
        if not options.trial:
            _tag_verified(context, result, source, image)
    return result.value


def build_only(name: str, options: Options, listener: Listener) -> MakeResult:
    """Build the layers and set the tags: the steps of `make` without preflight, self-test and evidence."""
    context = StepContext(listener, options.builder)
    with _result_of_run(context, name, options.requirements) as result:
        build_image(context, name, options, result)
    return result.value


def build_image(
    context: StepContext, name: str, options: Options, result: PartialResult[MakeResult]
) -> tuple[Source, Lock, Image]:
    source, plan = _load_and_resolve(context, name, options, result)
    lock, image = _lock_and_build(context, source, plan, options, result)
    return source, lock, image


def _load_and_resolve(
    context: StepContext, name: str, options: Options, result: PartialResult[MakeResult]
) -> tuple[Source, Plan]:
    source = context.step("load profile", load_profile, name, options.request.gpus, options)
    result.update(name=source.name)  # the user may have typed a GPU or a path
    plan = context.step("resolve", resolve_profile, source)
    result.update(advisories=plan.choice.states)
    return source, plan


def _lock_and_build(
    context: StepContext, source: Source, plan: Plan, options: Options, result: PartialResult[MakeResult]
) -> tuple[Lock, Image]:
    lock = context.step("lock", lock_profile, context, source, plan, options)
    result.update(lock=lock)
    dockerfile = context.step("render", render_dockerfile, source, lock, options)
    # Runs those of the steps "extensions", "build", "load" and "audit" that are needed.
    built = find_or_build_image(context, Recipe(source, plan, lock, dockerfile), no_cache=options.no_cache)
    result.update(image=built.image, new_records=built.new_records, tags=(image_tag(source, lock),))
    return lock, built.image


def preview_make(name: str, options: Options, listener: Listener) -> Preflight:
    """Return what `make` would do. Fetches nothing and writes no file; to find a GPU, it may start a container."""
    context = StepContext(listener, options.builder)
    try:
        source = load_profile(name, options.request.gpus, options).value
    except profile_name_lookup.UnwrittenProfile as missing:
        context.note(missing.note)
        source = profile_reader_and_overrides.unwritten(missing.gpu, options.pins)
    try:
        return examine(connect(context), source, resolve_profile(source).value, options)
    except EnvbuildError as error:
        error.partial = {"profile": source.name, **error.partial}
        raise


def _test_and_record(
    context: StepContext,
    result: PartialResult[MakeResult],
    order: SelfTestOrder,
    lock: Lock,
    image: Image,
    *,
    may_withdraw: bool = True,
) -> None:
    """Run the self-test in the image and write evidence. Raises CheckFailed if it failed, after removing the tag
    `verified` from the image if `may_withdraw`; NotProved if a required probe was skipped."""
    signer = context.signer  # before the long part: it may prompt for a passphrase
    run = run_selftest(context, result, order, select_runner(context, order, image))
    try:
        written = context.step("evidence", write_evidence, context, order.source, lock, image, run, signer)
        result.update(statement=written.file, signed_statement=written.signed, proofs=written.proofs)
    finally:  # also if the evidence cannot be written
        if may_withdraw and run.failures():
            withdrawn = withdraw_verified(context, order.source, image)
            result.update(tags=tuple(tag for tag in result.value.tags if tag != withdrawn))
    require_passed(result.value)


def run_selftest(
    context: StepContext, result: PartialResult[MakeResult], order: SelfTestOrder, runner: Runner
) -> TestRun:
    """Run the self-test; if several nodes were requested and it passed on one, also on all of them together."""
    run = context.step("self-test", test_on_one_node, context.progress, order, runner)
    result.update(run=run, memory_gb=order.source.profile.selftest.memory_gb if runner.image else None)
    if order.on.nodes > 1 and run.passed:
        run = context.step("nodes", test_across_nodes, context.progress, order, runner, run)
        result.update(run=run)
    return run


def _tag_verified(context: StepContext, result: PartialResult[MakeResult], source: Source, image: Image) -> None:
    """Set the tag `verified`, as the last step. Raises NotProved if the evidence does not verify the image."""
    if result.value.state != "verified":
        missing = [
            profile_proofs.reason(source.name, proof) for proof in result.value.proofs if proof.state != "proved"
        ]
        raise NotProved(f"{source.name} is built, but not proved on all of its GPUs", hint="\n".join(missing))
    tag = context.step("tag", tag_verified, context, source, image)
    result.update(tags=tuple(dict.fromkeys([*result.value.tags, tag])))


def prove(
    name: str, reference: str | None, listener: Listener, gpus: tuple[str, ...] = (), on: On = HERE
) -> MakeResult:
    """Run the self-test, write evidence and set the tag for an image built from this lock. Raises CheckFailed for any
    other image."""
    context = StepContext(listener)
    with _result_of_run(context, name) as result:
        source = context.step("load profile", load_profile, name, gpus)
        result.update(name=source.name)
        lock, image = existing(context, source, reference)
        _require_own_build(source, lock, image, reference)
        # the status before the self-test: if it cannot run, the status does not change
        proofs = profile_proofs.proofs_of(image.id, source.name, source.profile, lock)
        result.update(image=image, lock=lock, tags=tags_of(context, source, image), proofs=proofs)
        order = SelfTestOrder(source, lock.versions, lock.python, RunRequest(gpus=gpus), on)
        _test_and_record(context, result, order, lock, image)
        _tag_verified(context, result, source, image)
    return result.value


def _require_own_build(source: Source, lock: Lock, image: Image, reference: str | None) -> None:
    """Raise CheckFailed unless this envbuild recorded that it built the image from the lock."""
    records = build_records_and_comparison.all_records(image.id)
    if not any(recorded_images.matches(record, lock, source.name) for record in records):
        raise CheckFailed(
            f"{reference or image.id} was not built by this envbuild from the lock of {source.name}",
            hint=f"its self-test output could be forged; build it: envbuild build {source.known}, "
            f"or only look: envbuild test {source.known}",
        )


def test(name: str, reference: str | None, listener: Listener, request: RunRequest = ALL, on: On = HERE) -> MakeResult:
    """Run the self-test, or the selected probes, and report; write no evidence and set no tag."""
    context = StepContext(listener)
    source = context.step("load profile", load_profile, name, request.gpus)
    lock, image = existing(context, source, reference)
    result = PartialResult(MakeResult(source.name, lock=lock, image=image))
    order = SelfTestOrder(source, lock.versions, lock.python, request, on)
    run_selftest(context, result, order, select_runner(context, order, image))
    return result.value


def cluster_script(
    name: str, reference: str | None, listener: Listener, on: On, request: RunRequest = ALL, *, brief: bool = False
) -> str:
    """Return what `test` would submit to a cluster, `brief` as in Scheduled.script. For an image that is
    locked but not built, the digest is zeros. Raises UsageError if the runner uses no scheduler."""
    context = StepContext(listener)
    source = context.step("load profile", load_profile, name, request.gpus)
    lock, found = _locked_and_image(context, source, reference)
    if found is None:
        context.progress.say(f"{source.name} is not built: zeros stand for its image's digest")
    image = found or Image(f"sha256:{0:064}", f"sha256:{0:064}", (), {}, {}, 0)
    order = SelfTestOrder(source, lock.versions, lock.python, request, on)
    runner = select_runner(context, order, image, dry=True)
    if not isinstance(runner, Scheduled):
        raise UsageError("--dry-run shows what a cluster is given", hint="--on slurm, or --on kubernetes")
    scripts = [runner.script(job, brief=brief) for job in cluster_jobs(order, runner)]
    if len(scripts) == 1:
        return scripts[0]
    what = ("the self-test, on one node", f"dist.nodes, on {on.nodes} nodes, where the first has passed")
    # The joined text is for reading only: sbatch refuses a script that begins with an ordinary comment.
    remarks = (f"# job {number} of 2: {words}" for number, words in enumerate(what, 1))
    return "\n".join(f"{remark}\n{text}" for remark, text in zip(remarks, scripts, strict=True))


def test_environment(name: str, python: str, listener: Listener, request: RunRequest = ALL) -> MakeResult:
    """Run the self-test with an interpreter of this machine, or that of a virtual environment's directory; needs no
    engine."""
    context = StepContext(listener)
    source = context.step("load profile", load_profile, name, request.gpus)
    lock = _current_lock(context, source)
    runner = Here(python)
    result = PartialResult(MakeResult(source.name, lock=lock, interpreter=runner.python))
    run_selftest(
        context, result, SelfTestOrder(source, plan_resolver.computing(lock.versions), lock.python, request), runner
    )
    return result.value


def _current_lock(context: StepContext, source: Source) -> Lock:
    """Return the profile's lock. Raises OutOfDate if it does not match the profile."""
    plan = context.step("resolve", resolve_profile, source)
    return lock_file.current(lock_file.read(source.known_lock), plan, source.lock_file)


def existing(context: StepContext, source: Source, reference: str | None = None) -> tuple[Lock, Image]:
    """Return a profile's current lock and an image in the engine: `reference`, else the one built from the lock."""
    lock, image = _locked_and_image(context, source, reference)
    if image is None:
        older = recorded_images.older_image(context.engine, lock, source.name)
        state = "was built by an older envbuild" if older else "is not built"
        raise BuildError(f"{source.name} {state}", hint=f"run: envbuild build {source.known}")
    return lock, image


def _locked_and_image(context: StepContext, source: Source, reference: str | None) -> tuple[Lock, Image | None]:
    """Like `existing`, but the image is None if none was built from the lock."""
    lock = _current_lock(context, source)
    if reference is not None:
        return lock, context.engine.get(reference)
    return lock, recorded_images.existing_image(context.engine, lock, source.name)


def require_passed(result: MakeResult) -> None:
    """Raise CheckFailed, naming every failure, unless the self-test passed; NotProved if a required probe, or every
    probe, could not run."""
    if result.run is None:
        return
    failures = result.run.failures()
    if failures:
        named = [failure.probe for failure in failures if failure.probe]
        details = [f"{f.probe}: {f.detail}" if f.probe else f.detail for f in failures]
        hints = details if named or len(failures) > 1 else []  # otherwise the message has the only detail
        if result.run.out_of_memory and result.memory_gb:
            hints.append(f"its container may take {result.memory_gb:g} GB: selftest: memory_gb in the profile")
        raise CheckFailed(
            f"the self-test of {result.name} failed: {', '.join(named) or failures[0].detail}",
            hint="\n".join(hints) or None,
        )
    lacking = result.run.skipped_required or (() if result.run.passed else result.run.by_status("skipped"))
    if lacking or not result.run.passed:
        reasons = {probe.probe: probe.reason for probe in result.run.results}
        built = "built, and " if result.image else ""
        why = "a required probe was skipped" if result.run.skipped_required else "no probe could run"
        raise NotProved(
            f"{result.name} is {built}not proved: {why}",
            hint="\n".join(f"{name}: {reasons[name]}" for name in lacking),
        )


@contextlib.contextmanager
def _result_of_run(
    context: StepContext, name: str, requirements: Path | None = None
) -> Iterator[PartialResult[MakeResult]]:
    """Like `exclusive_run`, for a workflow whose result is MakeResult: yields the result so far. At the end, add the
    steps and notes of the context to it, and keep the durations of the steps for later estimates."""
    result = PartialResult(MakeResult(name))

    def document() -> MakeDocument:
        return replace(result.value, steps=context.steps, notes=context.notes).document()

    with exclusive_run(context, name, document, requirements):
        try:
            yield result
        except EnvbuildError as error:
            if not isinstance(error, Interrupted):  # that one ends at once, and leaves no file
                _keep_durations(context, result.value)
            raise
        _keep_durations(context, result.value)
    result.update(steps=context.steps, notes=context.notes)


def _keep_durations(context: StepContext, result: MakeResult) -> None:
    if result.lock:
        step_durations.keep_durations(result.name, disk_space_needs.needed_bytes(result.lock), context.steps)


@contextlib.contextmanager
def exclusive_run(
    context: StepContext, name: str, partial: Callable[[], object], requirements: Path | None = None
) -> Iterator[None]:
    """Lock the profile for this process during the `with` body. An error carries the partial result of the command."""
    with one_run_per_profile(profile_name_lookup.meant(name, requirements).name, context.progress.say):
        try:
            yield
        except EnvbuildError as error:
            error.partial = {**plain(partial()), **error.partial}
            raise


def one_run_per_profile(name: str, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Let only one process at a time work on a profile and use its build context."""
    return process_locks.exclusive(name, f"is working on {name}", say)
