"""`make` as a list of steps, each passing its value to the next; `build` and `test` use some of these steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from envbuild.attest import keys_and_signatures
from envbuild.image import build_records_and_comparison, dockerfile_renderer, image_build
from envbuild.image.docker_engine import Image
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import runner_selection
from envbuild.pipeline.model import HERE, Made, On, Options, Progress
from envbuild.pipeline.pipeline_steps import Session
from envbuild.profile import profile_name_lookup
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import plan_resolver
from envbuild.runners.host_runner import Here
from envbuild.runners.runner_interface import Scheduled
from envbuild.testrun.selftest_job import ALL, RunRequest
from envbuild.util import process_locks
from envbuild.util.errors import BuildError, CheckFailed, EnvbuildError, NotProved, UsageError


def make(name: str, options: Options, progress: Progress) -> Made:
    """Make a verified image from a profile. Raises what the steps raise; CheckFailed if the self-test fails."""
    keys_and_signatures.receive()
    session = Session(name, options, progress)
    with working(session, session.made.document):
        source = session.load()
        if not options.unproved:
            runner_selection.require_cards(source, options.asked.gpus)
        plan = session.resolve(source)
        locked = session.lock(source, plan)
        text = session.render(source, locked)
        image = session.build(source, plan, locked, text)
        if not session.proved_already(source, image, locked):
            signer = keys_and_signatures.configured_signer()  # before the long part: it may prompt for a passphrase
            run = session.selftest(source, session.runner(source, image, locked), locked.versions, locked.python)
            session.evidence(source, image, locked, run, signer)
            _passed(session, source, image)
        session.tag(source, image)
    return session.made


def build_only(name: str, options: Options, progress: Progress) -> Made:
    """Build the layers and set the tags, without a self-test."""
    session = Session(name, options, progress)
    with working(session, session.made.document):
        build_image(session)
    return session.made


def build_image(session: Session) -> tuple[Source, Lock, Image]:
    """Build the image of the profile, with the session's options."""
    source = session.load()
    plan = session.resolve(source)
    locked = session.lock(source, plan)
    return source, locked, session.build(source, plan, locked, session.render(source, locked))


def prove(name: str, reference: str | None, progress: Progress, gpus: tuple[str, ...] = (), on: On = HERE) -> Made:
    """Run the self-test, write evidence and set the tag for an image built from this lock. Raises CheckFailed for any
    other image."""
    session = Session(name, Options(locked=True, asked=RunRequest(gpus=gpus), on=on), progress)
    with working(session, session.made.document):
        source, locked, image = existing(session, reference)
        recipe = image_build.recipe_digest(locked, dockerfile_renderer.render(locked, source.name))
        if not any(record.recipe == recipe for record in build_records_and_comparison.all_records(image.id)):
            raise CheckFailed(
                f"{reference or image.id} was not built by this envbuild from the lock of {source.name}",
                hint=f"its self-test output could be forged; build it: envbuild build {source.known}, "
                f"or only look: envbuild test {source.known}",
            )
        session.there(source, image, locked)
        signer = keys_and_signatures.configured_signer()
        run = session.selftest(source, session.runner(source, image, locked), locked.versions, locked.python)
        session.evidence(source, image, locked, run, signer)
        _passed(session, source, image)
        session.tag(source, image)
    return session.made


def test(name: str, reference: str | None, progress: Progress, asked: RunRequest = ALL, on: On = HERE) -> Made:
    """Run the self-test, or the selected probes, and report; write no evidence and set no tag."""
    session = Session(name, Options(locked=True, asked=asked, on=on), progress)
    source, locked, image = existing(session, reference)
    session.made.image, session.made.lock = image, locked
    session.selftest(source, session.runner(source, image, locked), locked.versions, locked.python)
    return session.made


