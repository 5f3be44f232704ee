"""Reads the log signatures of causes (facts/data/signatures.yaml), further evidence in logs (facts/data/symptoms.yaml),
statements in prose (facts/data/statements.yaml), and error numbers (facts/data/error_numbers.yaml). The heads of these
files describe each key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from envbuild.facts import database, fact_file_reader
from envbuild.facts.advisory_model import Change
from envbuild.facts.fact_field_types import STRICT, Capability, FactRow, Name, Pattern, Text
from envbuild.util.errors import FactsError, near

Patterns = tuple[Pattern, ...]
State = Literal[
    "card-below-torch", "card-newer-than-cuda", "card-not-in-torch", "collectives-differ", "copy-differs",
    "crash-in-cpu-math", "epochs-get-faster", "fragmented", "hang-stack", "input-bound", "interrupted",
    "loss-scale-shrinks", "memory-free", "memory-grows", "memory-of-others", "rank-failed-first", "traceback-cut",
]  # fmt: skip
SymptomClass = Literal[
    "hang", "illegal-access", "kill", "nan", "out-of-memory", "signal-abrt", "signal-bus", "signal-fpe", "signal-ill",
    "signal-segv", "slow", "time-out", "will-not-compile", "will-not-load", "wrong-value",
]  # fmt: skip
OperationClass = Literal["attention", "collective", "compile", "conv", "copy", "gemm", "input", "load", "norm"]
EvidenceName = Literal[
    "line", "stated", "hint", "no-line", "holds", "fits", "not-loaded", "versions", "symptom", "other-symptom",
    "operation", "other-operation", "frames", "other-frames", "raised", "lowered",
]  # fmt: skip
ANY = "*"
NEUTRAL = "neutral"
"""The component of libraries whose frames do not tell causes apart, because many different faults crash in them."""
DRIVER_TOO_OLD = "driver-too-old"
"""The cause that the driver does not run the CUDA version of torch, in a log or in an environment."""
TORCH_WITHOUT_CUDA = "torch-without-cuda"
"""The cause in a log that torch is a build without CUDA."""
UNRELATED_APEX = "apex-unrelated"
"""The cause in a log that an import of NVIDIA's apex found the unrelated package."""
FIXED_BY_PACKAGES = frozenset({DRIVER_TOO_OLD, TORCH_WITHOUT_CUDA, UNRELATED_APEX})
"""The causes without an advisory for which `envbuild fix` changes packages."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Signature(FactRow):
    """The log signature of an advisory, or of a cause that does not depend on a version. Such a cause has a `title` and
    a `remedy`; an advisory has its own title and remedy."""

    id: Name
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.6
    lines: Patterns = ()
    hints: Patterns = ()
    hints_unless: Patterns = ()
    never: Patterns = ()
    needs: Patterns = ()
    symptoms: frozenset[SymptomClass] = frozenset()
    operations: frozenset[OperationClass] = frozenset()
    states: frozenset[State] = frozenset()
    unless_states: frozenset[State] = frozenset()
    shown_by: Mapping[State | SymptomClass, Patterns] = Field(default_factory=dict)
    hinted_by: Mapping[State | SymptomClass, Patterns] = Field(default_factory=dict)
    stated_by: frozenset[str] = frozenset()
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
    """The compute capability of GPUs by their names, used if a log names no GPU of gpus.yaml. `pattern`: matches the
    names."""

    pattern: Pattern
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
    """Advice to turn on diagnostics before the next run. `say`: the advice, given if the log has one of `lines` and
    none of `unless`."""

    say: Text
    lines: Patterns
    unless: Patterns = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Symptom(FactRow):
    """A class of failures. `lines`: patterns of lines that show it. `needs`: if set, one of these patterns must also
    match in the log. `of_gpu`: if true, a log shows the symptom only if it also shows that the program uses GPUs.
    `decide`: how to distinguish its causes."""

    symptom: SymptomClass
    lines: Patterns
    needs: Patterns = ()
    of_gpu: bool = False
    unless: Patterns = ()
    decide: Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GpuContext(FactRow):
    """Patterns of lines which show that a program uses GPUs."""

    lines: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OperationPattern(FactRow):
    """A class of operations. `lines`: patterns of lines that mention such an operation."""

    operation: OperationClass
    lines: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Concept(FactRow):
    """Words with one meaning, in several languages. `words`: their patterns. `negated`: whether a negation before the
    words does not matter because it is about something else. A negation before the words never matters for words that
    contain a negation."""

    concept: Name
    words: Patterns
    negated: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProseStatement(FactRow):
    """What a person states about a failure. `sentence`: concepts that one sentence must state, within `near` characters
    of the first one. `sentence_without`: concepts that this sentence must not state. `report`: concepts that the log
    must state somewhere, in this or another sentence. `report_without`: concepts that the log must not state anywhere.
    `unless`: other statements, which explain the same words better. `symptom`: what the statement shows."""

    statement: Name
    sentence: Annotated[tuple[Name, ...], Field(min_length=1)]
    near: int = 400
    symptom: SymptomClass | None = None
    sentence_without: tuple[Name, ...] = ()
    report: tuple[Name, ...] = ()
    report_without: tuple[Name, ...] = ()
    unless: tuple[Name, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Negation(FactRow):
    """Patterns of the text right before words that it negates."""

    before: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProseHearsay(FactRow):
    """What others say, denials, advice, and questions. `before`, `after`: patterns of the text before or after words
    that do not say what happened in this run. `sentences`: patterns of whole sentences that do not say it."""

    before: Patterns = ()
    after: Patterns = ()
    sentences: Patterns = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Weight(FactRow):
    """The weight that one kind of evidence adds to the log-odds of a cause. `say`: the evidence in words."""

    evidence: EvidenceName
    weight: float
    say: Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Component(FactRow):
    """A component of the software. `libraries` and `functions`: patterns for its libraries or Python files, and for its
    functions, in stack traces."""

    component: Name
    libraries: Patterns = ()
    functions: Patterns = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SystemMessage(FactRow):
    """A message of the C library, the loader or the shell. `forms`: patterns of the message in languages other than
    English."""

    english: Text
    forms: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ErrorFamily(FactRow):
    """The error numbers of one library. `forms`: patterns that match an error number in a line of a log; the group
    `n` is the number. `of_gpu`: further such patterns, which are tried only on logs which mention a program that uses
    GPUs. `messages`: number -> name and message. `names`: another name of an error -> name and message."""

    family: Name
    forms: Patterns
    of_gpu: Patterns = ()
    messages: Mapping[str, Text]
    names: Mapping[str, Text] = Field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Denial(FactRow):
    """Patterns of lines which state that a failure did not happen."""

    lines: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Hearsay(FactRow):
    """Patterns of the text before a quotation from another run, or before a description of errors. Lines with such a
    text do not show a failure of this run."""

    before: Patterns


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Around(FactRow):
    """Patterns of the text `before` or `after` the name of a GPU or a version, which show that it is not that of the
    failed run. `not_before`, `not_after`: exceptions to `before` and to `after`."""

    before: Patterns = ()
    after: Patterns = ()
    not_before: Patterns = ()
    not_after: Patterns = ()


@cache
def _rows() -> Mapping[str, Signature]:
    return {row.id: row for row in fact_file_reader.rows("signatures", "signatures", Signature)}


def signatures() -> Mapping[str, Signature]:
    """Signatures by id: one for every advisory, including the site's own, and one for every other cause. Raises
    FactsError if a signature is incomplete or refers to an unknown id."""
    return _signatures(fact_file_reader.site_files())


@cache
def _signatures(site: tuple[Path, ...]) -> Mapping[str, Signature]:
    """`site`: the site's own fact files; their paths are the cache key."""
    advisories, rows = {advisory.id: advisory for advisory in database.advisories()}, _rows()
    known = {*advisories, *rows}
    for row in rows.values():
        for other in sorted(row.stated_by - {statement.statement for statement in statements()}):
            raise FactsError(f"signature {row.id!r}: unknown statement {other!r} in stated_by")
        for other in sorted(row.yields_to - known - {ANY}):
            raise FactsError(f"signature {row.id!r} yields to {other!r}, which is not known", hint=near(other, known))
        if row.id not in advisories and not (row.title and row.remedy and (row.lines or row.shown_by or row.stated_by)):
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
    """Patterns of lines which state that a failure did not happen: "no NaN detected", "OOM retries: 0"."""
    return tuple(pattern for row in fact_file_reader.rows("symptoms", "denials", Denial) for pattern in row.lines)


