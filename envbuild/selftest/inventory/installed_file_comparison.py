"""Compares installed files with the checksums that their distributions have for them.

The checksums are those of the files in the wheel if they are known, else those in RECORD. RECORD is weaker evidence,
because it is only a claim of the distribution's author.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from envbuild.selftest.inventory import distribution_records, elf_reader

_MOST = 500
# Files in .dist-info that installers write in addition to the wheel's own files.
_ADDED = frozenset(("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json"))

Wheels = Mapping[str, Mapping[str, str]]
"""Maps the "name==version" of a wheel to the sha256 of its files, by path relative to site-packages."""


@dataclass
class Installed:
    """The result of the comparison.

    `altered`: files that differ from the distribution's files, are missing, or are not in its wheel although RECORD
    lists them. `unrecorded`: files in package folders that no RECORD lists. `owners`: maps the real path of a file to
    the distribution whose RECORD or wheel contains it. `hashes`: maps real paths to the sha256 of the installed files.
    `preferred`: files that the loader would load instead of a library of a different package. `unchecked`: bytecode
    that Python runs without comparing it with its source. `cut`: whether a limit shortened a list.
    """

    altered: list[dict[str, Any]] = field(default_factory=list)
    unrecorded: list[str] = field(default_factory=list)
    owners: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str | None] = field(default_factory=dict)
    preferred: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    cut: bool = False


@dataclass(frozen=True)
class _Wanted:
    """The expected state of a file.

    `owner`: "name==version" of the distribution. `sha256`: the expected one; None if the file should not exist. `by`:
    the source of the expectation, "wheel" or "RECORD".
    """

    path: str
    owner: str
    sha256: str | None
    by: str

    @property
    def name(self) -> str:
        return self.owner.partition("==")[0]


def compare_files(folders: Iterable[str], wheels: Wheels) -> Installed:
    """Compare all files of all distributions on sys.path with their expected sha256.

    `folders`: the package folders in which files that no RECORD lists are searched.
    """
    found = Installed()
    wanted = [
        item
        for distribution in distribution_records.found_distributions()
        for item in _wanted(distribution, wheels, found)
    ]
    found.hashes = distribution_records.file_hashes({item.path for item in wanted})
    # A distribution can have two RECORDs, because an upgrade can leave the old one behind. A file is not reported if it
    # matches one of them.
    right = {(item.path, item.name) for item in wanted if found.hashes[item.path] == item.sha256}
    wrong = [item for item in wanted if found.hashes[item.path] != item.sha256
             and (item.by == "wheel" or (item.path, item.name) not in right)]  # fmt: skip
    rows = [{**vars(item), "sha256": found.hashes[item.path]} for item in wrong]
    paths = [path for folder in folders for path in _files(folder)]
    lost = [path for path in paths if path not in found.owners and not _is_linker_name(path, found.owners)]
    preferred = [path for path in paths if _is_preferred(path, found.owners)]
    found.altered, found.unrecorded, found.preferred = rows[:_MOST], lost[:_MOST], preferred[:_MOST]
    unchecked = [path for path in paths if _is_unchecked(path)]
    found.unchecked = unchecked[:_MOST]
    found.cut = any(len(listed) > _MOST for listed in (rows, lost, preferred, unchecked))
    return found


def _is_linker_name(path: str, owners: Mapping[str, str]) -> bool:
    """Return whether the path is a link such as `libx.so` to a recorded `libx.so.1` in the same folder.

    Linkers need such links, but wheels do not contain them.
    """
    folder, _, name = path.rpartition("/")
    if not name.endswith(".so") or not Path(path).is_symlink():
        return False
    target = str(Path(path).readlink())
    return target.startswith(f"{name}.") and f"{folder}/{target}" in owners


def _is_unchecked(path: str) -> bool:
    """Return whether the path is bytecode that Python runs without checking its source (PEP 552: unchecked
    hash-based)."""
    folder, _, name = path.rpartition("/")
    if not folder.endswith("/__pycache__") or not name.endswith(".pyc"):
        return False
    try:
        with open(path, "rb", opener=_at_once) as file:
            return int.from_bytes(file.read(8)[4:], "little") & 3 == 1
    except OSError:
        return False


def _at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # do not block on a FIFO without a writer


def _is_preferred(path: str, owners: Mapping[str, str]) -> bool:
    other = elf_reader.loaded_as(path)
    return elf_reader.HWCAPS in path.split("/") or (
        other != path and other in owners and owners.get(path) != owners[other]
    )


def _wanted(distribution: metadata.Distribution, wheels: Wheels, found: Installed) -> Iterator[_Wanted]:
    name = distribution_records.normalise(str(distribution.metadata["Name"]))
    owner = f"{name}=={distribution.version}"
    folder = os.path.realpath(str(distribution.locate_file("")))
    rows, brought = list(distribution_records.record_rows(distribution)), wheels.get(owner)
    # pip compiles bytecode that a wheel contains again, and adds a second row without a checksum
    recorded, unhashed = dict(rows), {path for path, sha256 in rows if not sha256}
    for path in {**recorded, **(brought or {})}:
        real = _real(folder, path)
        found.owners.setdefault(real, name)
        inside = not path.startswith(("/", "../"))
        if brought is not None and path in brought:
            yield _Wanted(real, owner, brought[path], "wheel")
        elif brought is not None and inside and recorded[path] and not _is_generated(path):
            yield _Wanted(real, owner, None, "wheel")
        elif recorded.get(path) and path not in unhashed:
            yield _Wanted(real, owner, recorded[path], "RECORD")


def _is_generated(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder.endswith(".dist-info") and (name in _ADDED or name == "METADATA")


def _real(folder: str, path: str) -> str:
    """Return the path of a file with links to folders resolved. If the file itself is a link, it is not resolved."""
    inner, _, name = path.rpartition("/")
    return f"{_real_folder(folder, inner)}/{name}"


@functools.cache
def _real_folder(folder: str, inner: str) -> str:
    return os.path.realpath(f"{folder}/{inner}")


def _files(folder: str) -> Iterator[str]:
    for root, inner, names in os.walk(folder):
        yield from (_real(root, name) for name in [*names, *({elf_reader.HWCAPS} & set(inner))])
