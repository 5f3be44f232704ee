"""Finds a docker client with buildx, which runs the builds: next to this Python, or on PATH."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from envbuild.util.errors import EngineError
from envbuild.util.host_processes import ProcessMissing, ProcessTimeout, run


class Client(NamedTuple):
    """A docker client, and the output of `docker buildx version`."""

    program: Path
    buildx: str


def program() -> Path:
    """Return the path of a docker client with buildx. Raises EngineError if none is found."""
    return find_client().program


def find_client(seconds: float = 30.0) -> Client:
    """Find a docker client with buildx: next to this Python first (a private engine's client is linked there), then on
    PATH.

    Raises EngineError if none is found. A client that does not respond within `seconds` is skipped.
    """
    silent = ""
    folders = [str(Path(sys.executable).parent), *os.environ.get("PATH", "").split(os.pathsep)]
    for folder in dict.fromkeys(folders):
        there = shutil.which("docker", path=folder)
        if not there:
            continue
        try:
            answer = run([there, "buildx", "version"], timeout=seconds)
        except ProcessTimeout:
            silent = f" ({there} does not answer)"
            continue
        except ProcessMissing:
            continue
        if answer.code == 0:
            return Client(Path(there), answer.stdout)
    raise EngineError(
        f"no docker client with buildx is on PATH{silent}",
        hint="install docker-buildx (or docker-buildx-plugin); in a checkout: make engine",
    )
