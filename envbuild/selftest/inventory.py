"""Which shared libraries a process has mapped, which distribution brought each, and whether they are what it brought.

A library's version is that of the distribution whose RECORD lists its path with its sha256; a library in no RECORD is
unowned. Needs only the standard library; nothing is imported or loaded to find out.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Any

from envbuild.selftest.machine import processors

# What torch computes with: its own libraries, CUDA's, and the OpenMP and BLAS that wheels bring.
_FAMILY = re.compile(
    r"lib(torch|c10|caffe2|shm|cublas|cudnn|nccl|cudart|nvrtc|nvJitLink|cufft|curand|cusolver|cusparse|cupti|nvshmem"
    r"|gomp|iomp5|openblas|scipy_openblas|mkl)[^/]*\.so"
)
# One copy of each may be mapped; and those of one group must come from one folder.
_CUDA_GROUPS = {
    "cublas": re.compile(r"libcublas(Lt)?\.so"),
    "cudnn": re.compile(r"libcudnn[^/]*\.so"),
    "nccl": re.compile(r"libnccl\.so"),
    "cudart": re.compile(r"libcudart\.so"),
    "nvrtc": re.compile(r"libnvrtc[^/]*\.so"),
    "nvJitLink": re.compile(r"libnvJitLink\.so"),
}
_STEM = re.compile(r"^(.*?)(-[0-9a-f]{8})?\.so\b.*$")
_BLOCK = 1 << 20
_BATCH = 64


@dataclass(frozen=True)
class Recorded:
    """A file as a distribution's RECORD lists it; `sha256` in hexadecimal, None where RECORD has none."""

    owner: str
    version: str
    sha256: str | None


@dataclass(frozen=True)
class Library:
    """A shared library file. `owner` is "distribution==version" or "unowned"; `record` says whether its sha256 is the
    one recorded, None for unowned. `sha256` is None where the mapped file is no longer there.
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
        """The name without version and without the hash that auditwheel adds: libcublas of libcublas.so.12."""
        return _STEM.sub(r"\1", self.name)

    @property
    def is_pythons_own(self) -> bool:
        """True for a module of Python's standard library: no distribution brings those."""
        return "/lib-dynload/" in self.path

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Inventory:
    """The libraries, and the installed distributions by normalised name."""

    libraries: tuple[Library, ...]
    distributions: Mapping[str, str]
    records: Mapping[str, Sequence[Recorded]]  # by the path of every library in a RECORD


