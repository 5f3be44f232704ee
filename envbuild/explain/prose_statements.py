"""Reads the statements of a person who describes a failure in prose, such as "RAM grows by 10 GB per epoch". Pure.

The vocabulary is in facts/data/statements.yaml: concepts, which are groups of words in several languages, and
statements, which are concepts that occur in one sentence, or anywhere in the report. So a statement is found whatever
the order of its words. A concept does not count if it is negated ("memory does not grow"), is about another run,
repeats what other people say, or is in a question that is answered with yes or no.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from envbuild.explain import message_normalization
from envbuild.explain.log_reader_and_search import Line, Log
from envbuild.facts import log_signatures
from envbuild.facts.log_signatures import Concept, ProseStatement

_MOST_LINES = 20_000
"""Maximum number of lines of a log in which statements are read. A longer log is the output of a program."""
_MOST = 40
"""Maximum number of lines that are read for one pattern of a concept."""
_LONGEST = 400
"""Maximum number of characters of a sentence. A longer text is not prose."""
_END = re.compile(r"(?<=[.!?;])(?<!=\.\.\.)\s+|(?<=[^\x00-\x7f][.!?;。])")
_NEAR = 24
"""Number of characters before a word in which a negation is searched."""
_NEGATIVE = re.compile(r"\b(?:no|not|never|without|cannot|nor|unable|lacks?|lacking)\b|n.t\b|没|未|无法|不(?!断|停|住)")
"""Words of a concept that contain a negation themselves."""
_RAISED = re.compile(r"^\W{0,4}[a-z_][\w.]{0,80}(?:error|exception): ", re.IGNORECASE)
"""The beginning of the message of an exception. A question after it is about the message."""
_IF = re.compile(r"\b(?:if|whenever) $", re.IGNORECASE)
"""The beginning of a condition under which a failure happens: "it hangs if num_gpus=2"."""
_GROWN = 1.5
"""The least growth of an amount of memory, as the last amount divided by the first, that shows a leak."""


class ProseReader:
    """Finds statements in one log."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._known: dict[str, list[tuple[Line, str]]] = {}
        self._concepts = {row.concept: row for row in log_signatures.concepts()}

    @cached_property
    def _places(self) -> dict[int, int]:
        """The id of each line object -> its index in the log. The parts of one long line share its number."""
        return {id(line): place for place, line in enumerate(self._log.lines)}

    def statements(self) -> dict[str, tuple[Line, ...]]:
        """Returns the name of each statement in the log, with the lines that make it; none in a long log."""
        if len(self._log.lines) > _MOST_LINES:
            return {}
        rows = {row.statement: row for row in log_signatures.statements()}
        found = {name: tuple(dict.fromkeys(self._lines(row))) for name, row in rows.items()}
        return {name: lines for name, lines in found.items() if lines and not any(map(found.get, rows[name].unless))}

    def _lines(self, row: ProseStatement) -> Iterator[Line]:
        concepts = [self._concepts[name] for name in row.sentence]
        if not self._sentences(concepts[0]):
            return
        absent = [self._concepts[name] for name in row.sentence_without]
        elsewhere = [self._sentences(self._concepts[name]) for name in row.report]
        if not all(elsewhere) or any(self._sentences(self._concepts[name]) for name in row.report_without):
            return
        for line, sentence in self._sentences(concepts[0]):
            if _together(sentence, concepts, row.near) and not any(_spans(sentence, no) for no in absent):
                yield line
                yield from (found[0][0] for found in elsewhere)

    def _sentences(self, concept: Concept) -> list[tuple[Line, str]]:
        """Returns the sentences that state a concept, each with the line in which it begins or continues."""
        if concept.concept not in self._known:
            lines = [line for words in concept.words for line, _ in self._log.find(words, _MOST)]
            self._known[concept.concept] = [
                (line, sentence)
                for line in dict.fromkeys(lines)
                for sentence in self._texts(line)
                if _spans(sentence, concept)
            ]
        return self._known[concept.concept]

    def _texts(self, line: Line) -> Iterator[str]:
        """Yields the sentences of a line, also as continued from the line before and on the next line."""
        place = self._places[id(line)]
        around = [(each.file, each.text) for each in self._log.lines[max(0, place - 1) : place + 2]]
        joined = [text for _, _, text in message_normalization.joined(around) if line.text.strip()[:40] in text]
        for text in (line.text, *joined):
            for sentence in _END.split(message_normalization.normalized(text)):
                if sentence and len(sentence) <= _LONGEST:
                    yield sentence


def _together(sentence: str, concepts: Sequence[Concept], near: int) -> bool:
    """Whether a sentence states all of these concepts, each at most `near` characters from the first one."""
    first, *rest = ([*_spans(sentence, concept)] for concept in concepts)
    return any(
        all(any(end > start - near and begin < stop + near for begin, end in spans) for spans in rest)
        for start, stop in first
    )


def _spans(sentence: str, concept: Concept) -> list[tuple[int, int]]:
    """Returns where a sentence states a concept: not negated, and not as the report of another run."""
    negations, (_, _, of_others) = log_signatures.negations(), log_signatures.prose_hearsay()
    if not concept.negated and any(other.search(sentence) for other in of_others):
        return []
    found = []
    for words in concept.words:
        for match in words.finditer(sentence):
            before = sentence[: match.start()]
            checked = not concept.negated and not _NEGATIVE.search(match[0])
            negated = checked and any(no.search(before[-_NEAR:]) for no in negations)
            unconditional = _IF.sub("", before) if concept.negated else before
            heard = any(other.search(unconditional) for other in log_signatures.hearsay())
            if not (negated or heard or _of_others(before, sentence[match.end() :])) and _grown(match.groupdict()):
                found.append(match.span())
    return found


def not_of_this_run(match: re.Match[str]) -> bool:
    """Whether the sentence in which a pattern matches reports what others say, denies that this is the cause, or is a
    question that is answered with yes or no."""
    text = match.string
    begin = max((end.end() for end in _END.finditer(text, 0, match.start())), default=0)
    stop = _END.search(text, match.end())
    end = stop.start() if stop else len(text)
    sentence = text[begin:end]
    asked = (
        sentence.rstrip().endswith("?")
        and not _RAISED.search(sentence)
        and any(other.search(sentence) for other in log_signatures.prose_hearsay()[2])
    )
    return asked or _of_others(text[begin : match.start()], text[match.end() : end])


def _of_others(before: str, after: str) -> bool:
    """Whether the text before or after words shows that they do not say what happened in this run."""
    patterns_before, patterns_after, _ = log_signatures.prose_hearsay()
    return any(other.search(before) for other in patterns_before) or any(
        other.search(after) for other in patterns_after
    )


def _grown(amounts: Mapping[str, str | None]) -> bool:
    """Whether the second of two amounts (the groups `low` and `high`) is clearly larger. True if there are none."""
    low, high = amounts.get("low"), amounts.get("high")
    return low is None or high is None or float(high) >= _GROWN * max(float(low), 0.01)
