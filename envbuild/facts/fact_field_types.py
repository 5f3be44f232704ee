"""Types for the fields of facts: names, versions and patterns of limited form, and the fields common to all rows."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.specifiers import Specifier as PackagingSpecifier
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, ValidationInfo
from pydantic.dataclasses import dataclass

# defer_build: validators are built on first use, since commands for a CPU profile need none of them.
STRICT = ConfigDict(extra="forbid", strict=True, defer_build=True)

# verified: shown by a command or found in a primary source; reported: described by people who had the fault; inferred:
# derived from verified facts; unconfirmed: from one weak source.
Status = Literal["verified", "reported", "inferred", "unconfirmed"]
Sources = Annotated[tuple[str, ...], Field(min_length=1)]
Date = Annotated[str, Field(pattern=r"^20[0-9]{2}-[01][0-9](-[0-3][0-9])?$")]
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=60)]
Text = Annotated[str, Field(min_length=1, max_length=600)]


@lru_cache(maxsize=1024)
def _version_or_none(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def is_version(text: str) -> bool:
    """Whether `text` is a valid PEP 440 version. Versions of drivers are valid too."""
    return _version_or_none(text) is not None


def _parsed(text: str) -> str:
    Version(text)
    return text


def _specifier(text: str) -> str:
    SpecifierSet(text)
    return text


Release = Annotated[str, AfterValidator(_parsed)]
Specifier = Annotated[str, AfterValidator(_specifier)]
Capability = Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FactRow:
    """The fields common to all facts: sources, certainty and date."""

    source: Sources
    status: Status
    as_of: Date


@dataclasses.dataclass(frozen=True)
class VersionRange:
    """One or several PEP 440 specifiers, each possibly with several clauses (">=1,<2"). It contains the versions that
    satisfy all clauses of at least one specifier, including pre-releases."""

    any_of: tuple[SpecifierSet, ...]

    def __contains__(self, version: object) -> bool:
        known = _version_or_none(str(version))
        return known is not None and any(specifier.contains(known, prereleases=True) for specifier in self.any_of)

    def __str__(self) -> str:
        return " or ".join(str(specifier) for specifier in self.any_of)

    @property
    def in_words(self) -> str:
        """The versions for a reader: "2.7 or newer and before 2.8"."""
        ranges = (" and ".join(_in_words(item) for item in sorted(one, key=_lower_first)) for one in self.any_of)
        return ", or ".join(ranges)


_WORDS = {">=": "{} or newer", ">": "newer than {}", "<": "before {}", "<=": "{} or older", "==": "{}", "!=": "not {}"}


def _in_words(item: PackagingSpecifier) -> str:
    return _WORDS.get(item.operator, f"{item.operator}{{}}").format(item.version)


def _lower_first(item: PackagingSpecifier) -> tuple[bool, str]:
    return not item.operator.startswith(">"), str(item)


def _versions(value: Any) -> VersionRange:
    if isinstance(value, VersionRange):
        return value
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError("must be a specifier in quotes, as in '>=12.4', or a list of them")
    try:
        return VersionRange(tuple(SpecifierSet(text) for text in texts))
    except InvalidSpecifier as error:
        raise ValueError(str(error)) from None


# A repeated group, an unbounded repeat of the dot, or a backreference can make a regular expression slow on a hostile
# log.
_SLOW = re.compile(r"(?<!\\)(?:\)[*+{]|\.[*+])|\\[1-9]")


_FLAGS = re.IGNORECASE | re.ASCII  # ASCII: a word ends before a character of another script
_TOKEN = re.compile(r"(?P<set>\[(?:\\.|[^\]\\])*\])|\\.|(?P<letter>[^\x00-\x7f])")


def with_both_cases(pattern: str) -> str:
    """Returns a pattern in which each letter outside ASCII matches in both cases. With re.ASCII, re.IGNORECASE applies
    to ASCII letters only, so that "ошибка" would not match "Ошибка"."""
    return pattern if pattern.isascii() else _TOKEN.sub(_in_both_cases, pattern)


def _in_both_cases(token: re.Match[str]) -> str:
    if token["set"]:
        return "".join(map(_cases, token["set"]))
    cases = _cases(token["letter"]) if token["letter"] else ""
    return f"[{cases}]" if len(cases) > 1 else token[0]


def _cases(letter: str) -> str:
    """Returns a letter, and after it the same letter in the other case, if it has one and is not in ASCII."""
    other = letter.swapcase()
    return letter if letter.isascii() or len(other) != 1 or other == letter else letter + other


@dataclasses.dataclass(frozen=True)
class LazyPattern:
    """A regular expression that is compiled when it is first tried. Of about 2,000 patterns, only a few are tried on a
    log."""

    pattern: str
    flags: int = _FLAGS

    def __hash__(self) -> int:
        return hash(self.pattern)  # a string remembers its hash; `explain` looks up each pattern hundreds of times

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(with_both_cases(self.pattern), self.flags)

    def compile(self) -> None:
        """Compile the pattern now. Raises re.error if it is invalid."""
        _ = self._compiled

    def search(self, text: str, start: int = 0, end: int = sys.maxsize) -> re.Match[str] | None:
        return self._compiled.search(text, start, end)

    def fullmatch(self, text: str) -> re.Match[str] | None:
        return self._compiled.fullmatch(text)

    def finditer(self, text: str, start: int = 0) -> Iterator[re.Match[str]]:
        return self._compiled.finditer(text, start)

    def sub(self, replacement: str, text: str) -> str:
        return self._compiled.sub(replacement, text)


SearchPattern = re.Pattern[str] | LazyPattern


def _text_of_pattern(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("must be a regular expression in quotes")
    if _SLOW.search(value):
        raise ValueError(
            r"repeats a group, or contains .*, .+ or a backreference such as \1: write a bounded gap, as in .{0,80}"
        )
    return value


def _pattern(value: Any, info: ValidationInfo) -> LazyPattern:
    found = value if isinstance(value, LazyPattern) else LazyPattern(_text_of_pattern(value))
    if info.context:  # a site's pattern, which no test has compiled
        try:
            found.compile()
        except re.error as error:
            raise ValueError(f"is not a regular expression: {error}") from None
    return found


def _any_pattern(value: Any, info: ValidationInfo) -> LazyPattern:
    """Parse one pattern, or a list of alternatives."""
    if not isinstance(value, list):
        return _pattern(value, info)
    return _pattern("|".join(_pattern(item, info).pattern for item in value), info)


Spec = Annotated[VersionRange, PlainValidator(_versions)]
Pattern = Annotated[LazyPattern, PlainValidator(_pattern)]
"""A regular expression. It is compiled, and so checked, when it is read only if the validation's context is true. A
test checks those of the shipped facts."""
AnyPattern = Annotated[LazyPattern, PlainValidator(_any_pattern)]
