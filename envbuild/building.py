"""The steps that make an image: each does one thing, is timed, and says whether there was anything to do."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from envbuild import fetching
from envbuild.document import display
from envbuild.errors import OutOfDate, UsageError, some
from envbuild.image import base, build, buildx, context, dockerfile, extensions, places, records
from envbuild.image.engine import Engine, Image
from envbuild.image.extensions import Built, Order
from envbuild.image.names import repository
from envbuild.image.records import Record
from envbuild.making import Made, Options, Progress, Step
from envbuild.plan import contents, debs, facts, lock, locking, resolve, sources, store
from envbuild.plan.lock import Lock
from envbuild.plan.locked import LockedExtension
from envbuild.plan.resolve import Plan
from envbuild.plan.source import Source
from envbuild.proof import audit, collect
from envbuild.proof.runners import local

T = TypeVar("T")


class Building:
    """One profile being made: the steps up to its image in the order they are called, with what each learned."""

    def __init__(self, name: str, options: Options, progress: Progress) -> None:
        self.options = options
        self.progress = progress
        self.made = Made(name)
        self.engine: Engine | None = None
        self.recorded: list[Record] = []  # of images that were not recorded before

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

    def note(self, text: str) -> None:
        """What is to be known of what was made: told now, and in the document."""
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
        def work() -> tuple[Source, bool, str]:
            source = sources.load(self.made.name, self.options.pins, self.options.requirements)
            if self.options.tolerant:
                source = source.accepting((item.id for item in facts.advisories()), "only tried")
            if self.options.script:
                source = source.bringing(self.options.script)
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
            after = lock.current(before, plan, source.lock_file) if self.options.locked else self._lock(plan, before)
            after = self.at_hand(plan, after)
            if after is not before:
                for note in (*sources.ignored([source]), *source.notes):
                    self.note(note)
                if not self.options.trial:
                    lock.write(after, source.lock_file, source.name, source.origin)
                for change in locking.differences(before, after):
                    self.progress.say(f"locked: {change}")
            self.made.lock = after
            return after, after is before, f"{after.short} {display(source.lock_file)}"

        return self.step("lock", work)

    def _lock(self, plan: Plan, before: Lock | None) -> Lock:
        accepted = {locking.EVERYTHING} if self.options.tolerant else set(self.options.accept_old)
        show = fetching.shown(self.progress)
        return locking.make(plan, before, progress=show, accept_old=frozenset(accepted), say=self.note)

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
        with fetching.alone(self.progress):
            debs.fetch((*again.base, *again.apt), found.suite, store.debs(), again.made)
        return again

    def render(self, source: Source, locked: Lock) -> str:
        def work() -> tuple[str, bool, str]:
            text = dockerfile.render(locked, source.name)
            same = store.holds_text(source.dockerfile, text)
            if self.options.locked and source.dockerfile.is_file() and not same:
                raise OutOfDate(
                    f"{display(source.dockerfile)} is not what the lock gives",
                    hint=f"run: envbuild render {source.known}",
                )
            if not same and not self.options.trial:
                store.write_within(source.project, source.dockerfile, text)
            return text, same, display(source.dockerfile)

        return self.step("render", work)

    def build(self, source: Source, plan: Plan, locked: Lock, text: str) -> Image:
        """The image of a lock: built already, or its layers made, audited, and labelled with what is in them."""
        places.note(source.known_lock)  # before there is an image that prune would not know
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
        """Remove the context of the build, and the image that was made of it, unless that was there before; with the
        image its record, which would be told as another image than the next one."""
        context.discard(self.made.name)
        if not image:
            return
        there = any(step.name == "build" and step.cached for step in self.made.steps)
        if self.made.lock and not there:
            tag = f"{repository(self.made.name)}:{self.made.lock.short}"
            for reference in (tag, build.layers_tag(self.made.lock, self.made.name)):
                self.connected().remove(reference)
        for record in self.recorded:
            if self.connected().find(record.handle) is None:  # by no other name, and not kept by a container
                records.remove(record)

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
        tell = self.progress
        begin = functools.partial(build.begin, engine, locked, source.name, text)
        fetching.image(plan, locked, tell, None if self.options.no_cache else begin)
        image = build.build_layers(
            engine, locked, source.name, text, compiled,
            no_cache=self.options.no_cache, say=tell.say, on_line=tell.line,
        )  # fmt: skip
        return image, False, f"{some(len(image.layers), 'layer')}, {image.size / 1e6:.0f} MB"

    def _audit(self, source: Source, locked: Lock, image: Image) -> tuple[dict[str, str], bool, str]:
        """What the layers really hold; a defect or a known fault ends the build."""
        target = build.layers_tag(locked, source.name)
        held = collect.of_image(self.connected(), image, target, contents.hashes(locked))
        done = audit.judge(target, held, audit.expected(source, locked, claimed=True))
        done.require()
        return audit.labels(held), False, done.summary

    def _label(
        self, source: Source, locked: Lock, text: str, labels: Mapping[str, str], compiled: tuple[Built, ...]
    ) -> tuple[Image, bool, str]:
        engine = self.connected()
        tell = self.progress
        before = {record.image for record in build.recorded(locked, text)}
        image = build.build_labelled(
            engine, locked, source.name, text, labels, compiled, say=tell.say, on_line=tell.line, note=self.note
        )  # fmt: skip
        self.recorded = [record for record in build.recorded(locked, text) if record.image not in before]
        said = ", ".join(f"{key.rpartition('.')[2]} {value}" for key, value in labels.items())
        return image, False, said
