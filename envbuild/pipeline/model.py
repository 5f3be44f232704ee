"""Types of a pipeline run: its options, and the values that its steps and workflows give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from envbuild.audit.finding_types import Finding
from envbuild.evidence import evidence_statements_and_store, profile_proofs_and_image_states
from envbuild.evidence.profile_proofs_and_image_states import ProofRow
from envbuild.evidence.proof_rules import Proof
from envbuild.image.build_records import Record
from envbuild.image.docker_engine import Image
from envbuild.lock.lock_file import Lock
from envbuild.pipeline.progress_events import Step
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.project_test_shapes_and_script import Script
from envbuild.resolve.plan_resolver import Plan
from envbuild.testrun import selftest_job
from envbuild.testrun.run_result import SelfTestSummary, TestRun
from envbuild.testrun.selftest_job import RunRequest
from envbuild.util.json_output_types import AdvisoryRow, Digest
from envbuild.util.untrusted_input_errors import Reason

T = TypeVar("T")


@dataclass(frozen=True)
class StepResult(Generic[T]):
    """The result of a step. `cached`: nothing had to be done; `note`: text shown after the step's name."""

    value: T
    cached: bool = False
    note: str = ""


@dataclass(frozen=True)
class RunnerOptions:
    """Where the self-test runs. `runner`: None means as configured in the site's settings. `given`: maps a runner's
    name to settings that override the site's. `resume`: the id of a job started there earlier. `gpu`: the GPU model to
    test on, one of the profile's. `nodes`: if more than one, the self-test also runs on that many nodes together."""

    runner: str | None = None
    given: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    resume: str | None = None
    gpu: str | None = None
    nodes: int = 1


ON_THIS_MACHINE = RunnerOptions("local")
AS_CONFIGURED = RunnerOptions()


WheelRecords = Literal["write", "require", "ignore"]
"""How a build treats the compiled wheels that the lock records. `write`: record the wheel that it uses, also if that
replaces a record; `require`: refuse a wheel that differs from its record; `ignore`: use any wheel of this machine."""


@dataclass(frozen=True)
class Options:
    """The options of `build`, `make` and `bisect`."""

    locked: bool = False
    no_cache: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)
    write: bool = False
    requirements: Path | None = None
    request: RunRequest = selftest_job.ALL
    tolerant: bool = False  # known faults are tried instead of refused
    script: Script | None = None  # replaces the profile's own script
    builder: str | None = None  # name of a buildx builder, if not the engine's default
    unproved: bool = False  # build even what cannot be verified here
    accept_old: tuple[str, ...] = ()  # packages that are not refused if they are far behind their newest release
    line_reason: str = "the default"  # why this CUDA line of the GPU is built, such as an option or the driver

    @property
    def trial(self) -> bool:
        """True if pins are only tried: no file of the project is changed and the tag `verified` is not moved."""
        return bool(self.pins) and not self.write

    @property
    def wheel_records(self) -> WheelRecords:
        return "require" if self.locked else "ignore" if self.trial else "write"


@dataclass(frozen=True)
class Recipe:
    """What an image is built from, and what is done with the records of its compiled wheels."""

    loaded: LoadedProfile
    plan: Plan
    lock: Lock
    wheel_records: WheelRecords = "require"

    @property
    def name(self) -> str:
        return self.loaded.name


@dataclass(frozen=True)
class BuiltImage:
    """An image built from a recipe. `new_build_records`: build records written for it that did not exist before.
    `tags`: the tags that the build has set."""

    image: Image
    new_build_records: tuple[Record, ...] = ()
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class SelfTestOrder:
    """A self-test to run. `versions`: the version of each distribution that it must find; `python`: the release of
    Python that it must find, such as 3.11."""

    loaded: LoadedProfile
    versions: Mapping[str, str]
    python: str
    request: RunRequest = selftest_job.ALL
    on: RunnerOptions = ON_THIS_MACHINE


