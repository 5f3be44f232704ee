"""The document of `explain`: the causes, facts and advice of an explanation, with secrets masked. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from envbuild.explain.cause_ranking import Explanation, MissingFact, SignatureMatch, of_profile
from envbuild.explain.log_facts import Reading
from envbuild.explain.log_reader_and_search import Line
from envbuild.explain.rank_failure_and_last_collectives import Works
from envbuild.explain.secret_masking import safe_line
from envbuild.facts import log_signatures
from envbuild.facts.advisory_model import Change
from envbuild.facts.log_signatures import FIXED_BY_PACKAGES, EvidenceName
from envbuild.util.json_output_types import AdvisoryRow


@dataclass(frozen=True)
class LogPlace:
    """A line of the log. `file`: None if only one log was read."""

    file: str | None
    line: int


@dataclass(frozen=True)
class LogLine(LogPlace):
    text: str


@dataclass(frozen=True)
class EvidenceOfCause:
    """A piece of evidence for a cause (`supports`), or against it."""

    id: EvidenceName
    supports: bool
    reason: str


@dataclass(frozen=True)
class CauseRow:
    """A cause. `advisory`: its id, null for a cause that does not depend on a version. `change`: the versions that fix
    it, as bounds, and the variables; `profile_change`: the same change as keys and values of a profile. `profile`: the
    name of the profile that the commands contain; if it is null, they contain NAME instead. `fix_command`: the command
    that shows how to fix the active environment, with LOG for a log from standard input; null for a possible cause, and
    if `envbuild fix` cannot fix the cause. `command`: tests the fix. `missing_facts`: facts that the log lacks and on
    which the diagnosis depends, each with the command that shows it."""

    id: str
    advisory: str | None
    title: str
    confidence: float
    lines: tuple[LogLine, ...]
    remedy: str
    change: Mapping[str, Any]
    profile_change: Mapping[str, Any]
    profile: str | None
    fix_command: str | None
    command: str | None
    sources: tuple[str, ...]
    missing_facts: tuple[MissingFact, ...]
    evidence: tuple[EvidenceOfCause, ...]


@dataclass(frozen=True)
class FirstFailure(LogPlace):
    """The line of the rank that failed first. `local_rank`: the rank within its node. `exit_code`: negative for a
    signal."""

    rank: int | None
    local_rank: int | None
    exit_code: int | None


@dataclass(frozen=True)
class FactsOfLog:
    """The facts of the log. `inferred`: the libraries whose version was derived from torch's version; `loaded`: those
    whose loaded version the log shows. `candidates`: name -> the possible versions, if the log has several."""

    gpus: tuple[str, ...]
    gpu_count: int | None
    torch: str | None
    cuda: str | None
    driver: str | None
    libraries: Mapping[str, str]
    inferred: tuple[str, ...]
    loaded: tuple[str, ...]
    candidates: Mapping[str, tuple[str, ...]]
    symptoms: tuple[str, ...]
    operations: tuple[str, ...]


@dataclass(frozen=True)
class RuledOut(LogPlace):
    """An advisory that is ruled out: its line is in the log, but its versions or GPUs do not match."""

    id: str


@dataclass(frozen=True)
class ExplanationDocument:
    """The document of `explain`. `state`: known if a cause was found. `possible`: causes with too little evidence, or
    whose only contradiction is a version that the log does not show to be loaded. `advisories`: the advisories of
    `causes` (state affected), of `possible`, and of `ruled_out`. `advice`: what to enable before the next run.
    `distinctions`: if no cause was found, how to distinguish the causes of each symptom. `ranks`: the last collectives
    of the ranks. `exception`: the line of the exception that ended Python."""

    state: Literal["known", "unknown"]
    causes: tuple[CauseRow, ...]
    possible: tuple[CauseRow, ...]
    ruled_out: tuple[RuledOut, ...]
    advisories: tuple[AdvisoryRow, ...]
    advice: tuple[str, ...]
    distinctions: tuple[str, ...]
    first_failure: FirstFailure | None
    ranks: Works
    exception: LogLine | None
    facts: FactsOfLog
    notes: tuple[str, ...]


def document(
    found: Explanation, profiles: Container[str] = (), notes: Sequence[str] = (), files: Sequence[str] = ("-",)
) -> ExplanationDocument:
    """Return the document of an explanation. `profiles`: the names of the known profiles. `files`: the names of the log
    files. Secrets in lines of the log are masked."""
    first, error = found.read.first, found.read.error
    return ExplanationDocument(
        state="unknown" if found.unknown else "known",
        causes=tuple(_cause(match, match.profile(profiles), fix_command(match, files)) for match in found.matches),
        possible=tuple(_cause(match, match.profile(profiles)) for match in found.possible),
        ruled_out=tuple(RuledOut(*_place(ruled.line), ruled.advisory.id) for ruled in found.ruled_out),
        advisories=tuple(_advisories(found)),
        advice=found.advice,
        distinctions=found.decide,
        first_failure=FirstFailure(*_place(first.line), first.rank, first.local, first.exit) if first else None,
        ranks=found.read.works,
        exception=LogLine(*_place(error), safe_line(error.text)) if error else None,
        facts=_facts(found.read),
        notes=tuple(notes),
    )


def _facts(read: Reading) -> FactsOfLog:
    situation = read.situation
    return FactsOfLog(
        gpus=tuple(gpu.id for gpu in situation.gpus),
        gpu_count=situation.gpu_count,
        torch=situation.torch,
        cuda=situation.cuda,
        driver=situation.driver,
        libraries=situation.libraries,
        inferred=tuple(sorted(set(situation.libraries) - read.stated)),
        loaded=tuple(sorted(read.loaded)),
        candidates=read.candidates,
        symptoms=tuple(sorted(read.symptoms)),
        operations=tuple(sorted(read.operations)),
    )


def _advisories(found: Explanation) -> Iterator[AdvisoryRow]:
    kinds: tuple[tuple[Literal["affected", "possible"], tuple[SignatureMatch, ...]], ...] = (
        ("affected", found.matches),
        ("possible", found.possible),
    )
    for state, matches in kinds:
        for match in matches:
            if match.advisory:
                yield AdvisoryRow(match.id, state, match.title, match.remedy)
    for ruled in found.ruled_out:
        text = "the versions or GPUs in the log do not match"
        yield AdvisoryRow(ruled.advisory.id, "ruled-out", text, ruled.advisory.remedy)


def fix_command(match: SignatureMatch, files: Sequence[str]) -> str | None:
    """Returns the command that shows how to fix the active environment; None if `envbuild fix` cannot. LOG in the
    command stands for a log that was read from a pipe."""
    fixes = {"torch", "pins", "packages", "env"}
    advisory = match.advisory
    by_change = advisory and (advisory.by_library_path or advisory.change.torch or fixes & match.write.keys())
    if not (by_change or match.id in FIXED_BY_PACKAGES):
        return None
    return shlex.join(["envbuild", "fix", *dict.fromkeys(map(_argument, files)), "--here"])


def _argument(file: str) -> str:
    if file == "-" or file.startswith(("/dev/", "/proc/")):
        return "LOG"
    return f"./{file}" if file.startswith("-") else file


def _cause(match: SignatureMatch, profile: str | None, fix: str | None = None) -> CauseRow:
    name, weights = profile or "NAME", log_signatures.weights()
    return CauseRow(
        id=match.id,
        advisory=match.advisory.id if match.advisory else None,
        title=match.title,
        confidence=match.confidence,
        lines=tuple(LogLine(*_place(line), safe_line(line.text)) for line in match.lines),
        remedy=of_profile(match.remedy, name),
        change=change(match.change),
        profile_change=match.write,
        profile=profile,
        fix_command=fix,
        command=of_profile(match.prove, name) if match.prove else None,
        sources=match.cite,
        missing_facts=match.find_out,
        evidence=tuple(EvidenceOfCause(one, weights[one].weight >= 0, weights[one].say) for one in match.evidence),
    )


def evidence_words(match: SignatureMatch, sign: int) -> Iterator[str]:
    """Yield in words the evidence for a cause (`sign` is 1) or against it (`sign` is -1)."""
    for name in match.evidence:
        row = log_signatures.weights()[name]
        if (row.weight < 0) == (sign < 0):
            yield row.say


def _place(line: Line) -> tuple[str | None, int]:
    """Return (file, line number); the file is None if only one log was read."""
    return line.file or None, line.number


def change(wanted: Change) -> dict[str, Any]:
    """Returns a change of versions as text: {"pins": {"cublas": ">=12.4.5.8"}}."""
    changes = {
        "torch": str(wanted.torch) if wanted.torch else None,
        "pins": {name: str(versions) for name, versions in wanted.pins.items()},
        "driver": str(wanted.driver) if wanted.driver else None,
        "env": dict(wanted.env),
        "env_with": {name: dict(variables) for name, variables in wanted.env_with.items()},
    }
    return {key: value for key, value in changes.items() if value}
