"""The steps from a built image to the tag `verified`: self-test, evidence and tag."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from envbuild.attest import in_toto_statements, keys_and_signatures
from envbuild.attest.in_toto_statements import Subject
from envbuild.attest.keys_and_signatures import Signer
from envbuild.doctor import cpu_memory_and_os
from envbuild.evidence import evidence_statements_and_store, profile_proofs_and_image_states
from envbuild.evidence.proof_rules import Proof
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.facts import database
from envbuild.image.docker_engine import Image
from envbuild.image.image_naming import VERIFIED, repository
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import runner_selection
from envbuild.pipeline.image_stores.image_store import ImageStore
from envbuild.pipeline.model import SelfTestOrder, StepResult, probe_counts
from envbuild.pipeline.progress_events import Progress
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.runners import docker_runner
from envbuild.runners.runner_interface import Runner, Scheduled, Watch, runs_in_container
from envbuild.testrun import expected_hardware, output_judge, selftest_job
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import Expectations, Job
from envbuild.util.errors import EngineError, EnvbuildError


@dataclass(frozen=True)
class WrittenEvidence:
    """The file of a statement, the proofs that follow from it and from earlier evidence, and the file of the signed
    statement, if a key is set."""

    statement: Path
    proofs: tuple[Proof, ...]
    signed_statement: Path | None = None


def require_gpu(context: StepContext) -> StepResult[None]:
    """Check for a GPU before anything is built that needs one. Raises NotProved if the engine has no GPU."""
    docker_runner.look_for_gpu(context.engine)
    return StepResult(None, note="the engine has a GPU")


def select_runner(
    context: StepContext, images: ImageStore, order: SelfTestOrder, image: Image, *, dry: bool = False
) -> Runner:
    """Return the runner that will run the self-test. `dry`: only show what it would do."""

    say = context.progress.say if dry else context.progress.line
    validate = functools.partial(_validate_jobs, order)  # before the image is pushed
    return runner_selection.runner(order, images, image, say, dry=dry, validate=validate)


def require_valid_jobs(order: SelfTestOrder) -> None:
    """Raise the errors of the jobs that would be submitted to the selected cluster. Needs no image."""
    cluster = runner_selection.selected_cluster(order.on, order.loaded.name, order.request)
    if cluster is not None:
        found = runner_selection.placeholder_runner(cluster, runner_selection.UNKNOWN_IMAGE, order.on.resume)
        _validate_jobs(order, found)


def _validate_jobs(order: SelfTestOrder, found: Scheduled) -> None:
    for job in cluster_jobs(order, found):
        found.script(job)


def cluster_jobs(order: SelfTestOrder, runner: Runner) -> list[Job]:
    """Return the jobs to submit to a cluster, in this order: a job on one node and, if requested, one on several."""
    return [job_for(order, runner, nodes) for nodes in sorted({1, order.on.nodes})]


def job_for(order: SelfTestOrder, runner: Runner, nodes: int = 1) -> Job:
    """Return the job for the runner. `nodes`: if more than one, the job runs only the probe that needs several
    nodes."""
    profile = order.loaded.profile
    request = replace(order.request, probes=(selftest_job.ACROSS,)) if nodes > 1 else order.request
    models = runner_selection.models_to_test(profile, order.on.gpu)
    selftest = profile.selftest if runs_in_container(runner) else selftest_job.on_host(profile.selftest, request)
    gpu_names = [name for gpu in models for name in database.gpus()[gpu].all_names]
    hardware = expected_hardware.expected_hardware(profile)
    hardware |= {"nodes": nodes} if nodes > 1 else {}
    expected = Expectations(order.versions, order.python, gpu_names, profile.gpu_count, hardware)
    job = selftest_job.make_job(runner.image, selftest, expected, request, models, runner.nonce)
    return replace(job, nodes=nodes)


def test_on_one_node(progress: Progress, order: SelfTestOrder, runner: Runner) -> StepResult[TestRun]:
    """Run the self-test on one node. A runner without an image runs it outside a container."""
    job = job_for(order, runner)
    run = output_judge.judge_output(runner.run(job, _watch(progress, job)), job.nonce, job.require)
    if not runs_in_container(runner):
        run = run.leaving_out(selftest_job.left_out_on_host(order.loaded.profile.selftest, order.request))
    return StepResult(run, note=probe_counts(run))


def test_across_nodes(progress: Progress, order: SelfTestOrder, runner: Runner, alone: TestRun) -> StepResult[TestRun]:
    """Run the multi-node test after the self-test passed on one node, and return both as one run. The multi-node test
    is a separate job, the only job with a network."""
    job = job_for(order, runner, order.on.nodes)
    across = output_judge.judge_nodes(runner.run(job, _watch(progress, job)), job.nonce, job.require)
    run = output_judge.join_runs(alone, across)
    return StepResult(run, note=probe_counts(run))


def memory_limit(order: SelfTestOrder, runner: Runner) -> float | None:
    """The memory that the self-test's container may use, in GiB; None without a container."""
    return order.loaded.profile.selftest.memory_gb if runs_in_container(runner) else None


