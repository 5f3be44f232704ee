"""Caches the results of apt in the user's cache folder, so that apt does not resolve the same packages from the same
package lists again.

A file holds the sha256 of its text in the first line, and is replaced atomically. A damaged file is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envbuild.util import atomic_files, user_folders

FOLDER = "apt-results"
_FORMAT = 1  # increase it if the same inputs give other rows than before


def load_rows(inputs: Sequence[Any]) -> list[list[Any]] | None:
    """The cached rows for these inputs; None if they are missing or damaged."""
    try:
        digest, _, text = _file(inputs).read_bytes().partition(b"\n")
    except OSError:
        return None
    found: list[list[Any]] | None = json.loads(text) if digest.decode("latin-1") == _sha256(text) else None
    return found


def save_rows(inputs: Sequence[Any], rows: Sequence[Sequence[Any]]) -> None:
    text = json.dumps(rows).encode()
    with contextlib.suppress(OSError):  # the result is known; it is resolved again if the disk is full
        atomic_files.write_atomically(_file(inputs), _sha256(text).encode() + b"\n" + text, flush=False)


def _file(inputs: Sequence[Any]) -> Path:
    key = _sha256(json.dumps([_FORMAT, *inputs]).encode())
    return user_folders.cache_folder(FOLDER, make=False) / key


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
