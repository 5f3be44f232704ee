"""Reads the installed distributions and the entries of their RECORD files, and hashes files to compare with them."""

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
    """A file that the RECORD of a distribution lists.

    `owner` and `version`: the distribution. `sha256`: in hexadecimal; None if RECORD has no sha256 for the file.
    """

    owner: str
    version: str
    sha256: str | None


def normalise(name: str) -> str:
    """Normalise a distribution's name as in PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def found_distributions(path_entries: Sequence[str] | None = None) -> Iterator[metadata.Distribution]:
    """Return the installed distributions that have a name, in the order of `path_entries` (default: sys.path)."""
    found_ = metadata.distributions() if path_entries is None else metadata.distributions(path=list(path_entries))
    return (item for item in found_ if item.metadata["Name"])


def record_rows(distribution: metadata.Distribution, part: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield (path, sha256 in hexadecimal) for each row of the distribution's RECORD that contains the text `part`.

    The sha256 is None if the row has none, which is usual for bytecode. An invalid sha256 is returned unchanged, so
    that no file matches it.
    """
    lines = (distribution.read_text("RECORD") or "").splitlines()
    try:
        for row in csv.reader(line for line in lines if part in line):
            if row and row[0]:
                yield row[0], _hexadecimal(row[1] if len(row) > 1 else "")
    except csv.Error:  # a field is longer than 128 KiB, which cannot be a path
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
    """Yield (path, real path, sha256) for each shared library in the distribution's RECORD.

    The path and the sha256 are those of `record_rows`.
    """
    for path, sha256 in record_rows(distribution, ".so"):
        if ".so" in Path(path).name:
            yield path, os.path.realpath(str(distribution.locate_file(path))), sha256


def file_hashes(paths: Iterable[str]) -> dict[str, str | None]:
    """Return the sha256 of each file; None for a file that cannot be read.

    Several threads hash files at the same time, because hashlib releases the interpreter lock. The largest files are
    hashed first, and small files are hashed in batches.
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
    """Return the sha256 of a file; None if it cannot be read.

    That is the case for a mapped file that was deleted, which the kernel lists as "PATH (deleted)".
    """
    digest = hashlib.sha256()
    try:
        with Path(path).open("rb", buffering=0) as file:
            for block in iter(lambda: file.read(_BLOCK), b""):
                digest.update(block)
    except OSError:
        return None
    return digest.hexdigest()
