"""Measures how well `envbuild explain` names the causes of the logs in tests/logs.

python benchmarks/explain_score.py        writes benchmarks/results/explain.md and explain.svg; exit 1 if a part of the
                                          logs, except the sealed one, scores below 0.95
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from machine import RESULTS, described, write
from options import program

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from unit.explain import corpus
from unit.explain.corpus import PARTS, UNSEEN, Case

WANTED = 0.95
BINS = (0.5, 0.7, 0.85, 0.95, 1.01)
"""The limits of the ranges of confidence, each of which is one point in the plot."""
SIDE, EDGE = 360, 50
"""The size of the plot's square and of its margin, in pixels."""


def row(part: str) -> str:
    cases = [case for case in corpus.cases() if case.part == part]
    kinds, score = Counter(case.kind for case in cases), corpus.score(cases)
    unknown = [case for case in cases if case.kind != "cause"]
    silent = sum(not corpus.named(case) for case in unknown)
    figures = (kinds["cause"], kinds["unknown"], kinds["innocent"], f"{score.precision:.3f}", f"{score.recall:.3f}")
    return f"| {part} | {' | '.join(map(str, figures))} | {silent}/{len(unknown)} |"


def mistake(case: Case, named: frozenset[str]) -> str:
    wanted, got = (", ".join(sorted(names)) or "-" for names in (case.expect, named))
    return f"| {case.name} | {case.part} | {case.cite} | {wanted} | {got} |"


def sealed(symptom: str | None, split: str = "sealed") -> str:
    found = corpus.sealed(symptom, split)
    answers = found.right + found.wrong
    precision, recall = (f"{found.right / of:.2f}" if of else "-" for of in (answers, found.with_cause))
    accused = f"{found.accused}/{found.innocent} | {found.by_advisory}/{found.innocent}"
    return f"| {symptom or 'all'} | {found.with_cause} | {precision} | {recall} | {accused} |"


def confusion(symptom: str) -> str:
    """Return the table row of a symptom class: how often the right cause was named. It has only counts, so it may
    include the part whose single results must not be looked at."""
    cases = [case for case in corpus.cases() if case.symptom == symptom]
    known = [case for case in cases if case.kind == "cause"]
    right = sum(corpus.named(case) == case.expect for case in known)
    silent = sum(not corpus.named(case) for case in known)
    accused = sum(bool(corpus.named(case)) for case in cases if case.kind != "cause")
    figures = (len(known), right, len(known) - right - silent, silent, len(cases) - len(known), accused)
    return f"| {symptom} | {' | '.join(map(str, figures))} |"


def instead() -> Iterator[str]:
    """Yield a table row for each pair of an expected cause and a different cause that was named instead."""
    pairs = Counter(
        (", ".join(sorted(case.expect - named)) or "none", ", ".join(sorted(named - case.expect)))
        for case in corpus.seen()
        if (named := corpus.named(case)) - case.expect
    )
    yield from (f"| {wanted} | {got} | {count} |" for (wanted, got), count in sorted(pairs.items()))


def advisories() -> list[str]:
    """Return table rows: for how many logs an advisory that does not apply is named."""

    def row(name: str, cases: Sequence[Case]) -> str:
        wrong = sum(
            any(match.advisory and match.id not in case.expect for match in corpus.explained(case).matches)
            for case in cases
        )
        return f"| {name} | {len(cases)} | {wrong} |"

    cases = corpus.cases()
    return [
        row("all", cases),
        row("without a known cause (unknown and innocent)", [case for case in cases if case.kind != "cause"]),
        row("crashes of programs without a GPU", [case for case in cases if case.symptom == "unrelated"]),
    ]


def confidences(parts: Sequence[str]) -> list[tuple[float, bool]]:
    """Return the confidence of each cause named in these parts, and whether the cause is right."""
    return [
        (match.confidence, match.id in case.expect)
        for case in corpus.cases()
        if case.part in parts
        for match in corpus.explained(case).matches
    ]


