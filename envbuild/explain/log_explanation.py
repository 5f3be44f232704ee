"""Ranks the causes that a log shows: each with its lines, confidence, fix and the command that proves it. Pure.

cause_scoring.py adds up the evidence for each cause. An advisory whose versions or GPUs the log contradicts is ruled
out, whatever its lines.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from packaging.specifiers import Specifier

from envbuild.explain import cause_scoring, log_facts
from envbuild.explain.cause_scoring import CauseLines
from envbuild.explain.log_facts import Reading
from envbuild.explain.log_reader_and_search import Line, Log
from envbuild.explain.rank_failure_and_last_collectives import Works
from envbuild.explain.secret_masking import safe_line
from envbuild.facts import database, log_signatures
from envbuild.facts.advisory_model import Advisory, Change, Situation
from envbuild.facts.gpu_models import Gpu
from envbuild.facts.json_document_types import AdvisoryRow
from envbuild.facts.log_signatures import ANY, EvidenceName, Signature
from envbuild.resolve import advisory_remedy

NAMED = 0.5
"""The lowest confidence at which a cause is reported."""
CANDIDATE = 0.05
"""The lowest confidence at which a cause is reported as possible."""
MOST_POSSIBLE = 3


@dataclass(frozen=True)
class MissingFact:
    """A fact that a log lacks, and the command that shows it."""

    fact: str
    command: str

    def __str__(self) -> str:
        return f"{self.fact}: {self.command}"


@dataclass(frozen=True)
class SignatureMatch:
    """A cause that the log shows. `advisory`: None for a cause that does not depend on a version. `standing`: how the
    versions and GPUs in the log relate to the advisory. `prove`: a command; NAME in it, and in `remedy`, stands for the
    profile. `cards`: the GPUs of the log that may be affected. `write`: the change as keys and values of a profile.
    `find_out`: facts that the log lacks and on which the diagnosis or the change depends, each with the command that
    shows it. `evidence`: what the confidence was computed from."""

    id: str
    advisory: Advisory | None
    title: str
    confidence: float
    standing: str
    lines: tuple[Line, ...]
    remedy: str
    change: Change
    write: Mapping[str, Any]
    prove: str | None
    cite: tuple[str, ...]
    cards: tuple[Gpu, ...]
    find_out: tuple[MissingFact, ...] = ()
    evidence: tuple[EvidenceName, ...] = ()

    def profile(self, known: Container[str]) -> str | None:
        """The id of the first affected GPU that is also the name of a known profile; None if there is no such GPU."""
        return next((gpu.id for gpu in self.cards if gpu.id in known), None)


@dataclass(frozen=True)
class Ruled:
    """An advisory that is ruled out: its lines are in the log, but the versions or GPUs in the log contradict it."""

    advisory: Advisory
    line: Line


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`. `matches`: sorted by confidence, highest first; empty if no cause is known.

    `possible`: causes with a confidence below NAMED. If there are matches, it contains only advisories whose lines are
    in the log and whose only contradiction is a version that the log does not show to be loaded. `decide`: if there are
    no matches, how to distinguish the causes of each symptom in the log. `advice`: what to enable before the next run.
    """

    matches: tuple[SignatureMatch, ...]
    possible: tuple[SignatureMatch, ...]
    ruled_out: tuple[Ruled, ...]
    advice: tuple[str, ...]
    decide: tuple[str, ...]
    read: Reading

    @property
    def unknown(self) -> bool:
        return not self.matches


@dataclass(frozen=True)
class ScoredCause:
    """A cause with the evidence for and against it, whatever its confidence. `advisory`: None if the cause has no
    advisory. `unloaded`: libraries whose loaded version would decide whether the advisory applies."""

    signature: Signature
    advisory: Advisory | None
    found: CauseLines
    standing: str
    evidence: tuple[EvidenceName, ...]
    unloaded: frozenset[str] = frozenset()

    @property
    def confidence(self) -> float:
        return cause_scoring.confidence(self.signature.confidence, self.evidence)


