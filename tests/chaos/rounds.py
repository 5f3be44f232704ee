"""A campaign: rounds of one fault each. In each round, the invariants are checked after the fault, and again after a
run without fault."""

from __future__ import annotations

import json
import random
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from e2e.support import Result

from chaos.invariant import LEFT, Breach, Ground, check
from chaos.place import NAME, Place
from chaos.products import VARIANTS
from envbuild.image.image_naming import repository
from envbuild.lock import lock_file

NONE = "none"


@dataclass(frozen=True)
class Struck:
    """One injected fault. `kind`: its kind, for the table; `where`: the moment; `code`: the exit code of the run into
    which it was injected, -9 if that run was killed; `message`: the error of that run; `fair`: whether the run may end
    this way."""

    kind: str
    where: str
    code: int
    seconds: float
    message: str = ""
    fair: bool = True


@dataclass(frozen=True)
class Outcome:
    """`next_code` and `next_seconds`: of the following run; `breaches`: the violated invariants, after the fault or the
    following run; `others`: how many images replaced an image with the same files, which was reported."""

    struck: Struck
    next_code: int
    next_seconds: float
    breaches: tuple[str, ...]
    others: int = 0


class Campaign(Protocol):
    """`strike` injects a fault and returns the result. `strike` returns None if the run ended before the fault; then
    another fault is tried. `again` is the following run, which must complete."""

    name: str

    def prepare(self, place: Place) -> None: ...
    def strike(self, place: Place, dice: random.Random, number: int) -> Struck | None: ...
    def again(self, place: Place) -> Result: ...
    def extra(self, place: Place) -> list[Breach]: ...
    def close(self) -> None: ...


@dataclass
class Ran:
    """A finished campaign. `preparing`: seconds until the first fault."""

    name: str
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    preparing: float = 0.0
    seconds: float = 0.0

    @property
    def breaches(self) -> list[str]:
        return [breach for outcome in self.outcomes for breach in outcome.breaches]

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Ran:
        outcomes = [
            Outcome(**{**one, "struck": Struck(**one["struck"]), "breaches": tuple(one["breaches"])})
            for one in document["outcomes"]
        ]
        return cls(**{**document, "outcomes": outcomes})


def run(campaign: Campaign, place: Place, count: int, seed: int, keep: Callable[[Ran], None] = lambda ran: None) -> Ran:
    """Run `count` faults; apart from timing, a seed always gives the same faults. `keep` is called after each fault."""
    ran, begin = Ran(campaign.name, seed), time.monotonic()
    campaign.prepare(place)
    assert not (found := check(ground(place), settled=True)), f"before any fault: {', '.join(map(str, found))}"
    ran.preparing = time.monotonic() - begin
    tries = 0
    while len(ran.outcomes) < count:
        tries += 1
        assert tries < 10 * count + 20, "too few of the faults found something to hit"
        dice = random.Random(f"{campaign.name} {seed} {tries}")
        try:
            struck = campaign.strike(place, dice, len(ran.outcomes))
        except AssertionError as failed:  # in a run without an injected fault
            struck = Struck(NONE, "-, a run without a fault", -1, 0.0, str(failed)[:500], fair=False)
        if struck:
            ran.outcomes.append(_settle(campaign, place, struck))
            _print_outcome(len(ran.outcomes), count, ran.outcomes[-1])
            ran.seconds = time.monotonic() - begin
            keep(ran)
    return ran


def _settle(campaign: Campaign, place: Place, struck: Struck) -> Outcome:
    breaches = [f"after the fault: {breach}" for breach in check(ground(place))]
    if not struck.fair:
        breaches.append(f"the run under it ended with {struck.code}: {struck.message}")
    begin = time.monotonic()
    try:
        code = campaign.again(place).code
    except AssertionError as failed:
        code = -1
        breaches.append(f"the next run: {failed}")
    seconds = time.monotonic() - begin
    found = [*check(ground(place), settled=True), *campaign.extra(place)]
    found += [Breach(LEFT, f"process {line[:100]}") for line in place.processes().values()]
    breaches += [f"after the next run: {breach}" for breach in found]
    if found or code:
        clear(place)
    others = len(place.others)
    place.others.clear()
    return Outcome(struck, code, round(seconds, 2), tuple(breaches), others)


