"""Advisories as data, and whether one applies to a profile, an image or a machine. fact_file_reader.py reads the rows.

Nothing here knows a version: every number stands in facts/data/advisories.yaml, whose head says what each key means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
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
from envbuild.facts.gpu_models import UNLISTED, Gpu


@dataclasses.dataclass(frozen=True)
class Situation:
    """What is known of a profile, an image or a machine; None, or a name that is absent, is unknown.

    torch: the distribution's version (the index's CUDA builds have no local label there, though they import as
    2.3.1+cu121). cuda: torch's. libraries: short name -> version. environment: words, see facts/data/advisories.yaml.
    gpu_count: that work together; None: unknown.
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

    @property
    def build(self) -> str | None:
        """torch's local label, "cpu" or "cu128"; "pypi" where it has none; None where torch is unknown."""
        try:
            return (Version(self.torch).local or "pypi") if self.torch else None
        except InvalidVersion:
            return None


@dataclass(frozen=True, config=STRICT)
class Match:
    """Conditions that must all hold; what is not stated does not matter. `without`: environment words not there;
    `unequal_cards`: of several compute capabilities."""

    gpus: frozenset[str] = frozenset()
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
        """What the situation says to each condition that is stated; None: it says nothing, which is no yes."""
        cards, build = situation.gpus, situation.build
        if self._needs_cuda and build == "cpu":
            yield False
        if self.gpus or self.compute_capability:
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
        held: dict[str, str] = {canonicalize_name(name): told for name, told in situation.distributions.items()}
        for name, versions in self.distributions.items():
            yield _within(versions, held.get(name))
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
        """Whether it would hold there with other versions of torch, libraries, distributions or the driver."""
        anyhow = dataclasses.replace(self, driver=None, torch=None, build=None, libraries={}, distributions={})
        return anyhow.holds(situation)

    @property
    def versioned(self) -> frozenset[str]:
        """The libraries and distributions whose versions it asks for."""
        return frozenset((*self.libraries, *self.distributions))

    @property
    def states_nothing(self) -> bool:
        return all(not getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "without")

    @property
    def _needs_cuda(self) -> bool:
        return bool(self.gpus or self.compute_capability or self.unequal_cards or self.driver or self.gpu_count)

    def _takes(self, cards: tuple[Gpu, ...]) -> bool | None:
        """Whether any of the cards is meant; None where there is none, or one that fits and has no known model."""
        fitting = [
            card for card in cards if not self.compute_capability or card.compute_capability in self.compute_capability
        ]
        if any(not self.gpus or card.id in self.gpus for card in fitting):
            return True
        return None if not cards or any(card.id == UNLISTED for card in fitting) else False


def _within(wanted: VersionRange, version: object | None) -> bool | None:
    return None if version is None else str(version) in wanted


def _major(version: str | None) -> int | None:
    head = (version or "").partition(".")[0]
    return int(head) if head.isdecimal() else None


@dataclass(frozen=True, config=STRICT)
class Shows:
    """How a fault looks. `patterns` are searched in single lines; `like`: advisories whose lines look the same."""

    signals: tuple[Annotated[str, Field(pattern=r"^SIG[A-Z0-9]+$")], ...] = ()
    exit_codes: tuple[int, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    examples: tuple[Text, ...] = ()
    probes: tuple[Name, ...] = ()
    like: frozenset[str] = frozenset()


@dataclass(frozen=True, config=STRICT)
class Change:
    """What to write into a profile: `pins` by short library name or distribution. Empty where there is nothing to."""

    pins: Mapping[str, Spec] = Field(default_factory=dict)
    torch: Spec | None = None
    driver: Spec | None = None
    env: Mapping[str, str] = Field(default_factory=dict)


def _stating(match: Match) -> Match:
    if match.states_nothing:
        raise ValueError("states no condition; write [] where nothing in a situation tells")
    return match


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Advisory(FactRow):
    """A known fault. It holds where any of `match` does; `decidable`: a profile alone can tell.

    `signature`: what a probe reports when it is met, in any of these ways: each key of its result, or of its traits,
    holds a value that the pattern fits from end to end.
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
        """Whether a probe's result is this fault's signature."""
        told = {**(result.get("traits") or {}), **result}
        return any(
            all(told.get(key) is not None and pattern.fullmatch(str(told[key])) for key, pattern in keys.items())
            for keys in self.signature
            if keys
        )

    def holds(self, situation: Situation) -> bool:
        return any(match.holds(situation) for match in self.match)

    def concerns(self, situation: Situation) -> bool:
        """Whether it would hold there with other versions than the situation's."""
        return any(match.concerns(situation) for match in self.match)

    def standing(self, situation: Situation) -> Literal["holds", "fits", "open", "contradicted"]:
        """What a situation of which little is known says of it. "fits": some condition is met and none is broken;
        "open": nothing of what it asks for is known; "contradicted": no alternative can hold."""
        answers = [list(match.answers(situation)) for match in self.match]
        if any(all(told) for told in answers):
            return "holds"
        left = [told for told in answers if False not in told]
        if not left:
            return "contradicted" if answers else "open"
        return "fits" if any(True in told for told in left) else "open"

    def met_by(self, situation: Situation) -> dict[str, str]:
        """The versions by which it holds: of libraries by their short names, of distributions by theirs."""
        names = {name for match in self.match if match.holds(situation) for name in match.versioned}
        return {
            name: version
            for known in (situation.libraries, situation.distributions)
            for name, version in sorted(known.items())
            if name in names
        }


def holding(known: Iterable[Advisory], situation: Situation) -> list[Advisory]:
    """Those that hold, the severe ones first, else in the order of the data."""
    rank = {"refuse": 0, "warn": 1, "note": 2}
    return sorted((item for item in known if item.holds(situation)), key=lambda item: rank[item.severity])
