"""Determines the evidence that a profile requires, and finds the evidence on disk for its lock. Needs no engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from envbuild.evidence import evidence_statements_and_store, proof_rules
from envbuild.evidence.proof_rules import EvidenceRequirements, Proof
from envbuild.image.build_records import Record
from envbuild.image.image_naming import VERIFIED, repository
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.model import Profile
from envbuild.testrun.selftest_job import performance_requirements, project_tests_digests, required_probes
from envbuild.util.json_output_types import ImageState
from envbuild.util.untrusted_input_errors import Reason

EvidenceState = Literal["verified", "unverified", "stale", "failed"]


def wanted(name: str, profile: Profile, lock: Lock) -> EvidenceRequirements:
    selftest = profile.selftest
    require = tuple(required_probes(selftest, bool(profile.gpus), gpu_count=profile.gpu_count))
    settings = {"allow_tf32": selftest.allow_tf32}
    return EvidenceRequirements(
        name,
        lock.id,
        selftest.level,
        require,
        settings,
        profile.gpu_count,
        selftest.transport,
        project_tests_digests(selftest),
        performance_requirements(selftest),
    )


def models_to_prove(profile: Profile) -> tuple[str, ...]:
    """Return the GPU models that need evidence: those of the profile, or the CPU."""
    return profile.gpus or (proof_rules.CPU,)


def proofs_of(image_id: str, name: str, profile: Profile, lock: Lock) -> tuple[Proof, ...]:
    """Return a proof for each GPU model of the profile, from the evidence about one image."""
    return tuple(
        evidence_statements_and_store.newest_proofs(image_id, wanted(name, profile, lock), models_to_prove(profile))
    )


_BEST_FIRST = ("proved", "stale", "missing")


def on_disk(
    name: str, profile: Profile, lock: Lock | None, built: Iterable[Record], published: Iterable[Proof] = ()
) -> tuple[Proof, ...]:
    """Return for each GPU model the best evidence about any image built from this lock, even if the image was deleted.

    `built`: the build records. `published`: evidence for this lock that contributors signed.
    """
    found = list(map(proof_rules.untested, models_to_prove(profile)))
    for record in built:
        found += proofs_of(record.image, name, profile, lock) if lock and record.lock == lock.id else ()
    found += published
    best = sorted(found, key=lambda proof: _BEST_FIRST.index(proof.state))
    return tuple(next(proof for proof in best if proof.model == model) for model in models_to_prove(profile))


def reason(name: str, proof: Proof) -> str:
    """Return `MODEL: reason`. For the CPU, return `PROFILE: reason`, because many profiles use the CPU."""
    return f"{name if proof.model == proof_rules.CPU else proof.model}: {proof.reason}"


def proof_sentence(name: str, proofs: Iterable[Proof]) -> str:
    """Return a text such as `proved on NVIDIA H20, 2026-11-21`; `unverified` if no GPU model has evidence."""
    known = [p.reason if p.state == "proved" else reason(name, p) for p in proofs if p.state != "missing"]
    missing = [proof.model for proof in proofs if proof.state == "missing"]
    return "; ".join([*known, *(f"{model}: unverified" for model in missing)]) if known else "unverified"


@dataclass(frozen=True)
class ProofRow:
    """The evidence for one GPU model in a JSON document. `model`: cpu for a profile without GPUs. `state`: stale: the
    evidence does not meet the requirements, for example because it is for another lock, self-test or level; failed: the
    self-test failed, and no later run overrides the failure. `statement`: the file. For valid evidence,
    `level` is the level of the self-test, and `unconfined` lists the restrictions of Docker's containers that were
    missing when it ran."""

    model: str
    state: Literal["verified", "stale", "failed", "missing"]
    statement: str | None
    reason: str
    level: str | None
    unconfined: tuple[str, ...]


_ROW_STATES: Mapping[str, Literal["verified", "stale", "missing"]] = {
    "proved": "verified",
    "stale": "stale",
    "missing": "missing",
}


def proof_rows(proofs: Iterable[Proof]) -> tuple[ProofRow, ...]:
    return tuple(
        ProofRow(
            proof.model,
            "failed" if proof.failed else _ROW_STATES[proof.state],
            str(proof.evidence) if proof.evidence else None,
            proof.reason,
            proof.level,
            proof.unconfined,
        )
        for proof in proofs
    )


def state_by_evidence(proofs: Sequence[Proof], stale: bool = False) -> EvidenceState:
    """Return the state of a locked profile's image, or of an environment, from its evidence alone. `stale`: the lock is
    out of date, or the environment has changed."""
    if any(proof.failed for proof in proofs):
        return "failed"
    if stale or any(proof.state == "stale" for proof in proofs):
        return "stale"
    return "verified" if proofs and all(proof.state == "proved" for proof in proofs) else "unverified"


def image_state(proofs: Sequence[Proof], *, built: bool, stale: bool) -> ImageState:
    """Return the state of a profile's image if its tags are correct. `built`: whether an image of the lock exists."""
    return state_by_evidence(proofs, stale) if built else "missing"


def reasons_not_verified(
    name: str,
    lock: Lock | None,
    stale: Sequence[str],
    proofs: Sequence[Proof],
    *,
    built: bool,
    built_differently: str | None = None,
) -> list[Reason]:
    """Return the reasons why a profile's image is not verified, apart from those about tags. `stale`: the parts of the
    lock that no longer match the profile. `built_differently`: how an image of the lock was built that does not
    count."""
    reasons = [Reason("lock", f"{part} changed in the profile since it was locked") for part in stale]
    reasons += [Reason("evidence", reason(name, proof)) for proof in proofs if proof.state != "proved"]
    if lock is None:
        reasons.append(Reason("lock", "never locked"))
    elif not built:
        missing = f"{built_differently}: make it again" if built_differently else "no image was built from its lock"
        reasons.append(Reason("image", missing))
    return reasons


def next_command(state: ImageState, loaded: LoadedProfile, proofs: Sequence[Proof]) -> str:
    """Return the command to type next for a profile in this state."""
    if state == "verified":
        gpus = "--gpus all " if loaded.profile.gpus else ""
        return f"docker run --rm -it {gpus}{repository(loaded.name)}:{VERIFIED}"
    if state == "failed":
        return f"envbuild test {loaded.known}"
    if state == "unverified" and any(proof.state != "proved" for proof in proofs):
        return f"envbuild test {loaded.known} --record"
    return f"envbuild make {loaded.known}"
