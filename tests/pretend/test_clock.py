"""The simulation's time is counted apart from the host's."""

import os
import time

from pretend.clock import Clock

SECONDS = 0.05


def work() -> None:
    end = time.process_time() + SECONDS
    while time.process_time() < end:
        pass


def test_time_counts_once_while_the_clock_is_entered_and_not_stopped() -> None:
    clock = Clock()
    work()
    with clock, clock, clock.stopped():  # entered twice: one operation within another
        work()
    with clock:
        work()
        with clock.stopped():
            work()
    found = clock.read()
    assert 2 * SECONDS <= found.processor < 3 * SECONDS
    assert found.wall >= found.processor - 0.01 and found.entries == 2


def test_a_forked_process_adds_to_the_processor_time_and_not_to_the_wall_time() -> None:
    clock = Clock()
    pid = os.fork()
    if pid == 0:
        with clock:
            work()
        os._exit(0)
    os.waitpid(pid, 0)
    found = clock.read()
    assert found.processor >= SECONDS and found.wall == 0
