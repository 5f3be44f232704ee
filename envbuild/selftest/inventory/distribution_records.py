"""The installed distributions, the entries of their RECORDs, and the sha256 of files to compare with those."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from envbuild.selftest.harness.cpu_count import processors

_BLOCK = 1 << 20
_BATCH = 64


@dataclass(frozen=True)
class Recorded:
    """A file in a distribution's RECORD; `sha256` is hexadecimal, None if RECORD has none."""

    owner: str
    version: str
    sha256: str | None


def normalise(name: str) -> str:
    """Normalise a distribution's name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def found_distributions(path_entries: Sequence[str] | None = None) -> Iterator[metadata.Distribution]:
    """The installed distributions with a name, in the order of the path (None: sys.path)."""
    found_ = metadata.distributions() if path_entries is None else metadata.distributions(path=list(path_entries))
    return (item for item in found_ if item.metadata["Name"])


def record_rows(distribution: metadata.Distribution, part: str = "") -> Iterator[tuple[str, str | None]]:
    """(path, sha256 in hexadecimal) of each RECORD row of the distribution that contains `part`.

    sha256 is None if RECORD has none, as for bytecode. An invalid sha256 is returned unchanged: no file matches it.
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


def recorded_libraries(distribution: metadata.Distribution) -> Iterator[tuple[str, str, str | None]]:
    """(path, real path, sha256 as from `record_rows`) of each shared library in the distribution's RECORD."""
    for path, sha256 in record_rows(distribution, ".so"):
        if ".so" in Path(path).name:
            yield path, os.path.realpath(str(distribution.locate_file(path))), sha256


def file_hashes(paths: Iterable[str]) -> dict[str, str | None]:
    """sha256 of each file; None for a missing file.

    The largest files come first, and small ones in batches. Threads are used because hashlib releases the interpreter
    lock.
    """
    by_size = sorted(paths, key=file_size, reverse=True)
    large, small = by_size[: 8 * _BATCH], by_size[8 * _BATCH :]
    batches = [[path] for path in large] + [small[at : at + _BATCH] for at in range(0, len(small), _BATCH)]
    with ThreadPoolExecutor(max_workers=processors()) as pool:
        return {path: digest for part in pool.map(_batch, batches) for path, digest in part}


def _batch(paths: Sequence[str]) -> list[tuple[str, str | None]]:
    return [(path, file_sha256(path)) for path in paths]


def file_size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except OSError:
        return 0


def file_sha256(path: str) -> str | None:
    """sha256 of a file; None if it no longer exists: the kernel then lists it as "PATH (deleted)"."""
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb", buffering=0) as file:
            for block in iter(lambda: file.read(_BLOCK), b""):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()
