"""What several parts of the self-test need is found in one place."""

import os

import pytest

pytest.importorskip("torch")

from envbuild.selftest import apart, libcuda, packages
from envbuild.selftest.outcome import signal_name


def test_the_drivers_file_is_read_by_one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libcuda, "module_version", lambda: "550.54.15")
    assert packages.machine()["driver"] == "550.54.15"


@pytest.mark.parametrize(("number", "name"), [(8, "SIGFPE"), (9, "SIGKILL"), (40, "signal 40")])
def test_a_signal_is_named_the_same_by_harness_and_processes(number: int, name: str) -> None:
    assert signal_name(number) == name
    assert apart.run(lambda tell: os.kill(os.getpid(), number), 10).signal == name
