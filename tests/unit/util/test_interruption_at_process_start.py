"""A signal during the start of a program ends the command, though Python ignores exceptions of the handler."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from envbuild.util import host_processes, interruption_at_process_start

_STRUCK: list[int] = []


def strike() -> None:
    """Send the signal, if requested, at every fork."""
    while _STRUCK:
        os.kill(os.getpid(), _STRUCK.pop())


os.register_at_fork(before=strike)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: interruption_at_process_start.interrupt(KeyboardInterrupt))
    yield
    signal.signal(signal.SIGUSR1, before)
    _STRUCK.clear()


def test_it_is_raised_once_the_program_runs_and_ends_it() -> None:
    _STRUCK.append(signal.SIGUSR1)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        host_processes.run([sys.executable, "-c", "import time; time.sleep(600)"])
    assert time.monotonic() - begin < 120
    assert host_processes.run(["true"]).code == 0, "it was raised once"


def test_it_is_raised_where_the_program_is_missing() -> None:
    _STRUCK.append(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt):
        host_processes.run(["/nosuch/program"])


def test_otherwise_it_is_raised_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)


def test_a_program_that_another_thread_starts_holds_nothing_back() -> None:
    threads = [threading.Thread(target=host_processes.run, args=(["sleep", "0.2"],)) for _ in range(3)]
    for thread in threads:
        thread.start()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(60)
    for thread in threads:
        thread.join()


def test_an_argument_that_no_program_can_have_does_not_delay_later_interruptions() -> None:
    with pytest.raises(ValueError, match="null byte"):
        host_processes.run(["true", "a\0b"])
    with pytest.raises(KeyboardInterrupt):
        interruption_at_process_start.interrupt(KeyboardInterrupt)
