"""Computes the status of an image from the lock, the image, its build record and the evidence, each time it is
needed."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.evidence import evidence_statements_and_store, profile_proofs
from envbuild.evidence.proof_rules import Proof
from envbuild.image import build_records_and_comparison, dockerfile_renderer, image_build
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.image_naming import VERIFIED, repository
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import Source
from envbuild.resolve import plan_resolver


@dataclass(frozen=True)
class Status:
    """The status of an image. `state`: verified, unproved, failed, out-of-date, missing or tampered; `reasons`: why;
    `next`: the command to type next."""

    name: str
    state: str
    reasons: tuple[str, ...]
    lock: str | None
    image: Image | None
    tags: tuple[str, ...]
    proofs: tuple[Proof, ...]
    next: str

    def document(self) -> dict[str, object]:
        return {
            "profile": self.name,
            "status": self.state,
            "reasons": list(self.reasons),
            "next": self.next,
            "lock": self.lock,
            "image": {"id": self.image.id, "tags": list(self.tags)} if self.image else None,
            "proofs": profile_proofs.document(self.proofs),
        }


def compute(engine: Engine, source: Source) -> Status:
    """Compute the status of a profile's image. Raises ProfileError or LockError if the profile or the lock is
    invalid."""
    plan = plan_resolver.resolve(source)
    locked = lock_file.read(source.known_lock)
    if locked is None:
        return status_of(engine, source, None, [], "")
    stale = locked.stale(plan)
    if not stale:
        plan_resolver.as_locked(plan, locked.versions)
    return status_of(engine, source, locked, stale, dockerfile_renderer.render(locked, source.name))


def status_of(engine: Engine, source: Source, locked: Lock | None, stale: list[str], text: str) -> Status:
    """Compute the status from a lock. `stale`: the parts of the lock that no longer match the profile; `text`: the
    lock's Dockerfile."""
    name, profile = source.name, source.profile
    named = repository(name)
    tags = engine.tags(named)
    image = image_build.existing_image(engine, locked, text) if locked else None
    proofs = profile_proofs.proofs_of(image.id, name, profile, locked) if locked and image else ()
    reasons = [f"{part} changed in the profile since it was locked" for part in stale]
    reasons += [profile_proofs.reason(name, proof) for proof in proofs if proof.state != "proved"]
    if image is None:
        state = "missing"
        reasons.append("not built for its lock" if locked else "never locked")
    elif any(proof.failed for proof in proofs):
        state = "failed"
    elif stale or any(proof.state == "stale" for proof in proofs):
        state = "out-of-date"
    else:
        state = "unproved" if reasons else VERIFIED
    tag = _tag(engine, name, tags, image, state == VERIFIED, locked)
    if tag:
        reasons.append(tag)
        state = "tampered" if tag == _BY_HAND else "unproved" if state == VERIFIED else state
    names = tuple(f"{named}:{tag}" for tag, handle in sorted(tags.items()) if image and handle == image.handle)
    command = _next_command(state, source, proofs)
    return Status(name, state, tuple(reasons), locked.id if locked else None, image, names, proofs, command)


def _next_command(state: str, source: Source, proofs: tuple[Proof, ...]) -> str:
    if state == VERIFIED:
        gpus = "--gpus all " if source.profile.gpus else ""
        return f"docker run --rm -it {gpus}{repository(source.name)}:{VERIFIED}"
    if state == "failed":
        return f"envbuild test {source.known}"
    if state == "unproved" and any(proof.state != "proved" for proof in proofs):
        return f"envbuild test {source.known} --record"
    return f"envbuild make {source.known}"


_BY_HAND = "the tag verified was moved by hand: this machine has no evidence that its image was proved for this profile"

_ANOTHER = "the tag verified names a different image: an earlier one, or that of another profile with the same name"

_ELSEWHERE = (
    "the tag verified names an image of this lock of which this state folder holds no record and no evidence: another "
    "user or machine made it, or the folder was lost"
)


def _tag(
    engine: Engine, name: str, tags: dict[str, str], image: Image | None, is_proved: bool, locked: Lock | None
) -> str | None:
    """Return what is wrong with the tag `verified`, or None if it agrees with the evidence."""
    handle = tags.get(VERIFIED)
    if handle is None:
        return "the tag verified is missing" if is_proved else None
    tagged = image if image and handle == image.handle else engine.find(handle)
    locks = {record.lock for record in build_records_and_comparison.all_records(tagged.id)} if tagged else set()
    if locked and not locks and tags.get(locked.short) == handle:
        return _ELSEWHERE
    # An image that was verified once keeps the tag until its successor is verified.
    if tagged is None or not evidence_statements_and_store.ever_proved(tagged.id, name, locks):
        return _BY_HAND
    return _ANOTHER if is_proved and tagged != image else None
