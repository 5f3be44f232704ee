"""Write envbuild/explain/data/required_texts.json: `python -m unit.explain.shipped_texts` in tests/.

The file has the required texts of every pattern that `explain` may search for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from unittest import mock

from envbuild.explain import (
    cause_ranking,
    error_number_translation,
    log_reader_and_search,
    required_texts,
)
from envbuild.facts import database, log_signatures
from envbuild.facts.fact_field_types import LazyPattern, SearchPattern
from envbuild.util.atomic_files import write_atomically


def patterns_in(value: object) -> Iterator[LazyPattern]:
    """The patterns in a row of facts, at any depth."""
    if isinstance(value, LazyPattern):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from patterns_in(getattr(value, field.name))
    elif isinstance(value, dict):
        yield from patterns_in(tuple(value.values()))
    elif isinstance(value, tuple):
        for item in value:
            yield from patterns_in(item)


def lazy_patterns() -> set[LazyPattern]:
    """Every pattern of the facts about logs."""
    tables = (
        tuple(log_signatures.signatures().values()), log_signatures.gpu_patterns(), log_signatures.words(),
        log_signatures.advice(), log_signatures.components(), log_signatures.system_messages(),
        log_signatures.error_families(), log_signatures.symptoms(), log_signatures.denials(),
        log_signatures.gpu_context(), log_signatures.operation_patterns(), log_signatures.hearsay(),
        log_signatures._around("elsewhere"), log_signatures._around("mentions"), log_signatures.concepts(),
        log_signatures.negations(),
    )  # fmt: skip
    return set(patterns_in(tables))


_LINE = b"RuntimeError: CUDA error: an illegal memory access was encountered (error 700)"
SAMPLES = (_LINE, _LINE + b"\nGPU: NVIDIA H20")
"""Logs in which explain searches for most patterns of its code."""


def patterns_of_the_code() -> set[SearchPattern]:
    searched = set[SearchPattern]()
    right = required_texts.required_texts

    def record(pattern: SearchPattern) -> tuple[bytes, ...]:
        searched.add(pattern)
        return right(pattern)

    log_reader_and_search._words_of.cache_clear()  # so that each pattern is looked up again
    with mock.patch.object(required_texts, "required_texts", record):
        for sample in SAMPLES:
            cause_ranking.explain(log_reader_and_search.Log(sample))
    return searched


def searched_patterns() -> set[SearchPattern]:
    """The patterns of the facts, as they are and relaxed, and of the code."""
    known = lazy_patterns()
    return {
        *known,
        *map(log_reader_and_search.relaxed, known),
        *(pattern for advisory in database.advisories() for pattern in advisory.shows.patterns),
        *error_number_translation.number_patterns(of_gpu=True),
        *patterns_of_the_code(),
    }


def text() -> str:
    """The content of the file."""
    found = {
        required_texts.key_of(pattern): [text.decode() for text in required_texts.computed_texts(pattern)]
        for pattern in searched_patterns()
    }
    lines = (f"{json.dumps(key)}: {json.dumps(texts, ensure_ascii=False)}" for key, texts in sorted(found.items()))
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    write_atomically(required_texts.SHIPPED, text())
