"""`bisect`: builds a trial image for one version after the other, tests it and removes it, by the pipeline's steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packaging.version import Version

from envbuild.facts import probe_catalogue_reader
from envbuild.fetch import wheel_resolution_and_download
from envbuild.pipeline import workflows
from envbuild.pipeline.bisection_search_and_result import Bisection, Hunt, Try, most_tries, search_versions
from envbuild.pipeline.model import Options, Progress, Step, StepResult
from envbuild.pipeline.pipeline_steps import Session
from envbuild.profile import project_shapes_and_script
from envbuild.resolve import plan_resolver
from envbuild.resolve.plan_resolver import Plan
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util.errors import CheckFailed, NotProved, ProfileError, UsageError, some


def bisect(name: str, hunt: Hunt, progress: Progress) -> Bisection:
    """Build and test trial images of one version after the other until the version where the outcome changes is found.

    Changes no file of the project, moves no tag, writes no evidence. Raises NotProved if the probe cannot run here.
    """
    session = Session(name, Options(), progress)
    done = Bisection(name, hunt)
    with workflows.working(session, done.document):
        plan = session.resolve(session.load())
        done.profile = session.made.name
        gpus = plan.choice.situation.gpus
        if probe_catalogue_reader.known_probes()[hunt.probe].needs == "cuda" and not gpus:
            raise UsageError(f"{hunt.probe} needs a GPU; {session.made.name} is for the CPU")
        trial = Options(
            tolerant=True,
            asked=RunRequest(probes=tuple(dict.fromkeys((*([_CARD] if gpus else []), hunt.probe)))),
            script=project_shapes_and_script.given(hunt.script, plan.python) if hunt.script else None,
        )
        distribution = done.distribution = plan_resolver.pinned_distribution(plan, hunt.pin)
        if gpus:
            session.look_for_card()
        versions = done.versions = session.step("versions", lambda: _versions(plan, distribution, hunt))

        def passes(index: int) -> bool | None:
            version = versions[index]
            options = replace(trial, pins={hunt.pin: version})
            done.tries.append(session.step(version, lambda: _try(name, version, options, hunt, progress)))
            return done.tries[-1].passed

        done.found = search_versions(len(versions), passes)
    return done


def _versions(plan: Plan, distribution: str, hunt: Hunt) -> StepResult[list[str]]:
    found = releases_between(distribution, plan.python, plan.glibc, hunt.oldest, hunt.newest)
    if not found:
        raise UsageError(f"no release of {distribution} lies within these bounds", hint="--from and --to are versions")
    tries = f"at most {some(most_tries(len(found)), 'try', 'tries')} if each can be made"
    return StepResult(found, note=f"{len(found)} of {distribution}, {found[0]} to {found[-1]}: {tries}")


_CARD = "env.identity"  # on a GPU model that is not the profile's, an outcome would mean nothing


def _try(name: str, version: str, options: Options, hunt: Hunt, progress: Progress) -> StepResult[Try]:
    """Try one version: build an image with it, run the probe, and remove the image."""
    session = Session(name, options, _Within(progress, version))
    begin = time.monotonic()
    try:
        passed, reason = _outcome(session, hunt)
    finally:
        session.discard(image=not hunt.keep)
    word = {True: "passed", False: "failed", None: "cannot be tried"}[passed]
    return StepResult(
        Try(version, passed, reason, time.monotonic() - begin), note=f"{word}: {reason}" if reason else word
    )


def _outcome(session: Session, hunt: Hunt) -> tuple[bool | None, str]:
    try:
        source, locked, image = workflows.build_image(session)
    except (ProfileError, CheckFailed) as error:
        return None, error.message
    session.selftest(source, session.runner(source, image, locked), locked.versions, locked.python)
    for failure in session.made.run.failures() if session.made.run and hunt.probe != _CARD else ():
        if failure["probe"] == _CARD:
            raise NotProved(f"the card here is none of {source.name}'s", hint=failure["detail"])
    try:
        workflows.require_passed(session.made)
    except CheckFailed as error:
        return False, (error.hint or error.message).partition("\n")[0]
    return True, ""


class _Within:
    """The progress of a try. Its steps are shown only as the current activity; a long step gets a line when it
    begins."""

    def __init__(self, progress: Progress, version: str) -> None:
        self.line = progress.line
        self._progress, self._version = progress, version

    def begin(self, step: str) -> None:
        self.line(step)
        if step in ("lock", "build", "self-test"):
            self._progress.say(f"{self._version}: {step}")

    def say(self, text: str) -> None:
        """Show nothing."""

    def probe(self, told: Mapping[str, Any]) -> None:
        """Show nothing: the try reports its outcome."""

    def end(self, step: Step) -> None:
        """Show nothing."""

    def abort(self) -> None:
        """Show nothing: the try ends as a step of the bisection."""


def releases_between(
    name: str, python: str, glibc: str, oldest: str | None = None, newest: str | None = None
) -> list[str]:
    """Return the releases that have a compatible wheel, oldest first, bounds included; pre-releases only if there are
    no others.

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
