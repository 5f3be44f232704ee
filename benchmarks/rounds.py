"""The cases of the build benchmark. The tools run in turn on one engine; values are added to `found` as they are
measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import watch
from arena import Arena
from libraries import twice
from registry import Registry
from stock import PINS, Stock
from ways import Ours, Way

Say = Callable[[str], None]


@dataclass
class Rounds:
    """`found`: case -> tool -> name of a value -> its value in each run. Times are in s, sizes in bytes."""

    arena: Arena
    stock: Stock
    registry: Registry
    say: Say
    found: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def note(self, case: str, way: str, **figures: float) -> None:
        kept = self.found.setdefault(case, {}).setdefault(way, {})
        for name, value in figures.items():
            kept.setdefault(name, []).append(value)
        values = ", ".join(
            f"{name} {value / 1e9:.2f} GB" if value > 1e6 else f"{name} {value:.2f}" for name, value in figures.items()
        )
        self.say(f"{case}: {way}: {values}")

    def timed(self, case: str, way: Way, work: Callable[[], float]) -> None:
        """Measure the time of `work`, minus the seconds that `work` returns."""
        excluded, took = watch.taken(work, [self.arena.pid], self.stock.folder)
        figures: dict[str, float] = {"seconds": took.seconds - excluded, "memory": took.memory, "written": took.written}
        if isinstance(way, Ours):
            figures |= {f"step {name}": seconds for name, seconds in way.steps.items()}
        self.note(case, way.name, **figures)

    def one(self, way: Way, first: bool) -> None:
        """Build with an empty engine and without downloaded wheels. Then change a pin to a wheel that must be
        downloaded, and, if the tool keeps wheels, to one that is already downloaded. `first`: also measure
        sizes."""
        way.forget()
        self.arena.empty()
        self.timed("cold", way, lambda: way.build(PINS[0]))
        if first:
            self.sizes(way, way.tag(PINS[0]))
        self.timed("pin, wheel to fetch", way, lambda: way.build(PINS[1]))
        if way.keeps:
            way.bring(PINS[2])
            self.timed("pin, wheel here", way, lambda: way.build(PINS[2]))

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

    def pushed(self, ways: list[Way]) -> None:
        """Measure the bytes that a push of the image transfers, then a push of an image with a different cuBLAS; for
        envbuild also a push of a second GPU's image."""
        for way in ways:
            way.forget()
            self.arena.empty()
            way.build(PINS[0])
            whole = self._push(way, way.tag(PINS[0]))
            way.build(PINS[1])
            self.note("push", way.name, image=whole, change=self._push(way, way.tag(PINS[1])))
            if isinstance(way, Ours):
                way.build_second()
                self.note("push", way.name, second=self._push(way, way.second()))

    def _push(self, way: Way, tag: str) -> int:
        """Push an image, and return the bytes that the registry did not have before."""
        name = f"{self.registry.host}/{way.name}:{tag.rpartition(':')[2]}"
        before = self.registry.holds()
        self.arena.docker("tag", tag, name)
        self.arena.docker("push", "--quiet", name)
        return self.registry.holds() - before
