"""Measures the time that the simulation takes, to separate it from the self-test's own work on the host."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

_SLOTS = 1 << 12  # for processes, by process id: each writes to its own, so no lock is needed
_NUMBERS = 3  # in each slot: processor time, wall time, entries


@dataclass(frozen=True)
class Spent:
    """`processor`: seconds of all threads of a process and of the processes forked from it. `wall`: seconds of the
    process alone. `entries`: how often these processes entered the clock, without entries into a clock that was entered
    already."""

    processor: float
    wall: float
    entries: int = 0

    def __sub__(self, other: Spent) -> Spent:
        return Spent(self.processor - other.processor, self.wall - other.wall, self.entries - other.entries)


class Clock(contextlib.ContextDecorator):
    """While entered, time counts as the simulation's. Processes forked later add to the same sums. Time in a clock that
    is entered more than once counts once."""

    def __init__(self) -> None:
        self._sums = memoryview(mmap.mmap(-1, 8 * _NUMBERS * _SLOTS)).cast("d")
        self._depth = 0
        self._begin = 0.0, 0.0

    def __enter__(self) -> Clock:
        self._depth += 1
        if self._depth == 1:
            self._sums[_slot() + 2] += 1
            self._begin = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        if self._depth == 1:
            slot = _slot()
            self._sums[slot] += time.process_time() - self._begin[0]
            self._sums[slot + 1] += time.perf_counter() - self._begin[1]
        self._depth -= 1

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Count the time inside as the host's again, unless the clock was entered more than once."""
        if self._depth != 1:
            yield
            return
        self._sums[_slot() + 2] -= 1  # continuing does not count as entering
        self.__exit__()
        try:
            yield
        finally:
            self.__enter__()

    def read(self) -> Spent:
        """Return the times; wall time is that of this process."""
        sums = self._sums.tolist()
        processor, _, entries = (sum(sums[number::_NUMBERS]) for number in range(_NUMBERS))
        return Spent(processor, sums[_slot() + 1], int(entries))


def _slot() -> int:
    return _NUMBERS * (os.getpid() % _SLOTS)


def of_host() -> Spent:
    """Return the time used so far by this process and by the child processes that this process has waited for."""
    return Spent(sum(os.times()[:4]), time.perf_counter())