def normalise(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def mapped_paths(maps: str) -> tuple[str, ...]:
    """The shared libraries in the text of a /proc/PID/maps, sorted, each once."""
    paths = (line.split(None, 5)[5] for line in maps.splitlines() if len(line.split(None, 5)) == 6)
    return tuple(sorted({path for path in paths if path.startswith("/") and ".so" in Path(path).name}))


def mapped(pid: str = "self") -> tuple[str, ...]:
    return mapped_paths(Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape"))


def found(roots: Iterable[str]) -> tuple[str, ...]:
    """The shared libraries that lie under the folders, mapped or not, sorted."""
    paths = (path for root in roots for path in Path(root).rglob("*.so*") if path.is_file())
    return tuple(sorted({os.path.realpath(path) for path in paths}))


def take(
    paths: Sequence[str],
    path_entries: Sequence[str] | None = None,
    hashed: Mapping[str, str | None] = MappingProxyType({}),
) -> Inventory:
    """The inventory of these files, judged by the RECORDs of the distributions on `path_entries` (None: sys.path).

    `hashed`: the sha256 of files that were read already.
    """
    return _judged({}, paths, *_records(path_entries), hashed)


def more(first: Inventory, paths: Sequence[str]) -> Inventory:
    """The inventory of these files by what the first one read already: only files that are new in it are hashed."""
    known = {library.path: library for library in first.libraries}
    return _judged(known, paths, first.distributions, first.records)


def _judged(
    known: Mapping[str, Library],
    paths: Sequence[str],
    distributions: Mapping[str, str],
    records: Mapping[str, Sequence[Recorded]],
    hashed: Mapping[str, str | None] = MappingProxyType({}),
) -> Inventory:
    new = [path for path in paths if path not in known]
    unread = [path for path in new if path not in hashed]
    digests = {**hashed, **hashes(unread)}
    judged = {path: _library(path, digests[path], records.get(path, ())) for path in new}
    libraries = {**known, **judged}
    return Inventory(tuple(libraries[path] for path in paths), distributions, records)


def _records(path_entries: Sequence[str] | None) -> tuple[dict[str, str], dict[str, list[Recorded]]]:
    """The distributions' versions by normalised name, and what their RECORDs say of each library."""
    distributions: dict[str, str] = {}
    records: dict[str, list[Recorded]] = {}
    for distribution in found_distributions(path_entries):
        name = normalise(str(distribution.metadata["Name"]))
        distributions.setdefault(name, distribution.version)  # an import takes the first on the path
        for _, path, sha256 in recorded(distribution):
            records.setdefault(path, []).append(Recorded(name, distribution.version, sha256))
    return distributions, records


def faults(inventory: Inventory) -> list[str]:
    """What is wrong with mapped libraries of torch's family, a sentence each."""
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


def _fault(library: Library, owners: Mapping[str, str]) -> str | None:
    """`owners`: by the stem of every library in a RECORD, whose it is."""
    if library.record is False:
        return f"{library.path} is not the file that {library.owner} recorded"
    if library.record is not None:
        return None
    if "/site-packages/" in library.path or "/dist-packages/" in library.path:
        return f"{library.path} stands in no distribution's RECORD"
    owner = owners.get(library.stem)
    if owner and any(pattern.match(library.name) for pattern in _CUDA_GROUPS.values()):
        return f"{library.path} is mapped instead of the one that {owner} brought"
    return None


def _copies(members: Sequence[Library]) -> list[str]:
    paths: dict[str, list[str]] = {}
    for library in members:
        paths.setdefault(library.stem, []).append(library.path)
    return [
        "{} is mapped {} times: {}".format(stem, len(copies), ", ".join(copies))
        for stem, copies in paths.items()
        if len(copies) > 1
    ]


def found_distributions(path_entries: Sequence[str] | None = None) -> Iterator[metadata.Distribution]:
    """The installed distributions in the order of the path (None: sys.path), those without a name left out."""
    found_ = metadata.distributions() if path_entries is None else metadata.distributions(path=list(path_entries))
    return (item for item in found_ if item.metadata["Name"])


def record_rows(distribution: metadata.Distribution, part: str = "") -> Iterator[tuple[str, str | None]]:
    """(path, sha256 in hexadecimal) of each row of the distribution's RECORD with `part` in it.

    None where RECORD has no sha256, as for bytecode. An invalid sha256 is returned as it is: no file has it.
    """
    lines = (distribution.read_text("RECORD") or "").splitlines()
    try:
        for row in csv.reader(line for line in lines if part in line):
            if row and row[0]:
                yield row[0], _hexadecimal(row[1] if len(row) > 1 else "")
    except csv.Error:  # a field of more than 128 KiB: no file has such a path
        return


def _hexadecimal(text: str) -> str | None:
    algorithm, _, value = text.partition("=")
    if algorithm != "sha256":
        return None
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except ValueError:
        return value


def recorded(distribution: metadata.Distribution) -> Iterator[tuple[str, str, str | None]]:
    """(path, real path, sha256 as `record_rows` has it) of each shared library in the distribution's RECORD."""
    for path, sha256 in record_rows(distribution, ".so"):
        if ".so" in Path(path).name:
            yield path, os.path.realpath(str(distribution.locate_file(path))), sha256


def _library(path: str, sha256: str | None, records: Sequence[Recorded]) -> Library:
    """Where several distributions list the file, its owner is the one whose checksum fits."""
    name = Path(path).name
    if not records:
        return Library(name, path, None, sha256, "unowned", None)
    recorded = next((record for record in records if sha256 and record.sha256 == sha256), records[0])
    same = sha256 is not None and sha256 == recorded.sha256
    return Library(name, path, recorded.version, sha256, f"{recorded.owner}=={recorded.version}", same)


def hashes(paths: Iterable[str]) -> dict[str, str | None]:
    """sha256 of each file; None for one that is not there.

    The biggest come first, and small ones in batches. Threads do it: hashlib releases the interpreter's lock.
    """
    by_size = sorted(paths, key=size, reverse=True)
    large, small = by_size[: 8 * _BATCH], by_size[8 * _BATCH :]
    batches = [[path] for path in large] + [small[at : at + _BATCH] for at in range(0, len(small), _BATCH)]
    with ThreadPoolExecutor(max_workers=processors()) as pool:
        return {path: digest for part in pool.map(_batch, batches) for path, digest in part}


def _batch(paths: Sequence[str]) -> list[tuple[str, str | None]]:
    return [(path, sha256(path)) for path in paths]


def size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def sha256(path: str) -> str | None:
    """None where the file is gone: the kernel then calls it "PATH (deleted)"."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb", buffering=0) as file:
            for block in iter(lambda: file.read(_BLOCK), b""):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()
