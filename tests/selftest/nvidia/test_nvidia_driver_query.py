"""The driver's version file has one parser, which the inventory uses too."""

import pytest

pytest.importorskip("torch")

from envbuild.selftest.inventory import interpreter_and_distributions
from envbuild.selftest.nvidia import nvidia_driver_query


def test_the_drivers_file_is_read_by_one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia_driver_query, "kernel_module_version", lambda: "550.54.15")
    assert interpreter_and_distributions.driver_and_gpus()["driver"] == "550.54.15"
