"""The steps of the pipeline: those that make an image (building.py), and here those that prove it."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Mapping
from dataclasses import asdict, replace

from envbuild import placing
from envbuild.attest import signing, statements
from envbuild.attest.signing import Signer
from envbuild.attest.statements import Subject
from envbuild.building import Building
from envbuild.errors import EngineError, NotProved
from envbuild.host import machine
from envbuild.image.engine import Image
from envbuild.image.names import VERIFIED, repository
from envbuild.making import counts
from envbuild.plan import facts
from envbuild.plan.lock import Lock
from envbuild.plan.source import Source
from envbuild.proof import evidence, hardware, job, proved, reading, together
from envbuild.proof.counting import Proof
from envbuild.proof.job import Job
from envbuild.proof.runners.protocol import Runner, Scheduled, Watch
from envbuild.proof.testrun import TestRun


class Session(Building):
    """One profile being made and proved: the steps in the order they are called, with what each learned."""

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

        run = self.step("self-test", work)
        return self._across(run, source, runner, versions, python) if self.options.on.nodes > 1 and run.passed else run

    def _across(
        self, alone: TestRun, source: Source, runner: Runner, versions: Mapping[str, str], python: str
    ) -> TestRun:
        """And on several nodes together, once it is sound on one: a job of its own, which alone has a network."""

        def work() -> tuple[TestRun, bool, str]:
            prepared = self.job(source, runner, versions, python, self.options.on.nodes)
            watch = Watch(functools.partial(self._tell, prepared.nonce), self.progress.say)
            run = together.judge(runner.run(prepared, watch), prepared.nonce, prepared.require)
            self.made.run = together.joined(alone, run)
            return self.made.run, False, counts(run)

        return self.step("nodes", work)

    def runner(self, source: Source, image: Image, locked: Lock, *, dry: bool = False) -> Runner:
        """Of the place that the self-test is to run in. `dry`: it is only asked what it would do."""

        def tried(found: Runner) -> None:
            """What would be refused is, before an image of gigabytes is pushed for it."""
            if isinstance(found, Scheduled):
                for wanted in self.jobs(source, found, locked):
                    found.script(wanted)

        say = self.progress.say if dry else self.progress.line
        return placing.runner(self.options, self.connected(), image, source.name, say, dry=dry, tried=tried)

    def jobs(self, source: Source, runner: Runner, locked: Lock) -> list[Job]:
        """Each that a cluster is handed, in that order: on one node, then on several."""
        counted = sorted({1, self.options.on.nodes})
        return [self.job(source, runner, locked.versions, locked.python, nodes) for nodes in counted]

    def job(self, source: Source, runner: Runner, versions: Mapping[str, str], python: str, nodes: int = 1) -> Job:
        """What the runner is handed. `nodes`: several are asked for what only they can show."""
        wanted = source.profile.selftest
        asked = replace(self.options.asked, probes=(job.ACROSS,)) if nodes > 1 else self.options.asked
        models = placing.models(source.profile, self.options.on.gpu)
        if not runner.image:
            wanted = job.on_host(wanted, asked)
        cards = [name for gpu in models for name in facts.gpus()[gpu].all_names]
        count, expected = source.profile.gpu_count, hardware.expected(source.profile)
        expected |= {"nodes": nodes} if nodes > 1 else {}
        made = job.make(runner.image, wanted, versions, python, cards, asked, count, expected, models, runner.nonce)
        return replace(made, nodes=nodes)

    def _tell(self, nonce: str, line: bytes) -> None:
        told = reading.told(line, nonce)
        if told:
            self.progress.probe(told)

    def _proofs(self, source: Source, image: Image, locked: Lock) -> tuple[Proof, ...]:
        return proved.of(image.id, source.name, source.profile, locked)

    def there(self, source: Source, image: Image, locked: Lock) -> None:
        """What holds of an image before it is tested again: a self-test that never ran takes nothing from it."""
        named = repository(source.name)
        tags = sorted(self.connected().tags(named).items())
        self.made.image, self.made.lock = image, locked
        self.made.tags = [f"{named}:{tag}" for tag, handle in tags if handle == image.handle]
        self.made.proofs = self._proofs(source, image, locked)

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
            self.made.tags = [tag for tag in self.made.tags if tag != f"{named}:{VERIFIED}"]
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
            self.made.tags = list(dict.fromkeys([*self.made.tags, f"{named}:{VERIFIED}"]))
            return None, cached, f"{named}:{VERIFIED}"

        self.step("tag", work)
