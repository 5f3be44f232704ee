"""Compares the libraries of this machine, byte for byte, with those that the lock of a profile installs.

gpu_locked_files.json contains the checksums of the shared libraries in the lock's wheels: {"profile", "lock": its id,
"wheels": {"nvidia-cublas==13.1.0.3": {path below site-packages: sha256 in the form of RECORD}}, "missing": [wheels that
were not in the store when the file was written]}. The file replaces the wheels, which have gigabytes: the machine with
the GPU has neither the wheels nor a network.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gpu_plan.selftests import ROOT

FILE = ROOT / "benchmarks" / "gpu_locked_files.json"
PROFILE = "h200"
_LIBRARY = re.compile(r"\.so(\.[0-9]+)*$")


@dataclass(frozen=True)
class Compared:
    """The comparison of one locked wheel's libraries with this machine. `installed`: the version here, None if it is
    not installed."""

    wheel: str
    installed: str | None
    same: int
    different: tuple[str, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        version = self.wheel.partition("==")[2]
        if self.installed is None:
            return f"{self.wheel}: not installed"
        total = self.same + len(self.different) + len(self.missing)
        here = "" if self.installed == version else f" (version {self.installed} is installed)"
        others = [f"{len(names)} {what}: {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
                  for what, names in (("different", self.different), ("missing", self.missing)) if names]  # fmt: skip
        return f"{self.wheel}{here}: {self.same} of {total} libraries identical" + "".join(f"; {o}" for o in others)


def compare(expected: dict[str, Any]) -> Iterator[Compared]:
    """Compare this interpreter's distributions with the file's wheels, in the order of the file."""
    for wheel, libraries in expected["wheels"].items():
        try:
            found = metadata.distribution(wheel.partition("==")[0])
        except metadata.PackageNotFoundError:
            yield Compared(wheel, None, 0, (), tuple(libraries))
            continue
        paths = {path: Path(str(found.locate_file(path))) for path in libraries}
        missing = tuple(path for path, place in paths.items() if not place.is_file())
        present = [path for path in libraries if path not in missing]
        with ThreadPoolExecutor() as threads:
            hashes = dict(zip(present, threads.map(file_hash, map(paths.__getitem__, present)), strict=True))
        different = tuple(path for path in present if hashes[path] != libraries[path])
        yield Compared(wheel, found.version, len(present) - len(different), different, missing)


def file_hash(file: Path) -> str:
    """Return the sha256 of a file in RECORD's form: URL-safe base64 without padding."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def recorded(wheel: Path) -> dict[str, str]:
    """Return the sha256 by path of the shared libraries that a wheel's RECORD lists."""
    with zipfile.ZipFile(wheel) as archive:
        record = next(name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        rows = csv.reader(io.StringIO(archive.read(record).decode("utf-8")))
        return {row[0]: row[1].partition("sha256=")[2] for row in rows if _LIBRARY.search(row[0])}


def expected(lock: dict[str, Any], store: Path, before: dict[str, Any]) -> dict[str, Any]:
    """Return the file's content for this lock (its parsed YAML), from the wheels in `store`, a folder for each sha256.
    For a wheel that is not in the store, the entry in `before` (the previous content) is kept if the version is the
    same."""
    wheels: dict[str, dict[str, str]] = {}
    missing = []
    for wheel in lock["content"]["wheels"]:
        name = f"{wheel['name']}=={wheel['version']}"
        file = store / wheel["sha256"] / wheel["file"]
        if file.is_file():
            libraries = recorded(file)
        elif name in before.get("wheels", {}):
            libraries = before["wheels"][name]
        else:
            missing.append(name)
            continue
        if libraries:
            wheels[name] = libraries
    return {"profile": PROFILE, "lock": lock["id"], "wheels": wheels, "missing": missing}


def read() -> dict[str, Any]:
    """Read the committed file."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
