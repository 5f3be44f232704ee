"""Kill envbuild with SIGKILL in `make` or `build`: at the begin and end of steps, before effects, at random times."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from e2e.support import Result

from chaos.invariant import WRONG, Breach
from chaos.place import NAME, PATIENCE, Place
from chaos.products import VARIANTS
from chaos.rounds import Struck, both, current, forget_build, forget_proof, forget_unused, other, wait
from envbuild.image.image_naming import VERIFIED, repository

# bytes; the start "fetch" removes only smaller wheels from the store, so that larger ones are never fetched again
_SMALL = 5_000_000


@dataclass(frozen=True)
class Start:
    """The state from which a round begins. `set` puts the project into this state. `steps`: the steps that have work to
    do from there."""

    set: Callable[[Place, str], None]
    steps: tuple[str, ...]
    options: tuple[str, ...] = ()


def _relock(place: Place, variant: str) -> None:
    """Change the profile, and remove the image of its new lock."""
    forget_build(place, variant)


def _layer(place: Place, variant: str) -> None:
    """Lock the profile, and remove the layer that differs from the other variant from the builder's cache, so that it
    is built again."""
    place.lock_file.write_text(place.locks[variant], encoding="utf-8")
    forget_build(place, variant)
    forget_unused(place)


def _reprove(place: Place, variant: str) -> None:
    forget_proof(place, variant)


def _fetch(place: Place, variant: str) -> None:
    """Remove the small wheels from the store."""
    forget_build(place, variant)
    for file in place.project.cached("wheels").glob("*/*.whl"):
        if file.stat().st_size < _SMALL:
            shutil.rmtree(file.parent)


def _without_base(place: Place, variant: str) -> None:
    forget_build(place, variant)
    for file in place.project.cached("bases").glob("*"):
        file.unlink()


def _switch(place: Place, variant: str) -> None:
    """Change the profile to one whose image exists and is verified: little work is left, and `verified` moves."""


STARTS = {
    "switch": Start(_switch, ("load profile", "resolve", "lock", "render")),
    "relock": Start(_relock, ("build", "load", "audit")),
    "layer": Start(_layer, ("build", "load", "audit")),
    "reprove": Start(_reprove, ("self-test", "evidence", "tag")),
    "fetch": Start(_fetch, ()),
    "base": Start(_without_base, ()),
    "cold": Start(_relock, (), ("--no-cache",)),
}


@dataclass(frozen=True)
class Moments:
    """The moments of the kills. `boundaries`: pairs of a start, and the begin or end of a step; every `every`-th round
    takes the next pair. `shares`: how often each start is used in the other rounds; the share is smaller if a run takes
    longer."""

    boundaries: Sequence[tuple[str, str]]
    every: int
    shares: Mapping[str, int]


MAKE = Moments(
    [
        (start, f"{edge} {step}")
        for start in ("switch", "relock", "reprove")
        for step in STARTS[start].steps
        for edge in ("begin", "end")
    ],
    every=7,
    shares={"switch": 44, "relock": 16, "fetch": 8, "reprove": 5, "cold": 1, "base": 1},
)
# For a build without self-test, that of a large image: few kills, so most are at moments with half-finished work.
BUILD = Moments(
    [("layer", f"{edge} {step}") for edge in ("end", "begin") for step in STARTS["layer"].steps],
    every=3,
    shares={"layer": 5, "switch": 1},
)


@dataclass
class Kills:
    """Kills of envbuild. `starts`: the states from which rounds begin; if empty, all states that `moments` contains.
    `effects`, `seconds`: start -> the number of effects of a whole run from that start, and the duration of that
    run."""

    starts: Collection[str] = ()
    name: str = "kill"
    moments: Moments = MAKE
    effects: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    target: str = VARIANTS[0]

    def prepare(self, place: Place) -> None:
        both(place)

    def _measure(self, place: Place, start: str) -> None:
        """Measure a whole run from that start once."""
        if start in self.effects:
            return
        self._begin(place, start)
        trace = place.root / "trace"
        trace.unlink(missing_ok=True)
        done = place.make(self.target, *STARTS[start].options, trace=trace)
        self.effects[start] = len(trace.read_text(encoding="utf-8").splitlines())
        self.seconds[start] = done.seconds

    def _begin(self, place: Place, start: str) -> None:
        self.target = other(current(place, self.target)) if start != "reprove" else current(place, self.target)
        place.want(self.target)
        STARTS[start].set(place, self.target)

    def strike(self, place: Place, dice: random.Random, number: int) -> Struck | None:
        start, kind, moment, delay = self._moment(place, dice, number)
        self._begin(place, start)
        running = place.start(place.product.verb, NAME, "--json", *STARTS[start].options, at=moment)
        if moment is None and not wait(delay, lambda: not running.alive()):
            running.kill()
        ended = running.finish(PATIENCE)
        if ended.code != -9:  # the moment was not reached: the run ended normally
            assert ended.code == 0, f"{start}, {moment or delay}: {ended.code}\n{ended.stdout}\n{ended.stderr}"
            return None
        return Struck(kind, f"{start}, {moment or f'{delay:.3f} s'}", ended.code, round(ended.seconds, 2))

    def _moment(self, place: Place, dice: random.Random, number: int) -> tuple[str, str, str | None, float]:
        """Return (start, kind, moment, delay): every boundary in turn; otherwise half of the kills at an effect and
        half at any time."""
        every = self.moments.every
        shares = {start: share for start, share in self.moments.shares.items() if start in (self.starts or STARTS)}
        boundaries = [(start, moment) for start, moment in self.moments.boundaries if start in shares]
        if number % every == 0 and boundaries:
            start, moment = boundaries[number // every % len(boundaries)]
            return start, "at a step's begin or end", moment, 0.0
        (start,) = dice.choices([*shares], [*shares.values()])
        self._measure(place, start)
        if number % 2:
            return start, "before an effect", f"effect {dice.randint(1, self.effects[start])}", 0.0
        return start, "at a random moment", None, dice.uniform(0.2, self.seconds[start])

    def again(self, place: Place) -> Result:
        return place.make(self.target)

    def extra(self, place: Place) -> list[Breach]:
        """Check that a product that was only built is never verified, whatever evidence exists."""
        if place.product.status == VERIFIED:
            return []
        named = place.engine.client().api.images(f"{repository(NAME)}:{VERIFIED}")
        return [Breach(WRONG, f"{image['Id'][:19]}: nothing can prove it here") for image in named]

    def close(self) -> None:
        """Nothing to close."""
