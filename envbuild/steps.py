"""The steps of the pipeline: each does one thing, is timed, and says whether there was anything to do."""

from __future__ import annotations

import datetime
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TypeVar

from envbuild import fetching, placing
from envbuild.attest import signing, statements
from envbuild.attest.signing import Signer
from envbuild.attest.statements import Subject
from envbuild.errors import EngineError, NotProved, OutOfDate, UsageError
from envbuild.host import machine
from envbuild.image import base, build, context, dockerfile, extensions
from envbuild.image.engine import Engine, Image
from envbuild.image.extensions import Built, Order
from envbuild.image.names import VERIFIED, repository
from envbuild.making import Made, Options, Progress, Step, counts
from envbuild.plan import debs, facts, lock, locking, resolve, sources, store
from envbuild.plan.document import display
from envbuild.plan.lock import Lock
from envbuild.plan.locked import LockedExtension
from envbuild.plan.resolve import Plan
from envbuild.plan.sources import Source
from envbuild.proof import audit, collect, evidence, hardware, job, proved, reading
from envbuild.proof.counting import Proof
from envbuild.proof.job import Job
from envbuild.proof.runners import local
from envbuild.proof.runners.protocol import Runner, Watch
from envbuild.proof.testrun import TestRun

T = TypeVar("T")


