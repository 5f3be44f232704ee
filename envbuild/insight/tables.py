"""What documents say of profiles: locked versions, the least ones that faults leave, and who proved them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from envbuild.attest import community
from envbuild.insight import markdown
from envbuild.plan import facts
from envbuild.plan.advisories import Situation
from envbuild.plan.choice import Choice
from envbuild.plan.lock import Lock

_LIBRARIES = {"cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL"}


@dataclass(frozen=True)
class Row:
    """A profile with its lock: `choice` is held against what was locked; `evidence` is all that is published."""

    name: str
    choice: Choice
    lock: Lock
    evidence: Sequence[community.Row] = ()


def versions(rows: Iterable[Row]) -> str:
    """One line a profile: cards, locked versions, oldest driver, advisories taken on, proof."""
    head = ("Profile", "GPU", "CUDA", "torch", *_LIBRARIES.values(), "Python", "Driver", "Accepted", "Proved")
    return markdown.table([head, *map(_cells, rows)])


def _cells(row: Row) -> tuple[str, ...]:
    known = row.choice.situation
    return (
        row.name,
        ", ".join(gpu.id for gpu in known.gpus) or "CPU",
        known.cuda or "",
        known.torch or "",
        *(known.libraries.get(library, "") for library in _LIBRARIES),
        row.lock.python,
        f">= {row.choice.driver}" if row.choice.driver else "",
        ", ".join(advice.advisory.id for advice in row.choice.advice if advice.state == "accepted"),
        "; ".join(_proofs(row)) or "never",
    )


def _proofs(row: Row) -> Iterator[str]:
    """What counts of the evidence on this very lock: on which card, when, and of which image."""
    for one in row.evidence:
        if (one.profile, one.lock) == (row.name, row.lock.id) and not one.objections:
            yield f"{one.gpu}, {one.when}, {one.image[:19]}"


def minimum(situations: Sequence[Situation]) -> str:
    """What the advisories ask for on these cards, whatever a profile pins now: refusals and warnings."""
    rows = list(dict.fromkeys(row for situation in situations for row in _asking(situation)))
    return (
        markdown.table([("Needs", "Version", "Known fault otherwise", "Source"), *rows])
        if rows
        else "No known fault asks for any."
    )


def proofs(rows: Sequence[community.Row]) -> str:
    """Who proved which profile on which card; a run that is no proof, or none any longer, says why."""
    if not rows:
        return "No evidence yet: no profile is proved on a GPU."
    said = [(row.gpu, row.profile, row.who, row.when, "; ".join(row.objections) or "yes") for row in rows]
    return markdown.table([("GPU", "Profile", "Who", "When", "Does it count?"), *said])


def _asking(situation: Situation) -> Iterator[tuple[str, ...]]:
    major = (situation.cuda or "").partition(".")[0]
    for advisory in facts.advisories():
        if advisory.severity == "note" or not advisory.decidable or not advisory.concerns(situation):
            continue
        change = advisory.change
        own = {"torch": change.torch, "driver": change.driver}
        wanted = {**{name: versions for name, versions in own.items() if versions}, **change.pins}
        for name, versions in wanted.items():
            # A library that is not made for this CUDA asks for nothing here.
            if name not in facts.libraries() or facts.distribution_of(name, major):
                yield _LIBRARIES.get(name, name), str(versions), advisory.title, ", ".join(advisory.cite[:2])
