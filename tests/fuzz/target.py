"""A target of the campaign, and how one input is tried on it."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import strategies as st

from envbuild.util.errors import EnvbuildError, printable

DEADLINE = 10.0
"""Seconds of one input, by the clock: most take milliseconds; some have taken seconds, on a busy machine."""
MEMORY = 768 << 20
"""Bytes of address space that one input may take beyond what the process has: the largest file that any reader takes
whole has 64 MiB, and a parsed one is some ten times that."""


@dataclass(frozen=True)
class Target:
    """Code that takes untrusted input. `run` tries one input, and asserts what must hold of the result; the only other
    error that it may raise is EnvbuildError. `share`: a target with the share 2 gets twice as many of the campaign's
    inputs as a target with the share 1; the share is larger if an input takes little time."""

    name: str
    inputs: st.SearchStrategy[Any]
    run: Callable[[Any], object]
    share: int


class Hang(BaseException):
    """Not an Exception, so that nothing on the way handles it as an ordinary failure."""


def tried(target: Target, value: Any) -> bool:
    """Whether the input was accepted. Raises everything that must not happen: any error that is not ours,
    AssertionError, Hang, MemoryError."""
    with _bounded():
        try:
            target.run(value)
            return True
        except EnvbuildError as error:
            _assert_printable(error)
            return False


def _assert_printable(error: EnvbuildError) -> None:
    """An error must be printable: as JSON, and as UTF-8 without control characters."""
    json.dumps(error.document())
    assert error.message, "an error without a word"
    text = "\n".join([error.message, error.hint or "", *map(str, error.faults)])
    shown = printable(text).encode()
    assert b"\x1b" not in shown


def _hang(number: int, frame: FrameType | None) -> None:
    raise Hang(f"no answer within {DEADLINE:.0f} s")


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, _hang)
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, DEADLINE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def sandbox() -> Iterator[Path]:
    """Use an empty project as the working folder, with its own settings, caches and evidence, and without a network."""
    kept, cwd = dict(os.environ), Path.cwd()
    with tempfile.TemporaryDirectory(prefix="envbuild-fuzz-") as name:
        folder = Path(name)
        (folder / "profiles").mkdir()
        for kind in ("CACHE", "STATE", "CONFIG", "DATA"):
            os.environ[f"XDG_{kind}_HOME"] = str(folder / kind.lower())
        os.environ |= {"HOME": name, "DOCKER_CONFIG": str(folder / "docker"), "PIP_CONFIG_FILE": os.devnull}
        for variable in [found for found in os.environ if found.startswith(("ENVBUILD_", "SLURM_"))]:
            del os.environ[variable]
        os.chdir(folder)
        _forget()
        try:
            yield folder
        finally:
            os.chdir(cwd)
            os.environ.clear()
            os.environ.update(kept)
            _forget()


def _forget() -> None:
    """Clear the package's caches of the machine's configuration."""
    for name in ("envbuild.util.settings", "envbuild.registry.registry_http_and_auth"):
        for value in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


@dataclass(frozen=True)
class Found:
    """A fault: the exception and its place in envbuild, recorded once; `example`: the shortest input that triggers
    it."""

    what: str
    where: str
    example: str
    times: int = 1


def where(error: BaseException) -> str:
    """Return the innermost line of envbuild, or of the target, in an error's traceback."""
    at, trace = "", error.__traceback__
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if ("/envbuild/" in file or "/fuzz/" in file) and trace.tb_frame.f_code is not _hang.__code__:
            at = f"{'/'.join(Path(file).parts[-2:])}:{trace.tb_lineno}"
        trace = trace.tb_next
    return at
