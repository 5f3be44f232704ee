"""Kill the engine with SIGKILL during `make`, and restart the engine while `make` may still wait for the engine."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass, field

from e2e.support import Result

from chaos.invariant import Breach
from chaos.kills import STARTS
from chaos.place import NAME, PATIENCE, Place
from chaos.products import VARIANTS
from chaos.rounds import Struck, both, current, other, wait, words

_ALLOWED = {0, 6}  # 0: the run no longer needed the engine, or waited for it; 6: engine error
SHARES = {"switch": 3, "relock": 3, "reprove": 2, "cold": 1}  # of kills.STARTS
BUILDING = ("relock", "cold")  # the starts of which a build follows


@dataclass
class Engines:
    """Faults of the engine. `starts`: the states from which rounds begin; all if none is given."""

    starts: Collection[str] = ()
    name: str = "engine"
    seconds: dict[str, float] = field(default_factory=dict)
    target: str = VARIANTS[0]

    def prepare(self, place: Place) -> None:
        both(place)

    def strike(self, place: Place, dice: random.Random, number: int) -> Struck | None:
        shares = {start: share for start, share in SHARES.items() if start in (self.starts or SHARES)}
        (start,) = dice.choices([*shares], [*shares.values()])
        options = STARTS[start].options
        if start not in self.seconds:
            self._begin(place, start)
            self.seconds[start] = place.make(self.target, *options).seconds
        self._begin(place, start)
        whole, pause = dice.random() < 0.3, dice.choice([0.0, 0.5, 3.0])
        delay = dice.uniform(0.3, self.seconds[start])
        running = place.start("make", NAME, "--json", *options)
        if wait(delay, lambda: not running.alive()):
            running.finish()
            return None
        place.engine.kill(whole)
        wait(pause, lambda: False)
        place.engine.start()
        ended = running.finish(PATIENCE)
        place.heard.append(ended.stderr)
        what = "dockerd and containerd" if whole else "dockerd"
        where = f"{start}, {delay:.3f} s, back after {pause} s"
        message = words(ended)
        return Struck(what, where, ended.code, round(ended.seconds, 2), message, ended.code in _ALLOWED)

    def _begin(self, place: Place, start: str) -> None:
        self.target = current(place) if start == "reprove" else other(current(place))
        place.want(self.target)
        place.heard.clear()
        if start in BUILDING:  # it may give a different image, and the present one is removed
            place.look(place.images[self.target])
        with place.recorded():  # so that a different image can be reported
            STARTS[start].set(place, self.target)

    def again(self, place: Place) -> Result:
        return place.make(self.target)

    def extra(self, place: Place) -> list[Breach]:
        return []

    def close(self) -> None:
        """Nothing to close."""
