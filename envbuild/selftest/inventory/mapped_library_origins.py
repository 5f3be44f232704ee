"""Determines which shared libraries a process has mapped, to which distribution each library belongs, and whether the
library is unmodified.

A library belongs to the distribution whose RECORD lists its path, and has the version of this distribution. It is
unmodified if its sha256 is the one in RECORD. A library that no RECORD lists is "unowned". This module needs only the
standard library, and loads none of the libraries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from envbuild.selftest.inventory import distribution_records
from envbuild.selftest.inventory.distribution_records import Recorded

# The libraries of torch's family: torch's own, CUDA's, and the OpenMP and BLAS libraries in wheels.
_FAMILY = re.compile(
    r"lib(torch|c10|caffe2|shm|cublas|cudnn|nccl|cudart|nvrtc|nvJitLink|cufft|curand|cusolver|cusparse|cupti|nvshmem"
    r"|gomp|iomp5|openblas|scipy_openblas|mkl)[^/]*\.so"
)
# At most one copy of each of these libraries may be mapped. All libraries of a group must be in the same folder.
_CUDA_GROUPS = {
    "cublas": re.compile(r"libcublas(Lt)?\.so"),
    "cudnn": re.compile(r"libcudnn[^/]*\.so"),
    "nccl": re.compile(r"libnccl\.so"),
    "cudart": re.compile(r"libcudart\.so"),
    "nvrtc": re.compile(r"libnvrtc[^/]*\.so"),
    "nvJitLink": re.compile(r"libnvJitLink\.so"),
}
_STEM = re.compile(r"^(.*?)(-[0-9a-f]{8})?\.so\b.*$")


@dataclass(frozen=True)
class MappedLibrary:
    """A shared library file.

    `version`: that of its distribution; None if it is unowned. `owner`: "distribution==version" or "unowned". `record`:
    whether its sha256 is that in RECORD; None if it is unowned. `sha256`: None if the file cannot be read.
    """

    name: str
    path: str
    version: str | None
    sha256: str | None
    owner: str
    record: bool | None

    @property
    def is_family(self) -> bool:
        return _FAMILY.match(self.name) is not None

    @property
    def stem(self) -> str:
        """The file name without ".so", its version and the hash that auditwheel adds: libcublas for libcublas.so.12."""
        return _STEM.sub(r"\1", self.name)

    @property
    def is_pythons_own(self) -> bool:
        """Whether this is an extension module of Python's standard library, which does not belong to a distribution."""
        return "/lib-dynload/" in self.path

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Inventory:
    """Libraries and the distributions to which they may belong.

    `distributions`: the versions of the installed distributions, by normalised name.
    """

    libraries: tuple[MappedLibrary, ...]
    distributions: Mapping[str, str]
    records: Mapping[str, Sequence[Recorded]]  # real path of a library -> the RECORD entries that list it


def mapped_paths(maps: str) -> tuple[str, ...]:
    """Return the paths of the shared libraries in the text of /proc/PID/maps, sorted and without duplicates."""
    paths = (line.split(None, 5)[5] for line in maps.splitlines() if len(line.split(None, 5)) == 6)
    return tuple(sorted({path for path in paths if path.startswith("/") and ".so" in Path(path).name}))