def plot(series: dict[str, list[tuple[float, bool]]]) -> str:
    """Plot the share of right causes by mean confidence. The area of a point is the number of causes."""
    colours = dict(zip(series, ("#1d3557", "#e63946"), strict=True))
    size = SIDE + 2 * EDGE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{size}" height="{size}" font-family="sans-serif"'
        ' font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{EDGE} {EDGE}V{EDGE + SIDE}H{EDGE + SIDE}" fill="none" stroke="black"/>',
        f'<path d="M{EDGE} {EDGE + SIDE}L{EDGE + SIDE} {EDGE}" stroke="#b0b7c3" stroke-dasharray="4"/>',
        f'<text x="{size / 2}" y="{size - 10}" text-anchor="middle">mean confidence</text>',
        f'<text x="8" y="{EDGE - 14}">share of named causes that are right</text>',
    ]
    for step in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{EDGE + SIDE * step}" y="{EDGE + SIDE + 16}" text-anchor="middle">{step}</text>')
        parts.append(f'<text x="{EDGE - 6}" y="{EDGE + SIDE * (1 - step) + 4}" text-anchor="end">{step}</text>')
    for place, (name, found) in enumerate(series.items()):
        parts.append(f'<text x="{EDGE + 10}" y="{EDGE + 16 * (place + 1)}" fill="{colours[name]}">{name}</text>')
        for low, high in pairwise(BINS):
            here = [pair for pair in found if low <= pair[0] < high]
            if here:
                x = EDGE + SIDE * sum(confidence for confidence, _ in here) / len(here)
                y = EDGE + SIDE * (1 - sum(right for _, right in here) / len(here))
                radius = min(max(len(here) ** 0.5, 3), 14)
                parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{colours[name]}" fill-opacity="0.6">'
                    f"<title>{len(here)} causes</title></circle>"
                )
    return "\n".join((*parts, "</svg>")) + "\n"


def first_scores(part: str) -> Iterator[str]:
    """One row for each lot of logs of a part: the scores before anything was changed for this lot."""
    for with_cause, precision, recall in PARTS[part]["first_met"]:
        yield f"| {part} | {with_cause} | {precision:.2f} | {recall:.2f} |"


def left_out(split: str) -> str:
    every, used = corpus.read_yaml(corpus.FOLDER / split / "index.yaml"), corpus.unused(split)
    return (
        f"Of {len(every)} logs, {len(every) - len(used)} are left out, because an open part also has a log "
        "from their threads."
    )


