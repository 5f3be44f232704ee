"""The types of advisories, and the check whether an advisory applies to a profile, an image or a machine.

This module contains no versions: they are in facts/data/advisories.yaml, whose head describes each key.
fact_file_reader.py reads this file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from envbuild.facts.fact_field_types import (
    STRICT,
    AnyPattern,
    FactRow,
    Name,
    Pattern,
    Sources,
    Spec,
    Text,
    VersionRange,
)
from envbuild.facts.gpu_fact_types import UNLISTED, Gpu


@dataclasses.dataclass(frozen=True)
class Situation:
    """The known properties of a profile, an image or a machine; None or a missing name means unknown.

    `torch`: the version of the distribution. A CUDA build from the package index has the version 2.3.1, although
    torch.__version__ is 2.3.1+cu121. `cuda`: the CUDA version of torch. `libraries`: short name -> version.
    `gpu_count`: number of GPUs that work together; None: unknown. `environment`: words that facts/data/advisories.yaml
    describes.
    """

    gpus: tuple[Gpu, ...] = ()
    torch: str | None = None
    cuda: str | None = None
    libraries: Mapping[str, str] = dataclasses.field(default_factory=dict)
    distributions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    driver: str | None = None
    gpu_count: int | None = 1
    features: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()
    environment: frozenset[str] = frozenset()

    @cached_property
    def build(self) -> str | None:
        """torch's local label, "cpu" or "cu128"; "pypi" if it has none; None if torch is unknown."""
        try:
            return (Version(self.torch).local or "pypi") if self.torch else None
        except InvalidVersion:
            return None

    @cached_property
    def canonical_distributions(self) -> dict[str, str]:
        """`distributions` by canonical name."""
        return {canonicalize_name(name): version for name, version in self.distributions.items()}


@dataclass(frozen=True, config=STRICT)
class Match:
    """Conditions that must all be true; fields that are not set are ignored. `gpus` (ids), `series` (beginnings of
    names: "NVIDIA GeForce RTX 50") and `compute_capability` are conditions on the same GPU. `unequal_cards`: the GPUs
    have several compute capabilities. `without`: words that must not be in `environment`."""

    gpus: frozenset[str] = frozenset()
    series: tuple[Text, ...] = ()
    compute_capability: Spec | None = None
    unequal_cards: bool = False
    gpu_count: Spec | None = None
    driver: Spec | None = None
    torch: Spec | None = None
    build: Literal["pypi"] | None = None
    cuda_major: int | None = None
    libraries: Mapping[str, Spec] = Field(default_factory=dict)
    distributions: Mapping[str, Spec] = Field(default_factory=dict)
    features: frozenset[str] = frozenset()
    extensions: frozenset[str] = frozenset()
    environment: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()

    def holds(self, situation: Situation) -> bool:
        return all(self.answers(situation))

    def answers(self, situation: Situation) -> Iterator[bool | None]:
        """The result of each condition that is set: true, false, or None if the situation lacks the information."""
        cards, build = situation.gpus, situation.build
        if self._needs_cuda and build == "cpu":
            yield False
        if self.gpus or self.series or self.compute_capability:
            yield self._takes(cards)
        if self.unequal_cards:
            yield True if len({gpu.compute_capability for gpu in cards}) > 1 else None
        if self.gpu_count:
            yield _within(self.gpu_count, situation.gpu_count)
        if self.driver:
            yield _within(self.driver, situation.driver)
        if self.torch:
            yield _within(self.torch, situation.torch)
        if self.build:
            yield build == self.build if build else None
        if self.cuda_major:
            major = _major(situation.cuda)
            yield major == self.cuda_major if major else None
        for name, versions in self.libraries.items():
            yield _within(versions, situation.libraries.get(name))
        for name, versions in self.distributions.items():
            yield _within(versions, situation.canonical_distributions.get(name))
        for wanted, known in (
            (self.features, situation.features),
            (self.extensions, situation.extensions),
            (self.environment, situation.environment),
        ):
            if wanted:
                yield True if wanted <= known else None
        if not self.without.isdisjoint(situation.environment):
            yield False

    def concerns(self, situation: Situation) -> bool:
        """Whether all conditions are true, except those on the driver, on torch's version and build, and on the
        versions of libraries and distributions, which are ignored."""
        anyhow = dataclasses.replace(self, driver=None, torch=None, build=None, libraries={}, distributions={})
        return anyhow.holds(situation)

    @property
    def versioned(self) -> frozenset[str]:
        """The libraries and distributions with a version condition."""
        return frozenset((*self.libraries, *self.distributions))

    @property
    def states_nothing(self) -> bool:
        return all(not getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "without")

    @property
    def _needs_cuda(self) -> bool:
        return bool(
            self.gpus or self.series or self.compute_capability or self.unequal_cards or self.driver or self.gpu_count
        )

    def _takes(self, cards: tuple[Gpu, ...]) -> bool | None:
        """Whether any of the GPUs matches. None if there are no GPUs, or if none matches but a GPU with a matching
        compute capability is of an unknown model."""
        fitting = [
            card for card in cards if not self.compute_capability or card.compute_capability in self.compute_capability
        ]
        if any(self._fits(card) for card in fitting):
            return True
        return None if not cards or any(card.id == UNLISTED for card in fitting) else False

    def _fits(self, card: Gpu) -> bool:
        """Whether the GPU meets the conditions `gpus` and `series`."""
        return (not self.gpus or card.id in self.gpus) and (
            not self.series or any(name.startswith(self.series) for name in card.all_names)
        )


