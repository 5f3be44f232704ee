"""Ranks the causes that a log shows, each with its lines, confidence, fix, and the command that tests the fix. Pure.

cause_scoring.py adds up the evidence for each cause. If the versions or GPUs in the log contradict an advisory, the
advisory is ruled out, even if its lines are in the log. If only versions that the log does not show to be loaded
contradict it, the advisory remains possible.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.specifiers import Specifier

from envbuild.explain import cause_scoring, log_facts
from envbuild.explain.cause_scoring import NOT_LOADED, CauseLines
from envbuild.explain.log_facts import Reading
from envbuild.explain.log_reader_and_search import Line, Log
from envbuild.facts import database, log_signatures
from envbuild.facts.advisory_model import Advisory, Change, Situation
from envbuild.facts.gpu_fact_types import Gpu
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
    versions and GPUs in the log relate to the advisory. `remedy`: the fix. `prove`: the command that tests the fix.
    NAME in both stands for the profile. `cards`: the GPUs of the log that may be affected. `change`: the versions and
    variables that fix the cause, without a version of torch if the log does not show which torch it has; `write`: the
    same as keys and values of a profile. `find_out`: facts that the log lacks and on which the diagnosis or the change
    depends, each with the command that shows it. `evidence`: what the confidence was computed from."""

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
    """The result of `explain`. `matches`: the causes that a message of the log names, then those that only a statement
    in prose names; each group is sorted by confidence, highest first. Empty if no cause is known.

    `possible`: advisories whose lines are in the log, and whose only contradiction is a version that the log does not
    show to be loaded; if there are no matches, also causes with a confidence from CANDIDATE to below NAMED. At most
    MOST_POSSIBLE, those with the highest confidence. `decide`: without matches, how to distinguish the causes
    of each symptom in the log. `advice`: what to enable before the next run.
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
    """Scores every cause whose lines are in the log or that has a symptom in the log. Skips a cause whose conditions on
    the rest of the log are not met, and an advisory without lines in the log unless its versions and GPUs hold. Causes
    that the log contradicts have the standing "contradicted" and no evidence."""
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
            standing = NOT_LOADED
        if advisory and advisory.match and not found.lines and standing != "holds":
            continue
        left = _without(known, unloaded) if unloaded else known
        names = tuple(cause_scoring.evidence(log, signature, found, standing, _states_version(advisory, known), known))
        if advisory and standing == NOT_LOADED and _standing(advisory, left) != "open":
            names = ("fits", *names)
        yield ScoredCause(signature, advisory, found, standing, names, unloaded)


def explain(log: Log) -> Explanation:
    """Explains a log. The matches are the causes with a confidence of NAMED or more, except those that the log
    contradicts, and those for which another cause explains the log better."""
    known = log_facts.read(log)
    scored = list(score_causes(log, known))
    ruled = [
        Ruled(cause.advisory, cause.found.lines[0])
        for cause in scored
        if cause.standing == "contradicted" and cause.advisory and cause.found.lines
    ]
    able = [cause for cause in scored if cause.standing != "contradicted"]
    matches = [_match(cause, known) for cause in able if cause.standing != NOT_LOADED and cause.confidence >= NAMED]
    kept = without_yielded(match.id for match in _without_lesser_statements(matches))
    matches = sorted(
        (match for match in matches if match.id in kept),
        key=lambda match: ("stated" in match.evidence, -match.confidence),
    )
    possible = [
        _match(cause, known)
        for cause in able
        if cause.standing == NOT_LOADED or (not matches and CANDIDATE <= cause.confidence < NAMED)
    ]
    possible = sorted(possible, key=lambda match: -match.confidence)[:MOST_POSSIBLE]
    heard = log_signatures.hearsay()
    advice = [row.say for row in log_signatures.advice() if log.has(row.lines, heard) and not log.has(row.unless)]
    decide = [row.decide for row in log_signatures.symptoms() if row.symptom in known.symptoms and not matches]
    return Explanation(tuple(matches), tuple(possible), tuple(ruled), tuple(advice), tuple(decide), known)


def _without_lesser_statements(matches: Sequence[SignatureMatch]) -> list[SignatureMatch]:
    """Returns these causes. But if a message of the log names one of them, the causes that only a statement in prose
    names are left out, unless they explain this message better."""
    messages = [match.id for match in matches if "stated" not in match.evidence]
    better = frozenset[str]().union(*(log_signatures.signatures()[name].yields_to for name in messages))
    return [match for match in matches if not messages or match.id in messages or {match.id, ANY} & better]


def _states_version(advisory: Advisory | None, known: Reading) -> bool:
    """Whether the advisory is about exact versions (of torch, a library or a distribution) and the log itself states
    one of them."""
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
    contradicts it. The result is at most "fits" if one combination contradicts it, or if the log has several GPU models
    and one of them is not affected, because that GPU may be the one that failed."""
    found = {advisory.standing(situation) for situation in known.situations}
    standing = next(name for name in ("holds", "fits", "open", "contradicted") if name in found)
    doubtful = "contradicted" in found or len(_about(advisory, known.situation)) < len(known.situation.gpus)
    return "fits" if standing == "holds" and doubtful else standing


def _without(known: Reading, libraries: Container[str]) -> Reading:
    """Returns the facts of the log without the versions of these libraries."""

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
        and not signature.unless_states & known.states
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
    if advisory and advisory.about_apex and wanted.pins:
        remedy = f"{_UNRELATED_APEX} {remedy}"
    if known.situation.torch is None and (wanted.torch or _TORCH_CHANGE.search(remedy)):
        find_out.insert(0, FIND_TORCH)
        affected = "; or ".join(dict.fromkeys(_affected_torch(advisory)))
        remedy = f"depends on torch's version{f' (affected: {affected})' if affected else ''}: {remedy}"
        wanted = replace(wanted, torch=None)
    return SignatureMatch(
        signature.id, advisory, about.title or "", cause.confidence, cause.standing, cause.found.lines, remedy, wanted,
        advisory_remedy.written(wanted, known.situation), prove, tuple(cite),
        _about(advisory, _without(known, cause.unloaded).situation), tuple(find_out), cause.evidence,
    )  # fmt: skip


def _affected_torch(advisory: Advisory | None) -> Iterator[str]:
    """Yield each range of torch versions that the advisory affects, in words."""
    for match in advisory.match if advisory else ():
        if match.torch:
            origin = " from the package index" if match.build == "pypi" else ""
            yield f"torch {match.torch.in_words}{origin}"


FIND_TORCH = MissingFact("torch's version", "python -c 'import torch; print(torch.__version__, torch.version.cuda)'")
_UNRELATED_APEX = (
    "if apex is the unrelated package of that name from the package index (`envbuild fix` checks this), only remove "
    "it: pip uninstall apex. For NVIDIA's apex:"
)
_TORCH_CHANGE = re.compile(r"\btorch \d")


def without_yielded(ids: Iterable[str]) -> frozenset[str]:
    """Returns these causes, except those for which another of these causes explains the same lines better."""
    rows, found = log_signatures.signatures(), frozenset(ids)
    last = {name for name in found if ANY in rows[name].yields_to}
    order = [name for name in rows if name in last]
    kept = set()
    for name in found:
        better = rows[name].yields_to & found
        if name in last:
            better |= {other for other in found - last if name not in rows[other].yields_to}
            better |= set(order[: order.index(name)])
        if not better:
            kept.add(name)
    return frozenset(kept)


def of_profile(text: str, name: str) -> str:
    """Replaces NAME in a fix or a command with the name of the profile."""
    return re.sub(r"\bNAME\b", lambda _: name, text)
