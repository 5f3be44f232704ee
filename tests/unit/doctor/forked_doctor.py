"""Starts `envbuild doctor` in processes forked from one that has imported it. Python's start, envbuild's imports and
`pip config list` take most of the processor time of the command."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from fork_server import ForkedProcess, Server

from envbuild.cli import entry
from envbuild.util import package_data
from unit.support import quick_pip

_IMPORTED = (
    "envbuild.cli.doctor", "envbuild.doctor.machine_reader", "envbuild.doctor.profile_hardware_needs",
    "envbuild.doctor.wheel_availability",
)  # fmt: skip


def start(arguments: Sequence[str], sources: Path, variables: Mapping[str, str], folder: Path) -> ForkedProcess:
    """Start the command with the shipped profiles of `sources`. Its settings of pip are environment variables."""
    server = _server(variables["LD_LIBRARY_PATH"])
    function = "unit.doctor.forked_doctor:main"
    return server.start(function, [str(sources), *arguments], variables, folder=folder, reads=False)


@functools.cache
def _server(libraries: str) -> Server:
    """The server of a folder of libraries: the dynamic loader reads LD_LIBRARY_PATH when a process starts."""
    return Server([__name__, *_IMPORTED], {**os.environ, "LD_LIBRARY_PATH": libraries})


def main(sources: str, *arguments: str) -> None:
    package_data.ROOT = Path(sources)
    package_data.PROFILES = package_data.ROOT / "profiles"
    sys.executable = f"{os.environ['PATH'].split(os.pathsep)[0]}/python"  # docker is searched in its folder first
    quick_pip(pytest.MonkeyPatch())
    sys.argv = ["envbuild", "doctor", *arguments]
    entry.main()
