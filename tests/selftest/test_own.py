"""A profile's own shapes and script: run like every probe, and told apart in every way that they can fail."""

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest

from .reading import Frame, environment, job, outcomes, read, run

pytest.importorskip("torch")

from . import scripts

SHAPE = {"m": 3, "k": 7, "n": 5, "dtype": "bf16"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Frame]:
    frames, status, err = run("scripts", job(threads=2), tmp_path_factory.mktemp("scripts") / "frames")
    assert status == 5
    return {**outcomes(frames), "run": {"stderr": err}}


@pytest.mark.parametrize("name", list(scripts.RIGHT))
def test_a_script_that_comes_to_its_end_passes(told: dict[str, Frame], name: str) -> None:
    frame = told[name]
    assert frame["status"] == "passed", frame
    digest = hashlib.sha256(scripts.RIGHT[name].encode()).hexdigest()
    assert frame["traits"] == {"name": f"{name}.py", "sha256": digest}


@pytest.mark.parametrize(
    ("name", "failure", "at", "words"),
    [
        ("exit-3", "exit", "leaving", "the script ended with exit(3)"),
        ("exit-words", "exit", None, "the script ended with exit('no licence')"),
        ("exit-true", "exit", None, "the script ended with exit(True)"),
        ("os-exit-0", "incomplete", "leaving", "ended with status 0 with 0 results"),
        ("os-exit-4", "exit", None, "left with exit status 4"),
        ("raises", "exception", "doing", "ValueError: one is two"),
        ("raises-long", "exception", None, "ValueError: xxx"),
        ("syntax", "exception", None, "SyntaxError"),
        ("nul", "exception", None, "null bytes"),
        ("fails", "mismatch", "one", "first (and 1 more)"),
        ("fails-and-exits", "mismatch", None, "found it"),
        ("fails-long", "mismatch", "s" * 500, "f" * 500),
        ("loops", "hang", "looping", "no end after 1 s"),
        ("crashes", "signal", "reading", "died of SIGSEGV"),
        ("killed", "oom", "dying", "killed"),
        ("forges", "incomplete", None, "ended with status 0"),
    ],
)
def test_a_script_that_does_not_is_told_apart(
    told: dict[str, Frame], name: str, failure: str, at: str | None, words: str
) -> None:
    frame = told[name]
    assert (frame["status"], frame["failure"], frame["at"]) == ("failed", failure, at), frame
    assert words in frame["reason"]
    assert len(frame["reason"]) < 4000


def test_no_script_is_left_untested(told: dict[str, Frame]) -> None:
    assert set(told) - {"run"} == {*scripts.RIGHT, *scripts.WRONG}
    (mark,) = (m for m in test_a_script_that_does_not_is_told_apart.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(scripts.WRONG)


def test_where_a_script_was_is_told(told: dict[str, Frame]) -> None:
    assert 'loops.py", line 3 in forever' in told["loops"]["detail"]
    assert 'raises.py", line 3, in inner' in told["raises"]["detail"]
    assert 'crashes.py", line 1' in told["crashes"]["detail"]


def test_what_a_script_prints_goes_to_stderr(told: dict[str, Frame]) -> None:
    assert b"xxxxx" in told["run"]["stderr"]


def by_job(**fields: Any) -> tuple[int, dict[str, Frame]]:
    """The self-test itself, with a job document."""
    command = [sys.executable, "-m", "envbuild.selftest", "--job", "-"]
    text = json.dumps(job(**fields))
    done = subprocess.run(command, input=text.encode(), capture_output=True, env=environment(), timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, outcomes(read(done.stdout))


def test_a_job_brings_shapes_and_a_script() -> None:
    own = {
        "shapes": [{**SHAPE, "bias": True}, {**SHAPE, "layout": "tt"}],
        "script": {"name": "smoke.py", "text": "step('one')\nfail('no')"},
    }
    status, found = by_job(own=own, require=["own.script"], probes=["gemm.crash", "own.script"])
    assert (status, list(found)) == (5, ["gemm.crash", "own.script"])
    cases = [figure["case"] for figure in found["gemm.crash"]["figures"]]
    assert cases[:2] == ["own linear bf16 3x7x5 bias", "own matmul bf16 3x7x5 tt"]
    assert cases[2].startswith("pytorch#133548")
    assert (found["own.script"]["status"], found["own.script"]["reason"]) == ("failed", "no")


def test_a_script_that_is_asked_for_and_not_brought_is_skipped() -> None:
    status, found = by_job(probes=["own.script"])
    assert (status, found["own.script"]["status"]) == (0, "skipped")
    assert found["own.script"]["reason"] == "needs a script of the profile's own"
