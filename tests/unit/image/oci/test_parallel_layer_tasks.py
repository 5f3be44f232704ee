"""Tasks that run in parallel: their results, their number, and how the first error ends the others."""

from __future__ import annotations

import threading

import pytest

from envbuild.image.oci.parallel_layer_tasks import Stopped, StopSignal, run_layer_tasks


def test_the_results_are_in_the_order_of_the_items() -> None:
    second_ended = threading.Event()

    def task(item: int, stop: StopSignal) -> int:
        if item == 1:
            assert second_ended.wait(30)
        else:
            second_ended.set()
        return item * 10

    assert run_layer_tasks(task, [1, 2, 3]) == [10, 20, 30]
    assert run_layer_tasks(task, []) == []


def test_the_longest_tasks_begin_first() -> None:
    begun: list[int] = []
    four = threading.Barrier(4)

    def task(item: int, stop: StopSignal) -> int:
        begun.append(item)
        if len(begun) <= 4:
            four.wait(30)
        return item

    assert run_layer_tasks(task, [1, 9, 2, 8, 3, 7], work=float) == [1, 9, 2, 8, 3, 7]
    assert set(begun[:4]) == {9, 8, 7, 3}


def test_the_first_error_ends_running_tasks_and_starts_few_others() -> None:
    """Four tasks run: one fails after the other three have started, and these three end at their next check. The thread
    of the failed task may begin one more task before the signal is set."""
    all_run, started, ended = threading.Barrier(4), list[int](), list[int]()

    def task(item: int, stop: StopSignal) -> None:
        started.append(item)
        if item < 4:
            all_run.wait(30)
        if item == 3:
            raise ValueError("three")
        assert stop.wait(30)
        try:
            stop.check()
        except Stopped:
            ended.append(item)
            raise

    with pytest.raises(ValueError, match="three"):
        run_layer_tasks(task, range(8))
    assert {0, 1, 2, 3} <= set(started) <= {0, 1, 2, 3, 4}
    assert set(ended) == set(started) - {3}
