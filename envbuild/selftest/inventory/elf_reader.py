"""Reads from an ELF file the data that the dynamic loader uses (soname, search paths), its build id, and the offsets of
sections. The file is neither loaded nor mapped.

Supported are 64-bit little-endian files (x86-64, aarch64). The file may be truncated or malicious. Therefore reads are
limited to the file, all counts and lengths are limited, and unreadable parts are left out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_IDENT = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_ENTRY = struct.Struct("<qQ")
_NOTE = struct.Struct("<III")
_LOAD, _DYNAMIC, _NOTES = 1, 2, 4
_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 10, 14, 15, 29
_BUILD_ID = 3

_NO_BITS = 8  # SHT_NOBITS, the type of a section that has no data in the file

_MOST_SEGMENTS, _MOST_DYNAMIC, _MOST_NOTES, _LONGEST = 256, 1 << 16, 1 << 16, 1 << 12
X86_64 = 62

HWCAPS = "glibc-hwcaps"
"""The loader prefers libraries in a subfolder of this name to those in the folder itself."""
LEGACY_HWCAPS = frozenset(("tls", "x86_64", "haswell", "xeon_phi", "avx512_1"))  # such subfolders before glibc 2.37


@dataclass(frozen=True)
class Elf:
    """The data in an ELF file that the dynamic loader uses.

    `needed`: the sonames of the libraries that the file links. The loader searches the folders in `rpath` before those
    in LD_LIBRARY_PATH, also for indirect dependencies. It searches the folders in `runpath` after those in
    LD_LIBRARY_PATH, and only for direct dependencies of the file. If a file has both, the loader ignores `rpath`.
    `machine`: ELF's machine number, such as X86_64.
    """

    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: str | None = None
    runpath: str | None = None
    build_id: str | None = None
    machine: int = 0


@dataclass(frozen=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


class ElfFile:
    """An open file that is read at given offsets. Reads beyond the end of the file return fewer bytes."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self.size = size

    def at(self, offset: int, length: int) -> bytes:
        if offset < 0 or length <= 0 or offset >= self.size:
            return b""
        return os.pread(self._fd, min(length, self.size - offset), offset)


