"""`bisect`: builds a trial image for one version after the other, tests it and removes it, by the pipeline's steps."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from packaging.version import Version

from envbuild.facts import probe_catalogue_reader
from envbuild.fetch import wheel_resolution_and_download
from envbuild.pipeline import make_build_and_test
from envbuild.pipeline.bisection_search_and_result import Bisection, Hunt, Try, most_tries, search_versions
from envbuild.pipeline.image_steps import discard_build, load_profile, lock_profile, resolve_profile
from envbuild.pipeline.image_stores.engine_images import EngineImages
from envbuild.pipeline.model import MakeResult, Options, SelfTestOrder, StepResult
from envbuild.pipeline.progress_events import Activity, Event, Listener, Note, StepBegan
from envbuild.pipeline.selftest_steps import require_gpu, select_runner
from envbuild.pipeline.step_context import PartialResult, StepContext
from envbuild.profile import project_test_shapes_and_script
from envbuild.resolve import plan_resolver
from envbuild.resolve.plan_resolver import Plan
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util.errors import CheckFailed, NotProved, ProfileError, UsageError, some


def bisect(name: str, hunt: Hunt, listener: Listener) -> Bisection:
    """Build and test a trial image of one version after the other, until the change of the outcome is found.

    Changes no file of the project, moves no tag, writes no evidence. Raises NotProved if the probe cannot run here.
    """
    context = StepContext(listener)
    done = PartialResult(Bisection(name, hunt))
    with make_build_and_test.exclusive_run(context, name, done.document):
        loaded = context.step("load profile", load_profile, name)
        plan = context.step("resolve", resolve_profile, loaded)
        done.update(profile=loaded.name)
        gpus = plan.choice.situation.gpus
        if probe_catalogue_reader.known_probes()[hunt.probe].needs == "cuda" and not gpus:
            raise UsageError(f"{hunt.probe} needs a GPU; {loaded.name} is for the CPU")
        trial = Options(
            tolerant=True,
            request=RunRequest(probes=tuple(dict.fromkeys((*([_IDENTITY] if gpus else []), hunt.probe)))),
            script=project_test_shapes_and_script.given(hunt.script, plan.python) if hunt.script else None,
        )
        distribution = plan_resolver.pinned_distribution(plan, hunt.pin)
        done.update(distribution=distribution)
        if gpus:
            context.step("gpu", require_gpu, context)
        versions = context.step("versions", _find_versions, plan, distribution, hunt)
        done.update(versions=versions)

        def passes(index: int) -> bool | None:
            options = replace(trial, pins={hunt.pin: versions[index]})
            tried = context.step(versions[index], _try_version, name, options, hunt, listener)
            done.update(tries=(*done.value.tries, tried))
            return tried.passed

        done.update(found=search_versions(len(versions), passes))
    return done.value


def _find_versions(plan: Plan, distribution: str, hunt: Hunt) -> StepResult[tuple[str, ...]]:
    found = releases_between(distribution, plan.python, plan.glibc, hunt.oldest, hunt.newest)
    if not found:
        raise UsageError(
            f"no release of {distribution} is within these bounds",
            hint="give released versions, as in --from 12.1.3.1 --to 12.6.4.1",
        )
    tries = f"at most {some(most_tries(len(found)), 'try', 'tries')} if each can be built"
    return StepResult(tuple(found), note=f"{len(found)} of {distribution}, {found[0]} to {found[-1]}: {tries}")


_IDENTITY = "env.identity"  # detects a GPU model that is not the profile's, on which an outcome would mean nothing


def _try_version(name: str, options: Options, hunt: Hunt, listener: Listener) -> StepResult[Try]:
    """Build an image with the version that `options` pin, run the probe in it, and remove the image, unless
    `hunt.keep` is set."""
    version = options.pins[hunt.pin]
    context = StepContext(partial(_show_try, listener, version))
    images, known = EngineImages(context), PartialResult(MakeResult(name))
    begin = time.monotonic()
    try:
        loaded = context.step("load profile", load_profile, name, options)
        known.update(name=loaded.name)
        plan = context.step("resolve", resolve_profile, loaded)
        lock = context.step("lock", lock_profile, context, loaded, plan, options)
        known.update(lock=lock)
        built = make_build_and_test.render_and_build(context, images, loaded, plan, lock, options)
        known.update(image=built.image, new_build_records=built.new_build_records)
    except (ProfileError, CheckFailed) as error:
        passed, reason = None, error.message
    else:
        order = SelfTestOrder(loaded, lock.versions, lock.python, options.request)
        runner = select_runner(context, images, order, built.image)
        run = make_build_and_test.run_selftest(context, order, runner)
        passed, reason = _outcome(replace(known.value, run=run), hunt)
    finally:
        discard_build(context, known.value, image=not hunt.keep)
    word = {True: "passed", False: "failed", None: "cannot be tried"}[passed]
    return StepResult(
        Try(version, passed, reason, time.monotonic() - begin), note=f"{word}: {reason}" if reason else word
    )


def _outcome(result: MakeResult, hunt: Hunt) -> tuple[bool, str]:
    """Return whether the version passes, and the reason if it fails. Raises NotProved if the probe cannot run here."""
    for failure in result.run.failures() if result.run and hunt.probe != _IDENTITY else ():
        if failure.probe == _IDENTITY:
            raise NotProved(f"the GPU here is not one of {result.name}'s", hint=failure.detail)
    try:
        make_build_and_test.require_passed(result)
    except CheckFailed as error:
        return False, (error.hint or error.message).partition("\n")[0]
    return True, ""


def _show_try(listener: Listener, version: str, event: Event) -> None:
    """Show the steps of a try only as the current activity, with a note when a long one begins. The try reports its
    outcome as a step of the bisection."""
    if isinstance(event, StepBegan):
        listener(Activity(event.step))
        if event.step in ("lock", "build", "self-test"):
            listener(Note(f"{version}: {event.step}"))
    elif isinstance(event, Activity):
        listener(event)


def releases_between(
    name: str, python: str, glibc: str, oldest: str | None = None, newest: str | None = None
) -> list[str]:
    """Return the releases from `oldest` to `newest`, both included, that have a compatible wheel, oldest first.
    Pre-releases are left out, unless `newest` is one and no release is older.

    Asks repeatedly for the newest release below the previous one, so that the result is what a lock would select, from
    the same indexes. Raises NetworkError if an index does not respond.
    """
    found: list[str] = []
    wanted = f"{name}<={Version(newest).public}" if newest else name
    while True:
        try:
            (version,) = wheel_resolution_and_download.offered([wanted], python, glibc).values()
        except ProfileError:
            return found
        if oldest and Version(version) < Version(oldest):
            return found
        found.insert(0, version)
        wanted = f"{name}<{Version(version).public}"
