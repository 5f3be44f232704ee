"""Reads lists of installed files from the zip directories of wheels, and finds conflicts between wheels.

A wheel can overwrite a file of another wheel, or hide its module. Installers do not report that; the wheel that is
installed last wins. The zip directory has the CRC and size of each file. Both can be forged, so equal values are only a
hint, and wheel_file_hashes_and_contents.py compares the bytes.
"""

from __future__ import annotations

import configparser
import re
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import IO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from envbuild.selftest.inventory import elf_reader
from envbuild.util.errors import printable

SITE = "site-packages"
"""In the paths of a Listing, this stands for lib/python3.N/site-packages with any N."""

PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""How members may be compressed. LZMA is excluded: its header alone can request 4 GiB of memory."""

BROKEN = (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)
_DATA = re.compile(r"[^/]+\.data/([^/]+)/(.+)")
_IN_SITE = re.compile(r"lib/python3\.[0-9]+/site-packages/(.+)")
# Files of the virtual environment itself: activate, activate.csh, activate_this.py, but not argcomplete's
# activate-global-python-argcomplete. `python._pth` in an interpreter's folder replaces its sys.path, even with -I
# and -S.
ENVIRONMENT = re.compile(
    r"(bin/)?pyvenv\.cfg|lib64|bin/(lib(64)?/.*|pybuilddir\.txt|python(3(\.[0-9]+)?)?(\._pth)?"
    r"|activate([._][a-z0-9_.]*)?|Activate\.ps1)"
)
# The folders of the virtual environment.
_FOLDERS = re.compile(r"bin|(lib|include)(/python3\.[0-9]+)?|lib/python3\.[0-9]+/site-packages")
_DISTRIBUTION = re.compile(r"([^/]+?)(?:-[^/-]+)?(?:-py[^/]*)?\.(?:dist|egg)-info(?:/.*)?")
_MODULE = re.compile(r"((?:[^/]+/)*)([^/.]+)(?:\.py|\.pyc|(?:\.abi3|\.cpython-[^/.]+)?\.so)")
_BYTECODE = re.compile(r"((?:[^/]+/)*)__pycache__/([^/.]+)\.[^/]+\.pyc")
_SCRIPTS = ("console_scripts", "gui_scripts")
_UNICODE_PATH = b"\x75\x70"  # the extra field with a second name, which only some readers use
_LARGEST_TEXT = 1 << 20


@dataclass(frozen=True)
class Listing:
    """The files that a wheel installs. `files`: path below the environment's folder -> CRC and size, or the function
    that a generated script calls. `faults`: why the wheel is refused on its own."""

    files: Mapping[str, str]
    faults: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clash:
    """Two wheels that install the same path, or two paths of which one hides the other. `equal`: both files have the
    same CRC and size."""

    first: str
    second: str
    path: str
    other: str
    equal: bool = False

    def __str__(self) -> str:
        if self.path == self.other:
            return f"{self.first} and {self.second} both install {printable(self.path)}"
        return (
            f"{self.first} installs {printable(self.path)}, {self.second} {printable(self.other)}: one hides the other"
        )


# paths and modules of one wheel


def is_inside(name: str) -> bool:
    """Whether every reader resolves a member's name to the same path inside the target folder."""
    parts = name.rstrip("/").split("/")
    return name.isprintable() and "\\" not in name and not {"", ".", ".."} & set(parts)


def installed(member: str, distribution: str) -> str:
    """The path to which an installer writes a member, below the environment's folder."""
    match = _DATA.fullmatch(member)
    scheme, path = match.groups() if match else ("purelib", member)
    if scheme == "scripts":
        return f"bin/{path}"
    if scheme == "headers":
        return f"include/site/{distribution}/{path}"
    if scheme == "data":
        path = re.sub(r"^lib64/", "lib/", path)  # lib64 is a link in every virtual environment
        inside = _IN_SITE.fullmatch(path)
        return f"{SITE}/{inside[1]}" if inside else path
    return f"{SITE}/{path}"


def replaces_environment(path: str, folder: bool = False) -> bool:
    """Whether a file, or an empty folder, at a path below the environment's folder would replace a file or a folder of
    the environment."""
    parts = (path, *_folders(path))
    return (not folder and _FOLDERS.fullmatch(path) is not None) or any(map(ENVIRONMENT.fullmatch, parts))


