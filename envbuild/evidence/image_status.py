"""Computes the status of a profile's image from the lock, the engine's images, the build records and the evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from envbuild.evidence import evidence_statements_and_store, profile_proofs_and_image_states
from envbuild.evidence.profile_proofs_and_image_states import ProofRow
from envbuild.evidence.proof_rules import Proof
from envbuild.image import build_records
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.image_naming import VERIFIED, repository
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver
from envbuild.util.json_output_types import Digest, ImageState, LockState
from envbuild.util.untrusted_input_errors import Reason

TagState = Literal["correct", "missing", "moved", "unknown", "outdated"]


@dataclass(frozen=True)
class StatusDocument:
    """The document of `status`. `changed`: the parts of the lock that no longer match the profile. `tag`: the state of
    the tag `verified`: correct, missing, moved (by hand), unknown (set by another user or machine), or outdated (it
    names a different image); null if no engine can be used. Without an engine, `image` is an image that has a build
    record in the state folder."""

    profile: str
    state: ImageState
    reasons: tuple[Reason, ...]
    next_command: str
    lock: Digest | None
    lock_state: LockState | None
    changed: tuple[str, ...]
    image: Digest | None
    tags: tuple[str, ...]
    tag: TagState | None
    evidence: tuple[ProofRow, ...]


@dataclass(frozen=True)
class Status:
    """The status of an image. `reasons`: why it is not verified; `next`: the command to type next; `stale`: the parts
    of the lock that no longer match the profile; `tag`: None if no engine can be used."""

    name: str
    state: ImageState
    reasons: tuple[Reason, ...]
    lock: str | None
    stale: tuple[str, ...]
    image: Image | None
    tags: tuple[str, ...]
    tag: TagState | None
    proofs: tuple[Proof, ...]
    next: str

    @property
    def details(self) -> tuple[str, ...]:
        return tuple(reason.detail for reason in self.reasons)

    def document(self) -> StatusDocument:
        return StatusDocument(
            profile=self.name,
            state=self.state,
            reasons=self.reasons,
            next_command=self.next,
            lock=self.lock,
            lock_state="missing" if self.lock is None else "outdated" if self.stale else "current",
            changed=self.stale,
            image=self.image.id if self.image else None,
            tags=self.tags,
            tag=self.tag,
            evidence=profile_proofs_and_image_states.proof_rows(self.proofs),
        )


def compute(engine: Engine, loaded: LoadedProfile) -> Status:
    """Compute the status of a profile's image, for the lock on disk. Raises ProfileError or LockError if the profile or
    the lock is invalid."""
    return status_of(engine, loaded, *_lock_on_disk(loaded))


def _lock_on_disk(loaded: LoadedProfile) -> tuple[Lock | None, list[str]]:
    """Return the lock, and its parts that no longer match the profile."""
    plan = plan_resolver.resolve(loaded)
    locked = lock_file.read(loaded.known_lock)
    if locked is None:
        return None, []
    stale = locked.stale(plan)
    if not stale:
        plan_resolver.as_locked(plan, locked.versions)
    return locked, stale


def compute_without_engine(loaded: LoadedProfile) -> Status:
    """Compute the status of a profile's image from the lock, the build records and the evidence alone. Tags are not
    checked. Of several images of the lock, a verified one counts first. Raises what `compute` raises."""
    locked, stale = _lock_on_disk(loaded)
    name, found = loaded.name, lock_image_lookup_and_recipe.matching_records(locked) if locked else []
    proved = [
        (record, profile_proofs_and_image_states.proofs_of(record.image, name, loaded.profile, locked))
        for record in found
        if locked
    ]
    proved.sort(key=lambda one: sum(proof.state != "proved" for proof in one[1]))
    record, proofs = proved[0] if proved else (None, ())
    image = lock_image_lookup_and_recipe.recorded_image(record) if record else None
    built = image is not None
    other = lock_image_lookup_and_recipe.built_differently(locked) if locked and not built else None
    reasons = profile_proofs_and_image_states.reasons_not_verified(
        name, locked, stale, proofs, built=built, built_differently=other
    )
    state: ImageState = profile_proofs_and_image_states.image_state(proofs, built=built, stale=bool(stale))
    command = profile_proofs_and_image_states.next_command(state, loaded, proofs)
    if state == "verified":  # the next command would need an engine
        command = f"envbuild push {loaded.known} HOST/NAME"
    lock_id = locked.id if locked else None
    return Status(name, state, tuple(reasons), lock_id, tuple(stale), image, (), None, proofs, command)


def status_of(engine: Engine, loaded: LoadedProfile, locked: Lock | None, stale: list[str]) -> Status:
    """Compute the status of a profile's image for a lock. `stale`: the parts of the lock that no longer match the
    profile."""
    name, profile = loaded.name, loaded.profile
    named = repository(name)
    tags = engine.tags(named)
    image = lock_image_lookup_and_recipe.existing_image(engine, locked) if locked else None
    proofs = profile_proofs_and_image_states.proofs_of(image.id, name, profile, locked) if locked and image else ()
    built = image is not None
    other = lock_image_lookup_and_recipe.built_differently(locked, engine) if locked and not built else None
    reasons = profile_proofs_and_image_states.reasons_not_verified(
        name, locked, stale, proofs, built=built, built_differently=other
    )
    state: ImageState = profile_proofs_and_image_states.image_state(proofs, built=built, stale=bool(stale))
    tag = _tag(engine, name, tags, image, state == "verified", locked)
    if tag in _TAG_REASONS:
        reasons.append(Reason("tag", _TAG_REASONS[tag]))
        state = "tampered" if tag == "moved" else "unverified" if state == "verified" else state
    names = tuple(f"{named}:{tag}" for tag, handle in sorted(tags.items()) if image and handle == image.handle)
    command = profile_proofs_and_image_states.next_command(state, loaded, proofs)
    lock_id = locked.id if locked else None
    return Status(name, state, tuple(reasons), lock_id, tuple(stale), image, names, tag or "missing", proofs, command)


_TAG_REASONS: Mapping[TagState | None, str] = {
    "missing": "the tag 'verified' is missing",
    "moved": "the tag 'verified' was moved by hand: this machine has no evidence that the image with this tag was "
    "verified for this profile",
    "outdated": "the tag 'verified' names a different image: an earlier image of this profile, or the image of another "
    "profile with the same name",
    "unknown": "the tag 'verified' names an image of this lock, but the state folder has no build record and no "
    "evidence for this image: another user or machine built it, or the folder was lost",
}


def _tag(
    engine: Engine, name: str, tags: dict[str, str], image: Image | None, is_proved: bool, locked: Lock | None
) -> TagState | None:
    """Compare the tag `verified` with the evidence. Returns None if the tag does not exist and `image` is not
    verified."""
    handle = tags.get(VERIFIED)
    if handle is None:
        return "missing" if is_proved else None
    tagged = image if image and handle == image.handle else engine.find(handle)
    locks = {record.lock for record in build_records.all_records(tagged.id)} if tagged else set()
    if locked and not locks and tags.get(locked.short) == handle:
        return "unknown"
    # An image that was verified keeps the tag until its successor is verified.
    if tagged is None or not evidence_statements_and_store.ever_proved(tagged.id, name, locks):
        return "moved"
    return "outdated" if is_proved and tagged != image else "correct"
