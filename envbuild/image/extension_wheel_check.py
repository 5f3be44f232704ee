"""Checks that a wheel built from source is what was requested, without installing it or running any of its code.

A build without a compiler, or without the settings, can succeed and produce a wheel without kernels. A build also runs
foreign code, so the wheel is treated as hostile: names, counts and sizes are limited.
"""

from __future__ import annotations

import os
import re
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from pathlib import Path

from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuild.facts import database, torch_cuda_arch_list_parser
from envbuild.fetch import wheel_file_lists_and_clashes, wheel_resolution_and_download
from envbuild.fetch.wheel_file_lists_and_clashes import BROKEN, PACKED, installed, replaces_environment
from envbuild.selftest.inventory import extension_file_reader
from envbuild.selftest.inventory.elf_reader import X86_64
from envbuild.selftest.inventory.extension_file_reader import Compiled
from envbuild.util import temporary_files
from envbuild.util.errors import printable

_MOST_MEMBERS = 50_000
_LARGEST, _LARGEST_TOTAL = 4 << 30, 8 << 30  # bytes, unpacked; libtorch_cuda, the largest library known, has 1.6 GB
_LARGEST_TEXT = 1 << 20
_BLOCK = 1 << 20
_NEWEST_GLIBC = "2.99"  # no limit: the wheel was built on the base that it is for
_DATA = re.compile(r"[^/]+\.data/(?:platlib|purelib)/(.+)")
# headers, data: installed into Python's own directories
_ELSEWHERE = re.compile(r"[^/]+\.data/(?!(?:platlib|purelib)/|scripts/[^/]+\Z).*")
_INFO = ".dist-info"
_ENCRYPTED = 1


@dataclass(frozen=True)
class Module:
    """A compiled file of a wheel: its `path` below site-packages, and the data read from it."""

    path: str
    file: Compiled


class _Unreadable(Exception):
    """The wheel cannot be opened, or not safely; `args` has every reason."""


def wheel_faults(wheel: Path, *, name: str, modules: Sequence[str], arch: str, python: str | None = None) -> list[str]:
    """Return every fault of the wheel of distribution `name`, one sentence each; an empty list if it is as requested.

    `modules`: modules that must be importable. `arch`: TORCH_CUDA_ARCH_LIST of the build ("9.0;10.0"; PTX is not
    required), "" for a wheel without device code; any other text raises ValueError. `python`: for example "3.11"; if
    None, the wheel may be for any version, and is checked for the version that its tags name.
    """
    try:
        tags = _named(wheel)[1]
    except _Unreadable as error:
        return [str(error)]
    found = [*_name(wheel, name), *_tags(tags, python)]
    try:
        with _opened(wheel) as archive:
            found += _metadata(archive, name, wheel, tags)
            paths = [_installed(info.filename) for info in _files(archive)]
            inside = list(_compiled(archive))
    except _Unreadable as error:
        return [*found, *error.args]
    interpreter = python or _interpreter(tags)
    return [*found, *_modules(paths, inside, modules, interpreter), *_code(inside, arch)]


def contents(wheel: Path) -> tuple[Module, ...]:
    """Return the compiled files. Raises ValueError, with every reason, if the wheel cannot be read."""
    try:
        with _opened(wheel) as archive:
            return tuple(_compiled(archive))
    except _Unreadable as error:
        raise ValueError("; ".join(error.args)) from None


# checks of the archive


def _opened(wheel: Path) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(wheel)
    except BROKEN as error:
        raise _Unreadable(f"{wheel.name} is not a wheel, or is damaged: {_said(error)}") from None
    reasons = list(_hostile(archive))
    if reasons:
        archive.close()
        raise _Unreadable(*reasons)
    return archive


