"""Computes from files and evidence whether a Python environment of this machine is verified for a profile."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from envbuild.evidence import evidence_statements_and_store, profile_proofs_and_image_states
from envbuild.evidence.environment_record import MeasuredEnvironment
from envbuild.evidence.profile_proofs_and_image_states import EvidenceState, ProofRow
from envbuild.evidence.proof_rules import Proof
from envbuild.lock.lock_file import Lock
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.util.errors import CheckFailed
from envbuild.util.json_output_types import Digest
from envbuild.util.untrusted_input_errors import Reason


@dataclass(frozen=True)
class EnvironmentStatusDocument:
    """The document of `status --python`. `environment`: the path of the interpreter. `subject`: the digest of the
    locked distributions' files; null, with the state failed, if they do not match the lock or cannot be measured."""

    profile: str
    environment: str
    state: EvidenceState
    reasons: tuple[Reason, ...]
    next_command: str
    lock: Digest
    subject: Digest | None
    evidence: tuple[ProofRow, ...]


@dataclass(frozen=True)
class RecordedEnvironment:
    """The evidence on this machine about one environment, for one GPU model of a profile. Whether the environment has
    changed since its newest run was recorded is not checked. `subject`: the digest of the locked files; `python`: the
    version of the interpreter; `driver`: null for a run on the CPU."""

    subject: Digest
    model: str
    state: Literal["verified", "stale", "failed", "missing"]
    reason: str
    python: str
    driver: str | None
    statement: str | None


def recorded_environments(loaded: LoadedProfile, lock: Lock) -> tuple[RecordedEnvironment, ...]:
    """Return the evidence on this machine about environments with the locked files. It is judged without a check
    whether an environment has changed since its newest record."""
    rows = []
    for subject in evidence_statements_and_store.stored_subjects():
        records = (record for _, record in evidence_statements_and_store.stored(subject))
        newest = next(
            (one for one in records if one.installed and (one.profile, one.lock) == (loaded.name, lock.id)), None
        )
        if newest is None or newest.installed is None:
            continue
        proofs = [one for one in proofs_of_environment(newest.installed, loaded, lock) if one.evidence]
        rows += [
            RecordedEnvironment(
                subject, row.model, row.state, row.reason, newest.installed.interpreter.version,
                newest.installed.driver if newest.gpu else None, row.statement,
            )
            for row in profile_proofs_and_image_states.proof_rows(proofs)
        ]  # fmt: skip
    return tuple(rows)


def proofs_of_environment(measured: MeasuredEnvironment, loaded: LoadedProfile, lock: Lock) -> tuple[Proof, ...]:
    """Return a proof for each GPU model of the profile, from the evidence about an environment."""
    wanted = profile_proofs_and_image_states.wanted(loaded.name, loaded.profile, lock)
    models = profile_proofs_and_image_states.models_to_prove(loaded.profile)
    return tuple(evidence_statements_and_store.newest_proofs(measured.id, wanted, models, measured))


def refused_status(python: Path, error: CheckFailed, loaded: LoadedProfile, lock: Lock) -> EnvironmentStatusDocument:
    """Return the status of an environment whose files do not match the lock, or cannot be measured. `error`: why."""
    reasons = tuple(Reason("environment", line) for line in (error.message, *(error.hint or "").splitlines()))
    command = f"envbuild install {loaded.known} NEW_FOLDER"
    return EnvironmentStatusDocument(loaded.name, str(python), "failed", reasons, command, lock.id, None, ())


def environment_status(
    python: Path, measured: MeasuredEnvironment, loaded: LoadedProfile, lock: Lock, changed: Sequence[str]
) -> EnvironmentStatusDocument:
    """Return the status of an environment. `changed`: the parts of the lock that no longer match the profile."""
    proofs = proofs_of_environment(measured, loaded, lock)
    reasons = [Reason("lock", f"{part} changed in the profile since it was locked") for part in changed]
    reasons += [
        Reason("evidence", profile_proofs_and_image_states.reason(loaded.name, proof))
        for proof in proofs
        if proof.state != "proved"
    ]
    state = profile_proofs_and_image_states.state_by_evidence(proofs, bool(changed))
    path = shlex.quote(str(python))
    command = f"envbuild test {loaded.known} --python {path} --record"
    if state == "verified":
        command = path
    elif changed:
        command = f"envbuild lock {loaded.known}"
    elif state == "failed":
        command = f"envbuild test {loaded.known} --python {path}"
    rows = profile_proofs_and_image_states.proof_rows(proofs)
    return EnvironmentStatusDocument(
        loaded.name, str(python), state, tuple(reasons), command, lock.id, measured.id, rows
    )
