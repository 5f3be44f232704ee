"""What must be proved of a profile, and what the evidence on disk says of its lock. Asks no engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from envbuild.evidence import evidence_statements_and_store, proof_rules
from envbuild.evidence.proof_rules import Proof, RequiredProof
from envbuild.image.build_records_and_comparison import Record
from envbuild.lock.lock_file import Lock
from envbuild.profile.model import Profile
from envbuild.testrun.selftest_job import performance_requirements, project_tests_digests, required_probes


def wanted(name: str, profile: Profile, lock: Lock) -> RequiredProof:
    selftest = profile.selftest
    require = tuple(required_probes(selftest, bool(profile.gpus), gpu_count=profile.gpu_count))
    settings = {"allow_tf32": selftest.allow_tf32}
    return RequiredProof(
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
    """What must be proved: each of the profile's GPUs, or the CPU."""
    return profile.gpus or (proof_rules.CPU,)


def proofs_of(image_id: str, name: str, profile: Profile, lock: Lock) -> tuple[Proof, ...]:
    """For each model the evidence on one image."""
    return tuple(
        evidence_statements_and_store.newest_proofs(image_id, wanted(name, profile, lock), models_to_prove(profile))
    )


_BEST_FIRST = ("proved", "stale", "missing")


def on_disk(
    name: str, profile: Profile, lock: Lock | None, built: Iterable[Record], published: Iterable[Proof] = ()
) -> tuple[Proof, ...]:
    """For each model the best proof of any image that was built from this lock, wherever that image is now.

    `published`: proofs of this lock that others signed.
    """
    found = list(map(proof_rules.untested, models_to_prove(profile)))
    for record in built:
        found += proofs_of(record.image, name, profile, lock) if lock and record.lock == lock.id else ()
    found += published
    best = sorted(found, key=lambda proof: _BEST_FIRST.index(proof.state))
    return tuple(next(proof for proof in best if proof.model == model) for model in models_to_prove(profile))


def reason(name: str, proof: Proof) -> str:
    """What is known of one model; the CPU, which is many profiles' one, goes by the name of its profile."""
    return f"{name if proof.model == proof_rules.CPU else proof.model}: {proof.reason}"


def proof_sentence(name: str, proofs: Iterable[Proof]) -> str:
    """`proved on NVIDIA H20, 2026-11-21`; `proved: never` where no card was ever tried."""
    told = [p.reason if p.state == "proved" else reason(name, p) for p in proofs if p.state != "missing"]
    never = [proof.model for proof in proofs if proof.state == "missing"]
    return "; ".join([*told, *(f"{model}: never" for model in never)]) if told else "proved: never"


def document(proofs: Iterable[Proof]) -> list[dict[str, Any]]:
    """For `--json`; `unconfined` only where there is something to say."""
    return [
        {
            "model": proof.model,
            "state": proof.state,
            "evidence": str(proof.evidence) if proof.evidence else None,
            **({"unconfined": list(proof.unconfined)} if proof.unconfined else {}),
        }
        for proof in proofs
    ]
