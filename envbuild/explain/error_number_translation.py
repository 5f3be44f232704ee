"""Adds the name and message of an error of CUDA or its libraries after its number. Pure.

"cuStreamSynchronize returned 700" is followed by "[cudaErrorIllegalAddress: an illegal memory access was encountered]".
So the patterns in signatures.yaml need to match only names and messages, not numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from envbuild.facts import log_signatures
from envbuild.facts.fact_field_types import SearchPattern

Numbered = tuple[SearchPattern, Mapping[str, str]]


@cache
def _numbered(of_gpu: bool) -> tuple[Numbered, ...]:
    return tuple(
        (form, row.messages)
        for row in log_signatures.error_families()
        for form in (*row.forms, *(row.of_gpu if of_gpu else ()))
    )


def number_patterns(of_gpu: bool) -> Iterator[SearchPattern]:
    """Returns patterns, of which every line that `named` changes matches at least one. `of_gpu`: whether the log
    mentions a program that uses GPUs."""
    return (form for form, _ in _numbered(of_gpu))


def named(text: str, of_gpu: bool) -> str:
    """Adds the name and message of each error number in a line, unless the line contains the name already. `of_gpu`: as
    for number_patterns."""
    found: dict[str, int] = {}
    for form, messages in _numbered(of_gpu):
        for match in form.finditer(text):
            message = messages.get(match["n"])
            if message and message not in found and message.partition(":")[0].lower() not in text.lower():
                found[message] = match.end("n")
    for message, place in sorted(found.items(), key=lambda item: -item[1]):
        text = f"{text[:place]} [{message}]{text[place:]}"
    return text
