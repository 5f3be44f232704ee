"""Predicts which file the dynamic loader loads for each library that torch needs, by the rules of ld.so(8).

A name without a slash is searched in this order. First, unless the requesting file has a RUNPATH, in its RPATH and in
the RPATH of each file through which it was loaded. Then in LD_LIBRARY_PATH, in the requesting file's RUNPATH, in the
loader's cache, and in the default folders. A soname that is already loaded is not searched again. `LoaderInput.planned`
adds files that are not yet installed, and hides files that will be removed. Unlike the loader, the prediction does not
search subfolders for special processors (glibc-hwcaps).
"""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.selftest.inventory import elf_reader
from envbuild.selftest.inventory.elf_reader import Elf

_CACHE = Path("/etc/ld.so.cache")
_LARGEST_CACHE = 64 << 20
_DEFAULT_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_MOST_FILES = 2000


@dataclass(frozen=True)
class LoadedFile:
    """A file that the loader takes for a library name. `way`: the rule by which the loader finds it."""

    name: str
    path: str
    way: str


@dataclass(frozen=True)
class LoaderInput:
    """What the loader's choice of files depends on. `program`: the main program; `roots`: the files that it opens, in
    order; `planned`: the content of files that the changes will add, None for a file that they will remove."""

    program: str
    roots: tuple[str, ...]
    library_path: str = ""
    preload: str = ""
    planned: Mapping[str, Elf | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Object:
    path: str
    elf: Elf
    loader: _Object | None


def torch_roots(torch_folder: Path) -> tuple[str, ...]:
    """The existing files that `import torch` opens itself, in that order."""
    libraries = torch_folder / "lib"
    found = [
        libraries / "libtorch_global_deps.so",
        *sorted(torch_folder.glob("_C.*.so")),
        libraries / "libtorch_cuda.so",
    ]
    return tuple(os.path.realpath(path) for path in found if path.is_file())


def loaded_files(given: LoaderInput) -> dict[str, LoadedFile]:
    """The file of each library that gets loaded, by soname (by file name if the library has no soname), and by the name
    under which it was requested."""
    return _Loader(given).run()


def search_folders(variable: str) -> list[str]:
    """The folders of LD_LIBRARY_PATH. An empty entry means the working directory."""
    return [part or "." for part in re.split("[:;]", variable)] if variable else []


class _Loader:
    def __init__(self, given: LoaderInput) -> None:
        self._given = given
        self._found: dict[str, LoadedFile] = {}
        self._loaded: set[str] = set()
        self._cache = _cached_paths()

    def run(self) -> dict[str, LoadedFile]:
        program = _Object(self._given.program, self._elf(self._given.program) or Elf(), None)
        preloaded = [name for name in re.split(r"[ :]", self._given.preload) if name]
        opened = [
            *((name, "LD_PRELOAD") for name in preloaded),
            *((root, "opened by torch") for root in self._given.roots),
        ]
        self._load_needed([program])
        for name, way in opened:
            path = self._existing(name) if "/" in name else self._search(name, program)
            self._load_needed((self._open(path, way, program) if path else None) or [])
        return self._found

    def _load_needed(self, start: Iterable[_Object]) -> None:
        """Load the libraries that these files need, breadth first, as the loader does."""
        todo = deque(start)
        while todo and len(self._loaded) < _MOST_FILES:
            item = todo.popleft()
            for name in item.elf.needed:
                if name in self._found:
                    continue
                for path, way in self._candidates(name, item):
                    opened = self._open(path, way, item, name)
                    if opened is not None:
                        todo.extend(opened)
                        break

    def _open(self, path: str, way: str, loader: _Object, soname: str = "") -> list[_Object] | None:
        """Load a file and return it as a list with one element; an empty list if it was loaded before, None if it is
        not a library."""
        elf = self._elf(path)
        if elf is None:
            return None
        real = os.path.realpath(path)
        for name in dict.fromkeys(filter(None, (elf.soname or Path(path).name, soname))):
            self._found.setdefault(name, LoadedFile(name, real, way))
        if real in self._loaded:
            return []
        self._loaded.add(real)
        return [_Object(real, elf, loader)]

    def _search(self, name: str, item: _Object) -> str | None:
        return next((path for path, _ in self._candidates(name, item)), None)

    def _candidates(self, name: str, item: _Object) -> Iterator[tuple[str, str]]:
        """Yield (path, rule) of each existing file with this name, in the loader's search order."""
        if "/" in name:
            paths: Iterator[tuple[str, str]] = iter([(name, f"by path in {item.path}")])
        else:
            paths = self._searched(name, item)
        for path, way in paths:
            existing = self._existing(path)
            if existing:
                yield existing, way

    def _searched(self, name: str, item: _Object) -> Iterator[tuple[str, str]]:
        if item.elf.runpath is None:
            for above in _chain(item):
                if above.elf.runpath is None:
                    for folder in _expanded(above.elf.rpath, above.path):
                        yield f"{folder}/{name}", f"RPATH of {above.path}"
        for folder in search_folders(self._given.library_path):
            yield f"{folder}/{name}", "LD_LIBRARY_PATH"
        for folder in _expanded(item.elf.runpath, item.path):
            yield f"{folder}/{name}", f"RUNPATH of {item.path}"
        for path in self._cache.get(name, ()):
            yield path, "the loader's cache"
        for folder in _DEFAULT_FOLDERS:
            yield f"{folder}/{name}", "a default folder"

    def _existing(self, path: str) -> str | None:
        real = os.path.realpath(path)
        if real in self._given.planned:
            return real if self._given.planned[real] is not None else None
        return real if Path(real).is_file() else None

    def _elf(self, path: str) -> Elf | None:
        real = os.path.realpath(path)
        return self._given.planned[real] if real in self._given.planned else elf_reader.read(real)


def _chain(item: _Object) -> Iterator[_Object]:
    """The file and the files through which it was loaded, up to the main program."""
    above: _Object | None = item
    while above is not None:
        yield above
        above = above.loader


def _expanded(variable: str | None, path: str) -> Sequence[str]:
    """The folders of an RPATH or RUNPATH, with $ORIGIN replaced by the file's folder."""
    origin = str(Path(path).parent)
    return [
        re.sub(r"\$(?:ORIGIN\b|\{ORIGIN\})", lambda _: origin, part) for part in (variable or "").split(":") if part
    ]


def _cached_paths() -> dict[str, tuple[str, ...]]:
    """The paths in the loader's cache, by file name. They are read as strings between NUL bytes, whatever the cache's
    format version."""
    try:
        with _CACHE.open("rb") as file:
            parts = file.read(_LARGEST_CACHE).split(b"\0")
    except OSError:
        return {}
    found: dict[str, tuple[str, ...]] = {}
    for path in (os.fsdecode(part) for part in parts if part.startswith(b"/") and b".so" in part and len(part) < 4096):
        name = Path(path).name
        found[name] = (*found.get(name, ()), path)
    return found
