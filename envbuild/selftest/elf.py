"""What an ELF file says of itself to the loader: soname, search paths, build id. Never loads or maps it.

Reads 64-bit little-endian files (x86-64, aarch64). The file may be cut, or made to mislead: every offset is checked
against the file, every count and length is bounded, and what cannot be read is left out.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

_IDENT = b"\x7fELF\x02\x01"  # 64 bits, little-endian
_HEADER = struct.Struct("<16xHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_ENTRY = struct.Struct("<qQ")
_NOTE = struct.Struct("<III")
_LOAD, _DYNAMIC, _NOTES = 1, 2, 4
_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 10, 14, 15, 29
_BUILD_ID = 3

_MOST_SEGMENTS, _MOST_DYNAMIC, _MOST_NOTES, _LONGEST = 256, 1 << 16, 1 << 16, 1 << 12


@dataclass(frozen=True)
class Elf:
    """`rpath` is searched before LD_LIBRARY_PATH, and for what its dependencies need too; `runpath` after it, and for
    the file's own needs only. Where a file has both, the loader ignores `rpath`."""

    soname: str | None = None
    needed: tuple[str, ...] = ()
    rpath: str | None = None
    runpath: str | None = None
    build_id: str | None = None


@dataclass(frozen=True)
class _Segment:
    kind: int
    offset: int
    address: int
    size: int


class _File:
    """A file read by position; what lies outside it comes back short."""

    def __init__(self, fd: int, size: int) -> None:
        self._fd = fd
        self._size = size

    def at(self, offset: int, length: int) -> bytes:
        if offset < 0 or length <= 0 or offset >= self._size:
            return b""
        return os.pread(self._fd, min(length, self._size - offset), offset)


def read(path: str) -> Elf | None:
    """None for what is no such file, or cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return _parse(_File(fd, os.fstat(fd).st_size))  # a pipe's or a device's size is 0
    except OSError:
        return None
    finally:
        os.close(fd)


def _parse(file: _File) -> Elf | None:
    head = file.at(0, _HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_IDENT):
        return None
    _, _, _, _, start, _, _, _, entry_size, count, _, _, _ = _HEADER.unpack(head)
    if entry_size != _SEGMENT.size:
        return Elf()
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
    """The dynamic section's strings; its table is named by address, which the loaded segments turn into an offset."""

    def __init__(self, file: _File, segments: list[_Segment], entries: dict[int, list[int]]) -> None:
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


def _build_ids(file: _File, segments: list[_Segment]) -> Iterator[str]:
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
