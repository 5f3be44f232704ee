"""Ranks the causes that a log shows: each with its lines, confidence, remedy and the command that proves it. Pure.

signatures.yaml gives the confidence that a line gives to a cause. The versions and GPUs in the log then confirm the
cause (they match its advisory), fit it, or contradict it; other lines raise or lower the confidence.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from envbuild.explain import log_facts
from envbuild.explain.log_facts import Reading
from envbuild.explain.log_reader_and_search import Line, Log
from envbuild.facts import database, log_signatures
from envbuild.facts.advisory_matching import Advisory, Change, Situation
from envbuild.facts.gpu_models import Gpu
from envbuild.facts.log_signatures import ANY, Signature
from envbuild.resolve import advisory_remedy

NAMED = 0.5
"""Below this confidence a cause is not named."""
CANDIDATE = 0.3
"""Below this confidence a cause is not even called possible."""
MOST_POSSIBLE = 3
LINES = 5

# Factors on the doubt (1 - confidence). The values are our judgement, checked against the corpus in tests/logs.
_DOUBT = {"holds": 0.3, "fits": 0.6, "open": 1.0}
_RAISED, _LOWERED = 0.5, 0.5


@dataclass(frozen=True)
class SignatureMatch:
    """A cause that the log shows. `advisory`: None for a cause that does not depend on a version. `standing`: how the
    versions and GPUs in the log relate to the advisory. `prove`: a command; NAME in it, and in `remedy`, stands for the
    profile. `cards`: the GPUs of the log that may be affected. `write`: the change in the form that a profile has.
    `find_out`: facts that the log lacks and on which the diagnosis or the change depends, each with the command that
    shows it."""

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
    find_out: tuple[str, ...] = ()

    def profile(self, known: Container[str]) -> str | None:
        """The id of the first affected GPU that is also the name of a known profile; None without one."""
        return next((gpu.id for gpu in self.cards if gpu.id in known), None)


@dataclass(frozen=True)
class Ruled:
    """An advisory that is ruled out: its lines are in the log, but the versions or GPUs in the log contradict it."""

    advisory: Advisory
    line: Line


@dataclass(frozen=True)
class Explanation:
    """The result of `explain`. `matches`: sorted by confidence, highest first; empty if no cause is known.

    `possible`: causes with a confidence below NAMED: advisories whose lines are in the log and that are contradicted
    only by versions not shown to be loaded. Where `matches` is empty, also advisories that match the GPUs and versions
    and can cause such lines, and causes whose lines are in the log but do not suffice. `advice`: what to turn on before
    the next run.
    """

    matches: tuple[SignatureMatch, ...]
    possible: tuple[SignatureMatch, ...]
    ruled_out: tuple[Ruled, ...]
    advice: tuple[str, ...]
    read: Reading

    @property
    def unknown(self) -> bool:
        return not self.matches


def explain(log: Log) -> Explanation:
    """Finds every cause with a confidence of NAMED or more, without those that follow from another cause."""
    known = log_facts.read(log)
    advisories = {advisory.id: advisory for advisory in database.advisories()}
    found: list[SignatureMatch] = []
    unsure: list[SignatureMatch] = []
    candidates: list[SignatureMatch] = []
    ruled: list[Ruled] = []
    for signature in log_signatures.signatures().values():
        advisory = advisories.get(signature.id)
        lines = _lines(log, signature, advisory, known)
        if not lines or not _may(log, signature, known):
            continue
        standing = _standing(advisory, known) if advisory else "open"
        if advisory and standing == "contradicted":
            unloaded = signature.loaded - known.loaded
            if (otherwise := _standing(advisory, _without(known, unloaded))) != "contradicted":
                at_most = "open" if otherwise == "open" else "fits"
                confidence = round(_confidence(log, signature, at_most, known) * _LOWERED, 2)
                unsure.append(_match(signature, advisory, confidence, "not loaded", lines, known, unloaded))
            else:
                ruled.append(Ruled(advisory, lines[0]))
            continue
        confidence = _confidence(log, signature, standing, known)
        match = _match(signature, advisory, confidence, standing, lines, known)
        if confidence >= NAMED:
            found.append(match)
        elif advisory is None and confidence >= CANDIDATE:
            candidates.append(match)
    found = _yielded(found)
    found.sort(key=lambda match: -match.confidence)
    heard = log_signatures.hearsay()
    said = [row.say for row in log_signatures.advice() if log.has(row.lines, heard) and not log.has(row.unless)]
    possible = [*unsure, *(() if found else (*_possible(log, known, advisories), *candidates))]
    possible.sort(key=lambda match: -match.confidence)
    possible = possible[:MOST_POSSIBLE]
    return Explanation(tuple(found), tuple(possible), tuple(ruled), tuple(said), known)


def _possible(log: Log, known: Reading, advisories: Mapping[str, Advisory]) -> Iterable[SignatureMatch]:
    found: dict[str, SignatureMatch] = {}
    rows, heard = log_signatures.signatures(), log_signatures.hearsay()
    for row in log_signatures.possible_causes():
        matches = [match for pattern in row.lines for match in log.find(pattern, LINES, (), heard)]
        lines = sorted({line for line, _ in matches}, key=lambda line: (log.files.index(line.file), line.number))
        for name, confidence in row.advisories.items() if lines and not log.has(row.unless) else ():
            if _standing(advisories[name], known) == "holds" and confidence > _sure(found.get(name)):
                found[name] = _match(rows[name], advisories[name], confidence, "holds", lines[:LINES], known)
    return found.values()


def _sure(match: SignatureMatch | None) -> float:
    return match.confidence if match else 0.0


def _lines(log: Log, signature: Signature, advisory: Advisory | None, known: Reading) -> tuple[Line, ...]:
    """The lines that show the cause, in order, at most LINES."""
    of_facts = (one for fact, shown in signature.shown_by.items() if fact in known.states for one in shown)
    patterns = (*(advisory.shows.patterns if advisory else ()), *signature.lines, *of_facts)
    never, heard = signature.never, log_signatures.hearsay()
    found = {line for pattern in patterns for line, _ in log.find(pattern, LINES, never, heard)}
    return tuple(sorted(found, key=lambda line: (log.files.index(line.file), line.number))[:LINES])


def _standing(advisory: Advisory, known: Reading) -> str:
    """How the advisory relates to the log. Only if every possible combination of versions contradicts it, it is
    "contradicted". Of several different GPUs, one that is not affected may be the one that failed; then the result is
    at most "fits"."""
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


def _confidence(log: Log, signature: Signature, standing: str, known: Reading) -> float:
    """The confidence of a cause. The stack of a crash raises it where the innermost frames are in the cause's library,
    and lowers it where they are in others."""
    doubt = (1 - signature.confidence) * _DOUBT[standing]
    within = bool(signature.stack & known.crashed_in)
    if log.has(signature.raised_by) or within:
        doubt *= _RAISED
    elsewhere = bool(signature.stack and known.crashed_in and not within)
    return round((1 - doubt) * (_LOWERED if elsewhere or log.has(signature.lowered_by) else 1), 2)


def _match(
    signature: Signature,
    advisory: Advisory | None,
    confidence: float,
    standing: str,
    lines: Sequence[Line],
    known: Reading,
    unloaded: Iterable[str] = (),
) -> SignatureMatch:
    """Builds the match. `unloaded`: libraries whose loaded version would decide whether the advisory applies."""
    probe = next(iter(advisory.shows.probes), None) if advisory else None
    prove = signature.prove or (f"envbuild test NAME --probe {probe}" if probe else None)
    about: Advisory | Signature = advisory or signature
    cite = dict.fromkeys((*(advisory.cite if advisory else ()), *signature.cite))
    remedy, wanted, find_out = about.remedy or "", about.change, []
    asked = {name for match in (advisory.match if advisory else ()) for name in match.versioned}
    for library in sorted({*unloaded, *(asked & set(known.candidates))}):
        find_out.append(f"which {library} is loaded: envbuild audit --here")
    if known.situation.torch is None and (wanted.torch or _TORCH_CHANGE.search(remedy)):
        find_out.insert(0, FIND_TORCH)
        affected = ", ".join(str(match.torch) for match in (advisory.match if advisory else ()) if match.torch)
        remedy = f"depends on torch's version{f' (affected: {affected})' if affected else ''}: {remedy}"
        wanted = replace(wanted, torch=None)
    return SignatureMatch(
        signature.id, advisory, about.title or "", confidence, standing, tuple(lines), remedy, wanted,
        advisory_remedy.written(wanted, known.situation), prove, tuple(cite),
        _about(advisory, _without(known, frozenset(unloaded)).situation), tuple(find_out),
    )  # fmt: skip


FIND_TORCH = "torch's version: python -c 'import torch; print(torch.__version__, torch.version.cuda)'"
_TORCH_CHANGE = re.compile(r"\btorch \d")


def _yielded(found: Iterable[SignatureMatch]) -> list[SignatureMatch]:
    """Removes the matches that another cause explains better."""
    rows, matches = log_signatures.signatures(), list(found)
    ids = {match.id for match in matches}
    last = {match.id for match in matches if ANY in rows[match.id].yields_to}
    kept = []
    for match in matches:
        better = rows[match.id].yields_to & ids
        if ANY in rows[match.id].yields_to:
            order = [name for name in rows if name in last]
            better |= (ids - last) | set(order[: order.index(match.id)])
        if not better:
            kept.append(match)
    return kept


def of_profile(text: str, name: str) -> str:
    """A remedy or a command with NAME replaced by the profile's name."""
    return re.sub(r"\bNAME\b", lambda _: name, text)


