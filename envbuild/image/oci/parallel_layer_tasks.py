"""Runs a task for each of several layers in parallel, and stops all tasks at the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

_THREADS = 4  # each upload needs up to 32 MiB of memory

T = TypeVar("T")
R = TypeVar("R")


class Stopped(Exception):
    """Ends a task whose result is not needed any more."""


class StopSignal(threading.Event):
    """Is set when the results of tasks are not needed any more. `on_stop`: called then, to end what a task waits
    for."""

    def __init__(self, on_stop: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._on_stop = on_stop

    def stop(self) -> None:
        self.set()
        self._on_stop()

    def check(self) -> None:
        """Raise Stopped if the signal is set."""
        if self.is_set():
            raise Stopped

    def pause(self, seconds: float) -> None:
        """Wait, but raise Stopped as soon as the signal is set."""
        self.wait(seconds)
        self.check()


def run_layer_tasks(
    task: Callable[[T, StopSignal], R],
    items: Iterable[T],
    on_stop: Callable[[], object] = lambda: None,
    work: Callable[[T], float] = lambda item: 0.0,
) -> list[R]:
    """Run `task` for each item, four at the same time, and return the results in the order of the items. `work`: how
    long the task of an item takes, in any unit. The longest begin first, so that no long one is left alone at the end.

    Each task must call `check` of the signal after every block. If a task fails, or the user interrupts, the signal is
    set, `on_stop` is called, and tasks that have not begun are cancelled. The error is raised when all tasks have
    ended.
    """
    stop = StopSignal(on_stop)
    with ThreadPoolExecutor(_THREADS) as pool:
        ordered = sorted(enumerate(items), key=lambda pair: work(pair[1]), reverse=True)
        running = {index: pool.submit(task, item, stop) for index, item in ordered}
        try:
            for done in wait(running.values(), return_when=FIRST_EXCEPTION).done:
                done.result()
        except BaseException:
            stop.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    return [running[index].result() for index in sorted(running)]
