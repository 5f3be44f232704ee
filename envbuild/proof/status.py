"""Verified or why not, recomputed from the lock, the image, its build record and the evidence every time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from envbuild.image import build
from envbuild.image.engine import Engine, Image
from envbuild.plan.lock import Lock
from envbuild.plan.profile import Profile
from envbuild.proof import evidence
from envbuild.proof.evidence import Proof, Wanted

VERIFIED = "verified"


@dataclass(frozen=True)
class Status:
    """`state`: verified, unproved, out-of-date, missing or tampered; `reasons` say why, each with what to do."""

    name: str
    state: str
    reasons: tuple[str, ...]
    lock: str | None
    image: Image | None
    tags: tuple[str, ...]
    proofs: tuple[Proof, ...]

    def document(self) -> dict[str, Any]:
        return {
            "profile": self.name,
            "status": self.state,
            "reasons": list(self.reasons),
            "lock": self.lock,
            "image": {"id": self.image.id, "tags": list(self.tags)} if self.image else None,
            "proofs": proofs_document(self.proofs),
        }


def proofs_document(proofs: tuple[Proof, ...]) -> list[dict[str, Any]]:
    return [{"model": p.model, "state": p.state, "evidence": str(p.evidence) if p.evidence else None} for p in proofs]


def wanted(profile: Profile, lock: Lock) -> Wanted:
    return Wanted(lock.id, profile.selftest.level, profile.selftest.require)


def built(engine: Engine, lock: Lock, text: str) -> Image | None:
    """The image that was built from this lock and Dockerfile, if the engine still has it."""
    record = build.recorded(lock, text)
    image = engine.find(record.handle) if record else None
    return image if record and image and image.id == record.image else None


def compute(engine: Engine, name: str, profile: Profile, lock: Lock | None, stale: list[str], text: str) -> Status:
    """`stale`: the parts of the lock that no longer fit the profile; `text`: the Dockerfile of the lock."""
    repository = build.repository(name)
    tags = engine.tags(repository)
    if lock is None:
        return _nothing(name, None, "never locked; run: envbuild make " + name, engine, tags)
    image = built(engine, lock, text)
    if image is None:
        return _nothing(name, lock.id, f"not built for its lock; run: envbuild make {name}", engine, tags)
    proofs = tuple(evidence.prove(image.id, wanted(profile, lock)))
    names = tuple(f"{repository}:{tag}" for tag, handle in sorted(tags.items()) if handle == image.handle)
    reasons = [f"{part} changed in the profile since it was locked" for part in stale]
    state = "out-of-date" if stale else VERIFIED
    for proof in proofs:
        if proof.state != "proved":
            reasons.append(f"{proof.model}: {proof.reason}")
            state = "out-of-date" if stale or proof.state == "stale" else "unproved"
    tag = _tag(engine, tags, image, proofs)
    if tag == _BY_HAND:
        state = "tampered"
    elif tag and state == VERIFIED:
        state = "unproved"
    return Status(name, state, (*reasons, *([tag] if tag else [])), lock.id, image, names, proofs)


_BY_HAND = "the tag verified was moved by hand to an image that never passed"


def _tag(engine: Engine, tags: dict[str, str], image: Image, proofs: tuple[Proof, ...]) -> str | None:
    """What is wrong with the tag `verified`, None if it is what the evidence says."""
    handle = tags.get(VERIFIED)
    proved = all(proof.state == "proved" for proof in proofs)
    if handle is None:
        return "the tag verified is missing" if proved else None
    tagged = image if handle == image.handle else engine.find(handle)
    # An image that passed in its time keeps the tag until its successor is proved.
    if tagged is None or not evidence.ever_passed(tagged.id):
        return _BY_HAND
    return "the tag verified names an earlier image" if proved and handle != image.handle else None


def _nothing(name: str, lock: str | None, reason: str, engine: Engine, tags: dict[str, str]) -> Status:
    return Status(name, "missing", (reason,), lock, None, (), ())