def document(found: Explanation, profiles: Container[str] = ()) -> Mapping[str, Any]:
    """The document for `--json`: {"matches", "possible", "unknown", "ruled_out", "advice", "first_failure",
    "last_work", "error", "read"}.

    `profiles`: the names of the known profiles. The commands of a match contain its `profile`, or NAME where that is
    None. `write` is the `change` in the form that a profile has.
    """
    first, said, error = found.read.first, found.read.situation, found.read.error
    return {
        "matches": [_document(match, match.profile(profiles)) for match in found.matches],
        "possible": [_document(match, match.profile(profiles)) for match in found.possible],
        "unknown": found.unknown,
        "ruled_out": [{"advisory": ruled.advisory.id, **_place(ruled.line)} for ruled in found.ruled_out],
        "advice": list(found.advice),
        "first_failure": {"rank": first.rank, "local_rank": first.local, "exit": first.exit, **_place(first.line)}
        if first
        else None,
        "last_work": asdict(found.read.works),
        "error": {**_place(error), "text": error.text} if error else None,
        "read": {
            "gpus": [gpu.id for gpu in said.gpus],
            "torch": said.torch,
            "cuda": said.cuda,
            "driver": said.driver,
            "libraries": dict(said.libraries),
            "inferred": sorted(set(said.libraries) - found.read.stated),
            "loaded": sorted(found.read.loaded),
            "candidates": {name: list(versions) for name, versions in found.read.candidates.items()},
            "gpu_count": said.gpu_count,
        },
    }


def _document(match: SignatureMatch, profile: str | None) -> dict[str, Any]:
    name = profile or "NAME"
    return {
        "cause": match.id,
        "advisory": match.advisory.id if match.advisory else None,
        "title": match.title,
        "confidence": match.confidence,
        "lines": [{**_place(line), "text": line.text} for line in match.lines],
        "remedy": of_profile(match.remedy, name),
        "change": change(match.change),
        "write": dict(match.write),
        "profile": profile,
        "prove": of_profile(match.prove, name) if match.prove else None,
        "cite": list(match.cite),
        "find_out": list(match.find_out),
    }


def _place(line: Line) -> dict[str, Any]:
    """The position of a line; `file` only where several files were read."""
    return {"file": line.file, "line": line.number} if line.file else {"line": line.number}


def change(wanted: Change) -> dict[str, Any]:
    """The versions that fix the cause, as text: {"pins": {"cublas": ">=12.4.5.8"}}."""
    changes = {
        "torch": str(wanted.torch) if wanted.torch else None,
        "pins": {name: str(versions) for name, versions in wanted.pins.items()},
        "driver": str(wanted.driver) if wanted.driver else None,
        "env": dict(wanted.env),
    }
    return {key: value for key, value in changes.items() if value}
