"""What was measured in a run of the self-test: errors by probe, speeds next to datasheets, ranks by stages. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasuredFigure:
    """An error and its bound. `share`: the error over its bound, the rounding of the result left out of both; of the
    whole error in records from before that was done; infinite where the record has no number. `checks`: how many
    comparisons it is the worst of."""

    case: str
    dtype: str
    shape: tuple[int, ...]
    error: str
    bound: str
    share: float
    checks: int


@dataclass(frozen=True)
class KnownAdvisory:
    """An advisory, as far as a page tells it."""

    id: str
    title: str
    remedy: str
    cite: tuple[str, ...]


@dataclass(frozen=True)
class MeasuredProbe:
    """A probe's result. `shares`: those of every figure, rising; `worst`: the figure with the largest; `checks`: how
    many comparisons the figures are of."""

    name: str
    status: str
    required: bool
    seconds: float | None
    shares: tuple[float, ...]
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
    """What a card, the GPU `index`, reached in one precision, or copying (`name`), in `unit`. `promised`: by its
    datasheet, None where none has a source; `floor`: the part of it that the profile asks for."""

    card: str
    index: int
    name: str
    unit: str
    reached: float
    promised: float | None
    floor: float | None

    @property
    def part(self) -> float | None:
        return self.reached / self.promised if self.promised else None


@dataclass(frozen=True)
class Coverage:
    """How many cases of an operation the run sampled, and how many pairs of values of two dimensions they cover, `of`
    all that are possible."""

    operation: str
    cases: int
    pairs: int
    of: int

    @property
    def part(self) -> float | None:
        return self.pairs / self.of if self.of else None


@dataclass(frozen=True)
class Blame:
    """A rank that failed a stage, at which step and how; `member` is the GPU or process that it ran on."""

    rank: int
    member: int
    step: str
    reason: str


@dataclass(frozen=True)
class MeasuredStage:
    """A world that dist.staged tried. `blamed` is empty where it passed, or where the record names nobody."""

    name: str
    backend: str
    members: tuple[int, ...]
    settings: str
    passed: bool
    seconds: float | None
    transports: tuple[str, ...]
    blamed: tuple[Blame, ...]

    @property
    def kind(self) -> str:
        if self.settings:
            return f"over {self.backend} again, with less"
        size = {1: "each alone", 2: "pairs"}.get(len(self.members), "together")
        return f"{size}, over {self.backend}"

    def mark(self, member: int) -> str:
        """`absent`, `passed`, `blamed`, or `failed`: it took part in a stage that failed, and is not blamed."""
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
    """One run of the self-test. `unit`: what the members of `stages` are, GPU or process."""

    model: str
    card: str
    count: int
    driver: str | None
    finished: str
    level: str
    seconds: float
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