def _within(wanted: VersionRange, version: object | None) -> bool | None:
    return None if version is None else str(version) in wanted


def _major(version: str | None) -> int | None:
    head = (version or "").partition(".")[0]
    return int(head) if head.isdecimal() else None


@dataclass(frozen=True, config=STRICT)
class Shows:
    """Symptoms of a fault. `patterns` are searched in single lines; `like`: advisories with the same log lines."""

    signals: tuple[Annotated[str, Field(pattern=r"^SIG[A-Z0-9]+$")], ...] = ()
    exit_codes: tuple[int, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    examples: tuple[Text, ...] = ()
    probes: tuple[Name, ...] = ()
    like: frozenset[str] = frozenset()


@dataclass(frozen=True, config=STRICT)
class Change:
    """The changes to a profile that fix a fault; empty if no change does. `pins`: short library name or distribution ->
    versions. `env`: variables; `env_with`: distribution -> variables that only matter if it is installed."""

    pins: Mapping[str, Spec] = Field(default_factory=dict)
    torch: Spec | None = None
    driver: Spec | None = None
    env: Mapping[str, str] = Field(default_factory=dict)
    env_with: Mapping[Name, Mapping[str, str]] = Field(default_factory=dict)


def _stating(match: Match) -> Match:
    if match.states_nothing:
        raise ValueError(
            "has no condition (`without` alone does not count); write `match: []` if only a log can show that the "
            "advisory applies"
        )
    return match


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Advisory(FactRow):
    """A known fault. It applies if any of `match` does. `decidable`: whether a profile alone is enough to decide this.

    `signature`: alternatives that identify the result of a probe which had the fault. In an alternative, each key names
    an entry of the result or of its traits, and the pattern must match the whole value of the entry.
    """

    id: Name
    title: Text
    severity: Literal["refuse", "warn", "note"]
    match: tuple[Annotated[Match, AfterValidator(_stating)], ...]
    decidable: bool
    shows: Shows
    remedy: Text
    cite: Sources
    change: Change = Field(default_factory=Change)
    signature: tuple[Mapping[str, AnyPattern], ...] = ()
    caution: Text | None = None

    def matches(self, result: Mapping[str, Any]) -> bool:
        """Whether a probe's result matches this fault's signature."""
        values = {**(result.get("traits") or {}), **result}
        return any(
            all(values.get(key) is not None and pattern.fullmatch(str(values[key])) for key, pattern in keys.items())
            for keys in self.signature
            if keys
        )

    @property
    def by_library_path(self) -> bool:
        """Whether LD_LIBRARY_PATH causes the fault, so that the variable without the folder is a fix."""
        return any("ld-library-path" in match.environment for match in self.match)

    @property
    def about_apex(self) -> bool:
        """Whether the fault needs NVIDIA's apex."""
        return bool(self.match) and all("apex" in match.extensions for match in self.match)

    def holds(self, situation: Situation) -> bool:
        return any(match.holds(situation) for match in self.match)

    def concerns(self, situation: Situation) -> bool:
        """Whether the advisory applies if the versions in the situation are ignored."""
        return any(match.concerns(situation) for match in self.match)

    def standing(self, situation: Situation) -> Literal["holds", "fits", "open", "contradicted"]:
        """How a partly known situation relates to this advisory.

        "holds": the advisory applies. "fits": in an alternative of `match`, some condition is true and none is false.
        "open": some alternative has no false condition, but no such alternative has a true one; or `match` is empty.
        "contradicted": no alternative can apply.
        """
        answers = [list(match.answers(situation)) for match in self.match]
        if any(all(each) for each in answers):
            return "holds"
        left = [each for each in answers if False not in each]
        if not left:
            return "contradicted" if answers else "open"
        return "fits" if any(True in each for each in left) else "open"

    def met_by(self, situation: Situation) -> dict[str, str]:
        """The versions because of which the advisory applies: short name of a library, or distribution -> version."""
        names = {name for match in self.match if match.holds(situation) for name in match.versioned}
        return {
            name: version
            for known in (situation.libraries, situation.distributions)
            for name, version in sorted(known.items())
            if name in names
        }


def holding(known: Iterable[Advisory], situation: Situation) -> list[Advisory]:
    """The advisories that apply, by severity, otherwise in the order of the data."""
    rank = {"refuse": 0, "warn": 1, "note": 2}
    return sorted((item for item in known if item.holds(situation)), key=lambda item: rank[item.severity])
