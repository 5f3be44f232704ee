"""Fits the weights of evidence (facts/data/symptoms.yaml), and reports how well the confidences agree with the results
for threads that were left out of the fit.

python benchmarks/explain_weights.py      writes benchmarks/results/explain_weights.md: the fitted weights and those
                                          in use, and the reliability by cross-validation over repositories

The weights are fitted by logistic regression on pairs of a log and a cause, from the parts of tests/logs that are not
held out. Each weight is pulled towards the weight in use. There are five folds; all threads of a repository are in the
same fold.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from machine import described, write
from options import program

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from unit.explain import corpus

from envbuild.explain import cause_ranking, cause_scoring, log_facts, log_reader_and_search
from envbuild.facts import log_signatures

FOLDS = 5
STEPS, RATE, PULL = 200, 0.01, 2.0
"""The number of steps of the gradient ascent, their size, and how strongly a weight is pulled towards the weight in
use."""
BINS = (0.1, 0.3, 0.5, 0.7, 0.85, 0.95, 1.01)


@dataclass(frozen=True)
class Pair:
    """A cause that a log may have. `begin`: the log-odds from the line that names the cause."""

    fold: int
    begin: float
    evidence: tuple[str, ...]
    right: bool


def pairs(case: corpus.Case) -> list[Pair]:
    log = log_reader_and_search.Log(case.raw)
    scored = [
        cause
        for cause in cause_ranking.score_causes(log, log_facts.read(log))
        if cause.standing not in ("contradicted", "not loaded")
    ]
    kept = cause_ranking.without_yielded([cause.signature.id for cause in scored if cause.found.lines])
    fold = zlib.crc32(case.cite.partition("/")[0].lower().encode()) % FOLDS
    return [
        Pair(
            fold,
            cause_scoring.log_odds(cause.signature.confidence) if "line" in cause.evidence else 0.0,
            cause.evidence,
            cause.signature.id in case.expect,
        )
        for cause in scored
        if cause.signature.id in kept or not cause.found.lines
    ]


def probability(pair: Pair, weights: Mapping[str, float]) -> float:
    return cause_scoring.probability(pair.begin + sum(weights[name] for name in pair.evidence))


def fit(known: Collection[Pair], begin: Mapping[str, float]) -> dict[str, float]:
    weights = dict(begin)
    for _ in range(STEPS):
        slope = {name: PULL * (begin[name] - weight) for name, weight in weights.items()}
        for pair in known:
            error = pair.right - probability(pair, weights)
            for name in pair.evidence:
                slope[name] += error
        weights = {name: weight + RATE * slope[name] for name, weight in weights.items()}
    return weights


def reliability(found: Sequence[tuple[float, bool]]) -> list[str]:
    rows = []
    for low, high in pairwise(BINS):
        here = [(confidence, right) for confidence, right in found if low <= confidence < high]
        if here:
            mean = sum(confidence for confidence, _ in here) / len(here)
            right = sum(right for _, right in here)
            rows.append(f"| {low:.2f} to {min(high, 1.0):.2f} | {len(here)} | {mean:.2f} | {right / len(here):.2f} |")
    return rows


def main() -> int:
    begin: dict[str, float] = {str(name): row.weight for name, row in log_signatures.weights().items()}
    apart = ("held-out", corpus.UNSEEN)
    known = [pair for case in corpus.cases() if case.part not in apart for pair in pairs(case)]
    held = [pair for case in corpus.cases() if case.part in apart for pair in pairs(case)]
    left_out: list[tuple[float, bool]] = []
    for fold in range(FOLDS):
        weights = fit([pair for pair in known if pair.fold != fold], begin)
        left_out += [(probability(pair, weights), pair.right) for pair in known if pair.fold == fold]
    fitted = fit(known, begin)
    head = ["| confidence | causes | mean confidence | right |", "|---|---|---|---|"]
    write(
        "explain_weights",
        [
            "# How far the confidences of `envbuild explain` hold",
            "",
            f"Machine: {described()}. Made by `benchmarks/explain_weights.py`: {len(known)} pairs of a log and a cause "
            f"that are not held out, {FOLDS} folds over repositories; {len(held)} pairs of the held-out parts.",
            "",
            "## Reliability: weights fitted on the other folds",
            "",
            *head,
            *reliability(left_out),
            "",
            "## Reliability: weights in use, held-out parts",
            "",
            *head,
            *reliability([(probability(pair, begin), pair.right) for pair in held]),
            "",
            "Most signatures' patterns were written with the logs that are not held out at hand, and no fold undoes "
            "this. The held-out parts were not used to write patterns, except where tests/logs/index.yaml says so.",
            "",
            "## Weights",
            "",
            "| evidence | pairs | in use | fitted |",
            "|---|---|---|---|",
            *(
                f"| {name} | {sum(name in pair.evidence for pair in known)} | {weight:+.1f} | {fitted[name]:+.2f} |"
                for name, weight in begin.items()
            ),
        ],
    )
    return 0


if __name__ == "__main__":
    program(main)
