"""Which of several ranks caused a failure, by how each of them ended; and groups of processes that end together."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.selftest.distributed.rank_processes_and_faults import rank_faults
from envbuild.selftest.distributed.rank_program import DONE, STEP, WRONG
from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.forked_work import ForkEnding

STACK = """Fatal Python error: Aborted

Current thread 0x00007f2a4b2c5740 (most recent call first):
  File "{}", line 12 in {}
  File "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/tmp/x/selftest.zip/envbuild/selftest/distributed/rank_program.py", line 90 in run
"""
IN_TORCH = STACK.format("/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "all_reduce")
IN_PROJECT = STACK.format("/srv/project/hooks.py", "before_reduce")


def ended(step: int = 9, moment: float = 1.0, done: bool = False, **fields: Any) -> ForkEnding:
    reported = {STEP: [step, f"step {step}"], **({DONE: True} if done else {}), **fields.pop("reported", {})}
    return ForkEnding(reported=reported, moment=moment, **fields)


def right(moment: float = 1.0) -> ForkEnding:
    return ended(moment=moment, done=True)


def died(name: str, **fields: Any) -> ForkEnding:
    return ended(signal=name, failure=f"the process died of {name}", **fields)


def stuck(step: int = 3, noise: str = IN_TORCH, moment: float = 30.0) -> ForkEnding:
    return ended(step, moment, failure="not done after 30 s", stopped=True, noise=noise)


def raised(sentence: str, **fields: Any) -> ForkEnding:
    return ended(reported={"error": sentence}, failure=sentence, **fields)


def wrong(step: str = "all_reduce", **fields: Any) -> ForkEnding:
    return ended(reported={f"{WRONG}{step} fp32": [step, f"{step}: element [0] is 2"]}, done=True, **fields)


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:29500"


@pytest.mark.parametrize(
    ("endings", "blamed"),
    [
        ([right(), right()], []),
        # a dead rank is the cause, not the ranks that lost it or waited
        ([raised(LOST, moment=0.9), died("SIGSEGV", moment=1.0), stuck()], [(1, "signal", "died of SIGSEGV")]),
        ([died("SIGSEGV", moment=2.0), died("SIGSEGV")], [(1, "signal", "died of"), (0, "signal", "died of")]),
        ([died("SIGKILL"), stuck()], [(0, "oom", "killed: out of memory or a limit")]),
        # torch aborts ranks that lost another one
        ([died("SIGABRT", moment=3.0), raised("ValueError: x", moment=1.0)], [(1, "exception", "ValueError: x")]),
        ([raised(LOST, moment=1.0), died("SIGABRT", moment=2.0)], [(1, "signal", "died of SIGABRT")]),
        # the first rank that left
        ([raised(LOST, moment=1.2), raised("E: x"), raised(LOST, moment=1.1)], [(1, "exception", "E: x")]),
        ([raised("E: x", moment=2.0), raised("E: x")], [(1, "exception", "E: x"), (0, "exception", "E: x")]),
        ([raised(LOST, moment=0.5), ended(failure=None)], [(1, "incomplete", "exited before its last step")]),
        ([ended(failure=None), stuck()], [(0, "incomplete", "exited before its last step")]),
        ([ended(failure="the process ended with status 3"), stuck()], [(0, "exit", "ended with status 3")]),
        # wrong results
        ([right(), wrong(), right()], [(1, "mismatch", "all_reduce: element [0] is 2")]),
        ([wrong(moment=0.5), raised(LOST)], [(0, "mismatch", "element [0]"), (1, "exception", "Connection closed")]),
        # all wait: the ranks that are behind, or that do not wait in torch; otherwise all
        ([stuck(3), stuck(2), stuck(3)], [(1, "hang", "not done after 30 s, in all_reduce")]),
        ([stuck(), stuck(noise=IN_PROJECT), stuck()], [(1, "hang", "not done after 30 s, in before_reduce")]),
        ([stuck(), stuck()], [(0, "hang", "in all_reduce"), (1, "hang", "in all_reduce")]),
        ([stuck(noise=""), stuck(noise="")], [(0, "hang", "not done after 30 s"), (1, "hang", "not done after 30 s")]),
        ([right(), stuck()], [(1, "hang", "not done")]),
    ],
)  # fmt: skip
def test_the_rank_that_caused_a_failure_is_named(
    endings: Sequence[ForkEnding], blamed: list[tuple[int, str, str]]
) -> None:
    found = rank_faults([10 + rank for rank in range(len(endings))], endings)
    assert [(fault.rank, fault.kind) for fault in found] == [(rank, kind) for rank, kind, _ in blamed]
    for fault, (rank, _, words) in zip(found, blamed, strict=True):
        assert fault.member == 10 + rank
        assert words in fault.reason


def test_a_rank_is_blamed_at_its_step() -> None:
    assert rank_faults([0], [died("SIGSEGV", step=4)])[0].step == "step 4"
    assert rank_faults([0], [wrong("broadcast")])[0].step == "broadcast"
    assert rank_faults([0], [ForkEnding(failure="no process could be started: x")])[0].step == "start"


# processes that end together


def waits(tell: forked_work.Tell) -> None:
    tell("before", True)
    time.sleep(600)


def stubborn(tell: forked_work.Tell) -> None:
    signal.signal(signal.SIGABRT, signal.SIG_IGN)
    waits(tell)


def dies(tell: forked_work.Tell) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def ends(tell: forked_work.Tell) -> None:
    time.sleep(0.1)
    tell("end", True)


def test_ranks_that_wait_for_a_dead_one_are_stopped_soon() -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    begin = time.monotonic()
    ((dead, left), (alone,)) = forked_work.run_groups([[dies, waits], [ends]], 30, 0.2)
    assert time.monotonic() - begin < 10
    assert (dead.signal, dead.stopped, dead.failure) == ("SIGSEGV", False, "the process died of SIGSEGV")
    assert (left.signal, left.stopped, left.reported["before"]) == (None, True, True)
    assert (alone.failure, dict(alone.reported)) == (None, {"end": True})
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_another_group_is_not_hurried() -> None:
    def slow(tell: forked_work.Tell) -> None:
        time.sleep(1.0)
        tell("end", True)

    (_, (other,)) = forked_work.run_groups([[dies], [slow]], 30, 0.0)
    assert other.reported == {"end": True}


def test_a_stopped_function_is_named_with_its_stack() -> None:
    ending = forked_work.run_forked(waits, 0.3)
    assert "in waits" in ending.noise
    assert (ending.stopped, ending.failure) == (True, "not done after 0.3 s")


def test_a_process_that_ignores_sigabrt_is_killed() -> None:
    ending = forked_work.run_forked(stubborn, 0.3)
    assert ending.stopped and ending.seconds < 5


def test_where_no_process_can_be_started_all_of_them_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    fork, count = os.fork, iter(range(10))

    def failing() -> int:
        if next(count) == 2:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return fork()

    monkeypatch.setattr(os, "fork", failing)
    endings = forked_work.run_groups([[waits, waits], [waits]], 30, 1)
    assert [len(group) for group in endings] == [2, 1]
    assert all("no process could be started" in str(ending.failure) for group in endings for ending in group)
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
