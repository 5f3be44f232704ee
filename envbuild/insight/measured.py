"""What was measured in a run of the self-test: each probe's errors, speeds beside datasheets, ranks by stages. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """An error beside its bound; a ratio that is no number is infinite."""

    case: str
    dtype: str
    shape: tuple[int, ...]
    error: str
    bound: str
    ratio: float


@dataclass(frozen=True)
class Known:
    """An advisory, as far as a page tells it."""

    id: str
    title: str
    remedy: str
    cite: tuple[str, ...]


@dataclass(frozen=True)
class Probe:
    """A probe's result. `ratios`: error over bound of every figure, rising; `worst`: the figure of the last of them."""

    name: str
    status: str
    required: bool
    seconds: float | None
    ratios: tuple[float, ...]
    worst: Figure | None
    reason: str | None
    failure: str | None
    signal: str | None
    at: str | None
    detail: str | None
    known: Known | None


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
class Blame:
    """A rank that failed a stage, at which step and how; `member` is the GPU or process that it ran on."""

    rank: int
    member: int
    step: str
    reason: str


@dataclass(frozen=True)
class Stage:
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
class Library:
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
    probes: tuple[Probe, ...]
    errors: tuple[str, ...]
    speeds: tuple[Speed, ...]
    unit: str
    members: tuple[int, ...]
    stages: tuple[Stage, ...]
    verdict: str | None
    libraries: tuple[Library, ...]

    def by_status(self, status: str) -> list[Probe]:
        return [probe for probe in self.probes if probe.status == status]