def score_causes(log: Log, known: Reading) -> Iterator[ScoredCause]:
    """Scores every cause whose lines are in the log or that has a symptom in the log. Causes that the log contradicts
    have the standing "contradicted" and no evidence."""
    advisories = {advisory.id: advisory for advisory in database.advisories()}
    for signature in log_signatures.signatures().values():
        advisory = advisories.get(signature.id)
        found = cause_scoring.find_lines(log, signature, advisory, known)
        if not (found.lines or signature.symptoms & known.symptoms) or not _may(log, signature, known):
            continue
        standing, unloaded = _standing(advisory, known) if advisory else "open", frozenset[str]()
        if advisory and standing == "contradicted":
            unloaded = signature.loaded - known.loaded
            if _standing(advisory, _without(known, unloaded)) == "contradicted":
                yield ScoredCause(signature, advisory, found, standing, ())
                continue
            standing = "not loaded"
        if advisory and advisory.match and not found.lines and standing != "holds":
            continue
        left = _without(known, unloaded) if unloaded else known
        names = tuple(cause_scoring.evidence(log, signature, found, standing, _states_version(advisory, known), known))
        if advisory and standing == "not loaded" and _standing(advisory, left) != "open":
            names = ("fits", *names)
        yield ScoredCause(signature, advisory, found, standing, names, unloaded)


def explain(log: Log) -> Explanation:
    """Finds every cause with a confidence of NAMED or more, except consequences of another cause."""
    known = log_facts.read(log)
    scored = list(score_causes(log, known))
    ruled = [
        Ruled(cause.advisory, cause.found.lines[0])
        for cause in scored
        if cause.standing == "contradicted" and cause.advisory and cause.found.lines
    ]
    able = [cause for cause in scored if cause.standing != "contradicted"]
    matches = [_match(cause, known) for cause in able if cause.standing != "not loaded" and cause.confidence >= NAMED]
    kept = without_yielded(match.id for match in matches)
    matches = sorted((match for match in matches if match.id in kept), key=lambda match: -match.confidence)
    possible = [
        _match(cause, known)
        for cause in able
        if cause.standing == "not loaded" or (not matches and CANDIDATE <= cause.confidence < NAMED)
    ]
    possible = sorted(possible, key=lambda match: -match.confidence)[:MOST_POSSIBLE]
    heard = log_signatures.hearsay()
    advice = [row.say for row in log_signatures.advice() if log.has(row.lines, heard) and not log.has(row.unless)]
    decide = [row.decide for row in log_signatures.symptoms() if row.symptom in known.symptoms and not matches]
    return Explanation(tuple(matches), tuple(possible), tuple(ruled), tuple(advice), tuple(decide), known)


def _states_version(advisory: Advisory | None, known: Reading) -> bool:
    """Whether the advisory is about one exact version (of torch, a library or a distribution) and the log itself states
    that version."""
    situation = known.situation
    stated = {name: version for name, version in situation.libraries.items() if name in known.stated}
    stated |= situation.distributions
    if situation.torch:
        stated["torch"] = situation.torch
    return any(
        stated[name] in versions
        for match in (advisory.match if advisory else ())
        if False not in match.answers(situation)
        for name, versions in (
            *match.libraries.items(),
            *match.distributions.items(),
            *([("torch", match.torch)] if match.torch else []),
        )
        if name in stated and all(_is_exact(item) for one in versions.any_of for item in one)
    )


def _is_exact(item: Specifier) -> bool:
    return item.operator == "==" and not item.version.endswith(".*")


def _standing(advisory: Advisory, known: Reading) -> str:
    """Returns how the advisory relates to the log: "contradicted" only if every possible combination of versions
    contradicts it. If the log has several GPU models and one of them is not affected, that GPU may be the one that
    failed; then the result is at most "fits"."""
    found = {advisory.standing(situation) for situation in known.situations}
    standing = next(name for name in ("holds", "fits", "open", "contradicted") if name in found)
    doubtful = "contradicted" in found or len(_about(advisory, known.situation)) < len(known.situation.gpus)
    return "fits" if standing == "holds" and doubtful else standing


def _without(known: Reading, libraries: Container[str]) -> Reading:
    """The facts without the versions of these libraries."""

    def stripped(situation: Situation) -> Situation:
        left = {name: version for name, version in situation.libraries.items() if name not in libraries}
        return replace(situation, libraries=left)

    return replace(known, situation=stripped(known.situation), situations=tuple(map(stripped, known.situations)))


def _about(advisory: Advisory | None, known: Situation) -> tuple[Gpu, ...]:
    """The GPUs of the log that the advisory may affect."""
    return tuple(
        gpu
        for gpu in known.gpus
        if advisory is None or advisory.standing(replace(known, gpus=(gpu,))) != "contradicted"
    )


def _may(log: Log, signature: Signature, known: Reading) -> bool:
    return (
        signature.states <= known.states
        and (not signature.needs or log.has(signature.needs))
        and not log.has(signature.unless)
    )


