"""What is known of a profile, as one page tells it: whether it is proved, what was measured, what is in it. Pure.

Nothing here is the clock's: the same evidence gives the same page to the byte.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.evidence import profile_proofs
from envbuild.evidence.proof_rules import Proof
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import Source
from envbuild.report import fingerprint_comparison, pin_reasons, profile_and_image_diff, run_measurement_reader
from envbuild.report.fingerprint_comparison import Comparison
from envbuild.report.run_measurement_types import KnownAdvisory, Run
from envbuild.resolve.plan_resolver import Plan
from envbuild.resolve.torch_compatibility_and_advisories import Choice
from envbuild.testrun.fingerprint_reader import Fingerprint

PROVED, FAILED, OUT_OF_DATE, UNPROVED, UNLOCKED = "proved", "failed", "out of date", "not proved", "not locked"


@dataclass(frozen=True)
class PageGpu:
    """What the evidence says of one model that the profile is for. `state`: proved, stale or missing."""

    model: str
    state: str
    failed: bool
    reason: str
    evidence: str | None


@dataclass(frozen=True)
class PageStatus:
    """`state` is one of those above; `reasons` say why; `next`: the command to run, and `where` or when; `images`: the
    ids that builds of this lock gave."""

    state: str
    reasons: tuple[str, ...]
    next: str
    where: str
    cards: tuple[PageGpu, ...]
    lock: str | None
    images: tuple[str, ...]


@dataclass(frozen=True)
class PageLayer:
    """A layer of the image. `bytes`: of the files to fetch for it; None where only the base image's digest is known.
    `shared`: the other profiles whose image has the same layer."""

    number: int
    title: str
    bytes: int | None
    shared: tuple[str, ...]


@dataclass(frozen=True)
class Layers:
    """The layers from the largest down; `compared`: how many other profiles were looked at."""

    layers: tuple[PageLayer, ...]
    compared: int

    def bytes(self, shared: bool | None = None) -> int:
        """Of all layers, or of those that are (not) shared."""
        return sum(item.bytes or 0 for item in self.layers if shared in (None, bool(item.shared)))


@dataclass(frozen=True)
class PageAdvice:
    """An advisory that holds. `state`: refused, accepted, warned or noted."""

    state: str
    reason: str
    known: KnownAdvisory


@dataclass(frozen=True)
class PagePin:
    name: str
    version: str
    reason: str


@dataclass(frozen=True)
class LeftOut:
    """An extension that the profile does without, and its reason."""

    name: str
    reason: str


@dataclass(frozen=True)
class Variable:
    """Of the image's environment; `reason` where the cards of a fleet need it."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True)
class Compared:
    """Two fingerprints: the machines that they were recorded on, and where they part."""

    a: str
    b: str
    result: Comparison


