"""A few faults of each campaign, each followed by a run that must complete. `make chaos` runs the complete
campaigns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from e2e import engines
from e2e.support import required_alone

from chaos.invariant import HALF, LEFT, WRONG
from chaos.report import lines
from chaos.rounds import Outcome, Ran, Struck

CAMPAIGN = Path(__file__).parent / "campaign.py"
_MINUTES = 13  # five times the usual time


@pytest.mark.engine
def test_no_fault_makes_a_wrong_image_or_leaves_anything(tmp_path: Path) -> None:
    """The campaign runs in a separate process, because it switches to an empty network namespace. Runs without a fault
    verify their image with the required probe only."""
    lacking = engines.lacking()
    if lacking:
        pytest.skip(lacking)
    file = tmp_path / "ran.json"
    with subprocess.Popen(
        [sys.executable, CAMPAIGN, "--slice", "--json", file],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **required_alone()},
    ) as process:  # fmt: skip
        try:
            output, _ = process.communicate(timeout=60 * _MINUTES)
        finally:
            process.terminate()  # if it still runs: it then cleans up
    assert process.returncode == 0, output[-6000:]
    ran = [Ran.read(one) for one in json.loads(file.read_text(encoding="utf-8"))]
    assert [one.name for one in ran] == ["kill", "engine", "registry", "index"]
    assert all(one.outcomes and not one.breaches for one in ran)
    assert {outcome.next_code for one in ran for outcome in one.outcomes} == {0}
    assert {outcome.struck.code for outcome in ran[0].outcomes} == {-9}


# the report


def outcome(code: int = -9, *breaches: str) -> Outcome:
    return Outcome(
        Struck("before an effect", "relock, effect 3", code, 1.0, "the index did not answer"), 0, 2.5, breaches
    )


def test_a_report_counts_what_did_not_hold() -> None:
    ran = Ran(
        "kill", 7, [outcome(), outcome(), outcome(-9, f"after the fault: {WRONG}: x", f"after the next run: {LEFT}: y")]
    )
    text = "\n".join(lines([ran], "a machine", {"kill": 4, "engine": 0}))
    assert f"| {WRONG} | 1 | 0 |" in text and f"| {LEFT} | 0 | 1 |" in text and f"| {HALF} | 0 | 0 |" in text
    assert "| before an effect | relock | 3 | killed: 3 | 0: 3 | 2.5, 2.5 |" in text
    assert "kill 3 from seed 7" in text and "- 3 times: the index did not answer" in text
    assert "| did not end as it may | 0 | 0 |" in text
    assert "No fault is left" not in text
    assert "Cut short: kill had 3 of 4 faults." in text and "Cut short: engine" not in text


def test_a_report_counts_runs_that_did_not_end_as_they_may() -> None:
    ran = Ran("kill", 7, [outcome(6, "the run under it ended with 6: x", "the next run: make ended with 6")])
    assert "| did not end as it may | 1 | 1 |" in lines([ran], "a machine", {"kill": 1})


def test_a_report_counts_images_of_the_same_files() -> None:
    sentence = "Images with the same files that replaced another image, as envbuild reported: 2."
    ran = Ran("engine", 7, [replace(outcome(), others=1), outcome(), replace(outcome(), others=1)])
    assert sentence in lines([ran], "a machine", {"engine": 3})
    assert "replaced another image" not in "\n".join(lines([Ran("engine", 7, [outcome()])], "a machine", {"engine": 1}))


def test_a_report_without_a_breach_states_that() -> None:
    assert "No fault is left." in lines([Ran("kill", 1, [outcome()])], "a machine", {"kill": 1})
