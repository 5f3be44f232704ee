"""The shipped texts are those of the patterns, and each pattern is a regular expression."""

from __future__ import annotations

import re

import pytest

from envbuild.explain import cause_ranking, log_reader_and_search, required_texts
from envbuild.facts.fact_field_types import SearchPattern
from unit.explain import shipped_texts


def test_the_shipped_texts_are_those_of_the_patterns() -> None:
    wanted = shipped_texts.text()
    assert required_texts.SHIPPED.read_text(encoding="utf-8") == wanted, (
        "write it again: cd tests && ../.venv/bin/python -m unit.explain.shipped_texts"
    )


def test_every_pattern_of_the_facts_is_a_regular_expression() -> None:
    known = shipped_texts.lazy_patterns()
    assert len(known) > 1000
    for pattern in known:
        re.compile(pattern.pattern, pattern.flags)
        re.compile(log_reader_and_search.relaxed(pattern).pattern, pattern.flags)


def test_explain_parses_no_shipped_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    required_texts.required_texts.cache_clear()
    log_reader_and_search._words_of.cache_clear()
    parsed = list[str]()
    right = required_texts.computed_texts

    def compute(pattern: SearchPattern) -> tuple[bytes, ...]:
        parsed.append(pattern.pattern)
        return right(pattern)

    monkeypatch.setattr(required_texts, "computed_texts", compute)
    cause_ranking.explain(log_reader_and_search.Log(b"CUDA error: device-side assert triggered\nError 710\n"))
    assert parsed == []


def test_a_pattern_that_is_not_shipped_is_parsed() -> None:
    assert required_texts.required_texts(re.compile("not in the file [0-9]")) == (b"not in the file ",)