MakeState = Literal["verified", "unverified", "built", "computed", "failed"]


@dataclass(frozen=True)
class UsedGpu:
    """The GPU model that the self-test used, and how many of it."""

    model: str
    count: int


@dataclass(frozen=True)
class StepRow:
    name: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class MakeDocument:
    """The document of `make`, `build` and `test --record`. `state`: `built` if evidence was not checked; `computed` if
    `build` found no engine: then `image` is the one that the lock gives, not loaded and not audited. `tags`: those in
    the engine, or in the registry of a cluster if no engine can be used. `statement`: the file of the evidence that
    this run wrote; `signed_statement`: its signed form, if a key is set. `findings`: those of the audit, if they
    refused the image. `reasons`: why the image is not proved, apart from failures. Their ids are those of `make
    --dry-run`, `skipped` (a probe was skipped) and `evidence` (a GPU model has no current evidence)."""

    profile: str
    state: MakeState
    lock: Digest | None
    image: Digest | None
    tags: tuple[str, ...]
    gpu: UsedGpu | None
    evidence: tuple[ProofRow, ...]
    statement: str | None
    signed_statement: str | None
    advisories: tuple[AdvisoryRow, ...]
    findings: tuple[Finding, ...]
    selftest: SelfTestSummary | None
    steps: tuple[StepRow, ...]
    seconds: float
    notes: tuple[str, ...]
    reasons: tuple[Reason, ...]


@dataclass(frozen=True)
class MakeResult:
    """The result of `make` and its parts; a field keeps its default until the step that gives its value has ended."""

    name: str
    steps: tuple[Step, ...] = ()
    lock: Lock | None = None
    image: Image | None = None
    is_audited: bool = True  # False after `build` without an engine
    new_build_records: tuple[Record, ...] = ()  # build records written for the image
    interpreter: Path | None = None  # interpreter on this machine, tested instead of an image
    tags: tuple[str, ...] = ()
    run: TestRun | None = None
    memory_gb: float | None = None  # memory limit of the self-test's container
    statement: Path | None = None  # the evidence written by this run
    signed_statement: Path | None = None
    proofs: tuple[Proof, ...] = ()
    notes: tuple[str, ...] = ()  # notes for the user, in addition to the steps
    advisories: tuple[AdvisoryRow, ...] = ()
    reasons: tuple[Reason, ...] = ()  # why the image is not proved, apart from failures

    @property
    def state(self) -> MakeState:
        """The state of the image; `built` if evidence was not checked, as after `build`."""
        if self.image is None or (self.run is not None and self.run.failures()):
            return "failed"
        if not self.is_audited:
            return "computed"
        if not self.proofs:
            return "built"
        return "verified" if all(proof.state == "proved" for proof in self.proofs) else "unverified"

    def _gpu(self) -> UsedGpu | None:
        gpu = evidence_statements_and_store.gpu_of(self.run) if self.run else None
        return UsedGpu(gpu.model, gpu.count) if gpu else None

    def document(self) -> MakeDocument:
        return MakeDocument(
            profile=self.name,
            state=self.state,
            lock=self.lock.id if self.lock else None,
            image=self.image.id if self.image else None,
            tags=self.tags if self.image else (),
            gpu=self._gpu(),
            evidence=profile_proofs_and_image_states.proof_rows(self.proofs),
            statement=str(self.statement) if self.statement else None,
            signed_statement=str(self.signed_statement) if self.signed_statement else None,
            advisories=self.advisories,
            findings=(),
            selftest=self.run.summary() if self.run else None,
            steps=tuple(StepRow(step.name, round(step.seconds, 3), step.cached) for step in self.steps),
            seconds=round(sum(step.seconds for step in self.steps), 3),
            notes=self.notes,
            reasons=self.reasons,
        )


def probe_counts(run: TestRun) -> str:
    return ", ".join(f"{len(run.by_status(s))} {s}" for s in ("passed", "failed", "skipped") if run.by_status(s))
