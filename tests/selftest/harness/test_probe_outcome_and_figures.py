"""The harness and its processes use the same names for signals."""

import os

import pytest

pytest.importorskip("torch")

from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.probe_outcome_and_figures import signal_name


@pytest.mark.parametrize(("number", "name"), [(8, "SIGFPE"), (9, "SIGKILL"), (40, "signal 40")])
def test_a_signal_is_named_the_same_by_harness_and_processes(number: int, name: str) -> None:
    assert signal_name(number) == name
    assert forked_work.run_forked(lambda tell: os.kill(os.getpid(), number), 10).signal == name
