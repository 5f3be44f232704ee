"""Reads a folder of signed evidence from contributors, for GPU models that the project does not have.

`NAME.dsse.json` in the folder is one signed statement; `keys/WHO.pub` is the public key of an accepted signer.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from envbuild.attest import image_verifier, keys_and_signatures, policy_check, trusted_statements
from envbuild.attest.keys_and_signatures import Envelope, PublicKey
from envbuild.attest.policy import Policy
from envbuild.attest.trusted_statements import Trusted
from envbuild.evidence import proof_rules
from envbuild.evidence.proof_rules import Proof
from envbuild.facts import database
from envbuild.util.errors import CheckFailed, Fault
from envbuild.util.untrusted_input_errors import Malformed, Reason, Refusal

_CPU = "CPU"


@dataclass(frozen=True)
class EvidenceRow:
    """One run of the self-test. `gpu`: the GPU's name, or CPU; `who`: the signer; `when`: the day; `lock`, `image`:
    ids.

    `objections`: why the run is not sufficient evidence: for example, it failed, the self-test has changed since, or an
    advisory applies.
    """

    gpu: str
    profile: str
    who: str
    when: str
    lock: str
    image: str
    objections: tuple[str, ...]


def community_proofs(found: Iterable[EvidenceRow], profile: str, lock: str, models: Iterable[str]) -> list[Proof]:
    """Return a proof for each run that verifies this lock of the profile on one of `models`, GPU models or "cpu"."""
    counted = [row for row in found if (row.profile, row.lock) == (profile, lock) and not row.objections]
    return [
        Proof(model, "proved", None, f"proved on {'the CPU' if row.gpu == _CPU else row.gpu}, {row.when}")
        for model in models
        for row in counted
        if _model(row) in proof_rules.models_sharing_proof(model)
    ]


def _model(row: EvidenceRow) -> str:
    known = database.gpu_by_name(row.gpu)
    return proof_rules.CPU if row.gpu == _CPU else known.id if known else row.gpu


def read(folder: Path, now: datetime.datetime) -> list[EvidenceRow]:
    """Return one row per statement in the folder; none if the folder is missing. Raises CheckFailed as `evidence_rows`
    does."""
    keys = {file.stem: key for file in sorted(folder.glob("keys/*.pub")) if (key := keys_and_signatures.trusted(file))}
    envelopes: list[tuple[str, Envelope | Refusal]] = []
    for file in sorted(folder.glob("*.json")):
        try:
            envelopes.append((file.name, image_verifier.read_file(file)))
        except Refusal as refusal:
            envelopes.append((file.name, refusal))
    return evidence_rows(envelopes, keys, now)


def evidence_rows(
    found: Iterable[tuple[str, Envelope | Refusal]], keys: Mapping[str, PublicKey], now: datetime.datetime
) -> list[EvidenceRow]:
    """Return one row per envelope, sorted by GPU, profile and day. `found`: pairs of a file's name and its envelope, or
    why it is invalid; `keys`: public keys by owner. Pure.

    Raises CheckFailed, which lists every file that is not valid signed evidence.
    """
    made: list[EvidenceRow] = []
    faults: list[Fault] = []
    for name, envelope in found:
        try:
            made.append(_row(envelope, keys, now))
        except Refusal as refusal:
            faults.append(Fault(str(refusal.reason), name))
    if faults:
        hint = "docs/guides/share-proof.md of envbuild describes the files and the keys, and how to make them"
        raise CheckFailed("some files are not valid evidence", hint=hint, faults=faults)
    return sorted(made, key=lambda row: (row.gpu, row.profile, row.when, row.who))


def _row(envelope: Envelope | Refusal, keys: Mapping[str, PublicKey], now: datetime.datetime) -> EvidenceRow:
    if isinstance(envelope, Refusal):
        raise envelope
    who, believed = _signer(envelope, keys)
    if not believed.records:
        raise Malformed("it contains no test result")
    _, reasons = policy_check.of_records(believed.records, Policy(), now)
    objections = tuple(reason.detail for reason in reasons)
    ((_, record),) = believed.records
    if record.image is None:
        raise Refusal("subject", "it is about an environment, not about an image")
    gpu = record.gpu.name if record.gpu else _CPU
    return EvidenceRow(gpu, record.profile, who, record.finished[:10], record.lock, record.subject, objections)


def _signer(envelope: Envelope, keys: Mapping[str, PublicKey]) -> tuple[str, Trusted]:
    """Return the signer, and the trusted statement. Raises Refusal if the envelope is invalid, or not signed with one
    of `keys`."""
    refused = Reason("signature", "not signed with a key in keys/")
    for who, key in keys.items():
        believed = trusted_statements.believe([envelope], [key], None)
        if not believed.refused:
            return who, believed
        if believed.refused[0].id != "signature":
            refused = believed.refused[0]
    raise Refusal(refused.id, refused.detail)
