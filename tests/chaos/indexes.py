"""Run `lock` and `make` with a package index that is slow, truncates, answers 500, serves wrong bytes or resets."""

from __future__ import annotations

import contextlib
import random
import shutil
from dataclasses import dataclass, field, replace

from e2e.support import Result

from chaos.faulty import MODES, Fault, Index, serving
from chaos.invariant import WRONG, Breach
from chaos.place import NAME, Place
from chaos.products import VARIANTS
from chaos.rounds import Struck, both, current, forget_build, locked, other, words

# 3: the answer was invalid; only wrong bytes may cause this.
_ALLOWED = {mode: {0, 7} for mode in MODES} | {"wrong bytes": {0, 3, 7}}
_SMALL = 30_000_000  # bytes; larger wheels, such as torch, are not downloaded again


@dataclass
class Indexes:
    """Faults of the index. `lock` needs a different version of a package, so that all versions are resolved again;
    `make` lacks wheels."""

    name: str = "index"
    target: str = VARIANTS[0]
    verb: str = "lock"
    index: Index = field(init=False)
    _wide: str | None = None
    _before: str | None = None
    _narrow: str = ""
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def prepare(self, place: Place) -> None:
        both(place)
        self.index = self._stack.enter_context(serving(place.links))
        extra = {key: value for key, value in place.project.extra.items() if key != "PIP_NO_INDEX"}
        extra |= {"PIP_FIND_LINKS": "", "PIP_INDEX_URL": self.index.address}
        place.project = replace(place.project, extra=extra)
        self._widen(place)
        done = place.run("lock", NAME, "--json")
        assert done.code == 0, done.stdout
        self._wide = locked(place)

    def _widen(self, place: Place) -> None:
        """Change the profile to request a package that so far only torch required; the lock is the previous one."""
        if self._before is None:
            self._before = place.lock_file.read_text(encoding="utf-8")
            self._narrow = place.project.dockerfile(NAME).read_text(encoding="utf-8")
        place.lock_file.write_text(self._before, encoding="utf-8")
        place.want(VARIANTS[0])
        place.project.change(NAME, packages=["numpy", "networkx"])

    def _restore(self, place: Place) -> None:
        """Change from the wide lock back to the lock of an existing image."""
        assert self._before
        place.lock_file.write_text(self._before, encoding="utf-8")
        place.project.dockerfile(NAME).write_text(self._narrow, encoding="utf-8")

    def strike(self, place: Place, dice: random.Random, number: int) -> Struck | None:
        mode = MODES[number % len(MODES)]
        self.verb = "make" if number % 4 == 3 else "lock"
        kind = dice.choice(["page", "file"] if self.verb == "make" else ["page", "metadata"])
        fault = Fault(mode, kind, dice.choice([1, 2, 1000]), seconds=dice.choice([1.0, 4.0]))
        if self.verb == "make":
            self._restore(place)
            self.target = other(current(place))
            place.want(self.target)
            forget_build(place, self.target)
            for file in place.project.cached("wheels").glob("*/*.whl"):
                if file.stat().st_size < _SMALL:
                    shutil.rmtree(file.parent)
        else:
            self._widen(place)
        self.index.set(fault)
        ended = place.run(self.verb, NAME, "--json")
        struck = self.index.struck
        self.index.set(None)
        if not struck:
            return None
        message = words(ended)
        times = "for good" if fault.times > 2 else f"{fault.times} times"
        where = f"{self.verb}, {kind}, {times}"
        return Struck(mode, where, ended.code, round(ended.seconds, 2), message, ended.code in _ALLOWED[mode])

    def again(self, place: Place) -> Result:
        return place.make(self.target) if self.verb == "make" else place.run("lock", NAME, "--json")

    def extra(self, place: Place) -> list[Breach]:
        """Check that the lock is byte for byte the one that an index without fault gives. For `make`, the image is
        compared."""
        if self.verb == "make" or locked(place) == self._wide:
            return []
        return [Breach(WRONG, f"another lock, {locked(place)}, than {self._wide}")]

    def close(self) -> None:
        self._stack.close()