@dataclass(frozen=True)
class Page:
    """`name` to `driver`: of the profile. `runs`: what the evidence measured, one for each card that was tried.
    `layers`: None without a lock; `compared`: None where no fingerprints were given."""

    name: str
    description: str
    python: str
    torch: str
    cuda: str | None
    driver: str | None
    status: PageStatus
    runs: tuple[Run, ...]
    layers: Layers | None
    advice: tuple[PageAdvice, ...]
    pins: tuple[PagePin, ...]
    left_out: tuple[LeftOut, ...]
    environment: tuple[Variable, ...]
    compared: Compared | None

    def document(self) -> dict[str, Any]:
        """For `--json`: all of the above; what is not finite is text."""
        found: dict[str, Any] = _json({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        if self.compared:
            found["compared"] = {
                "a": self.compared.a,
                "b": self.compared.b,
                **fingerprint_comparison.document(self.compared.result),
            }
        return found


def page(
    source: Source,
    plan: Plan,
    choice: Choice,
    lock: Lock | None,
    proofs: Sequence[Proof],
    images: Iterable[str],
    runs: Iterable[Run],
    others: Mapping[str, Lock],
    compared: Compared | None = None,
) -> Page:
    """`choice`: the plan's, as it holds against a lock that fits. `images`: what builds of the lock gave. `runs`: those
    that `proofs` point at. `others`: the locks of other profiles, by name."""
    fits = lock is not None and not lock.stale(plan)
    versions = lock.versions if lock and fits else {}
    reasons = pin_reasons.pin_reasons(plan, choice, versions)
    fleet = {setting.variable: setting.reason for setting in pin_reasons.fleet_settings(plan, choice)}
    environment = lock.environment if lock and fits else plan.environment
    return Page(
        name=source.name,
        description=source.profile.description,
        python=plan.python,
        torch=source.profile.torch,
        cuda=choice.situation.cuda,
        driver=choice.situation.driver,
        status=status(plan, lock, proofs, images, source.profile.gpus),
        runs=tuple(runs),
        layers=page_layers(source.name, lock, others) if lock else None,
        advice=tuple(
            PageAdvice(item.state, item.reason, run_measurement_reader.known_advisory(item.advisory))
            for item in choice.advice
        ),
        pins=tuple(
            PagePin(name, version, reasons.get(name, ""))
            for name, version in pin_reasons.pin_versions(plan, choice, versions).items()
            if version is not None
        ),
        left_out=tuple(LeftOut(one.name, one.none) for one in source.profile.extensions if one.none),
        environment=tuple(Variable(name, value, fleet.get(name, "")) for name, value in sorted(environment.items())),
        compared=compared,
    )


def status(
    plan: Plan, lock: Lock | None, proofs: Sequence[Proof], images: Iterable[str], gpus: Sequence[str] = ()
) -> PageStatus:
    """From evidence alone, as evidence/image_status.py computes it for an image of the engine; no tag is read.

    `gpus`: that the profile is for."""
    stale = lock.stale(plan) if lock else []
    images = tuple(dict.fromkeys(images))
    reasons = [f"{part} changed in the profile since it was locked" for part in stale]
    reasons += [profile_proofs.reason(plan.name, proof) for proof in proofs]
    if lock is None:
        state = UNLOCKED
        reasons = ["not locked"]
    elif any(proof.failed for proof in proofs):
        state = FAILED
    elif stale or any(proof.state == "stale" for proof in proofs):
        state = OUT_OF_DATE
    elif any(proof.state != "proved" for proof in proofs):
        state = UNPROVED
        if not images:
            reasons.append("no build of this lock is recorded here")
    else:
        state = PROVED
    cards = [proof.model for proof in proofs if proof.state != "proved"] if gpus else []
    command, where = _next(plan.name, plan.asked, state, cards)
    return PageStatus(
        state, tuple(reasons), command, where, tuple(map(_card, proofs)), lock.id if lock else None, images
    )


def _next(name: str, asked: str, state: str, cards: Sequence[str]) -> tuple[str, str]:
    """The command that leads on from a state, and where it is run: `cards` are those that are not proved."""
    if state == PROVED:
        return f"envbuild push {asked} REGISTRY/{name}", "to let others use it"
    there = f"where there is {' and '.join(cards)}" if cards else ""
    if state == FAILED:
        return f"envbuild make {asked}", f"{there} once what failed is cured".strip()
    return f"envbuild make {asked}", there


def _card(proof: Proof) -> PageGpu:
    name = proof.evidence.name.partition(".")[0] if proof.evidence else None
    return PageGpu(proof.model, proof.state, proof.failed, proof.reason, name)


def page_layers(name: str, lock: Lock, others: Mapping[str, Lock]) -> Layers:
    """The largest first, those of one size in the image's order. Layers are compared as `envbuild diff` does."""
    holders: dict[str, list[str]] = {}
    for other, held in sorted(others.items()):
        for layer in profile_and_image_diff.of_lock(other, held).layers:
            holders.setdefault(layer.identity, []).append(other)
    found = [
        # of a base image by digest no size is locked
        PageLayer(
            number,
            layer.title,
            None if number == 1 and lock.image else layer.bytes,
            tuple(holders.get(layer.identity, ())),
        )
        for number, layer in enumerate(profile_and_image_diff.of_lock(name, lock).layers, 1)
    ]
    return Layers(tuple(sorted(found, key=lambda layer: -(layer.bytes or 0))), len(others))


def comparison(a: Fingerprint, b: Fingerprint) -> Compared:
    """Raises UsageError where the two cannot be compared."""
    return Compared(
        fingerprint_comparison.machine_line(a.machine),
        fingerprint_comparison.machine_line(b.machine),
        fingerprint_comparison.compare_fingerprints(a, b),
    )


def _json(value: Any) -> Any:
    """Dataclasses as mappings; JSON has no NaN and no infinity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
