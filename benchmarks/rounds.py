"""The cases of the build benchmark. The tools run in turn on one engine; values are added to `found` as they are
measured."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import docker
import watch
from arena import Arena
from libraries import twice
from registry import Registry
from stock import PINS, SHARING, Stock, sharing
from ways import Dockerfile, Ours, Way

_MEMORY = Path("/dev/shm")

Say = Callable[[str], None]


@dataclass
class Rounds:
    """`found`: case -> tool -> name of a value -> its value in each run. Times are in s, sizes in bytes."""

    arena: Arena
    stock: Stock
    registry: Registry
    say: Say
    found: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def with_engine(self, arena: Arena) -> Rounds:
        """The same cases on another engine; values are added to the same `found`."""
        return replace(self, arena=arena)

    def note(self, case: str, way: str, **figures: float) -> None:
        kept = self.found.setdefault(case, {}).setdefault(way, {})
        for name, value in figures.items():
            kept.setdefault(name, []).append(value)
        values = ", ".join(
            f"{name} {value / 1e9:.2f} GB" if value > 1e6 else f"{name} {value:.2f}" for name, value in figures.items()
        )
        self.say(f"{case}: {way}: {values}")

    def timed(self, case: str, way: Way, work: Callable[[], float | None]) -> float:
        """Measure the seconds of `work`, minus those that `work` returns."""
        excluded, took = watch.taken(work, [self.arena.pid], self.stock.folder)
        seconds = took.seconds - (excluded or 0.0)
        figures: dict[str, float] = {"seconds": seconds, "memory": took.memory, "written": took.written}
        if isinstance(way, Ours):
            figures |= {f"step {name}": value for name, value in way.steps.items()}
        self.note(case, way.name, **figures)
        return seconds

    def one(self, way: Way, number: int) -> None:
        """Build with an empty engine and without downloaded wheels. Then change a pin to a wheel that must be
        downloaded, and, if the tool keeps wheels, to a wheel that is already downloaded. If the tool pushes from the
        engine, push the first two images. `number`: of the run; the first also measures sizes."""
        way.forget()
        self.arena.empty()
        took = self.timed("cold", way, lambda: way.build(PINS[0]))
        if number == 0:
            self.sizes(way, way.tag(PINS[0]))
        if way.pushes:
            self.push("registry, cold", way, PINS[0], number, took)
        took = self.timed("pin, wheel to fetch", way, lambda: way.build(PINS[1]))
        if way.pushes:
            self.push("registry, pin changed", way, PINS[1], number, took)
        if way.keeps:
            way.bring(PINS[2])
            self.timed("pin, wheel here", way, lambda: way.build(PINS[2]))

    def repository(self, way: Way, what: str | int) -> str:
        """Return the name of a repository of the benchmark's registry."""
        return f"{self.registry.host}/{way.name}-{what}"

    def push(self, case: str, way: Way, pin: str, number: int, built: float) -> None:
        """Push an image from the engine. The seconds are those of the build, `built`, and of the push."""
        reference = f"{self.repository(way, number)}:{pin}"
        before, begin = self.registry.holds(), time.perf_counter()
        self.arena.docker("tag", way.tag(pin), reference)
        self.arena.docker("push", "--quiet", reference)
        seconds = built + time.perf_counter() - begin
        self.note(case, way.name, seconds=seconds, stored=self.registry.holds() - before)

    def without_engine(self, ours: Ours, number: int) -> None:
        """Write layers directly: to a registry, first without downloaded wheels and then with a changed pin; to a
        folder; and again, to compare the digests."""
        ours.forget()
        repository = self.repository(ours, number)
        for case, pin in (("registry, cold", PINS[0]), ("registry, pin changed", PINS[1])):
            before = self.registry.holds()
            self.timed(case, ours, partial(ours.push, pin, repository))
            self.note(case, ours.name, stored=self.registry.holds() - before)
        self.stock.change(PINS[0])
        self.stock.forget_layers()
        folder = self.stock.folder / "layout"
        self.timed("layout, wheels here", ours, lambda: ours.export(folder))
        shutil.rmtree(folder)
        self.timed("rebuild", ours, ours.write_again)

    def sizes(self, way: Way, tag: str) -> None:
        image = self.arena.image(tag)
        count, size = twice(image)
        used = self.arena.used()
        self.note("size", way.name, image=image["Size"], layers=len(image["RootFS"]["Layers"]), engine=used,
                  twice=count, **{"twice bytes": size})  # fmt: skip

    def here(self, ours: Ours) -> None:
        """Build with the wheels on the host and an empty engine; then build a profile for a second GPU; then build with
        nothing changed."""
        self.stock.forget_builds()
        self.arena.empty()
        self.timed("wheels here", ours, lambda: ours.build(PINS[0]))
        before = self.arena.used()
        self.timed("second GPU", ours, ours.build_second)
        self.note("second GPU", ours.name, engine=self.arena.used() - before)
        self.timed("nothing changed", ours, lambda: ours.build(PINS[0]))

    def loaded(self, ours: Ours) -> None:
        """Let an empty engine load an archive that is complete in memory, and then one with the layers of a changed
        pin: no tool can load an image into this engine faster. `unpack`: the part of this time after the engine has
        received the last byte. Then write the layers of the changed pin without an engine."""
        self.arena.empty()
        file = _MEMORY / f"envbuild-bench-{os.getpid()}.tar"
        cases = (("engine's load, whole image", PINS[0], ()), ("engine's load, pin changed", PINS[2], PINS[:1]))
        for case, pin, others in cases:
            try:
                ours.archive(pin, file, *others)
                os.sync()
                begin = time.perf_counter()
                received = self._load(file)
                end = time.perf_counter()
                self.note(case, "the archive in memory", seconds=end - begin, unpack=end - received)
            finally:
                file.unlink(missing_ok=True)
        begin = time.perf_counter()
        ours.write_changed(PINS[2], PINS[0])
        self.note("changed layers", ours.name, seconds=time.perf_counter() - begin)

    def _load(self, file: Path) -> float:
        """Load an archive, and return the time at which the engine had received all of it."""
        received = 0.0

        def blocks() -> Iterator[bytes]:
            nonlocal received
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    yield block
            received = time.perf_counter()

        with contextlib.closing(docker.APIClient(base_url=self.arena.host, timeout=600)) as client:
            for message in client.load_image(blocks()):  # type: ignore[no-untyped-call]
                if "error" in message:
                    raise SystemExit(f"the engine could not load the archive: {message['error']}")
        return received

    def shared(self, ours: Ours) -> None:
        """Push the images of profiles that share one torch to a new registry. Measure the bytes that the registry
        stores for the first image, for 4 images and for all images."""
        with Registry(self.stock.folder / "shared", self.registry.program) as registry:
            for count, gpu in enumerate(SHARING, 1):
                ours.push_profile(sharing(gpu), f"{registry.host}/shared")
                if count in (1, 4, len(SHARING)):
                    self.note("profiles on one torch", str(count), stored=registry.holds())
        shutil.rmtree(self.stock.folder / "shared")

    def pulled(self, ours: Ours, other: Dockerfile) -> None:
        """Pull and unpack three images, each with an empty engine: the image of another tool, the image of envbuild,
        and the image of envbuild compressed with zstd."""
        plain, zstd = (self.repository(ours, what) for what in ("pull", "pull-zstd"))
        ours.push(PINS[0], plain)
        ours.push(PINS[0], zstd, zstd=True)
        self.arena.empty()
        other.build(PINS[0])
        pushed = f"{self.repository(other, 'pull')}:1"
        self.arena.docker("tag", other.tag(PINS[0]), pushed)
        self.arena.docker("push", "--quiet", pushed)
        lock = ours.tag(PINS[0]).rpartition(":")[2]
        references = {other.name: pushed, ours.name: f"{plain}:{lock}", "envbuild, zstd": f"{zstd}:{lock}"}
        for what, reference in references.items():
            self.arena.empty()
            begin = time.perf_counter()
            self.arena.docker("pull", "--quiet", reference)
            self.note("pull", what, seconds=time.perf_counter() - begin)

    def containerd(self, ours: Ours, other: Dockerfile) -> None:
        """Measure builds with an engine that uses containerd's store: into the engine, and with the other tool to a
        registry, where BuildKit then compresses and pushes the layers itself."""
        for way in (other, ours):
            way.forget()
            self.arena.empty()
            self.timed("containerd's store, cold", way, partial(way.build, PINS[0]))
        self.arena.empty()
        reference = f"{self.repository(other, 'containerd')}:1"
        self.timed("containerd's store, registry, cold", other, lambda: other.build_to_registry(PINS[0], reference))