@cache
def gpu_context() -> Patterns:
    return tuple(pattern for row in fact_file_reader.rows("symptoms", "context", GpuContext) for pattern in row.lines)


@cache
def operation_patterns() -> tuple[OperationPattern, ...]:
    return fact_file_reader.rows("symptoms", "operations", OperationPattern)


@cache
def concepts() -> tuple[Concept, ...]:
    return fact_file_reader.rows("statements", "concepts", Concept)


@cache
def statements() -> tuple[ProseStatement, ...]:
    """Raises FactsError if a statement names an unknown concept."""
    rows, known = fact_file_reader.rows("statements", "statements", ProseStatement), {row.concept for row in concepts()}
    for row in rows:
        for name in (*row.sentence, *row.sentence_without, *row.report, *row.report_without):
            if name not in known:
                raise FactsError(f"statement {row.statement!r}: unknown concept {name!r}", hint=near(name, known))
    return rows


@cache
def negations() -> Patterns:
    return tuple(
        pattern for row in fact_file_reader.rows("statements", "negations", Negation) for pattern in row.before
    )


@cache
def prose_hearsay() -> tuple[Patterns, Patterns, Patterns]:
    """Patterns which show that words are not about what happened in this run. The three groups match the text before
    the words, the text after them, and the whole sentence."""
    rows = fact_file_reader.rows("statements", "hearsay", ProseHearsay)
    return (
        tuple(one for row in rows for one in row.before),
        tuple(one for row in rows for one in row.after),
        tuple(one for row in rows for one in row.sentences),
    )


@cache
def weights() -> Mapping[EvidenceName, Weight]:
    """The weight of each kind of evidence."""
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
"""Number of characters that are searched around a name: enough for a sentence, and for a command with its arguments."""


def _stands(table: Literal["elsewhere", "mentions"], near: str, rest: str) -> bool:
    return any(
        (_any(row.before, near) and not _any(row.not_before, near))
        or (_any(row.after, rest) and not _any(row.not_after, rest))
        for row in _around(table)
    )


def _any(patterns: Patterns, text: str) -> bool:
    return any(pattern.search(text) for pattern in patterns)
