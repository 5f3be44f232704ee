"""Finds all copies of the CUDA libraries that torch uses, by file name. A copy need not be loaded by a process.

The search is limited in the number of folder entries and in time, and skips the kernel's file systems (/proc, /sys,
/dev). It visits a folder again only if the earlier visit did not search as many levels below the folder.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r"lib(cublas|cublasLt|cudnn(?:_[a-z_]+)?|nccl|cudart|nvJitLink)(?:-[0-9a-f]{8})?\.so(?:\.[0-9]+)*")
_DIGITS = re.compile(r"\.so\.([0-9]+(?:\.[0-9]+){2,3})$")
_CACHE = Path("/etc/ld.so.cache")
_LARGEST_CACHE = 64 << 20
_KERNELS = ("/proc", "/sys", "/dev")
_LEFT_OUT = frozenset(("__pycache__", "stubs", ".git"))  # stubs: libraries only for the linker, which are never loaded

# Patterns of folders, and how many levels of each folder are searched.
_SYSTEM = (
    ("/usr/local/cuda*", 6),
    ("/opt/cuda*", 6),
    ("/opt/nvidia*", 6),
    ("/usr/lib*", 2),
    ("/lib*", 2),
    ("/usr/local/lib*", 2),
)
_DEFAULT_FOLDERS = re.compile(r"/(?:usr/)?(?:local/)?lib(?:64|32)?(?:/[^/]+-linux-gnu[^/]*)?$")
_PACKAGES = ("site-packages", "dist-packages")  # only these are searched deeply: others may be home directories
_DEEP = 12

# The ways in which the loader can find a copy: in the Python environment, or through the loader's own settings.
SITE, LD_PATH, LD_PRELOAD, LD_CACHE = "environment", "ld-library-path", "ld-preload", "ld-cache"


@dataclass(frozen=True)
class Bounds:
    entries: int = 2_000_000
    seconds: float = 6.0


@dataclass
class Search:
    """The result of a search.

    `copies`: maps the real path of each copy to the ways (SITE, LD_PATH, LD_PRELOAD, LD_CACHE) in which it can be
    loaded; a copy without a way is loaded only by its path. `compat`: the copies found of the driver's
    forward-compatibility library. `cut`: whether a limit ended the search early.
    """

    copies: dict[str, set[str]] = field(default_factory=dict)
    compat: set[str] = field(default_factory=set)
    cut: bool = False

    def add(self, path: str, *ways: str) -> None:
        if library_of_file(Path(path).name):
            real = os.path.realpath(path)
            if _is_file(real):
                self.copies.setdefault(real, set()).update(ways)
        elif Path(path).name.startswith("libcuda.so") and "compat" in Path(os.path.realpath(path)).parts:
            self.compat.add(path)


def library_of_file(name: str) -> str | None:
    """Return the short name of a CUDA library, such as cublasLt for libcublasLt.so.12; None for any other file."""
    match = _NAME.fullmatch(name.partition(" (deleted)")[0])
    return match[1] if match else None


def own_digits(path: str) -> str | None:
    """Return the version in a file name, such as 12.1.3.1 for libcublas.so.12.1.3.1.

    The result is None if the version does not have three or four numbers.
    """
    match = _DIGITS.search(path)
    return match[1] if match else None


def search_libraries(
    sites: Iterable[str], prefixes: Iterable[str], environment: Mapping[str, str], bounds: Bounds = Bounds()
) -> Search:
    """Search for copies of CUDA libraries.

    The search covers an interpreter's package folders (`sites`), folders of conda with libraries (`prefixes`), the
    system's library folders, and what LD_LIBRARY_PATH and LD_PRELOAD (in `environment`) and the loader's cache name.
    """
    found = Search()
    walk = _Walk(bounds)
    for site in sites:
        for path in walk.files(site, _DEEP if Path(site).name in _PACKAGES else 3):
            found.add(path, SITE)
    for prefix in prefixes:
        for path in (*walk.files(f"{prefix}/lib", 1), *walk.files(f"{prefix}/targets", 4)):
            found.add(path, SITE)
    for pattern, depth in _SYSTEM:
        for root in sorted(glob.glob(pattern)):  # noqa: PTH207 - Path has no absolute patterns
            for path in walk.files(root, depth):
                is_default = _DEFAULT_FOLDERS.match(str(Path(path).parent))
                found.add(path, *((LD_CACHE,) if is_default else ()))
    _loaders_ways(found, environment)
    found.cut = walk.cut
    return found


def _loaders_ways(found: Search, environment: Mapping[str, str]) -> None:
    for folder in ld_folders(environment.get("LD_LIBRARY_PATH", "")):
        for entry in _listed(folder):
            found.add(entry.path, LD_PATH)
    for path in re.split(r"[ :]", environment.get("LD_PRELOAD", "")):
        found.add(path, LD_PRELOAD)
    for path in _cached():
        found.add(path, LD_CACHE)


def ld_folders(variable: str) -> list[str]:
    """Return the folders in the value of LD_LIBRARY_PATH.

    Relative paths and empty entries are left out, because they depend on the working directory.
    """
    return list(dict.fromkeys(part for part in re.split("[:;]", variable) if part.startswith("/")))


def _cached() -> list[str]:
    """Return the paths of CUDA libraries and of the driver's library in the loader's cache.

    Paths are recognised as strings between NUL bytes, so that the format of the cache does not matter.
    """
    try:
        with _CACHE.open("rb") as file:
            parts = file.read(_LARGEST_CACHE).split(b"\0")
    except OSError:
        return []
    paths = (os.fsdecode(part) for part in parts if part.startswith(b"/") and b".so" in part and len(part) < 4096)
    return sorted({path for path in paths if library_or_driver(Path(path).name)})


class _Walk:
    """Walks through folders, and recognises folders that were visited already under a different name or link."""

    def __init__(self, bounds: Bounds) -> None:
        self._left = bounds.entries
        self._end = time.monotonic() + bounds.seconds
        self._seen: dict[tuple[int, int], int] = {}  # (device, inode) of a folder -> levels that were searched
        self.cut = False

    def files(self, root: str, depth: int) -> Iterator[str]:
        """Yield the paths of CUDA libraries and of the driver's library in `root`, searching `depth` folder levels."""
        stack = [(os.path.realpath(root), depth)]
        while stack and not self.cut:
            folder, left = stack.pop()
            if not self._new(folder, left):
                continue
            for entry in _listed(folder):
                self._left -= 1
                if self._left <= 0 or time.monotonic() > self._end:
                    self.cut = True
                    return
                if ".so" in entry.name and library_or_driver(entry.name):
                    yield entry.path
                elif left > 1 and entry.name not in _LEFT_OUT and _is_folder(entry):
                    stack.append((entry.path, left - 1))

    def _new(self, folder: str, depth: int) -> bool:
        real = os.path.realpath(folder)
        if real == "/" or any(real == kernel or real.startswith(kernel + "/") for kernel in _KERNELS):
            return False
        try:
            about = Path(real).stat()
        except OSError:
            return False
        key = (about.st_dev, about.st_ino)
        if self._seen.get(key, -1) >= depth:
            return False
        self._seen[key] = depth
        return True


def library_or_driver(name: str) -> bool:
    return library_of_file(name) is not None or name.startswith("libcuda.so")


def _listed(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_file(path: str) -> bool:
    try:
        return stat.S_ISREG(Path(path).stat().st_mode)
    except OSError:
        return False
