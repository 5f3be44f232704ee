"""Finds files that make Python run code at every start: `.pth` files with import lines, sitecustomize and
usercustomize. It also finds entry points in the group torch.backends, whose code `import torch` runs.

Such code runs in every program, including the self-test, even if nothing imports the package that contains it. On the
host, envbuild uses `pth_lines`, `runs`, `loads_backend` and `MODULES` to check wheels and layers.
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

# apport_python_hook is included because the sitecustomize of Debian imports it from any folder of sys.path.
MODULES = ("sitecustomize", "usercustomize", "apport_python_hook")
# Both patterns accept what importlib.metadata accepts: it ignores the case of folder names, and strips all brackets
# around the name of a group.
ENTRY_POINTS = re.compile(r"[^/]*(dist|egg)-info/entry_points\.txt", re.IGNORECASE)
_BACKENDS = re.compile(r"\[+\s*torch\.backends\s*\]")
_LARGEST = 1 << 20


def pth_lines(content: bytes) -> list[str]:
    """Return the lines of a `.pth` file that are neither empty nor comments.

    Lines are split at all line endings that any Python release accepts.
    """
    found = content.decode("utf-8-sig", "replace").splitlines()
    return [line for line in found if line.strip() and not line.startswith("#")]


def runs(line: str) -> bool:
    """Return whether Python runs this line of a `.pth` file as code. All other lines are paths to add to sys.path."""
    return line.startswith(("import ", "import\t"))


def loads_backend(entry_points: bytes) -> bool:
    """Return whether this entry_points.txt makes `import torch` run code of its distribution (group torch.backends).

    For a file of 1 MiB or more, the result is always true, because such a file is not searched.
    """
    found = entry_points.decode("utf-8", "replace").splitlines()
    return len(entry_points) >= _LARGEST or any(_BACKENDS.match(line.strip()) for line in found)


def find_startup_files(folders: Iterable[str], owners: Mapping[str, str]) -> list[dict[str, Any]]:
    """Find startup files in `folders` (those of sys.path) and in the folders that their `.pth` files add.

    Each row has the path of the file, its sha256, and the distribution to which it belongs, or None. `owners` maps real
    paths to distributions.
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
    """Return whether the file is a Python module without statements, such as the sitecustomize of Debian."""
    if path.suffix != ".py":
        return False
    try:
        return not ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _replacements() -> Iterator[Path]:
    """Yield the interpreter's `._pth` files, such as `python3._pth`. Such a file replaces the whole sys.path."""
    for executable in {sys.executable, os.path.realpath(sys.executable)}:
        path = Path(f"{executable}._pth")
        if path.is_file():
            yield path
