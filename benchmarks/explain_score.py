"""How well `envbuild explain` names the causes of the logs in tests/logs.

python benchmarks/explain_score.py        writes benchmarks/results/explain.md; exit 1 if a part scores below 0.95
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path

from machine import described, write
from options import program

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from unit.explain import corpus
from unit.explain.corpus import PARTS, Case

WANTED = 0.95


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


def sealed(symptom: str | None) -> str:
    found = corpus.sealed(symptom)
    answers = found.right + found.wrong
    precision, recall = (f"{found.right / of:.2f}" if of else "-" for of in (answers, found.with_cause))
    accused = f"{found.accused}/{found.innocent} | {found.by_advisory}/{found.innocent}"
    return f"| {symptom or 'all'} | {found.with_cause} | {precision} | {recall} | {accused} |"


def history() -> list[str]:
    """What the index says of its parts: how honest the figures are."""
    head = (corpus.FOLDER / "index.yaml").read_text(encoding="utf-8").partition("\nlogs:")[0]
    said = re.sub(r"\n# +", " ", head.partition("# part")[2])
    return [said.strip()]


def main() -> int:
    cases = corpus.cases()
    begin = time.perf_counter()
    for case in cases:
        corpus.explained(case)
    took = time.perf_counter() - begin
    named = {name for case in cases for name in case.expect}
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
            f"Over pairs of a log and a cause; {len(named)} of the causes occur. The parts: {history()[0]}",
            "",
            "## Sealed",
            "",
            "These logs were collected by a person who had not seen the signatures, and authors of signatures do not "
            "open them (tests/logs/sealed). Precision and recall of the first answer; innocent: logs of other "
            "failures, or of none. Their figures by symptom were looked at once, with single causes left out, to find "
            "the causes that named innocent logs; so the figures are a little better than for logs that were never "
            "scored.",
            "",
            "| symptom | logs with a cause | precision | recall | innocent with a cause named | with an advisory |",
            "|---|---|---|---|---|---|",
            *map(sealed, [*corpus.symptoms(), None]),
            "",
            "## Mistakes",
            "",
            "| named wrongly | part | thread | expected | named |",
            "|---|---|---|---|---|",
            *(mistake(*found) for found in corpus.mistakes(cases)),
        ],
    )
    scores = [corpus.score(case for case in cases if case.part == part) for part in PARTS]
    return 0 if min(min(score.precision, score.recall) for score in scores) >= WANTED else 1


if __name__ == "__main__":
    program(main)
