"""Verifies a Python environment on this machine: compares its files with the lock and runs the self-test in it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from envbuild.attest import keys_and_signatures
from envbuild.attest.keys_and_signatures import Signer
from envbuild.audit import environment_file_hasher
from envbuild.doctor import cpu_memory_and_os
from envbuild.evidence import (
    environment_measurement,
    evidence_statements_and_store,
    profile_proofs_and_image_states,
    python_environment_status,
)
from envbuild.evidence.environment_record import MeasuredEnvironment, environment_differences
from envbuild.evidence.profile_proofs_and_image_states import EvidenceState, ProofRow
from envbuild.evidence.proof_rules import Proof
from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.lock import lock_file, wheel_file_hashes_and_contents
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import make_build_and_test
from envbuild.pipeline.image_steps import load_profile, resolve_profile
from envbuild.pipeline.model import MakeResult, Options, SelfTestOrder, StepResult, StepRow
from envbuild.pipeline.progress_events import Listener, Step
from envbuild.pipeline.selftest_steps import WrittenEvidence, sign_evidence, test_on_one_node
from envbuild.pipeline.step_context import PartialResult, StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver
from envbuild.runners.host_runner import HostRunner
from envbuild.testrun.run_result import RunLocation, SelfTestSummary, TestRun
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util.errors import CheckFailed, NotProved, printable, some
from envbuild.util.json_output_types import Digest

UNCONFINED = "no container"
_MOST = 20  # how many names of files that are not locked a note lists


@dataclass(frozen=True)
class EnvironmentProofDocument:
    """The document of `test --record --python`. `environment`: the interpreter; `subject`: the digest of the locked
    distributions' files; `statement`: the file of the evidence that this run wrote; `signed_statement`: its signed
    form, if a key is set."""

    profile: str
    environment: str
    state: EvidenceState
    lock: Digest | None
    subject: Digest | None
    evidence: tuple[ProofRow, ...]
    statement: str | None
    signed_statement: str | None
    selftest: SelfTestSummary | None
    steps: tuple[StepRow, ...]
    seconds: float


@dataclass(frozen=True)
class ProvedEnvironment:
    """The result of proving an environment. A field has its default value until the step that sets it has finished."""

    name: str
    python: Path
    lock: Lock | None = None
    measured: MeasuredEnvironment | None = None
    run: TestRun | None = None
    proofs: tuple[Proof, ...] = ()
    statement: Path | None = None
    signed_statement: Path | None = None
    steps: tuple[Step, ...] = ()

    def document(self) -> EnvironmentProofDocument:
        return EnvironmentProofDocument(
            profile=self.name,
            environment=str(self.python),
            state=profile_proofs_and_image_states.state_by_evidence(self.proofs),
            lock=self.lock.id if self.lock else None,
            subject=self.measured.id if self.measured else None,
            evidence=profile_proofs_and_image_states.proof_rows(self.proofs),
            statement=str(self.statement) if self.statement else None,
            signed_statement=str(self.signed_statement) if self.signed_statement else None,
            selftest=self.run.summary() if self.run else None,
            steps=tuple(StepRow(step.name, round(step.seconds, 3), step.cached) for step in self.steps),
            seconds=round(sum(step.seconds for step in self.steps), 3),
        )


def prove_environment(name: str, python: str, listener: Listener, gpus: tuple[str, ...] = ()) -> ProvedEnvironment:
    """Compare an environment with the lock, run the self-test in it, and write evidence.

    Raises CheckFailed if the environment's files differ from those of the lock or change during the self-test, or if
    the self-test fails; NotProved if the profile has a self-test script, if a required probe cannot run, if the driver
    or the GPUs cannot be measured, or if a GPU model has no evidence.
    """
    keys_and_signatures.take_passphrase()
    context, runner = StepContext(listener), HostRunner(python)
    result = PartialResult(ProvedEnvironment(name, runner.python))

    def document() -> EnvironmentProofDocument:
        return replace(result.value, steps=context.steps).document()

    with make_build_and_test.exclusive_run(context, name, document):
        loaded = context.step("load profile", load_profile, name, Options(request=RunRequest(gpus=gpus)))
        result.update(name=loaded.name)
        _require_no_script(loaded)
        plan = context.step("resolve", resolve_profile, loaded)
        lock = lock_file.current_lock(loaded, plan)
        result.update(lock=lock)
        signer = context.signer  # before the long part: it may prompt for a passphrase
        wheels = context.step("wheels", _wheel_files, lock)
        measured = context.step("environment", _measure, runner.python, lock, wheels)
        result.update(measured=measured, proofs=python_environment_status.proofs_of_environment(measured, loaded, lock))
        order = SelfTestOrder(loaded, plan_resolver.computing(lock.versions), lock.python, RunRequest(gpus=gpus))
        if loaded.profile.gpus:
            _require_known_gpu(measured)
        run = context.step("self-test", test_on_one_node, context.progress, order, runner)
        run = replace(run, where=RunLocation(unconfined=(UNCONFINED,)))
        result.update(run=run, proofs=())  # the earlier proofs may be of files that changed since
        used_gpu = evidence_statements_and_store.gpu_of(run) is not None
        if used_gpu:
            _require_known_gpu(measured)
        if run.failures():  # a failure is evidence even if the environment changed meanwhile
            written = context.step("evidence", _write_evidence, context, loaded, lock, measured, run, signer)
            result.update(statement=written.statement, signed_statement=written.signed_statement, proofs=written.proofs)
            make_build_and_test.require_passed(MakeResult(loaded.name, run=run))
        after = context.step("environment", _measure, runner.python, lock, wheels)
        _require_same(measured, after, with_gpu=used_gpu)
        written = context.step("evidence", _write_evidence, context, loaded, lock, measured, run, signer)
        result.update(statement=written.statement, signed_statement=written.signed_statement, proofs=written.proofs)
        make_build_and_test.require_passed(MakeResult(loaded.name, run=run))
        _require_proved(loaded, written.proofs)
    result.update(steps=context.steps)
    return result.value


def _require_no_script(loaded: LoadedProfile) -> None:
    if loaded.profile.selftest.script:
        raise NotProved(
            f"{loaded.name} cannot be proved outside a container: its self-test has a script of its own",
            hint=f"prove it in an image: envbuild test {loaded.known} --record",
        )


def _wheel_files(lock: Lock) -> StepResult[Mapping[str, Mapping[str, str]]]:
    """Return the sha256 of each wheel's files, without those of tools such as pip; wheels that are missing in the store
    are downloaded."""
    glibc = plan_resolver.glibc_of_base(lock.suite)
    store = sha256_file_store.wheel_store()
    fetched = wheel_resolution_and_download.fetch_wheels(
        lock.wheels, lock.python, glibc, store, lambda file, count: None
    )
    found, versions = wheel_file_hashes_and_contents.wheel_hashes(lock), plan_resolver.computing(lock.versions)
    files = {name: found[f"{name}=={version}"] for name, version in versions.items()}
    return StepResult(files, cached=not fetched, note=f"{some(len(files), 'wheel')}, {fetched} downloaded")


def _measure(python: Path, lock: Lock, wheels: Mapping[str, Mapping[str, str]]) -> StepResult[MeasuredEnvironment]:
    files, locked = environment_file_hasher.hash_environment(python), plan_resolver.computing(lock.versions)
    measured = environment_measurement.measure_environment(files, locked)
    environment_measurement.require_locked_files(files, locked, wheels.values())
    unlocked = environment_measurement.unlocked_names(measured)
    more = [f"and {len(unlocked) - _MOST} more"] if len(unlocked) > _MOST else []
    rest = f"; not locked: {', '.join([*unlocked[:_MOST], *more])}" if unlocked else ""
    return StepResult(measured, note=f"{some(measured.files, 'locked file')}, {measured.sha256[:12]}{printable(rest)}")


def _require_known_gpu(measured: MeasuredEnvironment) -> None:
    """Raise NotProved if the driver or the GPUs cannot be measured, because a later change would not be noticed."""
    if measured.driver is None or not measured.gpus:
        raise NotProved(
            "the driver's version and the GPU models cannot be read from /proc/driver/nvidia",
            hint="run the command where the driver's files in /proc are visible, or test an image instead",
        )


def _require_same(before: MeasuredEnvironment, after: MeasuredEnvironment, *, with_gpu: bool) -> None:
    if changes := environment_differences(before, after, with_gpu=with_gpu):
        raise CheckFailed("the environment changed during the self-test", hint="\n".join(changes))


def _write_evidence(
    context: StepContext,
    loaded: LoadedProfile,
    lock: Lock,
    measured: MeasuredEnvironment,
    run: TestRun,
    signer: Signer | None,
) -> StepResult[WrittenEvidence]:
    now = datetime.datetime.now(datetime.UTC)
    wanted, machine = (
        profile_proofs_and_image_states.wanted(loaded.name, loaded.profile, lock),
        asdict(cpu_memory_and_os.read()),
    )
    record = evidence_statements_and_store.run_record(measured, wanted, run, "none", now, machine)
    file = evidence_statements_and_store.save(record)
    proofs = python_environment_status.proofs_of_environment(measured, loaded, lock)
    return sign_evidence(context, record, WrittenEvidence(file, proofs), signer)


def _require_proved(loaded: LoadedProfile, proofs: tuple[Proof, ...]) -> None:
    missing = [
        profile_proofs_and_image_states.reason(loaded.name, proof) for proof in proofs if proof.state != "proved"
    ]
    if missing:
        raise NotProved(f"{loaded.name}: the environment is not proved on all GPUs", hint="\n".join(missing))