def main() -> int:
    cases = corpus.cases()
    begin = time.perf_counter()
    for case in cases:
        corpus.explained(case)
    took = time.perf_counter() - begin
    named = {name for case in cases for name in case.expect}
    held = confidences(("held-out", UNSEEN))
    used = confidences([part for part in PARTS if part not in ("held-out", UNSEEN)])
    (RESULTS / "explain.svg").write_text(plot({"held out": held, "used": used}), encoding="utf-8")
    write(
        "explain",
        [
            "# Causes that `envbuild explain` names",
            "",
            f"Machine: {described()}. Made by `make explain-score`: {len(cases)} logs in {took:.2f} s.",
            "",
            "| part | logs with a cause | unknown | innocent | precision | recall | silent where nothing is known |",
            "|---|---|---|---|---|---|---|",
            *map(row, PARTS),
            "",
            f"Precision and recall count pairs of a log and a cause; the logs have {len(named)} different causes. Most "
            "signatures were written with these logs at hand, so the figures are higher than for other logs. Before "
            "anything was changed for them, the logs had these scores:",
            "",
            "| part | logs with a cause (develop, held-out: logs) | precision | recall |",
            "|---|---|---|---|",
            *(line for part in PARTS for line in first_scores(part)),
            "",
            "How the logs were found:",
            "",
            *(f"- {part}: {PARTS[part]['about']} Labels changed later: {PARTS[part]['relabelled']}." for part in PARTS),
            "",
            "## By symptom",
            "",
            "The logs that were collected by symptom class (parts named collected or recent).",
            "",
            "| symptom | with a cause | right | another named | none named | without a known cause | a cause named |",
            "|---|---|---|---|---|---|---|",
            *map(confusion, sorted({case.symptom for case in cases if case.symptom})),
            "",
            f"Causes that were named instead of the expected ones, in all parts except {UNSEEN}:",
            "",
            "| expected | named | logs |",
            "|---|---|---|",
            *instead(),
            "",
            "## Wrong advisories",
            "",
            "| logs | number | with a wrong advisory named |",
            "|---|---|---|",
            *advisories(),
            "",
            "## Reliability",
            "",
            "![share of right causes by confidence](explain.svg)",
            "",
            "## Sealed",
            "",
            "These logs were collected by a person who had not seen the signatures, and authors of signatures do not "
            "open them (tests/logs/sealed). Precision and recall of the first answer; innocent: logs of other "
            f"failures, or of none. {left_out('sealed')} The figures by symptom were looked at twice with single "
            "causes left out, to find the causes that named innocent logs and two changes that gave wrong answers, and "
            "once for the class slow, after collected-7; so all figures are a little better than for logs that were "
            "never scored. A person who improves no causes corrected labels by the conventions of the other parts: "
            "on 2026-11-30 two, without a look at any score, and on 2026-12-01 those of 10 scored logs, with a look "
            "at the answers (0.92 and 0.88 before). The searches for collected-13 also showed parts of the threads of "
            "13 of these logs, most of them missed before, to the author of the causes (0.97 and 0.91 before). So "
            "most of the gain since then does not show how well explain reads logs that nobody has seen. "
            "[Why logs of this part are missed](explain_missed.md).",
            "",
            "| symptom | logs with a cause | precision | recall | innocent with a cause named | with an advisory |",
            "|---|---|---|---|---|---|",
            *map(sealed, [*corpus.symptoms(), None]),
            "",
            "## Sealed, second split",
            "",
            "These logs (tests/logs/sealed-2) were collected by a person who had not seen the signatures, by a rule "
            "that was written down before the search, and labelled before any score. As first met they scored 0.91 "
            f"and 0.59. {left_out('sealed-2')} Then the vocabulary of statements.yaml was written with "
            "explain_missed.md at hand, which says in general words what was missing. No log was opened. These totals "
            "were looked at 24 times, so they are a little better than for logs that nobody scored. On "
            "2026-11-30, 12 labels were corrected as in the first split, and on 2026-12-01 six (0.97 and 0.80 before). "
            "The searches for collected-13 also showed parts of the threads of 12 of these logs, most of them "
            "missed before (0.95 and 0.81 before), so most of the gain since then does not count, as above. "
            "The phrases of the search describe symptoms, and many of the logs consist of sentences without a message. "
            "[Why logs of this part are missed](explain_missed.md#second-split).",
            "",
            "| symptom | logs with a cause | precision | recall | innocent with a cause named | with an advisory |",
            "|---|---|---|---|---|---|",
            *(sealed(symptom, "sealed-2") for symptom in [*corpus.symptoms("sealed-2"), None]),
            "",
            "## Sealed, third split",
            "",
            "These logs (tests/logs/sealed-3) were collected on 2026-12-01 by a person who had not seen a signature, "
            "by a rule that was written down before the search, and labelled before any score. The searches were not "
            "weighted to hard classes: words of programs, and of failures that users of GPUs report. As first met, "
            f"precision was 0.91 and recall 0.71. {left_out('sealed-3')} No cause was changed since then.",
            "",
            "| symptom | logs with a cause | precision | recall | innocent with a cause named | with an advisory |",
            "|---|---|---|---|---|---|",
            *(sealed(symptom, "sealed-3") for symptom in [*corpus.symptoms("sealed-3"), None]),
            "",
            "## Mistakes",
            "",
            "| named wrongly | part | thread | expected | named |",
            "|---|---|---|---|---|",
            *(mistake(*found) for found in corpus.mistakes(corpus.seen())),
        ],
    )
    scores = [corpus.score(case for case in cases if case.part == part) for part in PARTS if part != UNSEEN]
    return 0 if min(min(score.precision, score.recall) for score in scores) >= WANTED else 1


if __name__ == "__main__":
    program(main)
