"""Decides by fixed rules whether run records are valid evidence: they must meet the profile's requirements. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.evidence.environment_record import MeasuredEnvironment, environment_differences
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.facts import database, probe_catalogue_reader
from envbuild.facts.probe_catalogue_reader import HARNESS, LEVELS
from envbuild.testrun.selftest_job import OWN_SCRIPT, selftest_id
from envbuild.util.errors import near

CPU = "cpu"


@dataclass(frozen=True)
class Proof:
    """Whether the evidence for one GPU model ("cpu" if the profile names no GPU) meets the profile's requirements.

    `state`: proved, stale (there is evidence, but it does not meet the requirements: for example, it is for another
    lock, self-test or level, lacks a probe, or reports a failure), or missing. `failed`: the self-test failed, and no
    later run overrides the failure. `level`: the level of the run. `unconfined`: the restrictions of Docker's
    containers that were missing in the run."""

    model: str
    state: str
    evidence: Path | None
    reason: str
    failed: bool = False
    unconfined: tuple[str, ...] = ()
    level: str | None = None


@dataclass(frozen=True)
class EvidenceRequirements:
    """The requirements for evidence. `level`: the lowest accepted level. `require`: the probes that must pass.
    `settings`: those of torch. `gpu_count`: minimum number of GPUs. `transport`: the NCCL transport that the run must
    have required; None: any. `own`: "script" and "shapes", the parts that a profile can add to the self-test -> sha256.
    `demands`: minimum values by name (selftest_job.performance_requirements).
    """

    profile: str
    lock: str
    level: str
    require: tuple[str, ...]
    settings: Mapping[str, bool]
    gpu_count: int = 1
    transport: str | None = None
    own: Mapping[str, str] = field(default_factory=dict)
    demands: Mapping[str, float] = field(default_factory=dict)


def as_recorded(record: RunRecord) -> EvidenceRequirements:
    """Return the requirements of the run that a record describes. Used if no profile is known."""
    made = record.selftest
    return EvidenceRequirements(
        profile=record.profile,
        lock=record.lock,
        level=made.level,
        require=tuple(made.require),
        settings=made.settings,
        gpu_count=made.gpu_count,
        transport=made.transport,
        own=made.own,
        demands=made.demands,
    )


def model_of(record: RunRecord) -> str:
    return record.gpu.model if record.gpu else CPU


def models_sharing_proof(model: str) -> frozenset[str]:
    """Return the GPU models, this one included, for which evidence on this model is valid."""
    gpu = database.gpus().get(model)
    return frozenset(other.id for other in database.family(gpu)) if gpu else frozenset({model})


def judge_model(model: str, wanted: EvidenceRequirements, found: Sequence[tuple[Path, RunRecord]]) -> Proof:
    """Judge the evidence for one GPU model. `found`: (statement file, record), the newest first; the name of a
    statement file begins with the digest of its record.

    A failure counts until a later run is valid evidence, or at least passes the probes that had failed.
    """
    found = [(path, record) for path, record in found if model_of(record) in models_sharing_proof(model)]
    denials = {record_digest(path): (path, denial) for path, record in found if (denial := _denial(record, wanted))}
    denied = failed = stale = None
    for path, record in found:
        mine = denials.get(record_digest(path))
        if mine is None and failures(record):
            continue  # the run failed, but not in a way that counts against this profile: no result of it is used
        reason = _objection(record, wanted)
        later = [denials[digest] for digest in denials if digest not in record.before]
        if reason is None and not later:
            return _proof(model, path, record)
        if reason is None:
            path, denial = later[0]
            denied = denied or Proof(
                model, "stale", path, f"the self-test failed since: {', '.join(denial)}", failed=True
            )
        elif mine is None:
            stale = stale or Proof(model, "stale", path, reason)
        elif not any(_outweighs(other, record_digest(path), record, wanted) for _, other in found):
            denial = mine[1]
            failed = failed or Proof(model, "stale", path, f"the self-test failed: {', '.join(denial)}", failed=True)
    return denied or failed or stale or untested(model)


def judge_environment(
    model: str, wanted: EvidenceRequirements, found: Sequence[tuple[Path, RunRecord]], now: MeasuredEnvironment
) -> Proof:
    """Judge the evidence for one GPU model as `judge_model` does, but only by records of exactly this environment. If
    all records are from before the environment changed, the reason lists the changes since the newest record that
    passed."""
    changes = {path: differences_since(record, now) for path, record in found}
    proof = judge_model(model, wanted, [(path, record) for path, record in found if not changes[path]])
    if proof.state != "missing":
        return proof
    for path, record in found:
        if changes[path] and model_of(record) in models_sharing_proof(model) and not failures(record):
            reason = f"the environment changed since {record.finished[:10]}: {'; '.join(changes[path])}"
            return Proof(model, "stale", path, reason)
    return proof


def differences_since(record: RunRecord, now: MeasuredEnvironment) -> list[str]:
    """Return a message for each difference between an environment and that of a record. The driver and the GPU models
    are compared only if the run used a GPU."""
    if record.installed is None:
        return ["the record is about an image"]
    return environment_differences(record.installed, now, with_gpu=record.gpu is not None)


def _proof(model: str, path: Path, record: RunRecord) -> Proof:
    lacks = tuple(" ".join(lack.split()) for lack in record.where.unconfined) if record.where else ()
    less = f", less confined than in Docker: {'; '.join(lacks)}" if lacks else ""
    device = record.gpu.name if record.gpu else "the CPU"
    reason = f"proved on {device}, {record.finished[:10]}{less}"
    return Proof(model, "proved", path, reason, unconfined=lacks, level=record.selftest.level)


def untested(model: str) -> Proof:
    """Return the result for a GPU model without evidence. For an unknown model, the result suggests known models with a
    similar name."""
    known = database.gpus()
    meant = near(model, known) if model not in known and model != CPU else None
    question = f"; unknown GPU {model}: {meant}" if meant else ""
    return Proof(model, "missing", None, f"unverified{question}")


def _denial(record: RunRecord, wanted: EvidenceRequirements) -> list[str]:
    """Return the failures in a record that count against the profile of `wanted`.

    In a run of the same profile, every failed probe and every error of the run counts. In a run of another profile, all
    failed probes count, except the probe of a script that this profile does not have. A probe that failed at a shape
    which only the other profile adds counts too: both profiles run this probe, and if it crashed at that shape, the
    result of its other cases is unknown.
    """
    if record.profile == wanted.profile:
        return failures(record)
    foreign = record.selftest.own.get("script") != wanted.own.get("script")
    return [probe for probe in record.by_status("failed") if not (foreign and probe == OWN_SCRIPT)]


def _outweighs(record: RunRecord, digest: str, denial: RunRecord, wanted: EvidenceRequirements) -> bool:
    """Whether a run overrides an earlier failure, although it may not be valid evidence. The run must be later than the
    failure, must have used the profile's own script and shapes, must have no failures, and must have passed all probes
    that had failed.

    `digest`: that of `denial`, the record of the failure.
    """
    if digest not in record.before or failures(record) or record.selftest.own != dict(wanted.own):
        return False
    return set(denial.by_status("failed")) <= set(record.by_status("passed"))


def record_digest(statement_file: Path) -> str:
    """Return the sha256 (hex) of the record that a statement refers to, which is part of the statement file's name."""
    return statement_file.name.partition(".")[0]


