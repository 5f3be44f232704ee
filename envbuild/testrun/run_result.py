"""Types for the result of a self-test run: a runner's raw output, and the judged run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pydantic import BaseModel, ConfigDict

from envbuild.facts import database, probe_catalogue_reader

_SUBJECT = ("python", "torch", "device", "level", "threads", "seed")
MAX_STDOUT = 64 << 20  # limit on a runner's output, in bytes


class RunLocation(BaseModel):
    """Where a self-test ran, if not in a container of this machine's engine. Each runner sets the fields that it knows,
    and only these are stored.

    `unconfined`: the restrictions of Docker's containers that were missing; `told_image`: the image id that the cluster
    reports; `interface`, `infiniband`: for a run on several nodes, the network interface, and whether each node has
    InfiniBand devices; `nodes`: if the run had a second part on several nodes, where that part ran."""

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
        """Return the fields that the runner set, for JSON."""
        return self.model_dump(mode="json", exclude_unset=True)


@dataclass(frozen=True)
class RawOutput:
    """The raw output of a self-test. `exit_code`: None if the self-test was stopped at its time limit. `where`: where
    it ran, None for this machine. `parts`: for several nodes, the exit code of each node and the size of its part of
    stdout, in bytes."""

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
    own script printed; `output_cut`: whether `output` is only its end. Fields with a default may be missing in a run
    record.

    `figures`: its groups of checks, each with the keys of `Figure` in the self-test; `traits`: other values that it
    measured, under keys that the probe chooses. Both are stored exactly as the probe wrote them, because evidence must
    not change, and records of other versions have other keys."""

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
        """Return the fields that the probe reported."""
        return self.model_dump(exclude_unset=True)


@dataclass(frozen=True)
class RunFailure:
    """A failed probe, or, if `probe` is null, a fault of the run itself. `advisory`: the id of the advisory that
    matches the failure. `detail`: the failure in one sentence. `failure`: the kind of failure; `step`: where the probe
    failed; `reason`: what was wrong. `failure`, `step` and `reason` are null for a fault of the run."""

    probe: str | None
    signal: str | None
    advisory: str | None
    detail: str
    failure: str | None = None
    step: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class SelfTestSummary:
    """The number of probes with each result, for `--json`. `passed` is 0 if the run itself failed."""

    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: tuple[RunFailure, ...]


@dataclass(frozen=True)
class TestRun:
    """A judged run. `errors`: faults of the run itself; if there is one, no probe of the run counts as passed.

    `skipped_required`: required probes that could not run; such a run has not failed, but is not valid evidence.
    """

    results: tuple[ProbeResult, ...]
    environment: Mapping[str, object]
    start: Mapping[str, object]
    errors: tuple[str, ...]
    seconds: float
    skipped_required: tuple[str, ...] = ()
    log: str = field(default="", compare=False)
    fingerprint: Mapping[str, object] = field(default_factory=dict)  # not validated; empty if not requested
    where: RunLocation | None = None  # as reported by the runner
    short: bool = False  # a process in the container was killed because memory ran out

    def by_status(self, status: str) -> list[str]:
        return [result.probe for result in self.results if result.status == status]

    @property
    def passed(self) -> bool:
        """Whether nothing failed and at least one probe passed."""
        return not self.errors and bool(self.by_status("passed")) and not self.by_status("failed")

    @property
    def out_of_memory(self) -> bool:
        """Whether a probe or the container ran out of memory, as far as this was detected."""
        return self.short or any(result.failure == "oom" for result in self.results)

    @property
    def subject(self) -> dict[str, str]:
        """Return what the self-test reported about where and how it ran: the values of the keys in _SUBJECT."""
        return {key: str(self.start[key])[:100] for key in _SUBJECT if key in self.start}

    def leaving_out(self, reasons: Mapping[str, str]) -> TestRun:
        """Return the run with more skipped probes, which were not planned. `reasons`: the reason for each probe."""
        return replace(self, results=(*self.results, *(_skipped(name, reason) for name, reason in reasons.items())))

    @property
    def unconfined(self) -> tuple[str, ...]:
        """The restrictions of Docker's containers that were missing in this run, as reported by the runner."""
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
    return ProbeResult.model_validate(skipped.model_dump())  # sets every field, so that document() contains all of them


def _failure(result: ProbeResult) -> RunFailure:
    advisory = next((advisory for advisory in database.advisories() if advisory.matches(result.document())), None)
    where = f" at {result.at}" if result.at else ""
    detail = f"{result.failure}{where}: {result.reason}"
    known = advisory.id if advisory else None
    return RunFailure(result.probe, result.signal, known, detail, result.failure, result.at, result.reason)
