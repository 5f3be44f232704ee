"""The output of several nodes is judged as one run."""

from __future__ import annotations

from typing import Any

import pytest

from envbuild.testrun import output_judge
from envbuild.testrun.run_result import RawOutput, RunLocation, TestRun
from unit.evidence.runs import NONCE, documents, lines, probe

WHERE = RunLocation(runner="slurm", unconfined=("the network",), job="7")


def output_with(status: str = "passed", **more: Any) -> bytes:
    failing = {"failure": "signal", "signal": "SIGSEGV", "reason": "died"} if status == "failed" else {}
    return b"".join(lines(documents(probe("dist.nodes", status, **failing, **more))))


def judged(*parts: tuple[int, bytes], exit_code: int | None = None) -> TestRun:
    stdout = b"".join(text for _, text in parts)
    sizes = tuple((code, len(text)) for code, text in parts)
    worst = max((code for code, _ in parts), default=0) if exit_code is None else exit_code
    return output_judge.judge_nodes(RawOutput(stdout, "", worst, 3.0, parts=sizes, where=WHERE), NONCE, ("dist.nodes",))


def test_it_passes_where_it_passed_on_each() -> None:
    run = judged((0, output_with()), (0, output_with()))
    assert run.passed and run.by_status("passed") == ["dist.nodes"] and run.where == WHERE


@pytest.mark.parametrize("bad", [0, 1])
def test_a_node_on_which_it_failed_is_named(bad: int) -> None:
    parts = [(0, output_with()), (0, output_with())]
    parts[bad] = (5, output_with("failed"))
    run = judged(*parts)
    assert not run.passed and run.errors == ()
    assert f"node {bad}: died" in run.failures()[0].detail


def test_a_node_that_could_not_run_is_not_proof() -> None:
    run = judged((0, output_with()), (0, output_with("skipped", reason="1 of 8 GPUs visible")))
    assert not run.passed and run.skipped_required == ("dist.nodes",)


@pytest.mark.parametrize("other", [b"", output_with()[:-40], output_with().replace(NONCE.encode(), b"f" * 32)])
def test_output_of_a_node_that_is_not_whole_is_an_error(other: bytes) -> None:
    run = judged((0, output_with()), (0, other))
    assert not run.passed and all(error.startswith("node 1: ") for error in run.errors) and run.errors


def test_only_the_node_that_did_not_end_is_reported_as_late() -> None:
    late = output_with().rpartition(b"ENVBUILD")[0]
    sizes = ((0, len(output_with())), (124, len(late)))
    output = RawOutput(output_with() + late, "", None, 60.0, timed_out=True, parts=sizes, where=WHERE)
    run = output_judge.judge_nodes(output, NONCE, ("dist.nodes",))
    assert not run.passed and any("stopped after 60 s" in error for error in run.errors)
    assert all(error.startswith("node 1: ") for error in run.errors), run.errors


def test_a_container_that_ran_out_of_memory_on_one_node_is_reported() -> None:
    """The remedy is the profile's selftest.memory_gb."""
    alone = output_judge.judge_output(RawOutput(b"".join(lines(documents(probe("env.libs")))), "", 0, 4.0), NONCE, ())
    ended = RawOutput(output_with(), "", 137, 3.0, out_of_memory=True, parts=((0, len(output_with())), (137, 0)))
    run = output_judge.join_runs(alone, output_judge.judge_nodes(ended, NONCE, ("dist.nodes",)))
    assert run.out_of_memory and not run.passed


def test_a_run_without_nodes_does_not_pass() -> None:
    assert not judged().passed


def test_a_run_alone_and_one_on_several_are_one() -> None:
    stdout = b"".join(lines(documents(probe("env.libs"))))
    alone = output_judge.judge_output(
        RawOutput(stdout, "", 0, 4.0, where=RunLocation(runner="slurm", unconfined=())), NONCE, ()
    )
    run = output_judge.join_runs(alone, judged((0, output_with()), (0, output_with())))
    assert (run.passed, run.by_status("passed"), run.seconds) == (True, ["env.libs", "dist.nodes"], 7.0)
    assert run.where == RunLocation(runner="slurm", unconfined=("the network",), nodes=WHERE)
    failed = output_judge.join_runs(alone, judged((0, output_with()), (5, output_with("failed"))))
    assert not failed.passed