@contextmanager
def open_elf(path: str) -> Iterator[ElfFile | None]:
    """Open a file for reads at given offsets. Yields None if the file cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        yield None
        return
    try:
        yield ElfFile(fd, os.fstat(fd).st_size)  # the size of a pipe or a device is 0, so nothing is read from it
    finally:
        os.close(fd)


def read(path: str) -> Elf | None:
    """Read an ELF file. The result is None if the file cannot be read or is not a supported ELF file."""
    with open_elf(path) as file:
        try:
            return _parse(file) if file else None
        except OSError:
            return None


def find_section(file: ElfFile, name: str) -> tuple[int, int] | None:
    """Return (offset, size in bytes) of the first section with this name; None if there is no such section.

    If the section extends beyond the end of the file, the size ends at the end of the file.
    """
    head = _head(file)
    if head is None:
        return None
    start, (entry_size, count, names) = head[5], head[10:13]
    if entry_size != _SECTION.size or names >= count:
        return None
    table = file.at(start, count * _SECTION.size)
    rows = [_SECTION.unpack_from(table, at) for at in range(0, len(table) - _SECTION.size + 1, _SECTION.size)]
    if names >= len(rows):
        return None
    wanted = name.encode() + b"\0"
    for at, kind, _, _, offset, size, *_ in rows:
        if kind != _NO_BITS and file.at(rows[names][4] + at, len(wanted)) == wanted:
            return offset, max(0, min(size, file.size - offset))
    return None


def _head(file: ElfFile) -> tuple[Any, ...] | None:
    head = file.at(0, _HEADER.size)
    return _HEADER.unpack(head) if len(head) == _HEADER.size and head.startswith(_IDENT) else None


def _parse(file: ElfFile) -> Elf | None:
    head = _head(file)
    if head is None:
        return None
    machine, start, entry_size, count = head[1], head[4], head[8], head[9]
    if entry_size != _SEGMENT.size:
        return Elf(machine=machine)
    segments = list(_segments(file.at(start, min(count, _MOST_SEGMENTS) * _SEGMENT.size)))
    entries: dict[int, list[int]] = {}
    for segment in segments:
        if segment.kind == _DYNAMIC and not entries:
            for tag, value in _dynamic(file.at(segment.offset, min(segment.size, _MOST_DYNAMIC))):
                entries.setdefault(tag, []).append(value)
    strings = _Strings(file, segments, entries)
    return Elf(
        soname=strings.first(_SONAME),
        needed=strings.all(_NEEDED),
        rpath=strings.first(_RPATH),
        runpath=strings.first(_RUNPATH),
        build_id=next(_build_ids(file, segments), None),
        machine=machine,
    )


def _segments(table: bytes) -> Iterator[_Segment]:
    for at in range(0, len(table) - _SEGMENT.size + 1, _SEGMENT.size):
        kind, _, offset, address, _, size, _, _ = _SEGMENT.unpack_from(table, at)
        yield _Segment(kind, offset, address, size)


def _dynamic(table: bytes) -> Iterator[tuple[int, int]]:
    for at in range(0, len(table) - _ENTRY.size + 1, _ENTRY.size):
        tag, value = _ENTRY.unpack_from(table, at)
        if tag == 0:
            return
        yield tag, value


class _Strings:
    """Reads the strings to which the entries of the dynamic section refer.

    The dynamic section contains the address of the string table. The file offset is found through the loadable segment
    that contains this address.
    """

    def __init__(self, file: ElfFile, segments: list[_Segment], entries: dict[int, list[int]]) -> None:
        self._file = file
        self._entries = entries
        self._size = entries.get(_STRSZ, [0])[0]
        address = entries.get(_STRTAB, [-1])[0]
        loads = [item for item in segments if item.kind == _LOAD and item.address <= address < item.address + item.size]
        self._offset = loads[0].offset + address - loads[0].address if loads else None

    def first(self, tag: int) -> str | None:
        return next(iter(self.all(tag)), None)

    def all(self, tag: int) -> tuple[str, ...]:
        found = (self._string(index) for index in self._entries.get(tag, [])[:_MOST_SEGMENTS])
        return tuple(text for text in found if text)

    def _string(self, index: int) -> str | None:
        if self._offset is None or index >= self._size:
            return None
        raw, end, _ = self._file.at(self._offset + index, min(_LONGEST, self._size - index)).partition(b"\0")
        return raw.decode("utf-8", "backslashreplace") if end else None


def _build_ids(file: ElfFile, segments: list[_Segment]) -> Iterator[str]:
    for segment in segments:
        if segment.kind != _NOTES:
            continue
        notes, at = file.at(segment.offset, min(segment.size, _MOST_NOTES)), 0
        while at + _NOTE.size <= len(notes):
            name_size, size, kind = _NOTE.unpack_from(notes, at)
            name_at = at + _NOTE.size
            value_at = name_at + _padded(name_size)
            value = notes[value_at : value_at + size]
            if kind == _BUILD_ID and notes[name_at : name_at + name_size] == b"GNU\0" and len(value) == size <= 64:
                yield value.hex()
            at = value_at + _padded(size)


def _padded(size: int) -> int:
    return (size + 3) & ~3


def loaded_as(path: str) -> str:
    """An older loader loads lib/tls/x.so in place of lib/x.so. Return lib/x.so if `path` is lib/tls/x.so.

    If `path` is not in a subfolder of LEGACY_HWCAPS, the result is `path`.
    """
    folders, name = path.split("/")[:-1], path.rpartition("/")[2]
    while ".so" in name and folders and folders[-1] in LEGACY_HWCAPS:
        folders.pop()
    return "/".join([*folders, name])
