"""Checks whether the trusted evidence about an image is sufficient for a policy and the advisories known now. Pure."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from envbuild.attest.policy import Policy
from envbuild.attest.trusted_statements import SignedBuild
from envbuild.evidence import profile_proofs_and_image_states, proof_rules, run_record_schema
from envbuild.evidence.proof_rules import EvidenceRequirements, Proof
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.facts import database
from envbuild.facts.advisory_model import Situation
from envbuild.facts.probe_catalogue_reader import LEVELS
from envbuild.profile.model import Profile
from envbuild.resolve.torch_compatibility_and_advisories import stated
from envbuild.util.untrusted_input_errors import Reason

Records = Sequence[tuple[Path, RunRecord]]
_AHEAD = datetime.timedelta(hours=24)  # largest accepted difference between clocks


def of_build(
    build: SignedBuild, records: Records, policy: Policy, now: datetime.datetime
) -> tuple[list[Proof], list[Reason]]:
    """Check the run records of an image against the requirements of its profile and of the policy.

    Returns (a proof for each model whose runs meet the requirements of the profile and the level and probes of the
    policy, even if there are objections to its age, driver or advisories; all reasons why the evidence is not
    sufficient).
    """
    required = _stricter(profile_proofs_and_image_states.wanted(build.name, build.profile, build.lock), policy)
    named = policy.gpus or profile_proofs_and_image_states.models_to_prove(build.profile)
    return _each(named, required, records, policy, now, build.profile)


def unexpected_origin(profile: str, lock: str, policy: Policy) -> Iterator[Reason]:
    """Yield a reason for each of the profile and the lock that is not the one required by the policy."""
    if policy.profile not in (None, profile):
        yield Reason("profile", f"wrong profile: {profile}, expected {policy.profile}")
    if policy.lock and not lock.startswith(policy.lock):
        yield Reason("lock", f"wrong lock: {lock}, expected {policy.lock}")


def of_records(records: Records, policy: Policy, now: datetime.datetime) -> tuple[list[Proof], list[Reason]]:
    """Check run records without a build statement: each against the requirements that it contains, and the policy.
    Returns the same as `of_build`."""
    on: list[Proof] = []
    reasons: list[Reason] = []
    for path, record in records:
        required = _stricter(proof_rules.as_recorded(record), policy)
        named = policy.gpus or (proof_rules.model_of(record),)
        found, why = _each(named, required, [(path, record)], policy, now, None)
        on += found
        reasons += [*unexpected_origin(record.profile, record.lock, policy), *why]
    return list(dict.fromkeys(on)), list(dict.fromkeys(reasons))


def of_environment(records: Records, policy: Policy, now: datetime.datetime) -> tuple[list[Proof], list[Reason]]:
    """Check run records that are all of one environment, without a build statement. The newest record of a profile and
    lock on a GPU model gives the requirements, so that a later run can override an earlier failure. If several profiles
    or locks have records, the one with the fewest reasons counts. Returns the same as `of_build`."""
    answers: list[tuple[list[Proof], list[Reason]]] = []
    for origin in dict.fromkeys((record.profile, record.lock) for _, record in records):
        own = [record for _, record in records if (record.profile, record.lock) == origin]
        on: list[Proof] = []
        reasons = list(unexpected_origin(*origin, policy))
        for model in policy.gpus or dict.fromkeys(map(proof_rules.model_of, own)):
            shared = proof_rules.models_sharing_proof(model)
            newest = next((record for record in own if proof_rules.model_of(record) in shared), own[0])
            required = _stricter(proof_rules.as_recorded(newest), policy)
            found, why = _each((model,), required, records, policy, now, None)
            on, reasons = [*on, *found], [*reasons, *why]
        answers.append((list(dict.fromkeys(on)), list(dict.fromkeys(reasons))))
    return min(answers, key=lambda answer: len(answer[1]), default=([], []))


def _stricter(wanted: EvidenceRequirements, policy: Policy) -> EvidenceRequirements:
    level = max(wanted.level, policy.level or wanted.level, key=LEVELS.index)
    return dataclasses.replace(wanted, level=level, require=tuple(dict.fromkeys((*wanted.require, *policy.probes))))


def _each(
    models: Sequence[str],
    required: EvidenceRequirements,
    records: Records,
    policy: Policy,
    now: datetime.datetime,
    profile: Profile | None,
) -> tuple[list[Proof], list[Reason]]:
    on: list[Proof] = []
    reasons: list[Reason] = []
    by_name = dict(records)
    for model in models:
        proof = proof_rules.judge_model(model, required, records)
        if proof.state != "proved" or proof.evidence is None:
            reasons.append(Reason(_kind(proof), f"{model}: {proof.reason}"))
            continue
        on.append(proof)
        record = by_name[proof.evidence]
        reasons += [Reason(reason.id, f"{model}: {reason.detail}") for reason in _record(record, policy, now, profile)]
    return on, reasons


def _kind(proof: Proof) -> str:
    return "failed" if proof.failed else "gpu" if proof.state == "missing" else "stale"


def _record(record: RunRecord, policy: Policy, now: datetime.datetime, profile: Profile | None) -> Iterator[Reason]:
    finished = datetime.datetime.strptime(record.finished, run_record_schema.FINISHED).replace(tzinfo=datetime.UTC)
    if policy.max_age and now - finished > policy.max_age:
        yield Reason("age", f"proved {record.finished}, {(now - finished).days} days ago")
    if finished - now > _AHEAD:
        yield Reason("age", f"proved {record.finished}, which is in the future")
    yield from _driver(record, policy)
    accepted = {item.advisory for item in profile.accept} if profile else set()
    for advisory in database.matching(proved_situation(record, policy, profile)):
        if advisory.severity == "refuse" and advisory.id not in accepted:
            yield Reason("advisory", f"{advisory.id}: {advisory.title} ({', '.join(advisory.cite[:2])})")


def _driver(record: RunRecord, policy: Policy) -> Iterator[Reason]:
    """Yield a reason unless the run's driver is the policy's or older. Evidence with an older driver also holds for a
    newer driver, but not the other way round."""
    if policy.driver is None:
        return
    measured = record.gpu.driver if record.gpu else None
    try:
        if measured is None:
            yield Reason("driver", "the proof names no driver")
        elif Version(policy.driver) < Version(measured):
            yield Reason("driver", f"proved with driver {measured}; {policy.driver} is older")
    except InvalidVersion:
        yield Reason("driver", f"the driver {str(measured)[:40]!r} in the proof is not a version")


def proved_situation(record: RunRecord, policy: Policy, profile: Profile | None) -> Situation:
    """Return the GPU, driver and versions with which advisories are compared.

    The policy's driver takes precedence over the run's driver, and loaded libraries over installed ones.
    """
    installed = record.distributions
    situation = stated(profile) if profile else Situation()
    torch = installed.get("torch")
    release = database.torch_release(torch or "")
    cuda = release.cuda if release else situation.cuda
    gpu = database.gpus().get(proof_rules.model_of(record))
    return dataclasses.replace(
        situation,
        gpus=(gpu,) if gpu else (),
        torch=torch,
        cuda=cuda,
        libraries={**database.libraries_among(installed, cuda), **_loaded(record)} if record.gpu else {},
        distributions=installed,
        driver=policy.driver or (record.gpu.driver if record.gpu else None),
    )


def _loaded(record: RunRecord) -> dict[str, str]:
    """Return short name -> version of the libraries that the run loaded from a distribution's own files."""
    versions: dict[str, str] = {}
    for loaded in record.libraries:
        name, version = loaded.distribution
        library = database.library_of(name)
        if library and version and loaded.record:
            versions[library] = version
    return versions
