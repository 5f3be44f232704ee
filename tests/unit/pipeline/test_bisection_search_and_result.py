"""The search for a change: exact for rows with one change, correct but possibly incomplete for rows with several
changes or gaps."""

from __future__ import annotations

import itertools

import pytest

from envbuild.pipeline.bisection_search_and_result import Found, most_tries, search_versions

Row = tuple[bool | None, ...]
LENGTHS = range(1, 8)


def run(row: Row) -> tuple[Found | None, list[int]]:
    """Return the result of the bisection, and the versions tried, in order."""
    tried: list[int] = []

    def passes(index: int) -> bool | None:
        tried.append(index)
        return row[index]

    found = search_versions(len(row), passes)
    assert len(tried) == len(set(tried)), "nothing is tried twice"
    return found, tried


@pytest.mark.parametrize("count", [2, 3, 8, 9, 31, 100])
@pytest.mark.parametrize("first", [False, True])
def test_one_change_is_found_at_every_position(count: int, first: bool) -> None:
    for change in range(1, count):
        found, tried = run((first,) * change + (not first,) * (count - change))
        assert found == Found(change - 1, change, first, not first)
        assert len(tried) <= most_tries(count)


@pytest.mark.parametrize("count", [*range(1, 40), 64, 65, 66, 67, 129, 130])
def test_the_reported_maximum_of_tries_is_exact(count: int) -> None:
    rows = [(False,) * change + (True,) * (count - change) for change in range(1, count + 1)]
    assert max(len(run(row)[1]) for row in rows) == most_tries(count)


@pytest.mark.parametrize("outcome", [False, True])
def test_where_both_ends_agree_no_more_is_tried(outcome: bool) -> None:
    assert run((outcome,) * 9) == (Found(0, 8, outcome, outcome), [0, 8])
    assert run((outcome,)) == (Found(0, 0, outcome, outcome), [0])


@pytest.mark.parametrize("length", LENGTHS)
def test_a_reported_change_was_tried_for_any_pattern(length: int) -> None:
    """For several changes and any gaps, the result is a change, or the ends."""
    for row in itertools.product((False, True, None), repeat=length):
        check(row)


def check(row: Row) -> None:
    found, tried = run(row)
    known = [index for index, outcome in enumerate(row) if outcome is not None]
    if not known:
        assert found is None
        return
    assert found is not None
    assert {found.low, found.high} <= set(tried)
    assert (row[found.low], row[found.high]) == (found.low_passes, found.high_passes)
    assert (row[known[0]], row[known[-1]]) == (found.low_passes, found.high_passes)
    if found.changes:
        assert set(row[found.low + 1 : found.high]) <= {None}, "nothing between them could be tried"
    else:
        assert (found.low, found.high) == (known[0], known[-1])


def test_nothing_to_search() -> None:
    assert search_versions(0, lambda index: True) is None


@pytest.mark.parametrize(
    ("found", "passing"),
    [
        (Found(3, 4, False, True), 4),
        (Found(3, 4, True, False), 3),
        (Found(0, 9, True, True), 0),
        (Found(0, 9, False, False), None),
    ],
)
def test_the_oldest_that_passes(found: Found, passing: int | None) -> None:
    assert found.passing == passing