def failures(record: RunRecord) -> list[str]:
    """Return the failed probes and the errors of a run. If no probe passed, this counts as an error too."""
    nothing = [] if record.by_status("passed") else ["no probe passed"]
    return [*record.by_status("failed"), *record.errors, *nothing]


_OTHER_SELFTEST = "proved by a different version of the self-test"


def _different_selftest(record: RunRecord, wanted: EvidenceRequirements) -> str | None:
    """Return why the result of a different version of the self-test is not valid; None if it is valid. The result is
    valid if the harness, all required probes and all probes of the required level have the same versions as now."""
    made = record.selftest
    if made.id == selftest_id():
        return None
    present = probe_catalogue_reader.versions()
    if made.versions.get(HARNESS) != present[HARNESS]:
        return _OTHER_SELFTEST
    names = [name for name, probe in probe_catalogue_reader.known_probes().items() if probe.within(wanted.level)]
    changed = [
        name
        for name in dict.fromkeys((*names, *wanted.require))
        if name not in present or made.versions.get(name) != present[name]
    ]
    return f"{_OTHER_SELFTEST} (changed probes: {', '.join(changed)})" if changed else None


def _objection(record: RunRecord, wanted: EvidenceRequirements) -> str | None:
    """Return why a record is not valid evidence; None if it is valid."""
    if record.lock != wanted.lock:
        return "proved for another lock"
    if failed := failures(record):
        return f"the self-test failed: {', '.join(failed)}"
    if different := _different_selftest(record, wanted):
        return different
    if record.selftest.settings != dict(wanted.settings):
        return "proved with different settings of torch"
    if record.selftest.gpu_count < wanted.gpu_count:
        return f"proved with fewer than the required {wanted.gpu_count} GPUs that work together"
    if wanted.transport not in (None, record.selftest.transport):
        return f"proved without requiring the transport {wanted.transport}"
    own, differences = record.selftest.own, {"script": "another script", "shapes": "other shapes"}
    if other := [words for part, words in differences.items() if own.get(part) != wanted.own.get(part)]:
        return f"proved with {' and '.join(other)}"
    demanded = record.selftest.demands
    less = [name for name, least in wanted.demands.items() if demanded.get(name, 0) < least]
    if less:
        return f"proved with lower requirements for {', '.join(less)}"
    lacks, passed = [], record.by_status("passed")
    if LEVELS.index(record.selftest.level) < LEVELS.index(wanted.level):
        lacks.append(f"proved at level {record.selftest.level}, but {wanted.level} is required")
    if missing := [name for name in wanted.require if name not in passed]:
        lacks.append(f"required probes did not run: {', '.join(missing)}")
    return "; ".join(lacks) or None