def _hostile(archive: zipfile.ZipFile) -> Iterator[str]:
    """Yield a sentence for each reason not to unpack the wheel: too many or too large members, or a member that would
    be written outside the target or outside of site-packages and bin/, would replace a file of the environment, is not
    a regular file, occurs twice, or has an unsupported compression. At most ten members are named for each reason."""
    infos = archive.infolist()
    if len(infos) > _MOST_MEMBERS:
        yield f"it has {len(infos)} files, at most {_MOST_MEMBERS} are allowed"
        return
    names = Counter(_installed(info.filename) for info in infos)
    outside = [name for name in names if not wheel_file_lists_and_clashes.is_inside(name)]
    elsewhere = [name for info in infos if _ELSEWHERE.fullmatch(name := info.filename) and not name.endswith("/")]
    replaced = [info.filename for info in infos if replaces_environment(installed(info.filename, distribution=""))]
    odd = [info.filename for info in infos if not _is_plain(info)]
    packed = [info.filename for info in infos if info.compress_type not in PACKED]
    twice = [name for name, count in names.items() if count > 1]
    for kind, found in (
        ("would be written outside the target", outside),
        ("is not a regular file", odd),
        ("occurs twice", twice),
        ("would be installed outside site-packages and bin/", elsewhere),
        ("would replace a file of the environment", replaced),
        ("is neither stored nor deflated", packed),
    ):
        yield from (f"{_quoted(name)} {kind}" for name in found[:10])
    if any(info.file_size > _LARGEST for info in infos) or sum(info.file_size for info in infos) > _LARGEST_TOTAL:
        yield f"unpacked, it is larger than {_LARGEST_TOTAL >> 30} GiB, or a file is larger than {_LARGEST >> 30} GiB"


def _is_plain(info: zipfile.ZipInfo) -> bool:
    kind = stat.S_IFMT(info.external_attr >> 16)
    return kind in (0, stat.S_IFREG, stat.S_IFDIR) and not info.flag_bits & _ENCRYPTED


