"""Finds files whose code runs whenever Python starts: `.pth` files with import lines, sitecustomize and usercustomize;
and entry points of torch.backends, whose code `import torch` runs.

They run in every program, including a self-test, even if nothing imports their package. The host uses `pth_lines`,
`runs`, `loads_backend` and `MODULES` for wheels and layers.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

# Debian's sitecustomize imports apport_python_hook from any folder on the path.
MODULES = ("sitecustomize", "usercustomize", "apport_python_hook")
# importlib.metadata ignores the case of folder names and strips all brackets of a group name.
ENTRY_POINTS = re.compile(r"[^/]*(dist|egg)-info/entry_points\.txt", re.IGNORECASE)
_BACKENDS = re.compile(r"\[+\s*torch\.backends\s*\]")
_LARGEST = 1 << 20


def pth_lines(content: bytes) -> list[str]:
    """The lines of a `.pth` file that are not comments, with every line ending that any Python release accepts."""
    found = content.decode("utf-8-sig", "replace").splitlines()
    return [line for line in found if line.strip() and not line.startswith("#")]


def runs(line: str) -> bool:
    """Whether Python runs this line of a `.pth` file; any other line names a folder for sys.path."""
    return line.startswith(("import ", "import\t"))


def loads_backend(entry_points: bytes) -> bool:
    """Whether this entry_points.txt makes `import torch` run code of its distribution (group torch.backends).

    A file of 1 MiB or more counts as yes.
    """
    found = entry_points.decode("utf-8", "replace").splitlines()
    return len(entry_points) >= _LARGEST or any(_BACKENDS.match(line.strip()) for line in found)


def find_startup_files(folders: Iterable[str], owners: Mapping[str, str]) -> list[dict[str, Any]]:
    """Find startup files in `folders` (of sys.path) and in the folders that `.pth` files there add.

    Each row has the path, its sha256 and the distribution whose RECORD lists it (`owners`: by real path).
    """
    found = {path: None for folder in dict.fromkeys(folders) for path in _files(Path(folder))}
    found.update((path, None) for path in _replacements())
    rows = []
    for path in found:
        with contextlib.suppress(OSError):
            content = path.read_bytes()
            rows.append(
                {
                    "path": str(path),
                    "sha256": hashlib.sha256(content).hexdigest(),
                    "owner": owners.get(os.path.realpath(path)),
                }
            )
    return rows


def _files(folder: Path, follow: bool = True) -> Iterator[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.name.partition(".")[0] in MODULES:
            found = sorted(filter(Path.is_file, entry.rglob("*"))) if entry.is_dir() else [entry]
            yield from (path for path in found if not _is_empty(path))
        elif follow and entry.name.endswith(".pth") and entry.is_file():
            with entry.open("rb") as file:
                content = file.read(_LARGEST + 1)
            said = pth_lines(content[:_LARGEST])
            if len(content) > _LARGEST or any(map(runs, said)):
                yield entry
            for line in said:
                if not runs(line):
                    yield from _files(folder / line.rstrip(), follow=False)
        elif ENTRY_POINTS.fullmatch(f"{entry.name}/entry_points.txt"):
            path = entry / "entry_points.txt"
            with contextlib.suppress(OSError):
                if path.is_file() and loads_backend(path.read_bytes()):
                    yield path


def _is_empty(path: Path) -> bool:
    """Whether a module has no statements, like Debian's sitecustomize."""
    if path.suffix != ".py":
        return False
    try:
        return not ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _replacements() -> Iterator[Path]:
    """Find `python._pth` files: one in the interpreter's folder replaces its whole sys.path."""
    for executable in {sys.executable, os.path.realpath(sys.executable)}:
        path = Path(f"{executable}._pth")
        if path.is_file():
            yield path
