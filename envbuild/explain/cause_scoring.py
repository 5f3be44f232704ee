"""Scores a cause from the evidence in a log: a sum of weights, which a maintainer can add up by hand. Pure.

If a line of the log names the cause, the sum begins with the log-odds of the cause's own confidence (signatures.yaml).
If only a statement in prose names the cause, the sum begins in the same way, but the confidence is at most STATED. Such
a line or statement also shows the symptom and the operation, so these are not counted again. Otherwise the sum begins
with the weight of `hint` or `no-line`, and the symptom and the operation add their weights. Each other piece of
evidence adds its weight (symptoms.yaml): the GPU and versions of the advisory, the innermost frames, and other lines.
The sum is the log-odds of the confidence.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from envbuild.explain import prose_statements
from envbuild.explain.log_facts import Reading
from envbuild.explain.log_reader_and_search import Line, Log, relaxed
from envbuild.facts import log_signatures
from envbuild.facts.advisory_model import Advisory
from envbuild.facts.log_signatures import EvidenceName, Signature

STATED = 0.6
"""The highest confidence in a cause that only a statement in prose names."""
NOT_LOADED = "not loaded"
"""The standing of an advisory that only a version contradicts which the log does not show to be loaded."""
LINES = 5
"""Maximum number of lines that are kept as evidence for a cause."""


@dataclass(frozen=True)
class CauseLines:
    """The lines of a log that show a cause. `hints`: whether they are only weak evidence for the cause. `stated`:
    whether no message names the cause, only a statement in prose."""

    lines: tuple[Line, ...]
    hints: bool = False
    stated: bool = False


def find_lines(log: Log, signature: Signature, advisory: Advisory | None, known: Reading) -> CauseLines:
    """Finds the first lines that show the cause, at most LINES, in the order of the log. If there are none, finds the
    lines that are only hints."""
    facts = known.states | known.symptoms
    of_facts = (one for fact, shown in signature.shown_by.items() if fact in facts for one in shown)
    hints_of_facts = (one for fact, shown in signature.hinted_by.items() if fact in facts for one in shown)
    heard = log_signatures.hearsay()
    for hints, patterns in (
        (False, (*(advisory.shows.patterns if advisory else ()), *signature.lines, *of_facts)),
        (True, (*signature.hints, *hints_of_facts)),
    ):
        if hints and patterns and log.has(signature.hints_unless):
            continue
        never = (*signature.never, *log_signatures.denials()) if hints else signature.never
        found = {
            line
            for pattern in patterns
            for line, _ in log.find(relaxed(pattern), LINES, never, heard, prose_statements.not_of_this_run)
        }
        of_message = bool(found)
        if not hints:
            stated = [line for name in sorted(signature.stated_by) for line in known.statements.get(name, ())]
            found |= {line for line in stated if not any(no.search(line.text) for no in signature.never)}
        if found:
            lines = sorted(found, key=lambda line: (log.files.index(line.file), line.number))
            return CauseLines(tuple(lines[:LINES]), hints, stated=not of_message)
    return CauseLines(())


def evidence(
    log: Log, signature: Signature, found: CauseLines, standing: str, versions: bool, known: Reading
) -> Iterator[EvidenceName]:
    """Names the evidence for and against a cause. `found`: the lines that show the cause. `standing`: how the GPU and
    versions in the log relate to the cause. `versions`: whether the log states the exact version that is affected."""
    yield "no-line" if not found.lines else "stated" if found.stated else "hint" if found.hints else "line"
    if standing == "holds":
        yield "holds"
    elif standing in ("fits", NOT_LOADED):
        yield "fits" if standing == "fits" else "not-loaded"
    if versions:
        yield "versions"
    if found.hints or not found.lines:
        if signature.symptoms and known.symptoms:
            yield "symptom" if signature.symptoms & known.symptoms else "other-symptom"
        if signature.operations and known.operations:
            yield "operation" if signature.operations & known.operations else "other-operation"
    if signature.stack and known.crashed_in:
        yield "frames" if signature.stack & known.crashed_in else "other-frames"
    if log.has(signature.raised_by):
        yield "raised"
    if log.has(signature.lowered_by):
        yield "lowered"


def confidence(prior: float, names: Collection[EvidenceName]) -> float:
    """Returns the probability of a cause with this evidence. `prior`: the confidence in the cause if only a line of the
    log names it. The probability is at most STATED if only a statement in prose names the cause."""
    weights = log_signatures.weights()
    begin = log_odds(prior) if {"line", "stated"} & {*names} else 0.0
    total = round(probability(begin + sum(weights[name].weight for name in names)), 2)
    return min(total, STATED) if "stated" in names else total


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


def probability(logit: float) -> float:
    return 1 / (1 + math.exp(-logit))
