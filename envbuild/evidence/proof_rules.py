"""The rules for valid evidence: what a profile requires, and whether run records fulfil it for a GPU model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.evidence.environment_measurement_and_differences import MeasuredEnvironment, environment_differences
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.facts import database, probe_catalogue_reader
from envbuild.facts.probe_catalogue_reader import HARNESS, LEVELS
from envbuild.testrun.selftest_job import OWN_SCRIPT, selftest_id
from envbuild.util.errors import near

CPU = "cpu"


@dataclass(frozen=True)
class Proof:
    """Whether the evidence for one GPU model ("cpu" if the profile names no GPU) is a proof: fulfils what the profile
    requires.

    `state`: proved, stale (the evidence is for another self-test or level, lacks a probe, or reports a failure), or
    missing. `failed`: the self-test failed, and no later run of the same self-test passed. `unconfined`: the
    restrictions of this engine's containers that were missing in a run elsewhere. `level`: the level of the run."""

    model: str
    state: str
    evidence: Path | None
    reason: str
    failed: bool = False
    unconfined: tuple[str, ...] = ()
    level: str | None = None


@dataclass(frozen=True)
class EvidenceRequirements:
    """The requirements for evidence: this lock, these probes, at least this level, these settings of torch.

    `gpu_count`: minimum number of GPUs. `transport`: the NCCL transport that must have been required; None: any. `own`:
    the sha256 of each part that the profile adds to the self-test, by "script" and "shapes". `demands`: minimum values
    by name (selftest_job.performance_requirements).
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
    """Return the requirements that a record was made for; used if nothing else defines the requirements."""
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
    """Return the models for which evidence on this model is also valid."""
    gpu = database.gpus().get(model)
    return frozenset(other.id for other in database.family(gpu)) if gpu else frozenset({model})


def judge_model(model: str, wanted: EvidenceRequirements, found: Sequence[tuple[Path, RunRecord]]) -> Proof:
    """Judge one GPU model by its statements (named by their records' digests, the newest first) and records.

    A failure counts until a later run is valid evidence, or at least passes the probes that had failed.
    """
    found = [(path, record) for path, record in found if model_of(record) in models_sharing_proof(model)]
    denials = {record_digest(path): (path, denial) for path, record in found if (denial := _denial(record, wanted))}
    denied = failed = stale = None
    for path, record in found:
        mine = denials.get(record_digest(path))
        if mine is None and failures(record):
            continue  # only probes that this profile does not run failed; its other results are not trusted either
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
    """Judge one model as `judge_model` does, by the records of exactly this environment. If there are only records of
    the environment before it changed, the reason is what changed since the newest one."""
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
    """Return how an environment differs from that of a record. The driver and the GPU count if the run used a GPU."""
    if record.installed is None:
        return ["the record is about an image"]
    return environment_differences(record.installed, now, with_gpu=record.gpu is not None)


def _proof(model: str, path: Path, record: RunRecord) -> Proof:
    lacks = tuple(" ".join(lack.split()) for lack in record.where.unconfined) if record.where else ()
    less = f", less confined than here: {'; '.join(lacks)}" if lacks else ""
    device = record.gpu.name if record.gpu else "the CPU"
    reason = f"proved on {device}, {record.finished[:10]}{less}"
    return Proof(model, "proved", path, reason, unconfined=lacks, level=record.selftest.level)


def untested(model: str) -> Proof:
    """Return the proof of a GPU without evidence. A name similar to that of a known GPU is reported as a possible
    typo."""
    known = database.gpus()
    meant = near(model, known) if model not in known and model != CPU else None
    question = f"; unknown GPU {model}: {meant}" if meant else ""
    return Proof(model, "missing", None, f"unverified{question}")


def _denial(record: RunRecord, wanted: EvidenceRequirements) -> list[str]:
    """Return the failures in a record that count against this profile; empty if only probes failed that the profile
    does not run.

    In a run of the same profile, every failed probe and the faults of the run count. In a run of another profile, the
    failed probes that both profiles run count, except that of a different script. A failure at a shape that only the
    other profile adds counts too: the shape is a case of a probe that both run, and if the probe crashed at it, the
    result of its other cases is unknown.
    """
    if record.profile == wanted.profile:
        return failures(record)
    foreign = record.selftest.own.get("script") != wanted.own.get("script")
    return [probe for probe in record.by_status("failed") if not (foreign and probe == OWN_SCRIPT)]


def _outweighs(record: RunRecord, digest: str, denial: RunRecord, wanted: EvidenceRequirements) -> bool:
    """Whether a run that is not valid evidence still overrides an earlier failure: it ran later, with the profile's own
    script and shapes, and passed everything that had failed. This only decides which result is the newest."""
    if digest not in record.before or failures(record) or record.selftest.own != dict(wanted.own):
        return False
    return set(denial.by_status("failed")) <= set(record.by_status("passed"))


def record_digest(statement_file: Path) -> str:
    """Return the hex digest of the record that a statement refers to."""
    return statement_file.name.partition(".")[0]


def failures(record: RunRecord) -> list[str]:
    """Return the failed probes and the faults of the run; a run in which no probe passed is a fault too."""
    nothing = [] if record.by_status("passed") else ["no probe passed"]
    return [*record.by_status("failed"), *record.errors, *nothing]


def _outdated(record: RunRecord, wanted: EvidenceRequirements) -> str | None:
    """Return why the result of a different self-test is not valid. None if it is valid: then every probe that this
    self-test runs at the required level had the same version."""
    made = record.selftest
    if made.id == selftest_id():
        return None
    if made.versions.get(HARNESS) != probe_catalogue_reader.versions()[HARNESS]:
        return "proved by an older self-test"
    names = [name for name, probe in probe_catalogue_reader.known_probes().items() if probe.within(wanted.level)]
    changed = [
        name
        for name in dict.fromkeys((*names, *wanted.require))
        if made.versions.get(name) != probe_catalogue_reader.versions()[name]
    ]
    return f"proved by an older self-test: {', '.join(changed)} changed since" if changed else None


def _objection(record: RunRecord, wanted: EvidenceRequirements) -> str | None:
    """Return why this evidence is not valid, None if it is."""
    if record.lock != wanted.lock:
        return "proved for another lock"
    if failed := failures(record):
        return f"the self-test failed: {', '.join(failed)}"
    if older := _outdated(record, wanted):
        return older
    if record.selftest.settings != dict(wanted.settings):
        return "proved with different settings of torch"
    if record.selftest.gpu_count < wanted.gpu_count:
        return f"proved for fewer GPUs than {wanted.gpu_count} that work together"
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
