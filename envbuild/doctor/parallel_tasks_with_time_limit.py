"""Runs tasks in parallel with a time limit. A task may hang, for example because of a driver or a name server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def run_in_parallel(tasks: Sequence[Callable[[], T]], seconds: float) -> list[T | None]:
    """Runs the tasks and returns their results in order; None for a task that takes longer than `seconds`.

    The thread of a task that takes longer is left running, and ends with the process at the latest. If a task raises an
    exception, this function raises it.
    """
    results: list[T | None] = [None] * len(tasks)
    raised: list[BaseException] = []

    def work(index: int) -> None:
        try:
            results[index] = tasks[index]()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(tasks))]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if raised:
        raise raised[0]
    return list(results)
