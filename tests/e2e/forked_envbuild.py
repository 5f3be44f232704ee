"""Starts envbuild in processes forked from one that has imported it: its imports take 0.3 s of processor time, and the
end-to-end tests start it about a thousand times."""

from __future__ import annotations

import functools
import importlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fork_server import ForkedProcess, Server

import envbuild
from envbuild.cli import entry

HOOKS = Path(__file__).parent / "hooks"
_READ_AT_START = ("PYTHON", "LANG", "LC_", "TZ")  # how the names of variables begin that Python reads when it starts


def possible(variables: Mapping[str, str]) -> bool:
    """Whether a forked process behaves as a new one with these environment variables does."""
    return _read_at_start(variables) == _read_at_start(os.environ)


def _read_at_start(variables: Mapping[str, str]) -> dict[str, str]:
    path = variables.get("PYTHONPATH", "").split(os.pathsep)
    known = {"PYTHONPATH": os.pathsep.join(folder for folder in path if folder != str(HOOKS))}
    return {**{name: value for name, value in variables.items() if name.startswith(_READ_AT_START)}, **known}


def start(arguments: Sequence[str], folder: Path, variables: Mapping[str, str]) -> ForkedProcess:
    return _server().start("e2e.forked_envbuild:main", arguments, variables, folder=folder, reads=False)


@functools.cache
def _server() -> Server:
    return Server([__name__, *_modules(envbuild.__path__, "envbuild.")], os.environ)


def _modules(path: Sequence[str], prefix: str) -> Iterator[str]:
    """Return the modules of the package that the command line imports."""
    for found in pkgutil.iter_modules(path, prefix):
        if found.name not in ("envbuild.__main__", "envbuild.selftest"):
            yield found.name
            if found.ispkg:
                yield from _modules([str(Path(path[0], found.name.rpartition(".")[2]))], f"{found.name}.")


def main(*arguments: str) -> None:
    """Do what `python -m envbuild` does, with the hooks if PYTHONPATH has their folder."""
    sys.argv = ["envbuild", *arguments]
    sys.orig_argv = [sys.executable, "-m", *sys.argv]
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(Path.cwd()), *filter(None, folders), *sys.path]
    if str(HOOKS) in folders:
        importlib.import_module("sitecustomize")
    entry.main()
