"""Lists the files of compiled extensions, and tests whether they can be loaded.

A compiled extension is an installed distribution with a shared library that links torch or contains device code. Module
names and architectures are read from the files. Python modules and libraries that link torch are also loaded, with all
symbols resolved. This happens in a separate process that has imported torch and may crash. It needs no GPU, except for
libraries that link the driver's library (libcuda).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.forked_work import Tell
from envbuild.selftest.inventory import distribution_records, extension_file_reader
from envbuild.selftest.inventory.extension_file_reader import Compiled

_MOST_FILES, _MOST_KEPT = 20_000, 400
_LOAD_SECONDS = 90.0
_MOST_CRASHES = 3
# Distributions that are not extensions, but contain the libraries that extensions use. The audit reports CUDA's
# libraries separately.
_OTHERS = re.compile(r"torch|triton|(nvidia|cuda)-.*")


@dataclass(frozen=True)
class ExtensionFile:
    """A file of a compiled extension.

    `owner` and `version`: its distribution. `path`: its path relative to site-packages, as in RECORD. `real`: its path
    with links resolved. `file`: what the file contains; None if it is missing.
    """

    owner: str
    version: str
    path: str
    real: str
    file: Compiled | None

    @property
    def loadable(self) -> bool:
        """Whether loading is tested, which is the case for Python modules and for libraries that link torch.

        Other libraries are not loaded, because they may be variants of which only one fits this machine.
        """
        return self.file is not None and bool(self.file.module or self.file.links_torch)


def extension_rows(has_torch: bool) -> tuple[list[dict[str, Any]], bool]:
    """Return a row for each file of each compiled extension, and whether a limit shortened the list.

    In a row, "there" is whether the file exists, and "tried" is whether the self-test tried to load it. "failure" is
    the reason why loading failed, or why a loadable file was not tried; otherwise it is None.
    """
    files, cut = _files()
    failures = _loaded([item for item in files if item.loadable], has_torch)
    rows = []
    for item in files:
        tried, failure = failures.get(item.real, (item.loadable, None))
        rows.append(
            {
                "distribution": item.owner,
                "version": item.version,
                "path": item.path,
                "there": item.file is not None,
                "module": (item.file.module if item.file else extension_file_reader.module_of(item.path)[0]),
                "architectures": _listed(item.file),
                "damaged": bool(item.file and item.file.damaged),
                "tried": tried,
                "failure": failure,
            }
        )
    return rows, cut


def _listed(file: Compiled | None) -> list[str] | None:
    return None if file is None or file.architectures is None else list(file.architectures)


def _files() -> tuple[list[ExtensionFile], bool]:
    """Return the files of compiled extensions, and whether a limit shortened the list."""
    left = _MOST_FILES
    kept: list[ExtensionFile] = []
    for distribution in distribution_records.found_distributions():
        name = distribution_records.normalise(str(distribution.metadata["Name"]))
        if _OTHERS.fullmatch(name):
            continue
        found = []
        for path, real, _ in distribution_records.recorded_libraries(distribution):
            left -= 1
            if left < 0:
                return kept[:_MOST_KEPT], True
            file = extension_file_reader.read(real, path) if os.path.isfile(real) else None  # noqa: PTH113 - RECORD may hold NULs
            found.append(ExtensionFile(name, str(distribution.version), path, real, file))
        if any(item.file and item.file.is_extension for item in found):
            missing = [item for item in found if item.file is None]
            kept += [*(item for item in found if item.file and item.file.is_extension), *missing]
    return kept[:_MOST_KEPT], len(kept) > _MOST_KEPT


def _loaded(files: Sequence[ExtensionFile], has_torch: bool) -> dict[str, tuple[bool, str | None]]:
    """Try to load the files, and return by real path whether loading was tried and why it failed.

    Files that were loaded successfully are not in the result. If a file crashes the process, this is its failure, and
    the files after it are loaded in a new process.
    """
    failures: dict[str, tuple[bool, str | None]] = {}
    left = list(files)
    for _ in range(_MOST_CRASHES):
        if not left:
            break
        ending = forked_work.run_forked(_load(left, has_torch), _LOAD_SECONDS)
        failures.update({real: (True, why) for real, why in ending.reported.get("failed", {}).items()})
        at = ending.reported.get("at")
        if ending.failure is None:
            return failures
        if at is None:  # torch itself cannot be imported, which environment_collector reports separately
            return {item.real: (False, ending.failure) for item in files}
        failures[left[at].real] = (True, ending.failure)
        left = left[at + 1 :]
    failures.update({item.real: (False, "others crashed") for item in left})
    return failures


def _load(files: Sequence[ExtensionFile], has_torch: bool) -> Callable[[Tell], None]:
    def work(tell: Tell) -> None:
        if has_torch:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module("torch")
        failed: dict[str, str] = {}
        for index, item in enumerate(files):
            tell("at", index)
            try:
                first = _one(item)
                if first:
                    failed[item.real] = f"{extension_file_reader.LOADED_AFTER}{', '.join(first)}"
                    tell("failed", failed)
            except Exception as error:
                said = (str(error).strip().splitlines() or [type(error).__name__])[0]
                failed[item.real] = said.removeprefix(f"{item.real}: ")[:500]
                tell("failed", failed)

    return work


def _load_library(path: str) -> tuple[ctypes.CDLL, list[str]]:
    """Load a library. If it needs libraries that the loader does not find, but that are in the same folder, load those
    first, as the Python code of torchaudio does. Return the library and the names of those libraries."""
    first: list[str] = []
    todo = [path]
    while True:
        try:
            library = ctypes.CDLL(todo[-1], mode=os.RTLD_NOW | os.RTLD_LOCAL)
        except OSError as error:
            missing, _, reason = str(error).partition(": ")
            neighbour = Path(path).with_name(Path(missing).name)
            if not reason.startswith("cannot open") or str(neighbour) in todo or not neighbour.is_file():
                raise
            todo.append(str(neighbour))
            continue
        loaded = todo.pop()
        if loaded == path:
            return library, first
        first.append(Path(loaded).name)


def _one(item: ExtensionFile) -> list[str]:
    """Load a file with all symbols resolved. Return the names of the libraries that had to be loaded before it.

    If the file is a Python module, also import it as a module, but without importing the package that contains it.
    """
    handle, first = _load_library(item.real)
    name = item.file.module if item.file else None
    if name and hasattr(handle, f"PyInit_{name.rpartition('.')[2]}"):
        loader = importlib.machinery.ExtensionFileLoader(name, item.real)
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        loader.exec_module(importlib.util.module_from_spec(spec))
    return first
