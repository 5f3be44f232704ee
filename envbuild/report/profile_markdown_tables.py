"""Renders Markdown tables about profiles: locked versions, minimum versions because of known faults, evidence. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from envbuild.attest import community_evidence
from envbuild.evidence import profile_proofs_and_image_states
from envbuild.evidence.proof_rules import Proof
from envbuild.facts import database
from envbuild.facts.advisory_model import Match, Situation
from envbuild.facts.fact_field_types import VersionRange
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.lock.lock_file import Lock
from envbuild.report import markdown_generated_sections
from envbuild.resolve.torch_compatibility_and_advisories import Choice

_LIBRARIES = {"cublas": "cuBLAS", "cudnn": "cuDNN", "nccl": "NCCL"}


@dataclass(frozen=True)
class ProfileRow:
    """A profile with its lock. `choice`: the profile's choice of versions, checked against the locked versions;
    `proofs`: one for each GPU model of the profile."""

    name: str
    choice: Choice
    lock: Lock
    proofs: Sequence[Proof] = ()


def versions_table(rows: Iterable[ProfileRow]) -> str:
    """Return a table with one line per profile: GPUs, locked versions, oldest driver, accepted advisories, evidence."""
    head = ("Profile", "GPU", "CUDA", "torch", *_LIBRARIES.values(), "Python", "Driver", "Accepted", "State")
    return markdown_generated_sections.markdown_table([head, *map(_cells, rows)])


def _cells(row: ProfileRow) -> tuple[str, ...]:
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
        profile_proofs_and_image_states.proof_sentence(row.name, row.proofs),
    )


def minimum(situations: Sequence[Situation]) -> str:
    """Return a table of the versions that avoid known faults (advisories that refuse or warn) on these GPUs, whatever
    the profiles pin. The column Where states the condition under which a fault occurs. With several GPUs, the column
    GPU names the affected ones."""
    found: dict[tuple[str, ...], list[str]] = {}
    for situation in situations:
        for row, gpus in _asking(situation):
            found[row] = list(dict.fromkeys([*found.get(row, ()), *gpus]))
    if not found:
        return "No known fault requires a minimum version."
    every = {name for situation in situations for name in _named(situation.gpus)}
    head = ("Needs", "Where", *(["GPU"] if len(every) > 1 else []), "Known fault of other versions", "Source")
    rows = [
        (needs, where, *([", ".join(gpus)] if len(every) > 1 else []), title, source)
        for (needs, where, title, source), gpus in found.items()
    ]
    return markdown_generated_sections.markdown_table([head, *rows])


def _named(gpus: Sequence[Gpu]) -> list[str]:
    return [gpu.id for gpu in gpus] or ["CPU"]


def proofs_table(rows: Sequence[community_evidence.EvidenceRow]) -> str:
    """Return a table of the evidence by GPU and profile. For invalid evidence, the last column has the reasons."""
    if not rows:
        return "No evidence yet: no profile is proved on a GPU."
    cells = [(row.gpu, row.profile, row.who, row.when, "; ".join(row.objections) or "yes") for row in rows]
    return markdown_generated_sections.markdown_table([("GPU", "Profile", "Who", "When", "Valid?"), *cells])


def _asking(situation: Situation) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield, for each fault, a row (required versions, condition, title, source) and the GPUs that it affects."""
    for advisory in database.advisories():
        if advisory.severity == "note" or not advisory.decidable:
            continue
        change = advisory.change
        own = {"torch": change.torch, "driver": change.driver}
        wanted = {name: versions for name, versions in {**own, **change.pins}.items() if versions}
        needs = _versions({name: versions for name, versions in wanted.items() if _is_made(name, situation)})
        alone = [replace(situation, gpus=(gpu,)) for gpu in situation.gpus] or [situation]
        apart = [(on, match) for on in alone for match in advisory.match if _concerns(match, on)]
        together = [(situation, match) for match in advisory.match if _concerns(match, situation)]
        found = apart or together  # a fault may occur only where GPUs of different models work together
        if needs and found:
            where = "; or ".join(dict.fromkeys(_condition(match) for _, match in found))
            gpus = list(dict.fromkeys(name for on, _ in found for name in _named(on.gpus)))
            yield (", ".join(needs), where, advisory.title, ", ".join(advisory.cite[:2])), gpus


def _concerns(match: Match, situation: Situation) -> bool:
    return match.concerns(situation) and all(_is_made(name, situation) for name in match.libraries)


def _is_made(name: str, situation: Situation) -> bool:
    """Whether `name` is not a library, or is a library that exists for this CUDA version."""
    return name not in database.libraries() or database.distribution_of(name, situation.cuda or "") is not None


def _condition(match: Match) -> str:
    """Return all conditions of a fault except the GPU model."""
    stated = {"torch": match.torch, "driver": match.driver, **match.libraries, **match.distributions}
    return ", ".join(
        [
            *_versions({name: versions for name, versions in stated.items() if versions}),
            *(["torch without a local label"] if match.build else []),
            *([f"CUDA {match.cuda_major}"] if match.cuda_major else []),
            *([f"GPUs {match.gpu_count}"] if match.gpu_count else []),
            *(["GPUs of several compute capabilities"] if match.unequal_cards else []),
            *(f"with {word}" for word in sorted(match.features | match.extensions | match.environment)),
            *(f"without {word}" for word in sorted(match.without)),
        ]
    )


def _versions(known: Mapping[str, VersionRange]) -> list[str]:
    """Return texts such as "cuBLAS >=12.4.5.8"."""
    return [f"{_LIBRARIES.get(name, name)} {versions}" for name, versions in known.items()]