def cluster_script(
    name: str, reference: str | None, progress: Progress, on: On, asked: RunRequest = ALL, *, brief: bool = False
) -> str:
    """Return what `test` would submit to a cluster, `brief` as in Scheduled.script. For an image that is
    locked but not built, the digest is zeros. Raises UsageError if the runner uses no scheduler."""
    session = Session(name, Options(locked=True, asked=asked, on=on), progress)
    source, locked, found = _known(session, reference)
    if found is None:
        progress.say(f"{source.name} is not built: zeros stand for its image's digest")
    image = found or Image(f"sha256:{0:064}", f"sha256:{0:064}", (), {}, {}, 0)
    runner = session.runner(source, image, locked, dry=True)
    if not isinstance(runner, Scheduled):
        raise UsageError("--dry-run shows what a cluster is given", hint="--on slurm, or --on kubernetes")
    shown = [runner.script(job, brief=brief) for job in session.jobs(source, runner, locked)]
    if len(shown) == 1:
        return shown[0]
    what = ("the self-test, on one node", f"dist.nodes, on {on.nodes} nodes, where the first has passed")
    # The two scripts together cannot be run: sbatch accepts no script whose first line is another comment.
    said = (f"# job {number} of 2: {words}" for number, words in enumerate(what, 1))
    return "\n".join(f"{remark}\n{text}" for remark, text in zip(said, shown, strict=True))


def test_environment(name: str, python: str, progress: Progress, asked: RunRequest = ALL) -> Made:
    """Run the self-test with an interpreter of this machine, or that of a virtual environment's directory; needs no
    engine."""
    session = Session(name, Options(locked=True, asked=asked), progress)
    source, locked = _locked(session)
    runner = Here(python)
    session.made.lock, session.made.interpreter = locked, runner.python
    session.selftest(source, runner, plan_resolver.computing(locked.versions), locked.python)
    return session.made


def _locked(session: Session) -> tuple[Source, Lock]:
    """Return the profile and its lock, which must match."""
    source = session.load()
    plan = session.resolve(source)
    return source, lock_file.current(lock_file.read(source.known_lock), plan, source.lock_file)


def existing(session: Session, reference: str | None) -> tuple[Source, Lock, Image]:
    """Return a profile, its current lock, and an image in the engine: `reference`, else the one built from the lock."""
    source, locked, image = _known(session, reference)
    if image is None:
        raise BuildError(f"{source.name} is not built", hint=f"run: envbuild build {source.known}")
    return source, locked, image


def _known(session: Session, reference: str | None) -> tuple[Source, Lock, Image | None]:
    """Like `existing`, but the image is None if none was built from the lock."""
    source, locked = _locked(session)
    engine = session.connected()
    if reference is None:
        return (
            source,
            locked,
            image_build.existing_image(engine, locked, dockerfile_renderer.render(locked, source.name)),
        )
    return source, locked, engine.get(reference)


def _passed(session: Session, source: Source, image: Image) -> None:
    try:
        require_passed(session.made)
    except CheckFailed:
        session.withdraw(source, image)
        raise


def require_passed(made: Made) -> None:
    """Raise CheckFailed, naming every failure, unless the self-test passed; NotProved if a required probe, or every
    probe, could not run."""
    if made.run is None:
        return
    failures = made.run.failures()
    if failures:
        named = [f["probe"] for f in failures if f["probe"]]
        told = [f"{f['probe']}: {f['detail']}" if f["probe"] else f["detail"] for f in failures]
        hints = told if named or len(failures) > 1 else []
        if made.run.out_of_memory and made.memory_gb:
            hints.append(f"its container may take {made.memory_gb:g} GB: selftest: memory_gb in the profile")
        raise CheckFailed(
            f"the self-test of {made.name} failed: {', '.join(named) or failures[0]['detail']}",
            hint="\n".join(hints) or None,
        )
    lacking = made.run.skipped_required or (() if made.run.passed else made.run.by_status("skipped"))
    if lacking or not made.run.passed:
        reasons = {result["probe"]: result["reason"] for result in made.run.results}
        built = "built, and " if made.image else ""
        raise NotProved(
            f"{made.name} is {built}not proved: a required probe was skipped",
            hint="\n".join(f"{name}: {reasons[name]}" for name in lacking),
        )


@contextlib.contextmanager
def working(session: Session, partial: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Lock the profile for this process during the `with` body. An error carries the partial result of the command."""
    name = profile_name_lookup.meant(session.made.name, session.options.requirements).name
    with one_run_per_profile(name, session.progress.say):
        try:
            yield
        except EnvbuildError as error:
            error.partial = {**partial(), **error.partial}
            raise


def one_run_per_profile(name: str, say: Callable[[str], None]) -> contextlib.AbstractContextManager[None]:
    """Let only one process at a time work on a profile and use its build context."""
    return process_locks.exclusive(name, f"is making {name}", say)
