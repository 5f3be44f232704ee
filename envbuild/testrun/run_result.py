"""Types for the result of a test run: a runner's raw output, and the judged run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from envbuild.facts import database, probe_catalogue_reader

_SUBJECT = ("python", "torch", "device", "level", "threads", "seed")
MAX_STDOUT = 64 << 20  # limit on a runner's output, in bytes


class RunLocation(BaseModel):
    """Where a run took place that a cluster ran. Each runner sets the fields that it knows; only those are written.

    `unconfined`: the restrictions of this engine's containers that were missing; `told_image`: the image as the cluster
    reports it; `interface`, `infiniband`: of a run on several nodes, the network interface, and whether each node has
    InfiniBand devices; `nodes`: where the part on several nodes ran, of a run that has both parts."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)

    runner: str | None = None
    engine: str | None = None
    unconfined: tuple[str, ...] = ()
    job: str | None = None
    node: str | None = None
    gpus: str | None = None
    image: str | None = None
    told_image: str | None = None
    queued_seconds: float | None = None
    restarts: int | None = None
    interface: str | None = None
    infiniband: tuple[bool, ...] | None = None
    nodes: RunLocation | None = None

    def document(self) -> dict[str, object]:
        """The fields that the runner set, for JSON."""
        return self.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True)
class RawOutput:
    """The raw output of a run. `exit_code`: None if it did not end by itself. `where`: where it ran, None for this
    machine. `parts`: for several nodes, the exit code of each node and the size of its part of stdout, in bytes."""

    stdout: bytes
    stderr: str
    exit_code: int | None
    seconds: float
    out_of_memory: bool = False
    timed_out: bool = False
    too_long: bool = False
    parts: tuple[tuple[int, int], ...] = ()
    where: RunLocation | None = None


class ProbeResult(BaseModel):
    """The result of one probe. `seconds`: its duration; `at`: the step at which it failed; `output`: what the profile's
    own script printed, or only the end of it (`output_cut`). The optional fields may be missing in a run record.

    `figures`: its checks, each with the keys of `Figure` in the self-test; `traits`: facts that it measured, with keys
    that each probe chooses. Both are kept as the probe wrote them: evidence must keep its bytes, and records of other
    versions have other keys."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True, defer_build=True)

    probe: str
    level: str = ""
    status: Literal["passed", "failed", "skipped"]
    reason: str | None = None
    failure: str | None = None
    signal: str | None = None
    at: str | None = None
    detail: str | None = None
    figures: list[dict[str, object]] = []
    seconds: float = 0.0
    traits: dict[str, object] = {}
    output: str | None = None
    output_cut: bool = False

    def document(self) -> dict[str, object]:
        """Return the fields that were reported."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True)
class RunFailure:
    """A failed probe, or a fault of the run if `probe` is None. `advisory`: the id of the one that describes it.
    `detail`: the same in one sentence. `failure`: the kind of it; `step`: where the probe failed; `reason`: what
    was wrong. These are null for a fault of the run."""

    probe: str | None
    signal: str | None
    advisory: str | None
    detail: str
    failure: str | None = None
    step: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class SelfTestSummary:
    """The numbers of probes by result, for `--json`."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: tuple[RunFailure, ...]


@dataclass(frozen=True)
class TestRun:
    """A judged run. `errors` are faults of the run itself: with any of them, nothing in the run counts as passed.

    `skipped_required`: required probes that could not run here; the run did not fail, but is not valid evidence either.
    """

    results: tuple[ProbeResult, ...]
    environment: Mapping[str, object]
    start: Mapping[str, object]
    errors: tuple[str, ...]
    seconds: float
    skipped_required: tuple[str, ...] = ()
    log: str = field(default="", compare=False)
    fingerprint: Mapping[str, object] = field(default_factory=dict)  # as received, not judged; empty if not requested
    where: RunLocation | None = None  # as reported by the runner
    short: bool = False  # the container was killed because it ran out of memory

    def by_status(self, status: str) -> list[str]:
        return [result.probe for result in self.results if result.status == status]

    @property
    def passed(self) -> bool:
        """True if nothing failed and at least one probe passed."""
        return not self.errors and bool(self.by_status("passed")) and not self.by_status("failed")

    @property
    def out_of_memory(self) -> bool:
        """Whether a probe or the container was killed because it ran out of memory, as far as this can be detected."""
        return self.short or any(result.failure == "oom" for result in self.results)

    @property
    def subject(self) -> dict[str, str]:
        """Return where the self-test ran, as it reported itself: the keys in _SUBJECT."""
        return {key: str(self.start[key])[:100] for key in _SUBJECT if key in self.start}

    def leaving_out(self, reasons: Mapping[str, str]) -> TestRun:
        """Return the same run with additional skipped probes that were not planned, with the given reasons."""
        return replace(self, results=(*self.results, *(_skipped(name, reason) for name, reason in reasons.items())))

    @property
    def unconfined(self) -> tuple[str, ...]:
        """The restrictions of this engine's containers that were missing, as reported by the runner."""
        return self.where.unconfined if self.where else ()

    def failures(self) -> list[RunFailure]:
        """Return each failed probe, then each fault of the run."""
        found = [_failure(result) for result in self.results if result.status == "failed"]
        return [*found, *(RunFailure(None, None, None, text) for text in self.errors)]

    def summary(self) -> SelfTestSummary:
        passed, failed, skipped = (len(self.by_status(status)) for status in ("passed", "failed", "skipped"))
        seconds, failures = round(self.seconds, 2), tuple(self.failures())
        return SelfTestSummary(0 if self.errors else passed, failed, skipped, seconds, failures)


def _skipped(probe: str, reason: str) -> ProbeResult:
    level = probe_catalogue_reader.known_probes()[probe].level
    skipped = ProbeResult(probe=probe, level=level, status="skipped", reason=reason)
    return ProbeResult.model_validate(skipped.model_dump())  # with every field reported


def _failure(result: ProbeResult) -> RunFailure:
    advisory = next((advisory for advisory in database.advisories() if advisory.matches(result.document())), None)
    where = f" at {result.at}" if result.at else ""
    detail = f"{result.failure}{where}: {result.reason}"
    known = advisory.id if advisory else None
    return RunFailure(result.probe, result.signal, known, detail, result.failure, result.at, result.reason)
