"""Starts envbuild in processes forked from one that has imported it. The end-to-end tests start it hundreds of times,
and its imports take most of the processor time of a short command."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fork_server import ForkedProcess, Server

import envbuild
from envbuild.cli import entry

HOOKS = Path(__file__).parent / "hooks"
_READ_AT_START = ("PYTHON", "LANG", "LC_", "TZ")  # how the names of variables begin that Python reads when it starts

_NOT_IMPORTED = ("envbuild.selftest", "envbuild.__main__")


def possible(variables: Mapping[str, str]) -> bool:
    """Whether a forked process behaves as a new one with these environment variables does."""
    return _read_at_start(variables) == _read_at_start(os.environ)


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    path = variables.get("PYTHONPATH", "").split(os.pathsep)
    known = {"PYTHONPATH": os.pathsep.join(folder for folder in path if folder != str(HOOKS))}
    return {**{name: value for name, value in variables.items() if name.startswith(_READ_AT_START)}, **known}


def start(arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> ForkedProcess:
    server = _server(Path("/proc/self/ns/net").readlink())
    return server.start("e2e.forked_envbuild:main", arguments, variables, folder=folder, reads=False)


@functools.cache
def _server(network: Path) -> Server:
    """The server of a network namespace, which its processes inherit: the chaos campaign switches to its own. The
    server imports all modules but those that run in other processes or start the command line."""
    names = (found.name for found in pkgutil.walk_packages(envbuild.__path__, "envbuild."))
    return Server([__name__, *(name for name in names if not name.startswith(_NOT_IMPORTED))], os.environ)


def main(*arguments: str) -> None:
    """Do what `python -m envbuild` does, with the hooks if PYTHONPATH has their folder."""
    sys.argv = ["envbuild", *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path.cwd()), *filter(None, folders), *sys.path]
    if str(HOOKS) in folders:
        importlib.import_module("sitecustomize")
    entry.main()