def _files(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    return [info for info in archive.infolist() if not info.is_dir()]


def _installed(name: str) -> str:
    """Return the path below site-packages where an installer puts the file."""
    match = _DATA.fullmatch(name)
    return match[1] if match else name


def _compiled(archive: zipfile.ZipFile) -> Iterator[Module]:
    """Yield the compiled files. All other files are read too, since only reading shows whether they are intact."""
    with temporary_files.folder("wheel") as folder:
        copy, nowhere = folder / "file.so", Path(os.devnull)
        for info in _files(archive):
            path = _installed(info.filename)
            shared = extension_file_reader.is_shared(path)
            try:
                with archive.open(info) as source, (copy if shared else nowhere).open("wb") as target:
                    while block := source.read(_BLOCK):
                        target.write(block)
            except BROKEN as error:
                raise _Unreadable(f"{_quoted(info.filename)} is damaged: {_said(error)}") from None
            if shared:
                yield Module(path, extension_file_reader.read(str(copy), path))


# checks of the file name and the metadata


def _named(wheel: Path) -> tuple[str, frozenset[Tag]]:
    try:
        name, _, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise _Unreadable(f"{_quoted(wheel.name)} is not a wheel's name: {_said(error)}") from None
    return name, tags


def _name(wheel: Path, name: str) -> Iterator[str]:
    found = _named(wheel)[0]
    if found != canonicalize_name(name):
        yield f"the wheel is of {found}, but {name} was requested"


def _tags(tags: frozenset[Tag], python: str | None) -> Iterator[str]:
    names = ", ".join(sorted(map(str, tags)))
    if all(tag.platform == "any" for tag in tags):
        yield f"its tag is {names}: it was built without its compiled modules"
        return
    wanted = python or _interpreter(tags)
    if wanted is None or not tags & wheel_resolution_and_download.tags(wanted, _NEWEST_GLIBC).keys():
        yield f"its tag is {names}, which {f'Python {wanted} on ' if wanted else ''}linux x86_64 does not accept"


def _interpreter(tags: frozenset[Tag]) -> str | None:
    """Return "3.11" for cp311; the newest of several versions; the newest known version for py3; otherwise None."""
    found = [match for tag in tags for match in [re.fullmatch(r"(?:cp|py)3([0-9]{1,2})", tag.interpreter)] if match]
    if found:
        return f"3.{max(int(match[1]) for match in found)}"
    known = [suite.python for suite in database.suites().values()]
    return max(known, key=Version) if any(tag.interpreter == "py3" for tag in tags) else None


def _metadata(archive: zipfile.ZipFile, name: str, wheel: Path, tags: frozenset[Tag]) -> Iterator[str]:
    paths = [_installed(info.filename) for info in _files(archive)]
    folders = sorted({path.split("/")[0] for path in paths if f"{_INFO}/" in path})
    if len(folders) != 1:
        yield f"a wheel has one {_INFO} folder, this one {len(folders)}"
        return
    if not _is_own(folders[0], wheel):
        yield f"{_quoted(folders[0])} belongs to another distribution or version"
    for file, key, fits, expected in (
        ("METADATA", "Name", lambda text: canonicalize_name(text) == canonicalize_name(name), name),
        ("WHEEL", "Tag", {str(tag) for tag in tags}.__contains__, _list(sorted(map(str, tags)))),
    ):
        try:
            with archive.open(f"{folders[0]}/{file}") as source:
                head = BytesHeaderParser().parsebytes(source.read(_LARGEST_TEXT))
        except (KeyError, *BROKEN):
            yield f"{_quoted(folders[0])}/{file} is missing or damaged"
            continue
        found = [str(text) for text in head.get_all(key) or ()]
        if not any(map(fits, found)):
            yield f"its {file} says {key}: {_list(found)}, not {expected}"


def _is_own(folder: str, wheel: Path) -> bool:
    """Whether a .dist-info folder has the name and the version of the wheel's file."""
    try:
        named = parse_wheel_filename(f"{folder.removesuffix(_INFO)}-py3-none-any.whl")
    except InvalidWheelFilename:
        return False
    return named[:2] == parse_wheel_filename(wheel.name)[:2]


# checks of the contents


def _modules(paths: list[str], inside: list[Module], expected: Sequence[str], python: str | None) -> Iterator[str]:
    fitting = {None, "abi3", *([f"cpython-{python.replace('.', '')}"] if python else [])}
    there = {item.file.module for item in inside if item.file.abi in fitting}
    sources = [path.removesuffix(".py") for path in paths if path.endswith(".py")]
    there |= {path.removesuffix("/__init__").replace("/", ".") for path in sources}
    others = {item.file.module: item.path for item in inside if item.file.abi not in fitting}
    for name in expected:
        if name not in there:
            why = f": {_quoted(others[name])} is for another Python" if name in others else ""
            yield f"the module {name} is not in it{why}"
    for item in inside:
        if item.file.damaged:
            yield f"{_quoted(item.path)} is not a shared library, or its device code cannot be read"
        elif item.file.machine != X86_64:
            yield f"{_quoted(item.path)} is not for x86_64"


def _code(inside: list[Module], arch: str) -> Iterator[str]:
    """Check the device code. A file may have only host code, as apex_C has, but at least one file must have device
    code."""
    wanted = torch_cuda_arch_list_parser.capabilities(arch)
    coded = [(item.path, item.file.architectures) for item in inside if item.file.architectures is not None]
    if wanted and not coded:
        yield f"no file in it has device code, but code for {arch} was requested"
    for path, found in coded:
        lacking = [
            capability for capability in wanted if torch_cuda_arch_list_parser.serves(found, capability) != "compiled"
        ]
        if lacking:
            has = f"it has {', '.join(found)}" if found else "it has none"
            yield f"{_quoted(path)} has no device code for compute capability {', '.join(lacking)}: {has}"


# formatting of messages


def _said(error: BaseException) -> str:
    return printable(str(error))[:200] or type(error).__name__


def _quoted(name: str) -> str:
    return repr(name[:200])


def _list(texts: Sequence[str]) -> str:
    return ", ".join(printable(str(text))[:60] for text in texts[:5]) or "nothing"