class Session:
    """One profile being made: the steps in the order they are called, with what each learned."""

    def __init__(self, name: str, options: Options, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.made = Made(name)
        self.engine: Engine | None = None

    def step(self, name: str, work: Callable[[], tuple[T, bool, str]]) -> T:
        """Run one step; `work` returns its value, whether there was nothing to do, and a note for the reader."""
        self.progress.begin(name)
        begin = time.monotonic()
        try:
            value, cached, note = work()
        except BaseException:
            self.progress.abort()
            raise
        done = Step(name, time.monotonic() - begin, cached, note)
        self.made.steps.append(done)
        self.progress.end(done)
        return value

    def connected(self) -> Engine:
        if self.engine is None:
            self.engine = Engine(builder=self.options.builder)
            self.engine.require_bounds()
        return self.engine

    # the steps

    def load(self) -> Source:
        def work() -> tuple[Source, bool, str]:
            source = sources.load(self.made.name, self.options.pins, self.options.requirements)
            if self.options.tolerant:
                source = sources.accepting(source, (item.id for item in facts.advisories()), "only tried")
            if self.options.script:
                source = sources.bringing(source, self.options.script)
            self.made.name = source.name
            if self.options.asked.gpus and not source.profile.gpus:
                raise UsageError(f"--gpus: {source.name} is tested on the CPU", hint="its profile names no gpus")
            return source, False, display(source.file)

        return self.step("load profile", work)

    def resolve(self, source: Source) -> Plan:
        def work() -> tuple[Plan, bool, str]:
            plan = resolve.resolve(source)
            return plan, False, ", ".join([*plan.core[1:], *plan.packages[:4]])

        return self.step("resolve", work)

    def lock(self, source: Source, plan: Plan) -> Lock:
        """The lock, current, and the packages of its base at hand."""

        def work() -> tuple[Lock, bool, str]:
            before = lock.read(source.known_lock)
            if self.options.locked:
                after = lock.current(before, plan, source.lock_file)
            else:
                after = locking.make(plan, before, progress=fetching.shown(self.progress))
            after = self.at_hand(plan, after)
            if after is not before:
                if not self.options.trial:
                    lock.write(after, source.lock_file, source.name, source.origin)
                for change in locking.differences(before, after):
                    self.progress.say(f"locked: {change}")
            self.made.lock = after
            return after, after is before, f"{after.short} {display(source.lock_file)}"

        return self.step("lock", work)

    def at_hand(self, plan: Plan, found: Lock) -> Lock:
        """Base packages that no mirror has any longer are locked again, unless --locked forbids it."""
        if found.suite is None or (base.tar_file(found).is_file() and not found.apt):
            return found
        wanted = found.apt if base.tar_file(found).is_file() else (*found.base, *found.apt)
        try:
            with fetching.alone(self.progress):
                debs.fetch(wanted, found.suite, store.debs(), found.made)
            return found
        except debs.Unavailable as gone:
            if self.options.locked:
                raise
            self.progress.say(f"the base is locked again: {gone.message}")
        again = locking.make(plan, found, frozenset({locking.BASE}))
        debs.fetch((*again.base, *again.apt), found.suite, store.debs(), again.made)
        return again

    def render(self, source: Source, locked: Lock) -> str:
        def work() -> tuple[str, bool, str]:
            text = dockerfile.render(locked, source.name)
            same = store.holds_text(source.dockerfile, text)
            if self.options.locked and source.dockerfile.is_file() and not same:
                raise OutOfDate(
                    f"{display(source.dockerfile)} is not what the lock gives",
                    hint=f"run: envbuild render {source.name}",
                )
            if not same and not self.options.trial:
                store.write_atomically(source.dockerfile, text)
            return text, same, display(source.dockerfile)

        return self.step("render", work)

    def build(self, source: Source, plan: Plan, locked: Lock, text: str) -> Image:
        """The image of a lock: built already, or its layers made, audited, and labelled with what is in them."""
        there = None if self.options.no_cache else build.built(self.connected(), locked, text)
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
        """Before anything is built for it. Raises NotProved where the engine has no GPU."""

        def work() -> tuple[None, bool, str]:
            local.look_for_gpu(self.connected())
            return None, False, "the engine has a GPU"

        self.step("card", work)

    def discard(self, image: bool = True) -> None:
        """Remove the context of the build, and the image that was made of it, unless that was there before."""
        context.discard(self.made.name)
        if not image:
            return
        there = any(step.name == "build" and step.cached for step in self.made.steps)
        if self.made.lock and not there:
            tag = f"{repository(self.made.name)}:{self.made.lock.short}"
            for reference in (tag, build.layers_tag(self.made.lock, self.made.name)):
                self.connected().remove(reference)

    def extensions(self, source: Source, plan: Plan, locked: Lock, text: str) -> tuple[Built, ...]:
        """The wheels of what is compiled from source; no step where there is none."""

        def work() -> tuple[tuple[Built, ...], bool, str]:
            found = [extensions.find(locked, one) for one in locked.extensions]
            made = tuple(
                built or self._compiled(source, plan, locked, text, one)
                for built, one in zip(found, locked.extensions, strict=True)
            )
            told = ", ".join(f"{one.name} {one.path.stat().st_size / 1e6:.0f} MB {one.sha256[:12]}" for one in made)
            return made, None not in found, told

        return self.step("extensions", work) if locked.extensions else ()

    def _compiled(self, source: Source, plan: Plan, locked: Lock, text: str, one: LockedExtension) -> Built:
        engine = self.connected()
        build.check_disk(engine, locked, compiling=True)
        fetching.image(plan, locked, self.progress)
        fetching.builder(plan, locked, one, self.progress)
        progress = self.progress
        return extensions.build(Order(engine, locked, source.name, text, one, progress.say, progress.line))

    def _built(self, source: Source, locked: Lock, image: Image) -> tuple[Image, bool, str]:
        """It is there already; its tag may not be."""
        engine, named = self.connected(), repository(source.name)
        if engine.tags(named).get(locked.short) != image.handle:
            engine.tag(image, named, locked.short)
        return image, True, f"{named}:{locked.short} {image.size / 1e6:.0f} MB"

    def _layers(
        self, source: Source, plan: Plan, locked: Lock, text: str, compiled: tuple[Built, ...]
    ) -> tuple[Image, bool, str]:
        engine = self.connected()
        build.check_disk(engine, locked)
        fetching.image(plan, locked, self.progress)
        tell = self.progress
        image = build.build_layers(
            engine, locked, source.name, text, compiled,
            no_cache=self.options.no_cache, say=tell.say, on_line=tell.line,
        )  # fmt: skip
        return image, False, f"{len(image.layers)} layers, {image.size / 1e6:.0f} MB"

    def _audit(self, source: Source, locked: Lock, image: Image) -> tuple[dict[str, str], bool, str]:
        """What the layers really hold; a defect or a known fault ends the build."""
        target = build.layers_tag(locked, source.name)
        held = collect.of_image(self.connected(), image, target)
        done = audit.judge(target, held, audit.expected(source, locked, claimed=True))
        done.require()
        return audit.labels(held), False, done.summary

    def _label(
        self, source: Source, locked: Lock, text: str, labels: Mapping[str, str], compiled: tuple[Built, ...]
    ) -> tuple[Image, bool, str]:
        engine = self.connected()
        tell = self.progress
        image = build.build_labelled(
            engine, locked, source.name, text, labels, compiled, say=tell.say, on_line=tell.line
        )  # fmt: skip
        said = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in labels.items())
        return image, False, said

    def selftest(self, source: Source, runner: Runner, versions: Mapping[str, str], python: str) -> TestRun:
        """Where the runner runs it; without an image nothing confines it."""

        def work() -> tuple[TestRun, bool, str]:
            prepared = self.job(source, runner, versions, python)
            watch = Watch(functools.partial(self._tell, prepared.nonce), self.progress.say)
            self.made.memory_gb = source.profile.selftest.memory_gb if runner.image else None
            output = runner.run(prepared, watch)
            run = reading.judge(output, prepared.nonce, prepared.require)
            left_out = {} if runner.image else job.left_out(source.profile.selftest, self.options.asked)
            run = self.made.run = run.leaving_out(left_out)
            return run, False, counts(run)

        return self.step("self-test", work)

    def runner(self, source: Source, image: Image, *, dry: bool = False) -> Runner:
        """Of the place that the self-test is to run in. `dry`: it is only asked what it would do."""
        say = self.progress.say if dry else self.progress.line
        return placing.runner(self.options, self.connected(), image, source.name, say, dry=dry)

    def job(self, source: Source, runner: Runner, versions: Mapping[str, str], python: str) -> Job:
        """What the runner is handed."""
        wanted, asked = source.profile.selftest, self.options.asked
        models = placing.models(source.profile, self.options.on.gpu)
        if not runner.image:
            wanted = job.on_host(wanted, asked)
        cards = [name for gpu in models for name in facts.gpus()[gpu].all_names]
        count, expected = source.profile.gpu_count, hardware.expected(source.profile)
        return job.make(
            runner.image, wanted, versions, python, cards, asked, count, expected, models, runner.nonce
        )  # fmt: skip

    def _tell(self, nonce: str, line: bytes) -> None:
        told = reading.told(line, nonce)
        if told:
            self.progress.probe(told)

    def _proofs(self, source: Source, image: Image, locked: Lock) -> tuple[Proof, ...]:
        return proved.of(image.id, source.name, source.profile, locked)

    def proved_already(self, source: Source, image: Image, locked: Lock) -> bool:
        """Whether the evidence on disk still proves this image; then the self-test need not run again."""
        proofs = self._proofs(source, image, locked)
        self.made.proofs = proofs
        if any(proof.state != "proved" or proof.evidence is None for proof in proofs):
            return False

        def work() -> tuple[TestRun, bool, str]:
            assert proofs[0].evidence is not None
            run = evidence.run_of(proofs[0].evidence, image.id)
            return run, True, counts(run)

        self.made.run = self.step("self-test", work)
        self.made.proofs = self.step("evidence", lambda: (proofs, True, proofs[0].reason))
        return True

    def evidence(self, source: Source, image: Image, locked: Lock, run: TestRun, signer: Signer | None) -> None:
        def work() -> tuple[None, bool, str]:
            now = datetime.datetime.now(datetime.UTC)
            engine = run.where.get("engine") or f"docker {self.connected().version}"
            wanted = proved.wanted(source.name, source.profile, locked)
            here = asdict(machine.read()) if self.connected().data_folder and not run.where else None
            record = evidence.run_record(image, wanted, run, engine, now, here)
            self.made.evidence = evidence.save(record, run.where)
            self.made.proofs = self._proofs(source, image, locked)
            if signer is None:
                return None, False, f"{self.made.evidence.name[:12]} unsigned: no signing_key is set"
            subject = Subject(repository(source.name), image.id)
            made = statements.test_result(record, evidence.record_text(self.made.evidence), subject)
            file = evidence.save_envelope(self.made.evidence, signing.seal(statements.canonical(made), signer))
            self.progress.say(f"the signed statement is {file}")
            return None, False, f"{self.made.evidence.name[:12]} signed by {signer.public.fingerprint[:12]}"

        self.step("evidence", work)

    def withdraw(self, source: Source, image: Image) -> None:
        """An image whose latest self-test failed is not called verified any longer."""
        named = repository(source.name)
        if not self.options.trial and self.connected().tags(named).get(VERIFIED) == image.handle:
            self.connected().remove(f"{named}:{VERIFIED}")
            self.progress.say(f"{named}:{VERIFIED} is withdrawn: what it named failed its self-test")

    def tag(self, source: Source, image: Image) -> None:
        """Publish the answer of the evidence, last; not for pins that are only tried."""
        if self.options.trial:
            return
        if self.made.status != VERIFIED:
            missing = [proved.reason(source.name, proof) for proof in self.made.proofs if proof.state != "proved"]
            raise NotProved(f"{source.name} is built, and not proved on all it is for", hint="\n".join(missing))

        def work() -> tuple[None, bool, str]:
            engine = self.connected()
            named = repository(source.name)
            cached = engine.tags(named).get(VERIFIED) == image.handle
            if not cached:
                engine.tag(image, named, VERIFIED)
            if engine.tags(named).get(VERIFIED) != image.handle:
                raise EngineError(f"{named}:{VERIFIED} was moved by somebody else meanwhile")
            self.made.tags.append(f"{named}:{VERIFIED}")
            return None, cached, f"{named}:{VERIFIED}"

        self.step("tag", work)
