"""Determines which shared libraries a process has mapped, which distribution each belongs to, and whether it is
unmodified.

A library's version is that of the distribution whose RECORD lists its path with its sha256. A library that no RECORD
lists is "unowned". Needs only the standard library; nothing is imported or loaded.
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

# Libraries that torch uses: its own, CUDA's, and the OpenMP and BLAS libraries in wheels.
_FAMILY = re.compile(
    r"lib(torch|c10|caffe2|shm|cublas|cudnn|nccl|cudart|nvrtc|nvJitLink|cufft|curand|cusolver|cusparse|cupti|nvshmem"
    r"|gomp|iomp5|openblas|scipy_openblas|mkl)[^/]*\.so"
)
# At most one copy of each may be mapped, and those of one group must come from one folder.
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

    `owner` is "distribution==version" or "unowned". `record`: whether its sha256 matches RECORD; None for "unowned".
    `sha256` is None if the mapped file no longer exists.
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
        """The name without its version and without the hash that auditwheel adds: libcublas for libcublas.so.12."""
        return _STEM.sub(r"\1", self.name)

    @property
    def is_pythons_own(self) -> bool:
        """Whether this is a module of Python's standard library, which belongs to no distribution."""
        return "/lib-dynload/" in self.path

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Inventory:
    """The libraries, and the versions of the installed distributions by normalised name."""

    libraries: tuple[MappedLibrary, ...]
    distributions: Mapping[str, str]
    records: Mapping[str, Sequence[Recorded]]  # by the path of every library in a RECORD


def mapped_paths(maps: str) -> tuple[str, ...]:
    """The shared libraries in the text of /proc/PID/maps, sorted, without duplicates."""
    paths = (line.split(None, 5)[5] for line in maps.splitlines() if len(line.split(None, 5)) == 6)
    return tuple(sorted({path for path in paths if path.startswith("/") and ".so" in Path(path).name}))


def mapped(pid: str = "self") -> tuple[str, ...]:
    return mapped_paths(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape"))


def libraries_below(roots: Iterable[str]) -> tuple[str, ...]:
    """The shared libraries below the folders, mapped or not, sorted."""
    paths = (path for root in roots for path in Path(root).rglob("*.so*") if path.is_file())
    return tuple(sorted({os.path.realpath(path) for path in paths}))


def take_inventory(
    paths: Sequence[str],
    path_entries: Sequence[str] | None = None,
    hashed: Mapping[str, str | None] = MappingProxyType({}),
) -> Inventory:
    """The inventory of these files, based on the RECORDs of the distributions on `path_entries` (None: sys.path).

    `hashed`: sha256 of files that were already read.
    """
    return _judged({}, paths, *_records(path_entries), hashed)


def more(first: Inventory, paths: Sequence[str]) -> Inventory:
    """The inventory of these files, reusing the first one: only files that it does not contain are hashed."""
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
    """The distributions' versions by normalised name, and the RECORD entries of each library."""
    distributions: dict[str, str] = {}
    records: dict[str, list[Recorded]] = {}
    for distribution in distribution_records.found_distributions(path_entries):
        name = distribution_records.normalise(str(distribution.metadata["Name"]))
        distributions.setdefault(name, distribution.version)  # an import uses the first on the path
        for _, path, sha256 in distribution_records.recorded_libraries(distribution):
            records.setdefault(path, []).append(Recorded(name, distribution.version, sha256))
    return distributions, records


def library_faults(inventory: Inventory) -> list[str]:
    """Faults of the mapped libraries of torch's family, one sentence each."""
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
    """The fault of one library, if any. `owners`: the owner of every library in a RECORD, by its stem."""
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
    """Describe a library file. If several distributions list it, its owner is the one whose checksum matches."""
    name = Path(path).name
    if not records:
        return MappedLibrary(name, path, None, sha256, "unowned", None)
    recorded = next((record for record in records if sha256 and record.sha256 == sha256), records[0])
    same = sha256 is not None and sha256 == recorded.sha256
    return MappedLibrary(name, path, recorded.version, sha256, f"{recorded.owner}=={recorded.version}", same)
