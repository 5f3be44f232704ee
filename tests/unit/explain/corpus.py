"""The logs in tests/logs, and how well `explain` names their causes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from envbuild.cli.entry import cli
from envbuild.explain import cause_ranking, log_reader_and_search
from envbuild.explain.cause_ranking import Explanation

FOLDER = Path(__file__).parents[2] / "logs"
UNSEEN = "recent-held-out"
"""The part whose single results nobody looks at: only its score is reported, and no test names one of its logs."""
SEALED = ("sealed", "sealed-2", "sealed-3")
"""Folders of logs that were collected by a person who had not seen the signatures."""


def read_yaml(file: Path) -> Any:
    """Read a YAML file with the parser in C: each worker of pytest-xdist reads the files when it collects tests."""
    return yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)


INDEX = read_yaml(FOLDER / "index.yaml")
PARTS: Mapping[str, Mapping[str, Any]] = INDEX["parts"]
"""How the logs of each part were found, and how they were scored first. The index explains the fields."""


@dataclass(frozen=True)
class Case:
    name: str
    part: str
    kind: str
    expect: frozenset[str]
    cite: str
    symptom: str | None = None

    @property
    def raw(self) -> bytes:
        return (FOLDER / f"{self.name}.log").read_bytes()


@dataclass(frozen=True)
class Score:
    """Counts pairs of a log and a cause that are named rightly, named wrongly, or missed."""

    right: int
    wrong: int
    missed: int

    @property
    def precision(self) -> float:
        return self.right / (self.right + self.wrong)

    @property
    def recall(self) -> float:
        return self.right / (self.right + self.missed)


@cache
def cases() -> tuple[Case, ...]:
    return tuple(
        Case(name, row["part"], row["kind"], frozenset(row["expect"]), row["cite"], row.get("symptom"))
        for name, row in INDEX["logs"].items()
    )


def seen() -> tuple[Case, ...]:
    return tuple(case for case in cases() if case.part != UNSEEN)


@cache
def explained(case: Case) -> Explanation:
    return cause_ranking.explain(log_reader_and_search.Log(case.raw))


def named(case: Case) -> frozenset[str]:
    return frozenset(match.id for match in explained(case).matches)


def score(wanted: Iterable[Case]) -> Score:
    right = wrong = missed = 0
    for case in wanted:
        right += len(case.expect & named(case))
        wrong += len(named(case) - case.expect)
        missed += len(case.expect - named(case))
    return Score(right, wrong, missed)


@dataclass(frozen=True)
class Answers:
    """Counts of the first answers to sealed logs. `with_cause`: the logs with a known cause; `right`: those of them for
    which this cause is named first. `wrong`: the logs of any kind for which a different cause is named first.
    `innocent`: the logs of other failures and of no failure; `accused`: those of them for which any cause is named;
    `by_advisory`: those for which an advisory is named."""

    with_cause: int
    right: int
    wrong: int
    innocent: int
    accused: int
    by_advisory: int


def unused(split: str) -> dict[str, Any]:
    """The index of a folder of SEALED without the logs from whose threads an open part also has a log."""
    threads = {case.cite for case in cases()}
    rows = read_yaml(FOLDER / split / "index.yaml")
    return {name: row for name, row in rows.items() if row["cite"] not in threads}


def sealed(symptom: str | None = None, split: str = "sealed") -> Answers:
    """Score the unused logs of a folder of SEALED, which nobody who works on signatures may open: return only counts,
    never names of logs."""
    folder = FOLDER / split
    rows = unused(split)
    with_cause = right = wrong = innocent = accused = by_advisory = 0
    for name, row in rows.items():
        if symptom not in (None, row["symptom"]):
            continue
        matches = cause_ranking.explain(log_reader_and_search.Log((folder / f"{name}.log").read_bytes())).matches
        first = matches[0].id if matches else None
        with_cause += row["kind"] == "cause" and bool(row["expect"])
        right += row["kind"] == "cause" and first in row["expect"]
        wrong += first is not None and first not in row["expect"]
        innocent += row["kind"] == "innocent"
        accused += row["kind"] == "innocent" and first is not None
        by_advisory += row["kind"] == "innocent" and any(match.advisory for match in matches)
    return Answers(with_cause, right, wrong, innocent, accused, by_advisory)


def symptoms(split: str = "sealed") -> list[str]:
    return sorted({row["symptom"] for row in unused(split).values()})


def mistakes(wanted: Iterable[Case]) -> Iterator[tuple[Case, frozenset[str]]]:
    yield from ((case, named(case)) for case in wanted if named(case) != case.expect)


def piped(text: str, *arguments: str) -> str:
    """Return the output of `envbuild explain` for a log on its standard input."""
    done = CliRunner().invoke(cli, ["explain", *arguments, "-"], input=text, catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout
