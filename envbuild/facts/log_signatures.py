"""Log signatures of causes, from facts/data/signatures.yaml, what a log shows besides the lines of a cause, from
facts/data/symptoms.yaml, and error numbers, from facts/data/error_numbers.yaml; the heads of these files describe each
key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from envbuild.facts import database, fact_file_reader
from envbuild.facts.advisory_model import Change
from envbuild.facts.fact_field_types import STRICT, Capability, FactRow, LogPattern, Name, Text
from envbuild.util.errors import FactsError, near

Patterns = tuple[LogPattern, ...]
State = Literal[
    "card-below-torch", "card-not-in-torch", "copy-differs", "crash-in-cpu-math", "fragmented", "hang-stack",
    "interrupted", "memory-grows", "memory-of-others", "rank-failed-first", "traceback-cut",
]  # fmt: skip
SymptomClass = Literal[
    "hang", "illegal-access", "kill", "nan", "out-of-memory", "signal-abrt", "signal-bus", "signal-fpe", "signal-ill",
    "signal-segv", "slow", "time-out", "will-not-compile", "will-not-load", "wrong-value",
]  # fmt: skip
OperationClass = Literal["attention", "collective", "compile", "conv", "copy", "gemm", "input", "load", "norm"]
EvidenceName = Literal[
    "line", "hint", "no-line", "holds", "fits", "not-loaded", "versions", "symptom", "other-symptom", "operation",
    "other-operation", "frames", "other-frames", "raised", "lowered",
]  # fmt: skip
ANY = "*"
NEUTRAL = "neutral"
"""The component of libraries in which many different faults show."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Signature(FactRow):
    """The log signature of an advisory, or of a cause that does not depend on a version; the latter has `title` and
    `remedy`."""

    id: Name
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.6
    lines: Patterns = ()
    hints: Patterns = ()
    never: Patterns = ()
    needs: Patterns = ()
    symptoms: frozenset[SymptomClass] = frozenset()
    operations: frozenset[OperationClass] = frozenset()
    states: frozenset[State] = frozenset()
    shown_by: Mapping[State | SymptomClass, Patterns] = Field(default_factory=dict)
    hinted_by: Mapping[State | SymptomClass, Patterns] = Field(default_factory=dict)
    raised_by: Patterns = ()
    lowered_by: Patterns = ()
    unless: Patterns = ()
    loaded: frozenset[str] = frozenset()
    stack: frozenset[str] = frozenset()
    yields_to: frozenset[str] = frozenset()
    title: Text | None = None
    remedy: Text | None = None
    prove: Text | None = None
    change: Change = Field(default_factory=Change)
    cite: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GpuPattern(FactRow):
    """The compute capability of GPUs that are missing from the facts, by patterns of their names."""

    pattern: LogPattern
    compute_capability: Capability


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Word(FactRow):
    """Log lines that show that a condition of advisories holds. `word`: the condition, such as system-cudnn
    (environment), fp8 (features) or apex (extensions)."""

    kind: Literal["environment", "features", "extensions"]
    word: Name
    lines: Patterns
    unless: Patterns = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SignatureAdvice(FactRow):
    """Diagnostics to turn on before the next run."""

    say: Text
    lines: Patterns
    unless: Patterns = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Symptom(FactRow):
    """A class of failures. `needs`: any of these is in the log too; `of_gpu`: so is a word of a program that uses GPUs.
    `decide`: what tells its causes apart."""

    symptom: SymptomClass
    lines: Patterns
    needs: Patterns = ()
    of_gpu: bool = False
    unless: Patterns = ()
    decide: Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GpuContext(FactRow):
    """Words of a program that uses GPUs."""

    lines: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OperationPattern(FactRow):
    """A class of operations that a log mentions."""

    operation: OperationClass
    lines: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Weight(FactRow):
    """What one kind of evidence adds to the log-odds of a cause. `say`: the evidence in words."""

    evidence: EvidenceName
    weight: float
    say: Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Component(FactRow):
    """A component: libraries (or Python files) and functions in stack traces that belong together."""

    component: Name
    libraries: Patterns = ()
    functions: Patterns = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SystemMessage(FactRow):
    """A message of the C library, the loader or the shell in other languages than English."""

    english: Text
    forms: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ErrorFamily(FactRow):
    """The error numbers of one library: the patterns of a number in a log, with the group `n`, and the name and message
    of each number. `of_gpu`: patterns for logs that mention a program that uses GPUs."""

    family: Name
    forms: Patterns
    of_gpu: Patterns = ()
    messages: Mapping[str, Text]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Denial(FactRow):
    """Patterns of lines that say that a failure did not happen."""

    lines: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hearsay(FactRow):
    """Patterns before text that does not come from this run: it quotes another run, or describes errors."""

    before: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Around(FactRow):
    """Patterns before or after a name which show that the name does not belong to the failed part, except where
    `not_before` or `not_after` matches."""

    before: Patterns = ()
    after: Patterns = ()
    not_before: Patterns = ()
    not_after: Patterns = ()


