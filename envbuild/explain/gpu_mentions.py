"""Finds the GPUs that a log names, and their number, in the forms that drivers print and that people write. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from envbuild.explain.log_reader_and_search import Log, log_pattern
from envbuild.facts import database, fact_file_reader, log_signatures
from envbuild.facts.fact_field_types import LazyPattern
from envbuild.facts.gpu_fact_types import Gpu


def mentioned_gpus(log: Log) -> Iterator[tuple[Gpu, int]]:
    """Yields the GPUs that the log is about, each with the number of GPUs that is written next to its name (8x H100,
    two RTX 4090), else 0. GPUs on which the program worked, according to the log, are left out."""
    known = _full_names()
    for line, _ in log.find(known.pattern, 50):
        for match in known.pattern.finditer(line.text):
            before, after = line.text[: match.start()], line.text[match.end() :]
            if not log_signatures.elsewhere(before, after):
                yield known.gpus[re.sub(r"\s+", " ", match[1].lower())], _times(before, after)
    yield from _short_forms(log)


def names_a_gpu(log: Log) -> bool:
    """Whether the log has the full name of any GPU, even of a GPU on which the program worked."""
    return log.has([_full_names().pattern])


def _called(gpu: Gpu) -> Iterator[str]:
    """The names of a GPU as drivers print them and as people write them: H20, RTX 4090, A6000, 3090 Ti. Names of two
    characters (T4, L4) and bare numbers (4090) are ambiguous: `_short_forms` reads these."""
    yield from gpu.all_names
    short = re.sub(r"^(rtx)(pro)?", lambda m: "rtx pro " if m[2] else "rtx ", gpu.id)
    if len(short) > 2:
        yield short
        yield short.replace(" ", "")
    yield f"nvidia {short}"
    yield f"tesla {short}"
    if match := re.fullmatch(r"(rtx|gtx)(\d{3,4})(ti)?(d|-super)?", gpu.id):
        rest = match[4].removeprefix("-") if match[4] else ""
        for number in {f"{match[2]}{match[3] or ''}", f"{match[2]} {match[3]}" if match[3] else match[2]}:
            yield f"{match[1]} {number}{' ' if rest else ''}{rest}"
            if match[3]:
                yield number
    if re.fullmatch(r"rtxa\d{4}", gpu.id):
        yield gpu.id.removeprefix("rtx")


_TIMES = r"(?:[x*\u00d7]|\u5f20|\u5757|\u5361)"
"""The sign between a number of GPUs and their name. In Chinese it is a measure word."""


class _FullNames(NamedTuple):
    """The GPUs by their names in lower case, and a pattern for these names."""

    gpus: Mapping[str, Gpu]
    pattern: LazyPattern


def _full_names() -> _FullNames:
    return _full_names_with(fact_file_reader.site_files())


@cache
def _full_names_with(site: tuple[Path, ...]) -> _FullNames:
    """`site`: the files of the site's GPUs; they are the cache key."""
    gpus = {name.lower(): gpu for gpu in database.gpus().values() for name in _called(gpu)}
    called = {name for gpu in database.gpus().values() for name in _called(gpu)}
    names = sorted(called, key=lambda name: (-len(name), name))
    pattern = log_pattern(
        r"(?:(?<![a-z0-9_-])|(?<=\dx))(" + "|".join(map(re.escape, names)) + r")(?:(?![a-z0-9])|(?=s\b)|(?=[x*]\d))"
    )
    return _FullNames(gpus, pattern)


_SHORT = (
    r"(?:(?<![a-z0-9._/:%#-])|(?<=\dx)|(?<=\d\*))(?P<name>[1-5]0[5-9]0(?: ?super)?d?|[tlp]4|a2)"
    r"(?P<many>s?)(?![a-z0-9._%-]*[._%]\d)(?![a-wyz0-9_:/-])"
)
_BEFORE_SHORT = (
    rf"\d {{0,1}}{_TIMES} ?$|\b(?:dual|two|three|four|six|eight|quad|single|multiple|multi|several|both)[ -]$"
    r"|\b(?:geforce|nvidia|rtx|gtx|tesla|colab|gpus?|cards?|my|our)[ :=(-]{1,3}$|(?:双|单|四|八|显卡)[: ]?$"
    r"|\b(?:gpus?|cards?)(?: (?:i|we) (?:use|used|have))? (?:is|are|was|were)(?: an?| the)? $"
)
_AFTER_SHORT = (
    rf"^ ?{_TIMES} ?\d{{1,2}}\b|^ ?(?:-|_)?\(?\d{{1,2}} ?gi?b?\b"
    r"|^ ?(?:gpus?|cards?|graphics|super|laptop|vram)\b"
    r"|^ ?(?:显卡|的?卡)"
)
_WITH_SHORT = r"\b(?:cuda|gpus?|torch|bf16|bfloat16|fp16|float16|colab|kaggle|vram|vllm)\b"
_NUMBER_BEFORE_SHORT = r"\b(?:on|with|using|have|has|got|own|run|running) (?:an?|my|our|the|one|[2-8]) $"


def _short_forms(log: Log) -> Iterator[tuple[Gpu, int]]:
    """Yields GPUs that the log names in a form that needs context (4090s, 2x3090, 4090x2, T4 GPU), each with its
    number of GPUs or 0."""
    gpus = database.gpus()
    for line, _ in log.find(log_pattern(_SHORT), 50):
        full = [match.span() for match in _full_names().pattern.finditer(line.text)]
        for match in log_pattern(_SHORT).finditer(line.text):
            if any(begin <= match.start() < end for begin, end in full):
                continue
            before, after = line.text[: match.start()], line.text[match.end() :]
            name = re.sub(r" ?super$", "-super", match["name"].lower())
            number = name[0].isdigit()
            near = before[-40:]
            shown = (
                log_pattern(_BEFORE_SHORT).search(near)
                or log_pattern(_AFTER_SHORT).search(after[:20])
                or (number and match["many"])
                or (number and log_pattern(_NUMBER_BEFORE_SHORT).search(near))
                or (not number and match["name"].isupper() and log_pattern(_WITH_SHORT).search(line.text))
            )
            gpu = next((gpus[name] for name in (name, f"rtx{name}", f"gtx{name}") if name in gpus), None)
            if shown and gpu and not log_signatures.elsewhere(before, after):
                yield gpu, _times(before, after)


def _times(before: str, after: str) -> int:
    """The number of GPUs that is written before or after their name: 8x, *8, two; 0 if there is no number."""
    if match := log_pattern(_COUNT_BEFORE).search(before[-24:]):
        return int(match[1]) if match[1] else _WORDS_OF_NUMBER[(match[2] or match[3]).lower()]
    match = log_pattern(r"^(?:[- _]?(?:sxm\d?|pcie|nvl))?(?:[- _]?\d{2,3} ?gi?b?)?s? ?[x*\u00d7] ?(\d{1,3})\b").search(
        after
    )
    return int(match[1]) if match else 0


_WORDS_OF_NUMBER = {
    "dual": 2,
    "two": 2,
    "three": 3,
    "four": 4,
    "quad": 4,
    "six": 6,
    "eight": 8,
    "双": 2,
    "两": 2,
    "四": 4,
    "八": 8,
}
_COUNT_BEFORE = (
    rf"(?<![\d.])(?:(\d{{1,3}}) ?{_TIMES}|\b(dual|two|three|four|quad|six|eight)\b|(双|两|四|八)[张块卡]?)[ -]?"
    r"(?:nvidia |geforce |tesla |rtx |gtx ){0,3}$"
)
