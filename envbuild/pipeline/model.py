"""What a run of the pipeline is asked for, what it comes to, and where a person sees it happen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from envbuild.evidence import evidence_statements_and_store, profile_proofs
from envbuild.evidence.proof_rules import Proof
from envbuild.image.docker_engine import Image
from envbuild.image.image_naming import VERIFIED
from envbuild.lock.lock_file import Lock
from envbuild.profile.project_shapes_and_script import Script
from envbuild.testrun import selftest_job
from envbuild.testrun.run_result import TestRun
from envbuild.testrun.selftest_job import RunRequest

T = TypeVar("T")


class Progress(Protocol):
    """Where a person sees what happens; nothing of it goes to stdout."""

    def begin(self, step: str) -> None: ...
    def line(self, text: str) -> None: ...
    def say(self, text: str) -> None: ...
    def probe(self, told: Mapping[str, Any]) -> None: ...
    def end(self, step: Step) -> None: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Step:
    """A finished step. `cached`: nothing had to be done."""

    name: str
    seconds: float
    cached: bool
    note: str


@dataclass(frozen=True)
class StepResult(Generic[T]):
    """What a step came to. `cached`: nothing had to be done; `note`: for the reader, behind the step's name."""

    value: T
    cached: bool = False
    note: str = ""


@dataclass(frozen=True)
class On:
    """Where the self-test runs. `runner` None: as the site's settings say. `given`: a runner's name -> its settings,
    over the site's. `resume`: the id of a job there that was begun before. `gpu`: on which of the profile's GPUs.
    `nodes`: on as many machines together too.
    """

    runner: str | None = None
    given: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    resume: str | None = None
    gpu: str | None = None
    nodes: int = 1


HERE = On("local")


@dataclass(frozen=True)
class Options:
    locked: bool = False
    no_cache: bool = False
    pins: Mapping[str, str] = field(default_factory=dict)
    write: bool = False
    requirements: Path | None = None
    asked: RunRequest = selftest_job.ALL
    tolerant: bool = False  # known faults are tried, not refused
    script: Script | None = None  # instead of the profile's own
    on: On = HERE
    builder: str | None = None  # of buildx, if not the engine's own
    unproved: bool = False  # what cannot be proved here is built all the same
    accept_old: tuple[str, ...] = ()  # packages that may be far behind their newest release

    @property
    def trial(self) -> bool:
        """Pins to try: no file is changed and `verified` is never moved."""
        return bool(self.pins) and not self.write


@dataclass
class Made:
    """What `make` and its parts came to; filled in as the steps go."""

    name: str
    steps: list[Step] = field(default_factory=list)
    lock: Lock | None = None
    image: Image | None = None
    interpreter: Path | None = None  # of this machine, tested instead of an image
    tags: list[str] = field(default_factory=list)
    run: TestRun | None = None
    memory_gb: float | None = None  # what the self-test's container may take
    evidence: Path | None = None
    proofs: tuple[Proof, ...] = ()
    notes: list[str] = field(default_factory=list)  # what is to be known of it beside the steps

    @property
    def status(self) -> str:
        if self.image is None or (self.run is not None and not self.run.passed):
            return "failed"
        proved = bool(self.proofs) and all(proof.state == "proved" for proof in self.proofs)
        return VERIFIED if proved else "built"

    def _gpu(self) -> dict[str, Any] | None:
        card = evidence_statements_and_store.gpu_of(self.run) if self.run else None
        return {"model": card["model"], "count": card["count"]} if card else None

    def document(self) -> dict[str, Any]:
        return {
            "profile": self.name,
            "status": self.status,
            "image": {"id": self.image.id, "tags": self.tags} if self.image else None,
            "lock": self.lock.id if self.lock else None,
            "gpu": self._gpu(),
            "evidence": str(self.evidence) if self.evidence else None,
            "proofs": profile_proofs.document(self.proofs),
            "selftest": self.run.summary() if self.run else None,
            "steps": [{"name": s.name, "seconds": round(s.seconds, 3), "cached": s.cached} for s in self.steps],
            "notes": self.notes,
        }


def probe_counts(run: TestRun) -> str:
    return ", ".join(f"{len(run.by_status(s))} {s}" for s in ("passed", "failed", "skipped") if run.by_status(s))
