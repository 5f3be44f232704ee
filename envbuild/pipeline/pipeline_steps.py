"""The steps of one profile, from reading it to the tag `verified`. Each is timed and reports whether it did any
work."""

from __future__ import annotations

import datetime
import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TypeVar

from envbuild.attest import in_toto_statements, keys_and_signatures
from envbuild.attest.in_toto_statements import Subject
from envbuild.attest.keys_and_signatures import Signer
from envbuild.audit import environment_audit, image_collector
from envbuild.doctor import cpu_memory_and_os
from envbuild.evidence import evidence_statements_and_store, profile_proofs
from envbuild.evidence.proof_rules import Proof
from envbuild.facts import database
from envbuild.fetch import apt_resolution_and_download, sha256_file_store
from envbuild.fetch.locked_artifact_types import LockedExtension
from envbuild.image import (
    build_context_folders,
    build_records_and_comparison,
    buildx,
    debian_base_tar,
    dockerfile_renderer,
    extension_wheel_build,
    image_build,
    noted_lock_paths,
)
from envbuild.image.build_records_and_comparison import Record
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.extension_wheel_build import BuiltWheel, CompileOrder
from envbuild.image.image_naming import VERIFIED, repository
from envbuild.lock import lock_file, lock_update, wheel_contents
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads, runner_selection
from envbuild.pipeline.model import Made, Options, Progress, Step, StepResult, probe_counts
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.plan_resolver import Plan
from envbuild.runners import docker_runner
from envbuild.runners.runner_interface import Runner, Scheduled, Watch
from envbuild.testrun import expected_hardware, output_judge, selftest_job
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import Job
from envbuild.util import atomic_files
from envbuild.util.errors import EngineError, NotProved, OutOfDate, UsageError, some
from envbuild.util.yaml_document import display

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class Session:
    """Runs the steps of one profile in the order they are called, and records their results."""

    def __init__(self, name: str, options: Options, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.made = Made(name)
        self.engine: Engine | None = None
        self.recorded: list[Record] = []  # records of images that had no record before

    def step(self, name: str, work: Callable[[], StepResult[T]]) -> T:
        """Run one step and return its value."""
        _LOG.info("step %s begins", name)
        self.progress.begin(name)
        begin = time.monotonic()
        try:
            result = work()
        except BaseException:
            self.progress.abort()
            raise
        done = Step(name, time.monotonic() - begin, result.cached, result.note)
        self.made.steps.append(done)
        _LOG.info("step %s: %s, %s", name, "nothing to do" if done.cached else f"{done.seconds:.2f} s", done.note)
        self.progress.end(done)
        return result.value

    def note(self, text: str) -> None:
        """Show a note now and include it in the result document."""
        self.progress.say(text)
        self.made.notes.append(text)

    def connected(self) -> Engine:
        if self.engine is None:
            found = Engine(builder=self.options.builder)
            found.require_bounds()
            buildx.require_builder(found)
            self.engine = found
        return self.engine

    # the steps

    def load(self) -> Source:
        def work() -> StepResult[Source]:
            source = profile_reader_and_overrides.load(self.made.name, self.options.pins, self.options.requirements)
            if self.options.tolerant:
                source = source.accepting((item.id for item in database.advisories()), "only tried")
            if self.options.script:
                source = source.bringing(self.options.script)
            self.made.name = source.name
            if self.options.asked.gpus and not source.profile.gpus:
                raise UsageError(f"--gpus: {source.name} is tested on the CPU", hint="its profile names no gpus")
            return StepResult(source, note=display(source.file))

        return self.step("load profile", work)

    def resolve(self, source: Source) -> Plan:
        def work() -> StepResult[Plan]:
            plan = plan_resolver.resolve(source)
            return StepResult(plan, note=", ".join([*plan.core[1:], *plan.packages[:4]]))

        return self.step("resolve", work)

    def lock(self, source: Source, plan: Plan) -> Lock:
        """Return the current lock, after downloading its base packages."""

        def work() -> StepResult[Lock]:
            before = lock_file.read(source.known_lock)
            after = (
                lock_file.current(before, plan, source.lock_file) if self.options.locked else self._lock(plan, before)
            )
            after = self.at_hand(plan, after)
            if after is not before:
                for note in (*profile_reader_and_overrides.ignored_uv_settings([source]), *source.notes):
                    self.note(note)
                if not self.options.trial:
                    lock_file.write(after, source.lock_file, source.name, source.origin)
                for change in lock_update.version_changes(before, after):
                    self.progress.say(f"locked: {change}")
            self.made.lock = after
            return StepResult(after, cached=after is before, note=f"{after.short} {display(source.lock_file)}")

        return self.step("lock", work)

    def _lock(self, plan: Plan, before: Lock | None) -> Lock:
        accepted = {lock_update.EVERYTHING} if self.options.tolerant else set(self.options.accept_old)
        show = build_downloads.show_download(self.progress)
        return lock_update.update_lock(plan, before, progress=show, accept_old=frozenset(accepted), say=self.note)

    def at_hand(self, plan: Plan, found: Lock) -> Lock:
        """Download the base packages. Those that no mirror has any longer are locked again, unless --locked forbids
        it."""
        if found.suite is None or (debian_base_tar.tar_file(found).is_file() and not found.apt):
            return found
        wanted = found.apt if debian_base_tar.tar_file(found).is_file() else (*found.base, *found.apt)
        try:
            with build_downloads.one_fetch_at_a_time(self.progress):
                apt_resolution_and_download.fetch_debs(wanted, found.suite, sha256_file_store.debs(), found.made)
            return found
        except apt_resolution_and_download.AptUnavailable as gone:
            if self.options.locked:
                raise
            self.progress.say(f"the base is locked again: {gone.message}")
        again = lock_update.update_lock(plan, found, frozenset({lock_update.BASE}))
        with build_downloads.one_fetch_at_a_time(self.progress):
            apt_resolution_and_download.fetch_debs(
                (*again.base, *again.apt), found.suite, sha256_file_store.debs(), again.made
            )
        return again

    def render(self, source: Source, locked: Lock) -> str:
        def work() -> StepResult[str]:
            text = dockerfile_renderer.render(locked, source.name)
            same = atomic_files.holds_text(source.dockerfile, text)
            if self.options.locked and source.dockerfile.is_file() and not same:
                raise OutOfDate(
                    f"{display(source.dockerfile)} is not what the lock gives",
                    hint=f"run: envbuild lock {source.known}",
                )
            if not same and not self.options.trial:
                atomic_files.write_within(source.project, source.dockerfile, text)
            return StepResult(text, cached=same, note=display(source.dockerfile))

        return self.step("render", work)

    def build(self, source: Source, plan: Plan, locked: Lock, text: str) -> Image:
        """Return the image of a lock: an existing one, or a new one whose layers are built, audited, and labelled with
        the result."""
        noted_lock_paths.note_lock(source.known_lock)  # before an image exists that prune would not recognise
        there = None if self.options.no_cache else image_build.existing_image(self.connected(), locked, text)
        if there is not None:
            image = self.step("build", lambda: self._built(source, locked, there))
        else:
            compiled = self.extensions(source, plan, locked, text)
            image = self.step("build", lambda: self._layers(source, plan, locked, text, compiled))
            labels = self.step("audit", lambda: self._audit(source, locked, image))
            image = self.step("label", lambda: self._label(source, locked, text, labels, compiled))
        self.made.image = image
        self.made.tags = [f"{repository(source.name)}:{locked.short}"]
        return image

    def look_for_card(self) -> None:
        """Check for a GPU before anything is built that needs one. Raises NotProved if the engine has no GPU."""

        def work() -> StepResult[None]:
            docker_runner.look_for_gpu(self.connected())
            return StepResult(None, note="the engine has a GPU")

        self.step("card", work)

    def discard(self, image: bool = True) -> None:
        """Remove the build context, and the image built from it unless it existed before. Remove the image's build
        record too: otherwise the next image would be reported as differing from it."""
        build_context_folders.discard(self.made.name)
        if not image:
            return
        there = any(step.name == "build" and step.cached for step in self.made.steps)
        if self.made.lock and not there:
            tag = f"{repository(self.made.name)}:{self.made.lock.short}"
            for reference in (tag, image_build.layers_tag(self.made.lock, self.made.name)):
                self.connected().remove(reference)
        for record in self.recorded:
            if self.connected().find(record.handle) is None:  # the image has no other name and no container keeps it
                build_records_and_comparison.remove_record(record)

    def extensions(self, source: Source, plan: Plan, locked: Lock, text: str) -> tuple[BuiltWheel, ...]:
        """Return the wheels of the extensions compiled from source; without extensions the step is omitted."""

        def work() -> StepResult[tuple[BuiltWheel, ...]]:
            found = [extension_wheel_build.find_wheel(locked, one) for one in locked.extensions]
            made = tuple(
                built or self._compiled(source, plan, locked, text, one)
                for built, one in zip(found, locked.extensions, strict=True)
            )
            told = ", ".join(f"{one.name} {one.path.stat().st_size / 1e6:.0f} MB {one.sha256[:12]}" for one in made)
            return StepResult(made, cached=None not in found, note=told)

        return self.step("extensions", work) if locked.extensions else ()

    def _compiled(self, source: Source, plan: Plan, locked: Lock, text: str, one: LockedExtension) -> BuiltWheel:
        engine = self.connected()
        image_build.require_disk_space(engine, locked, compiling=True)
        build_downloads.fetch_image_parts(plan, locked, self.progress)
        build_downloads.builder(plan, locked, one, self.progress)
        progress = self.progress
        return extension_wheel_build.compile_wheel(
            CompileOrder(engine, locked, source.name, text, one, progress.say, progress.line)
        )

    def _built(self, source: Source, locked: Lock, image: Image) -> StepResult[Image]:
        """The image exists already; set its tag if missing."""
        engine, named = self.connected(), repository(source.name)
        if engine.tags(named).get(locked.short) != image.handle:
            engine.tag(image, named, locked.short)
        return StepResult(image, cached=True, note=f"{named}:{locked.short} {image.size / 1e6:.0f} MB")

    def _layers(
        self, source: Source, plan: Plan, locked: Lock, text: str, compiled: tuple[BuiltWheel, ...]
    ) -> StepResult[Image]:
        engine = self.connected()
        image_build.require_disk_space(engine, locked)
        tell = self.progress
        begin = functools.partial(image_build.start_build, engine, locked, source.name, text)
        build_downloads.fetch_image_parts(plan, locked, tell, None if self.options.no_cache else begin)
        image = image_build.build_layers(
            engine, locked, source.name, text, compiled,
            no_cache=self.options.no_cache, say=tell.say, on_line=tell.line,
        )  # fmt: skip
        return StepResult(image, note=f"{some(len(image.layers), 'layer')}, {image.size / 1e6:.0f} MB")

    def _audit(self, source: Source, locked: Lock, image: Image) -> StepResult[dict[str, str]]:
        """Audit the actual contents of the layers; a defect or a known fault ends the build."""
        target = image_build.layers_tag(locked, source.name)
        held = image_collector.collect_from_image(self.connected(), image, target, wheel_contents.wheel_hashes(locked))
        done = environment_audit.assess(target, held, environment_audit.expected_contents(source, locked, claimed=True))
        done.require()
        return StepResult(environment_audit.labels(held), note=done.summary)

    def _label(
        self, source: Source, locked: Lock, text: str, labels: Mapping[str, str], compiled: tuple[BuiltWheel, ...]
    ) -> StepResult[Image]:
        engine = self.connected()
        tell = self.progress
        before = {record.image for record in image_build.matching_records(locked, text)}
        image = image_build.build_labelled(
            engine, locked, source.name, text, labels, compiled, say=tell.say, on_line=tell.line, note=self.note
        )  # fmt: skip
        self.recorded = [record for record in image_build.matching_records(locked, text) if record.image not in before]
        said = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in labels.items())
        return StepResult(image, note=said)

    def selftest(self, source: Source, runner: Runner, versions: Mapping[str, str], python: str) -> TestRun:
        """Run the self-test by the runner. Without an image it runs unconfined."""

        def work() -> StepResult[TestRun]:
            prepared = self.job(source, runner, versions, python)
            watch = Watch(functools.partial(self._tell, prepared.nonce), self.progress.say)
            self.made.memory_gb = source.profile.selftest.memory_gb if runner.image else None
            output = runner.run(prepared, watch)
            run = output_judge.judge_output(output, prepared.nonce, prepared.require)
            left_out = (
                {} if runner.image else selftest_job.left_out_on_host(source.profile.selftest, self.options.asked)
            )
            run = self.made.run = run.leaving_out(left_out)
            return StepResult(run, note=probe_counts(run))

        run = self.step("self-test", work)
        return self._across(run, source, runner, versions, python) if self.options.on.nodes > 1 and run.passed else run

    def _across(
        self, alone: TestRun, source: Source, runner: Runner, versions: Mapping[str, str], python: str
    ) -> TestRun:
        """Run the multi-node test after the self-test passed on one node: a separate job, the only one with a
        network."""

        def work() -> StepResult[TestRun]:
            prepared = self.job(source, runner, versions, python, self.options.on.nodes)
            watch = Watch(functools.partial(self._tell, prepared.nonce), self.progress.say)
            run = output_judge.judge_nodes(runner.run(prepared, watch), prepared.nonce, prepared.require)
            self.made.run = output_judge.join_runs(alone, run)
            return StepResult(self.made.run, note=probe_counts(run))

        return self.step("nodes", work)

    def runner(self, source: Source, image: Image, locked: Lock, *, dry: bool = False) -> Runner:
        """Return the runner that will run the self-test. `dry`: only show what it would do."""

        def tried(found: Runner) -> None:
            """Validate the job before pushing the image."""
            if isinstance(found, Scheduled):
                for wanted in self.jobs(source, found, locked):
                    found.script(wanted)

        say = self.progress.say if dry else self.progress.line
        return runner_selection.runner(self.options, self.connected(), image, source.name, say, dry=dry, tried=tried)

    def jobs(self, source: Source, runner: Runner, locked: Lock) -> list[Job]:
        """Return the jobs submitted to a cluster, in that order: on one node, then on several."""
        counted = sorted({1, self.options.on.nodes})
        return [self.job(source, runner, locked.versions, locked.python, nodes) for nodes in counted]

    def job(self, source: Source, runner: Runner, versions: Mapping[str, str], python: str, nodes: int = 1) -> Job:
        """Return the job for the runner. `nodes`: if more than one, the job runs only the probe that needs several
        nodes."""
        wanted = source.profile.selftest
        asked = replace(self.options.asked, probes=(selftest_job.ACROSS,)) if nodes > 1 else self.options.asked
        models = runner_selection.models_to_test(source.profile, self.options.on.gpu)
        if not runner.image:
            wanted = selftest_job.on_host(wanted, asked)
        cards = [name for gpu in models for name in database.gpus()[gpu].all_names]
        count, expected = source.profile.gpu_count, expected_hardware.expected_hardware(source.profile)
        expected |= {"nodes": nodes} if nodes > 1 else {}
        made = selftest_job.make_job(
            runner.image, wanted, versions, python, cards, asked, count, expected, models, runner.nonce
        )
        return replace(made, nodes=nodes)

    def _tell(self, nonce: str, line: bytes) -> None:
        told = output_judge.progress_of(line, nonce)
        if told:
            self.progress.probe(told)

    def _proofs(self, source: Source, image: Image, locked: Lock) -> tuple[Proof, ...]:
        return profile_proofs.proofs_of(image.id, source.name, source.profile, locked)

    def there(self, source: Source, image: Image, locked: Lock) -> None:
        """Record the status of an image before it is tested again: if the self-test cannot run, the status does not
        change."""
        named = repository(source.name)
        tags = sorted(self.connected().tags(named).items())
        self.made.image, self.made.lock = image, locked
        self.made.tags = [f"{named}:{tag}" for tag, handle in tags if handle == image.handle]
        self.made.proofs = self._proofs(source, image, locked)

    def proved_already(self, source: Source, image: Image, locked: Lock) -> bool:
        """Whether the evidence on disk still verifies this image; if so, the self-test is not run again."""
        proofs = self._proofs(source, image, locked)
        self.made.proofs = proofs
        if any(proof.state != "proved" or proof.evidence is None for proof in proofs):
            return False

        def work() -> StepResult[TestRun]:
            assert proofs[0].evidence is not None
            run = evidence_statements_and_store.run_of(proofs[0].evidence, image.id)
            return StepResult(run, cached=True, note=probe_counts(run))

        self.made.run = self.step("self-test", work)
        self.made.proofs = self.step("evidence", lambda: StepResult(proofs, cached=True, note=proofs[0].reason))
        return True

    def evidence(self, source: Source, image: Image, locked: Lock, run: TestRun, signer: Signer | None) -> None:
        """Write the run record, and if there is a signer, its signed statement."""

        def work() -> StepResult[None]:
            now = datetime.datetime.now(datetime.UTC)
            engine = run.where.get("engine") or f"docker {self.connected().version}"
            wanted = profile_proofs.wanted(source.name, source.profile, locked)
            here = asdict(cpu_memory_and_os.read()) if self.connected().data_folder and not run.where else None
            record = evidence_statements_and_store.run_record(image, wanted, run, engine, now, here)
            self.made.evidence = evidence_statements_and_store.save(record, run.where)
            self.made.proofs = self._proofs(source, image, locked)
            if signer is None:
                return StepResult(None, note=f"{self.made.evidence.name[:12]} unsigned: no signing_key is set")
            subject = Subject(repository(source.name), image.id)
            made = in_toto_statements.test_result(
                record, evidence_statements_and_store.record_text(self.made.evidence), subject
            )
            file = evidence_statements_and_store.save_envelope(
                self.made.evidence, keys_and_signatures.seal(in_toto_statements.canonical(made), signer)
            )
            self.progress.say(f"the signed statement is {file}")
            return StepResult(None, note=f"{self.made.evidence.name[:12]} signed by {signer.public.fingerprint[:12]}")

        self.step("evidence", work)

    def withdraw(self, source: Source, image: Image) -> None:
        """Remove the tag `verified` from an image whose latest self-test failed."""
        named = repository(source.name)
        if not self.options.trial and self.connected().tags(named).get(VERIFIED) == image.handle:
            self.connected().remove(f"{named}:{VERIFIED}")
            self.made.tags = [tag for tag in self.made.tags if tag != f"{named}:{VERIFIED}"]
            self.progress.say(f"{named}:{VERIFIED} is withdrawn: what it named failed its self-test")

    def tag(self, source: Source, image: Image) -> None:
        """Set the tag `verified` if the evidence verifies the image, as the last step; not for pins that are only
        tried."""
        if self.options.trial:
            return
        if self.made.status != VERIFIED:
            missing = [
                profile_proofs.reason(source.name, proof) for proof in self.made.proofs if proof.state != "proved"
            ]
            raise NotProved(f"{source.name} is built, and not proved on all it is for", hint="\n".join(missing))

        def work() -> StepResult[None]:
            engine = self.connected()
            named = repository(source.name)
            cached = engine.tags(named).get(VERIFIED) == image.handle
            if not cached:
                engine.tag(image, named, VERIFIED)
            if engine.tags(named).get(VERIFIED) != image.handle:
                raise EngineError(f"{named}:{VERIFIED} was moved by somebody else meanwhile")
            self.made.tags = list(dict.fromkeys([*self.made.tags, f"{named}:{VERIFIED}"]))
            return StepResult(None, cached=cached, note=f"{named}:{VERIFIED}")

        self.step("tag", work)
