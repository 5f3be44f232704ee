"""Adds the name and message of an error of CUDA or its libraries after its number, or after another name of it. Pure.

"cuStreamSynchronize returned 700" is followed by "[cudaErrorIllegalAddress: an illegal memory access was encountered]",
and "CUDA_ERROR_ASSERT" by "[cudaErrorAssert: device-side assert triggered]". So the patterns in signatures.yaml need to
match only one name or message of an error, and no numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache

from envbuild.facts import log_signatures
from envbuild.facts.fact_field_types import SearchPattern

Numbered = tuple[SearchPattern, Mapping[str, str]]


@cache
def _numbered(of_gpu: bool) -> tuple[Numbered, ...]:
    """Returns pairs of a pattern with a group `n`, and a mapping from the text of this group, in lower case, to the
    message."""
    families = log_signatures.error_families()
    numbers = [(form, row.messages) for row in families for form in (*row.forms, *(row.of_gpu if of_gpu else ()))]
    return (*numbers, *((_name_pattern(tuple(row.names)), _lower(row.names)) for row in families if row.names))


@cache
def _name_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(rf"\b(?P<n>{'|'.join(map(re.escape, names))})\b", re.IGNORECASE | re.ASCII)


def _lower(names: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): message for name, message in names.items()}


def number_patterns(of_gpu: bool) -> Iterator[SearchPattern]:
    """Returns patterns. Every line that `named` changes matches at least one of them. `of_gpu`: whether the log
    mentions a program that uses GPUs."""
    return (form for form, _ in _numbered(of_gpu))


def named(text: str, of_gpu: bool) -> str:
    """Adds the name and message of each error in a line, unless the line contains the name already. `of_gpu`: as for
    number_patterns."""
    found: dict[str, int] = {}
    for form, messages in _numbered(of_gpu):
        for match in form.finditer(text):
            message = messages.get(match["n"].lower())
            if message and message not in found and message.partition(":")[0].lower() not in text.lower():
                found[message] = match.end("n")
    for message, place in sorted(found.items(), key=lambda item: -item[1]):
        text = f"{text[:place]} [{message}]{text[place:]}"
    return text
