"""Types for the measurements of a self-test run: errors of each probe, speeds and datasheet values, ranks in each
stage. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from envbuild.util.json_output_types import Measured


@dataclass(frozen=True)
class MeasuredFigure:
    """The largest error of a group of checks, and its tolerance. `share`: the ratio of error to tolerance, both without
    the rounding of the result (records of older versions include that rounding); infinity if the record has no finite
    number. `checks`: the number of checks in the group."""

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
    """A probe's result. `shares`: the error ratios of all groups of checks, ascending; `worst`: the group with the
    largest ratio; `checks`: the number of checks in all groups."""

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
    datasheet's value, None without a source; `floor`: the fraction of `promised` that the profile requires."""

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
    """How many cases of an operation a run sampled. `pairs`: how many pairs of values of two dimensions, such as a
    dtype with a layout, the cases cover; `of`: how many such pairs exist."""

    operation: str
    cases: int
    pairs: int
    of: int

    @property
    def part(self) -> float | None:
        return self.pairs / self.of if self.of else None


@dataclass(frozen=True)
class Blame:
    """A rank that caused the failure of a stage, with the failed step and the reason. `member`: the number of the GPU
    or process of this rank."""

    rank: int
    member: int
    step: str
    reason: str


@dataclass(frozen=True)
class MeasuredStage:
    """A group of ranks that the probe dist.staged tested together. `blamed` is empty if the stage passed, or if the
    record blames no rank."""

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
    """A library that the self-test's process had mapped after its probes."""

    name: str
    version: str
    owner: str
    path: str
    sha256: str


@dataclass(frozen=True)
class Run:
    """One run of the self-test. `unit`: what the members of `stages` are, GPU or process."""

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
