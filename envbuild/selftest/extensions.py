"""Compiled extensions here: distributions with libraries that are built against torch, or hold device code.

Which modules they bring and for which architectures is read off their files. Whether they can be loaded is tried, each
symbol resolved at once, in a process that has torch and may crash: no GPU is needed for that, but where a library asks
for the driver's own it cannot be tried without one.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from envbuild.selftest import apart, compiled, inventory
from envbuild.selftest.apart import Tell
from envbuild.selftest.compiled import Compiled

_MOST_FILES, _MOST_KEPT = 20_000, 400
_LOAD_SECONDS = 90.0
_MOST_CRASHES = 3
# Their libraries are what extensions are held against; the audit looks at them as copies of CUDA's libraries.
_OTHERS = re.compile(r"torch|triton|(nvidia|cuda)-.*")


@dataclass(frozen=True)
class File:
    """`path`: below site-packages, as RECORD has it; `real`: where it lies; `file` is None where it is not there."""

    owner: str
    version: str
    path: str
    real: str
    file: Compiled | None

    @property
    def tried(self) -> bool:
        """Modules, and what is built against torch; other libraries may be variants of which one fits."""
        return self.file is not None and bool(self.file.module or self.file.links_torch)


def collect(has_torch: bool) -> list[dict[str, Any]]:
    """A row for each file of each compiled extension. `failure`: why it cannot be loaded; `tried`: whether it was."""
    files = list(_files())
    failures = _loaded([item for item in files if item.tried], has_torch)
    return [
        {
            "distribution": item.owner,
            "version": item.version,
            "path": item.path,
            "there": item.file is not None,
            "module": (item.file.module if item.file else compiled.module_of(item.path)[0]),
            "architectures": _listed(item.file),
            "damaged": bool(item.file and item.file.damaged),
            "tried": item.tried,
            "failure": failures.get(item.real),
        }
        for item in files
    ]


def _listed(file: Compiled | None) -> list[str] | None:
    return None if file is None or file.architectures is None else list(file.architectures)


def _files() -> Iterator[File]:
    left, kept = _MOST_FILES, _MOST_KEPT
    for distribution in inventory.found_distributions():
        name = inventory.normalise(str(distribution.metadata["Name"]))
        if _OTHERS.fullmatch(name):
            continue
        found = []
        for path, real, _ in inventory.recorded(distribution):
            left -= 1
            if left < 0:
                return
            file = compiled.read(real, path) if os.path.isfile(real) else None  # noqa: PTH113 - RECORD may hold NULs
            found.append(File(name, str(distribution.version), path, real, file))
        if any(item.file and item.file.is_extension for item in found):
            missing = [item for item in found if item.file is None]
            chosen = [*(item for item in found if item.file and item.file.is_extension), *missing]
            yield from chosen[:kept]
            kept -= len(chosen[:kept])


def _loaded(files: Sequence[File], has_torch: bool) -> dict[str, str]:
    """Real path -> why it cannot be loaded. What kills its process is named, and the rest tried in another."""
    failures: dict[str, str] = {}
    left = list(files)
    for _ in range(_MOST_CRASHES):
        if not left:
            break
        ending = apart.run(_load(left, has_torch), _LOAD_SECONDS)
        failures.update(ending.told.get("failed", {}))
        at = ending.told.get("at")
        if ending.failure is None:
            return failures
        if at is None:  # torch itself does not come up: that is told elsewhere
            return {item.real: f"not tried: {ending.failure}" for item in files}
        failures[left[at].real] = ending.failure
        left = left[at + 1 :]
    failures.update({item.real: "not tried: others crashed" for item in left})
    return failures


def _load(files: Sequence[File], has_torch: bool) -> Callable[[Tell], None]:
    def work(tell: Tell) -> None:
        if has_torch:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module("torch")
        failed: dict[str, str] = {}
        for index, item in enumerate(files):
            tell("at", index)
            try:
                _one(item)
            except Exception as error:
                said = (str(error).strip().splitlines() or [type(error).__name__])[0]
                failed[item.real] = said.removeprefix(f"{item.real}: ")[:500]
                tell("failed", failed)

    return work


def _one(item: File) -> None:
    """Load it as the loader does, every symbol resolved; as a module where it is one, but without its package."""
    handle = ctypes.CDLL(item.real, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    name = item.file.module if item.file else None
    if name and hasattr(handle, f"PyInit_{name.rpartition('.')[2]}"):
        loader = importlib.machinery.ExtensionFileLoader(name, item.real)
        spec = importlib.util.spec_from_loader(name, loader)
        assert spec is not None
        loader.exec_module(importlib.util.module_from_spec(spec))