@cache
def _rows() -> Mapping[str, Signature]:
    return {row.id: row for row in fact_file_reader.rows("signatures", "signatures", Signature)}


def signatures() -> Mapping[str, Signature]:
    """Signatures by id: one for every advisory (a site's own too) and every other cause. Raises FactsError if a
    signature refers to an unknown one or is incomplete."""
    return _signatures(fact_file_reader.site_files())


@cache
def _signatures(site: tuple[Path, ...]) -> Mapping[str, Signature]:
    """`site`: the files of the site's advisories; they are the cache key."""
    advisories, rows = {advisory.id: advisory for advisory in database.advisories()}, _rows()
    known = {*advisories, *rows}
    for row in rows.values():
        for other in sorted(row.yields_to - known - {ANY}):
            raise FactsError(f"signature {row.id!r} yields to {other!r}, which is not known", hint=near(other, known))
        if row.id not in advisories and not (row.title and row.remedy and (row.lines or row.shown_by)):
            raise FactsError(f"{row.id!r} is not an advisory; a cause needs title, lines and remedy")
    return {
        **{
            advisory.id: Signature(id=advisory.id, source=advisory.source, status=advisory.status, as_of=advisory.as_of)
            for advisory in advisories.values()
        },
        **rows,
    }


@cache
def gpu_patterns() -> tuple[GpuPattern, ...]:
    return fact_file_reader.rows("signatures", "cards", GpuPattern)


@cache
def words() -> tuple[Word, ...]:
    return fact_file_reader.rows("signatures", "words", Word)


@cache
def advice() -> tuple[SignatureAdvice, ...]:
    return fact_file_reader.rows("signatures", "advice", SignatureAdvice)


@cache
def components() -> tuple[Component, ...]:
    return fact_file_reader.rows("signatures", "components", Component)


@cache
def system_messages() -> tuple[SystemMessage, ...]:
    return fact_file_reader.rows("signatures", "system_messages", SystemMessage)


@cache
def error_families() -> tuple[ErrorFamily, ...]:
    return fact_file_reader.rows("error_numbers", "families", ErrorFamily)


@cache
def symptoms() -> tuple[Symptom, ...]:
    return fact_file_reader.rows("symptoms", "symptoms", Symptom)


@cache
def denials() -> Patterns:
    """Patterns of lines that say that a failure did not happen: "no NaN detected", "OOM retries: 0"."""
    return tuple(pattern for row in fact_file_reader.rows("symptoms", "denials", Denial) for pattern in row.lines)


@cache
def gpu_context() -> Patterns:
    return tuple(pattern for row in fact_file_reader.rows("symptoms", "context", GpuContext) for pattern in row.lines)


@cache
def operation_patterns() -> tuple[OperationPattern, ...]:
    return fact_file_reader.rows("symptoms", "operations", OperationPattern)


@cache
def weights() -> Mapping[EvidenceName, Weight]:
    """The weights by the name of the evidence; one for each."""
    return {row.evidence: row for row in fact_file_reader.rows("symptoms", "weights", Weight)}


@cache
def hearsay() -> Patterns:
    return tuple(pattern for row in fact_file_reader.rows("signatures", "hearsay", Hearsay) for pattern in row.before)


@cache
def _around(table: Literal["elsewhere", "mentions"]) -> tuple[Around, ...]:
    return fact_file_reader.rows("signatures", table, Around)


def elsewhere(before: str, after: str) -> bool:
    """Whether the text around a name shows that the GPU or version worked, so that it did not cause the failure."""
    return _stands("elsewhere", before[-_NEAR:], after[:_NEAR])


def mentioned(before: str, after: str) -> bool:
    """Whether the text around a version shows that it is recommended, required or from another run, and therefore not
    evidence of the installed version."""
    return _stands("mentions", before[-_COMMAND:], after[:_NEAR]) or elsewhere(before, after)


_NEAR, _COMMAND = 120, 400
"""Characters that are searched around a name: a sentence, and a command with its arguments."""


def _stands(table: Literal["elsewhere", "mentions"], near: str, rest: str) -> bool:
    return any(
        (_any(row.before, near) and not _any(row.not_before, near))
        or (_any(row.after, rest) and not _any(row.not_after, rest))
        for row in _around(table)
    )


def _any(patterns: Patterns, text: str) -> bool:
    return any(pattern.search(text) for pattern in patterns)