def mapped(pid: str = "self") -> tuple[str, ...]:
    return mapped_paths(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape"))


def libraries_below(roots: Iterable[str]) -> tuple[str, ...]:
    """Return the real paths of all shared libraries in the folders and their subfolders, sorted."""
    paths = (path for root in roots for path in Path(root).rglob("*.so*") if path.is_file())
    return tuple(sorted({os.path.realpath(path) for path in paths}))


def take_inventory(
    paths: Sequence[str],
    path_entries: Sequence[str] | None = None,
    hashed: Mapping[str, str | None] = MappingProxyType({}),
) -> Inventory:
    """Return the inventory of these library files, based on the RECORDs of the distributions on `path_entries`.

    If `path_entries` is None, sys.path is used. `hashed`: the sha256 of files that were hashed earlier.
    """
    return _judged({}, paths, *_records(path_entries), hashed)


def more(first: Inventory, paths: Sequence[str]) -> Inventory:
    """Return the inventory of these library files. Files that are already in the inventory `first` are not hashed
    again."""
    known = {library.path: library for library in first.libraries}
    return _judged(known, paths, first.distributions, first.records)


def _judged(
    known: Mapping[str, MappedLibrary],
    paths: Sequence[str],
    distributions: Mapping[str, str],
    records: Mapping[str, Sequence[Recorded]],
    hashed: Mapping[str, str | None] = MappingProxyType({}),
) -> Inventory:
    new = [path for path in paths if path not in known]
    unread = [path for path in new if path not in hashed]
    digests = {**hashed, **distribution_records.file_hashes(unread)}
    judged = {path: _library(path, digests[path], records.get(path, ())) for path in new}
    libraries = {**known, **judged}
    return Inventory(tuple(libraries[path] for path in paths), distributions, records)


def _records(path_entries: Sequence[str] | None) -> tuple[dict[str, str], dict[str, list[Recorded]]]:
    """Return the versions of the distributions by normalised name, and the RECORD entries of each library by real
    path."""
    distributions: dict[str, str] = {}
    records: dict[str, list[Recorded]] = {}
    for distribution in distribution_records.found_distributions(path_entries):
        name = distribution_records.normalise(str(distribution.metadata["Name"]))
        distributions.setdefault(name, distribution.version)  # imports use the first distribution on the path
        for _, path, sha256 in distribution_records.recorded_libraries(distribution):
            records.setdefault(path, []).append(Recorded(name, distribution.version, sha256))
    return distributions, records


def library_faults(inventory: Inventory) -> list[str]:
    """Return the faults of the libraries of torch's family (_FAMILY) in the inventory, one sentence for each fault."""
    family = [library for library in inventory.libraries if library.is_family]
    owners = {_STEM.sub(r"\1", Path(path).name): found[0].owner for path, found in inventory.records.items()}
    wrong = [fault for library in family for fault in [_fault(library, owners)] if fault]
    for group, pattern in _CUDA_GROUPS.items():
        members = [library for library in family if pattern.match(library.name)]
        wrong += _copies(members)
        folders = sorted({str(Path(library.path).parent) for library in members})
        if len(folders) > 1:
            wrong.append("{} is mapped from several folders: {}".format(group, ", ".join(folders)))
    return wrong


def _fault(library: MappedLibrary, owners: Mapping[str, str]) -> str | None:
    """Return the fault of one library, or None. `owners`: maps the stem of each library in a RECORD to its owner."""
    if library.record is False:
        return f"{library.path} is not the file that {library.owner} recorded"
    if library.record is not None:
        return None
    if "/site-packages/" in library.path or "/dist-packages/" in library.path:
        return f"{library.path} is not listed in the RECORD of any distribution"
    owner = owners.get(library.stem)
    if owner and any(pattern.match(library.name) for pattern in _CUDA_GROUPS.values()):
        return f"{library.path} is mapped instead of the copy that {owner} installed"
    return None


def _copies(members: Sequence[MappedLibrary]) -> list[str]:
    paths: dict[str, list[str]] = {}
    for library in members:
        paths.setdefault(library.stem, []).append(library.path)
    return [
        "{} is mapped {} times: {}".format(stem, len(copies), ", ".join(copies))
        for stem, copies in paths.items()
        if len(copies) > 1
    ]


def _library(path: str, sha256: str | None, records: Sequence[Recorded]) -> MappedLibrary:
    """Describe a library file.

    If several distributions list the file, its owner is the one whose sha256 matches, or else the first one.
    """
    name = Path(path).name
    if not records:
        return MappedLibrary(name, path, None, sha256, "unowned", None)
    recorded = next((record for record in records if sha256 and record.sha256 == sha256), records[0])
    same = sha256 is not None and sha256 == recorded.sha256
    return MappedLibrary(name, path, recorded.version, sha256, f"{recorded.owner}=={recorded.version}", same)