def _print_outcome(number: int, count: int, outcome: Outcome) -> None:
    struck = outcome.struck
    line = f"{number}/{count} {struck.kind}, {struck.where}: {struck.code} in {struck.seconds:.1f} s; "
    other = "; the same files under another image id" if outcome.others else ""
    print(f"{line}next {outcome.next_code} in {outcome.next_seconds:.1f} s{other}", file=sys.stderr, flush=True)
    for breach in outcome.breaches:
        print(f"    {breach}", file=sys.stderr, flush=True)


def ground(place: Place) -> Ground:
    return Ground(
        place.project.folder, place.project.state, place.project.cached("wheels").parent, place.temporary,
        place.engine.client(), place.rendered,
    )  # fmt: skip


def clear(place: Place) -> None:
    """Remove leftovers after a violation, so that each round is charged only with its own."""
    client = place.engine.client()
    for container in client.api.containers(all=True):
        client.api.remove_container(container["Id"], force=True)
    for path in place.temporary.iterdir():
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
    for folder in (place.project.folder, place.project.state, place.root / "cache"):
        for path in sorted(folder.rglob(".*")):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    known = {"verified", *(one.removeprefix("sha256:")[:12] for one in place.rendered)}
    for image in client.api.images():
        for name in image.get("RepoTags") or ():
            if name.rpartition(":")[2] not in known:
                client.api.remove_image(name, force=True)
        if not image.get("RepoTags"):
            client.api.remove_image(image["Id"], force=True)


# the states from which a campaign begins its rounds


def both(place: Place) -> None:
    """Make both variants, verified if possible; at the end, the profile is that of the first variant."""
    for variant in reversed(VARIANTS):
        place.want(variant)
        place.make(variant)
    assert len({place.images[variant] for variant in VARIANTS}) == len(VARIANTS), "both have the same image"


def current(place: Place, made: str = VARIANTS[0]) -> str:
    """Return the variant whose image is tagged verified. If no image has the tag, return `made`, the variant that was
    made last."""
    (found,) = place.engine.client().api.images(f"{repository(NAME)}:verified") or [None]
    return next((name for name, image in place.images.items() if found and image == found["Id"]), made)


def other(variant: str) -> str:
    return VARIANTS[1 - VARIANTS.index(variant)]


def forget_build(place: Place, variant: str) -> None:
    """Remove the build record and the tag, as if the image had never been built here; only the builder's cache stays.
    The image must then not be verified."""
    image = place.images[variant]
    for file in place.records.glob(f"*-{image.removeprefix('sha256:')[:12]}.json"):
        file.unlink()
    for found in place.engine.client().api.images():
        if found["Id"] == image:
            for name in found["RepoTags"] or ():
                place.engine.client().api.remove_image(name)


def forget_unused(place: Place) -> None:
    """Remove the builder's cache of images that were removed, so that layers used only by a removed image are built
    again."""
    presence: list[str] = []  # a filter without a value selects records that have the key
    place.engine.client(300).api.prune_builds(filters={"type": "regular", "private": presence})


def forget_proof(place: Place, variant: str) -> None:
    """Remove the evidence, as if the self-test had never run. The image must then not be verified."""
    image = place.images[variant]
    shutil.rmtree(place.evidence / image.removeprefix("sha256:"), ignore_errors=True)
    client = place.engine.client()
    for found in client.api.images(f"{repository(NAME)}:verified"):
        if found["Id"] == image:
            client.api.remove_image(f"{repository(NAME)}:verified")


def words(ended: Result) -> str:
    """The error of a failed run: the message, and the first line of the hint. Empty if the run passed."""
    if not ended.code:
        return ""
    error = json.loads(ended.stdout or "{}").get("error", {})
    return f"{error.get('message', ended.stderr[-300:])} ({str(error.get('hint')).partition(chr(10))[0][:200]})"


def locked(place: Place) -> str | None:
    found = lock_file.read(place.lock_file)
    return found.id if found else None


def wait(seconds: float, ended: Callable[[], bool]) -> bool:
    """Whether the run ended before the time was over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if ended():
            return True
        time.sleep(0.005)
    return ended()
