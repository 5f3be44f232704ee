"""Types for the measurements of a self-test run: errors by probe, speeds and datasheet values, ranks by stage. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.util.json_output_types import Measured


@dataclass(frozen=True)
class MeasuredFigure:
    """The largest error of a group of checks, and its tolerance. `share`: the ratio of error to tolerance, both without
    the rounding of the result (older records include that rounding); infinite if the record has no number. `checks`:
    the number of checks."""

    case: str
    dtype: str
    shape: tuple[int, ...]
    error: str
    bound: str
    share: Measured
    checks: int


@dataclass(frozen=True)
class KnownAdvisory:
    """The part of an advisory that a page shows."""

    id: str
    title: str
    remedy: str
    cite: tuple[str, ...]


@dataclass(frozen=True)
class MeasuredProbe:
    """A probe's result. `shares`: the error ratios of all figures, ascending; `worst`: the figure with the largest
    ratio; `checks`: the number of checks in all figures."""

    name: str
    status: str
    required: bool
    seconds: Measured | None
    shares: tuple[Measured, ...]
    worst: MeasuredFigure | None
    checks: int
    reason: str | None
    failure: str | None
    signal: str | None
    at: str | None
    detail: str | None
    known: KnownAdvisory | None


@dataclass(frozen=True)
class Speed:
    """The speed that GPU `index` reached, in `unit`. `name`: the precision, or the kind of copy. `promised`: the
    datasheet's value, None without a source; `floor`: the fraction of it that the profile requires."""

    gpu: str
    index: int
    name: str
    unit: str
    reached: Measured
    promised: Measured | None
    floor: Measured | None

    @property
    def part(self) -> float | None:
        return self.reached / self.promised if self.promised else None


@dataclass(frozen=True)
class Coverage:
    """The number of cases of an operation that a run sampled, and the number of covered pairs of values of two
    dimensions; `of`: the number of possible pairs."""

    operation: str
    cases: int
    pairs: int
    of: int

    @property
    def part(self) -> float | None:
        return self.pairs / self.of if self.of else None


@dataclass(frozen=True)
class Blame:
    """A rank that caused the failure of a stage, with the step and the reason. `member`: the GPU or process that it ran
    on."""

    rank: int
    member: int
    step: str
    reason: str


@dataclass(frozen=True)
class MeasuredStage:
    """A group of ranks that dist.staged tested. `blamed` is empty if it passed, or if the record blames no rank."""

    name: str
    backend: str
    members: tuple[int, ...]
    settings: str
    passed: bool
    seconds: Measured | None
    transports: tuple[str, ...]
    blamed: tuple[Blame, ...]

    @property
    def kind(self) -> str:
        if self.settings:
            return f"over {self.backend} again, with fewer features"
        size = {1: "each alone", 2: "pairs"}.get(len(self.members), "together")
        return f"{size}, over {self.backend}"

    def mark(self, member: int) -> str:
        """Return `absent`, `passed`, `blamed`, or `failed` (took part in a failed stage without being blamed)."""
        if member not in self.members:
            return "absent"
        if self.passed:
            return "passed"
        return "blamed" if any(blame.member == member for blame in self.blamed) else "failed"


@dataclass(frozen=True)
class MeasuredLibrary:
    """A library that the process had mapped after its probes."""

    name: str
    version: str
    owner: str
    path: str
    sha256: str


@dataclass(frozen=True)
class Run:
    """One run of the self-test. `unit`: the kind of the members of `stages`, GPU or process."""

    model: str
    gpu: str
    count: int
    driver: str | None
    finished: str
    level: str
    seconds: Measured
    image: str
    evidence: str
    engine: str
    python: str
    torch: str
    probes: tuple[MeasuredProbe, ...]
    errors: tuple[str, ...]
    speeds: tuple[Speed, ...]
    coverage: tuple[Coverage, ...]
    seed: int | None
    unit: str
    members: tuple[int, ...]
    stages: tuple[MeasuredStage, ...]
    verdict: str | None
    libraries: tuple[MeasuredLibrary, ...]

    def by_status(self, status: str) -> list[MeasuredProbe]:
        return [probe for probe in self.probes if probe.status == status]