def read(stream: IO[bytes], file: str) -> Listing:
    """List the files of a wheel. `stream`: its bytes; `file`: its file name. Raises ValueError for an invalid wheel."""
    try:
        distribution, _, _, _ = parse_wheel_filename(file)
        with zipfile.ZipFile(stream) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            faults = [f"{info.filename!r} has an ambiguous name" for info in members
                      if not is_inside(info.filename) or info.orig_filename != info.filename
                      or has_second_name(info.extra)]  # fmt: skip
            faults += [f"{info.filename!r} is neither stored nor deflated" for info in members
                       if info.compress_type not in PACKED]  # fmt: skip
            files: dict[str, str] = {}
            for info in members:
                path = installed(info.filename, distribution)
                if path in files:
                    faults.append(f"it has {path!r} more than once")
                files[path] = f"{info.CRC:08x} {info.file_size}"
            scripts = {f"bin/{name}": target for name, target in _entry_points(archive)}
            faults += [f"its command {path!r} is also one of its files, or outside of bin/" for path in scripts
                       if path in files or not is_inside(path)]  # fmt: skip
            files |= scripts
    except (InvalidWheelFilename, *BROKEN, configparser.Error) as error:
        raise ValueError(printable(str(error))[:200] or type(error).__name__) from None
    faults += [
        f"it installs {path!r}, which is part of the environment" for path in files if replaces_environment(path)
    ]
    faults += [f"it installs {path!r}, which the loader prefers to libraries of other packages" for path in files
               if elf_reader.HWCAPS in path.split("/")]  # fmt: skip
    faults += [f"it installs {path!r}, which is metadata of {name}" for path, name in _foreign(files, distribution)]
    return Listing(files, tuple(faults[:20]))


def has_second_name(extra: bytes) -> bool:
    while len(extra) >= 4:
        if extra[:2] == _UNICODE_PATH:
            return True
        extra = extra[4 + int.from_bytes(extra[2:4], "little") :]
    return False


def _entry_points(archive: zipfile.ZipFile) -> Iterator[tuple[str, str]]:
    for info in archive.infolist():
        if info.compress_type in PACKED and re.fullmatch(r"[^/]+\.dist-info/entry_points\.txt", info.filename):
            parser = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
            parser.optionxform = str  # type: ignore[assignment, method-assign]
            with archive.open(info) as file:
                parser.read_string(file.read(_LARGEST_TEXT).decode())
            for section in _SCRIPTS:
                if parser.has_section(section):
                    yield from parser.items(section)


def _foreign(files: Iterable[str], distribution: str) -> Iterator[tuple[str, str]]:
    """Metadata of other distributions: the first path of each folder, with the distribution's name."""
    seen: set[str] = set()
    for path in files:
        match = _DISTRIBUTION.fullmatch(path.removeprefix(f"{SITE}/")) if path.startswith(f"{SITE}/") else None
        if match and canonicalize_name(match[1]) not in {distribution, *seen}:
            seen.add(canonicalize_name(match[1]))
            yield path, match[1]


# conflicts between several wheels


def clashes(listings: Mapping[str, Listing]) -> Iterator[Clash]:
    """The pairs of wheels (by name) that install the same path, module or library, or a file where the other wheel has
    a folder."""
    owners: dict[str, list[str]] = defaultdict(list)
    for name, listing in listings.items():
        for path in listing.files:
            owners[path].append(name)
    for path, names in owners.items():
        for one, two in combinations(names, 2):
            yield Clash(one, two, path, path, listings[one].files[path] == listings[two].files[path])
    yield from _hidden(owners)
    for path, names in owners.items():
        above = next((found for found in _folders(path) if found in owners), None)
        for one in owners[above] if above else ():
            yield from (Clash(one, two, str(above), path) for two in names if two != one)


def _hidden(owners: Mapping[str, list[str]]) -> Iterator[Clash]:
    """Conflicts between files with different paths. Either an import finds both as the same module, such as
    torch/__init__.py and torch.so, or the loader finds both as the same library, such as lib/x.so and lib/tls/x.so."""
    same: dict[str, list[str]] = defaultdict(list)
    for path in owners:
        for name in (module(path), elf_reader.loaded_as(path) if ".so" in path else None):
            if name:
                same[name].append(path)
    for paths in same.values():
        for first, second in combinations(paths, 2):
            # a wheel that has both files itself is not a conflict
            pairs = ((one, two) for one in owners[first] for two in owners[second])
            if not set(owners[first]) & set(owners[second]):
                yield from (Clash(one, two, first, second) for one, two in pairs)


def module(path: str) -> str | None:
    """The module that an import finds in an installed file, as a path: torch/nn for torch/nn/__init__.py."""
    if not path.startswith(f"{SITE}/"):
        return None
    below = path.removeprefix(f"{SITE}/")
    match = _BYTECODE.fullmatch(below) or _MODULE.fullmatch(below)
    return f"{match[1]}{match[2]}".removesuffix("/__init__") if match else None


def _folders(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
