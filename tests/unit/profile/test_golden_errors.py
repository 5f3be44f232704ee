"""Golden folders of invalid profiles, each with its complete error text. A new folder is a new test."""

from __future__ import annotations

from pathlib import Path

import pytest

from unit.regenerate import error_text

FAULTS = Path(__file__).parent.parent.parent / "golden" / "faults"
CASES = sorted(folder.name for folder in FAULTS.iterdir() if folder.is_dir())


def test_there_are_cases() -> None:
    assert len(CASES) >= 15


@pytest.mark.parametrize("case", CASES)
def test_the_error_text_is_the_golden_one(case: str) -> None:
    expected = (FAULTS / case / "expected.txt").read_text(encoding="utf-8")
    assert expected != "no fault\n"
    assert error_text(FAULTS / case) == expected
