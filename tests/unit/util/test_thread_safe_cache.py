from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from envbuild.util.thread_safe_cache import thread_safe_cache


def test_concurrent_requests_compute_each_key_once() -> None:
    calls: list[int] = []

    @thread_safe_cache
    def square(number: int) -> int:
        calls.append(number)
        time.sleep(0.05)
        return number**2

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(square, [1, 2, 1, 2, 3, 1])) == [1, 4, 1, 4, 9, 1]
    assert sorted(calls) == [1, 2, 3]


def test_another_key_does_not_wait() -> None:
    held = threading.Event()

    @thread_safe_cache
    def work(name: str) -> str:
        if name == "slow":
            assert held.wait(10)
        return name

    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(work, "slow")
        assert work("fast") == "fast"
        held.set()
        assert slow.result() == "slow"


def test_a_failure_is_everybodys_who_waits_and_is_tried_again_by_the_next() -> None:
    tries = []

    @thread_safe_cache
    def work(name: str) -> str:
        tries.append(name)
        time.sleep(0.05)
        if len(tries) == 1:
            raise ValueError(name)
        return name

    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(work, "a") for _ in range(4)]
    assert all(isinstance(answer.exception(), ValueError) for answer in answers)
    assert work("a") == "a"