def _watch(progress: Progress, job: Job) -> Watch:
    return Watch(functools.partial(_show_probe, progress, job.nonce), progress.say)


def _show_probe(progress: Progress, nonce: str, line: bytes) -> None:
    report = output_judge.progress_of(line, nonce)
    if report:
        progress.probe(report)


def is_proved(proofs: Sequence[Proof]) -> bool:
    """Whether the evidence on disk still verifies the image; if so, the self-test is not run again."""
    return bool(proofs) and all(proof.state == "proved" and proof.evidence is not None for proof in proofs)


def read_earlier_run(image: Image, proofs: Sequence[Proof]) -> StepResult[TestRun]:
    """Return the run that proved the image on the profile's first GPU model."""
    assert proofs[0].evidence is not None
    run = evidence_statements_and_store.run_of(proofs[0].evidence, image.id)
    return StepResult(run, cached=True, note=probe_counts(run))


def show_earlier_evidence(proofs: Sequence[Proof]) -> StepResult[None]:
    """Report why the evidence of earlier runs is sufficient."""
    return StepResult(None, cached=True, note="; ".join(dict.fromkeys(proof.reason for proof in proofs)))


def write_evidence(
    context: StepContext, loaded: LoadedProfile, lock: Lock, image: Image, run: TestRun, signer: Signer | None
) -> StepResult[WrittenEvidence]:
    """Write the run record, a statement that refers to it and, if there is a signer, the signed statement."""
    now = datetime.datetime.now(datetime.UTC)
    engine = (run.where.engine or "unknown") if run.where else f"docker {context.engine.version}"
    wanted = profile_proofs_and_image_states.wanted(loaded.name, loaded.profile, lock)
    machine = asdict(cpu_memory_and_os.read()) if not run.where and context.engine.data_folder else None
    record = evidence_statements_and_store.run_record(image, wanted, run, engine, now, machine)
    file = evidence_statements_and_store.save(record, run.where)
    proofs = profile_proofs_and_image_states.proofs_of(image.id, loaded.name, loaded.profile, lock)
    return sign_evidence(context, record, WrittenEvidence(file, proofs), signer)


def sign_evidence(
    context: StepContext, record: RunRecord, written: WrittenEvidence, signer: Signer | None
) -> StepResult[WrittenEvidence]:
    """Write the signed form of a statement next to it, if there is a signer."""
    file = written.statement
    if signer is None:
        return StepResult(written, note=f"{file.name[:12]} unsigned: no signing_key is set")
    subject = Subject(evidence_statements_and_store.subject_name(record), record.subject)
    statement = in_toto_statements.test_result(record, evidence_statements_and_store.record_text(file), subject)
    try:
        envelope = keys_and_signatures.seal(in_toto_statements.canonical(statement), signer)
        signed = evidence_statements_and_store.save_envelope(file, envelope)
    except EnvbuildError as error:  # the run record is evidence without a signature too
        error.partial = {"statement": str(file), **error.partial}
        raise
    context.progress.say(f"the signed statement is {signed}")
    return StepResult(
        replace(written, signed_statement=signed), note=f"{file.name[:12]} signed by {signer.public.fingerprint[:12]}"
    )


def tags_of(context: StepContext, loaded: LoadedProfile, image: Image) -> tuple[str, ...]:
    """Return the image's tags in the profile's repository."""
    named = repository(loaded.name)
    tags = sorted(context.engine.tags(named).items())
    return tuple(f"{named}:{tag}" for tag, handle in tags if handle == image.handle)


def tag_verified(context: StepContext, loaded: LoadedProfile, image: Image) -> StepResult[str]:
    """Set the tag `verified` and return it. Raises EngineError if another process moved it meanwhile."""
    engine, named = context.engine, repository(loaded.name)
    cached = engine.tags(named).get(VERIFIED) == image.handle
    if not cached:
        engine.tag(image, named, VERIFIED)
    if engine.tags(named).get(VERIFIED) != image.handle:
        raise EngineError(f"{named}:{VERIFIED} was moved by another process in the meantime")
    return StepResult(f"{named}:{VERIFIED}", cached=cached, note=f"{named}:{VERIFIED}")


def withdraw_verified(
    context: StepContext, loaded: LoadedProfile, image: Image, tags: Sequence[str]
) -> tuple[str, ...]:
    """Remove the tag `verified` from an image whose latest self-test did not pass, if it has that tag. Return those of
    its `tags` that remain."""
    tag = f"{repository(loaded.name)}:{VERIFIED}"
    if context.engine.tags(repository(loaded.name)).get(VERIFIED) != image.handle:
        return tuple(tags)
    context.engine.remove(tag)
    context.progress.say(f"{tag} is withdrawn: its image did not pass the self-test")
    return tuple(one for one in tags if one != tag)