def _match(cause: ScoredCause, known: Reading) -> SignatureMatch:
    signature, advisory = cause.signature, cause.advisory
    probe = next(iter(advisory.shows.probes), None) if advisory else None
    prove = signature.prove or (f"envbuild test NAME --probe {probe}" if probe else None)
    about: Advisory | Signature = advisory or signature
    cite = dict.fromkeys((*(advisory.cite if advisory else ()), *signature.cite))
    remedy, wanted, find_out = about.remedy or "", about.change, []
    versioned = {name for match in (advisory.match if advisory else ()) for name in match.versioned}
    for library in sorted({*cause.unloaded, *(versioned & set(known.candidates))}):
        find_out.append(MissingFact(f"which {library} is loaded", "envbuild audit --here"))
    if known.situation.torch is None and (wanted.torch or _TORCH_CHANGE.search(remedy)):
        find_out.insert(0, FIND_TORCH)
        affected = ", ".join(str(match.torch) for match in (advisory.match if advisory else ()) if match.torch)
        remedy = f"depends on torch's version{f' (affected: {affected})' if affected else ''}: {remedy}"
        wanted = replace(wanted, torch=None)
    return SignatureMatch(
        signature.id, advisory, about.title or "", cause.confidence, cause.standing, cause.found.lines, remedy, wanted,
        advisory_remedy.written(wanted, known.situation), prove, tuple(cite),
        _about(advisory, _without(known, cause.unloaded).situation), tuple(find_out), cause.evidence,
    )  # fmt: skip


FIND_TORCH = MissingFact("torch's version", "python -c 'import torch; print(torch.__version__, torch.version.cuda)'")
_TORCH_CHANGE = re.compile(r"\btorch \d")


def without_yielded(ids: Iterable[str]) -> frozenset[str]:
    """Returns the causes without those that another cause in the list explains better."""
    rows, found = log_signatures.signatures(), frozenset(ids)
    last = {name for name in found if ANY in rows[name].yields_to}
    order = [name for name in rows if name in last]
    kept = set()
    for name in found:
        better = rows[name].yields_to & found
        if name in last:
            better |= (found - last) | set(order[: order.index(name)])
        if not better:
            kept.add(name)
    return frozenset(kept)


def of_profile(text: str, name: str) -> str:
    """Replaces NAME by the profile's name in a fix or a command."""
    return re.sub(r"\bNAME\b", lambda _: name, text)


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
    """A cause. `advisory`: its id, None for a cause that does not depend on a version. `change`: the versions that fix
    it, as bounds; `profile_change`: the same change as keys and values of a profile. `profile`: the name of the profile
    that the commands contain; if it is null, they contain NAME instead. `command`: proves the cause. `missing_facts`:
    the deciding facts that the log lacks, each with the command that shows it."""

    id: str
    advisory: str | None
    title: str
    confidence: float
    lines: tuple[LogLine, ...]
    remedy: str
    change: Mapping[str, Any]
    profile_change: Mapping[str, Any]
    profile: str | None
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
    """The facts of the log. `inferred`: the libraries whose version follows from torch's; `loaded`: those whose loaded
    version the log shows; `candidates`: the possible versions if several are in the log."""

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
    """The document of `explain`. `state`: known if a cause was found. `possible`: causes with too little evidence.
    `advisories`: the advisories of `causes` (affected) and of `possible`, and the ruled-out ones. `advice`: what to
    enable before the next run. `distinctions`: if no cause was found, how to distinguish the possible ones. `ranks`:
    the last collectives of the ranks. `exception`: the line that ended Python."""

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


def document(found: Explanation, profiles: Container[str] = (), notes: Sequence[str] = ()) -> ExplanationDocument:
    """Return the document of an explanation. `profiles`: the names of the known profiles. Secrets in lines of the log
    are masked."""
    first, error = found.read.first, found.read.error
    return ExplanationDocument(
        state="unknown" if found.unknown else "known",
        causes=tuple(_cause(match, match.profile(profiles)) for match in found.matches),
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


def _cause(match: SignatureMatch, profile: str | None) -> CauseRow:
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
    """The versions that fix the cause, as text: {"pins": {"cublas": ">=12.4.5.8"}}."""
    changes = {
        "torch": str(wanted.torch) if wanted.torch else None,
        "pins": {name: str(versions) for name, versions in wanted.pins.items()},
        "driver": str(wanted.driver) if wanted.driver else None,
        "env": dict(wanted.env),
    }
    return {key: value for key, value in changes.items() if value}
