"""Reads for which GPU architectures a compiled file has machine code or PTX, without running or unpacking it.

nvcc stores device code in the section .nv_fatbin: one container for each translation unit, with one entry for each
architecture. An entry's header states its kind and SM, whether or not its code is compressed, so only headers are read.
NVIDIA does not document the layout; it was derived from files of CUDA 11.7 to 13.0 and compared with the output of
cuobjdump. The file may be malicious: every offset is checked, and the number of reads is limited.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.selftest.inventory import elf_reader
from envbuild.selftest.inventory.elf_reader import ElfFile

SECTION = ".nv_fatbin"
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, bytes that follow it
_MAGIC = 0xBA55ED50
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
# kind, version, header size, bytes of code after it, compressed, -, minor, major, SM, offset of the name, size, flags
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_KINDS = {1: "compute", 2: "sm"}  # PTX and machine code; others, such as input for the linker, run on no GPU
_SPECIFIC, _FAMILY = 1 << 20, 1 << 21  # flags: sm_90a, sm_100f

_MOST_ENTRIES = 1 << 18  # libtorch_cuda has about 10000
_MOST_PADDING = 1 << 24  # bytes without a container
_BLOCK = 1 << 16


@dataclass(frozen=True)
class DeviceCode:
    """The device code of a file.

    `architectures` as torch writes them: "sm_90" and "sm_90a" are machine code, "compute_90" is PTX; sorted, without
    duplicates. `damaged`: not all of the section could be read.
    """

    architectures: tuple[str, ...] = ()
    damaged: bool = False


def read(path: str) -> DeviceCode | None:
    """Read a file; None if it has no such section, is not an ELF file or cannot be read."""
    with elf_reader.open_elf(path) as file:
        try:
            found = elf_reader.find_section(file, SECTION) if file else None
            return _walked(file, *found) if file and found else None
        except OSError:
            return None


class _Damaged(Exception):
    """The remaining data is invalid."""


def _walked(file: ElfFile, start: int, size: int) -> DeviceCode:
    found: set[tuple[str, int, str]] = set()
    damaged = False
    try:
        for one in _entries(file, start, start + size):
            found.add(one)
    except _Damaged:
        damaged = True
    ordered = sorted(found, key=lambda item: (item[0] != "sm", item[1:]))
    return DeviceCode(tuple(f"{kind}_{number}{suffix}" for kind, number, suffix in ordered), damaged)


def _entries(file: ElfFile, at: int, end: int) -> Iterator[tuple[str, int, str]]:
    """Yield (kind, SM, suffix) of each entry; raises _Damaged if headers are invalid, exceed their container or are too
    many.
    """
    left = _MOST_ENTRIES
    at = _after_padding(file, at, end)
    while at < end:
        head = file.at(at, _CONTAINER.size)
        if len(head) < _CONTAINER.size or not left:
            raise _Damaged
        magic, _, head_size, size = _CONTAINER.unpack(head)
        at, stop = at + head_size, at + head_size + size
        if magic != _MAGIC or head_size < _CONTAINER.size or stop > end:
            raise _Damaged
        left -= 1
        while at < stop:
            entry = file.at(at, _ENTRY.size)
            if len(entry) < _ENTRY.size or not left:
                raise _Damaged
            kind, _, head_size, size, _, _, _, _, number, _, _, flags = _ENTRY.unpack(entry)
            at += head_size + size
            if head_size < _ENTRY.size or at > stop:
                raise _Damaged
            if kind in _KINDS:
                yield _KINDS[kind], number, "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else ""
            left -= 1
        at = _after_padding(file, stop, end)


def _after_padding(file: ElfFile, at: int, end: int) -> int:
    """The offset after the zeros between two containers."""
    if file.at(at, len(_MAGIC_BYTES)) == _MAGIC_BYTES:
        return at
    limit = at + _MOST_PADDING
    while at < end:
        block = file.at(at, min(_BLOCK, end - at))
        rest = block.lstrip(b"\0")
        at += len(block) - len(rest)
        if rest:
            return at
        if not block or at > limit:
            raise _Damaged
    return end
