"""Determines for which GPU architectures a compiled file has machine code or PTX, without running or unpacking the
code.

nvcc stores device code in the ELF section .nv_fatbin. The section has one container for each translation unit, and a
container has one entry for each architecture. The header of an entry contains its kind and architecture even if its
code is compressed, so only headers are read. NVIDIA does not document this layout. It was derived from files of CUDA
11.7 to 13.0, and the results were compared with the output of cuobjdump.

The file may be malicious. Therefore every offset is checked, and the number of reads is limited.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.selftest.inventory import elf_reader
from envbuild.selftest.inventory.elf_reader import ElfFile

SECTION = ".nv_fatbin"
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, number of bytes after the header
_MAGIC = 0xBA55ED50
_MAGIC_BYTES = struct.pack("<I", _MAGIC)
# kind, version, header size, bytes of code after the header, compressed size, unknown, minor and major version, SM
# (architecture number), offset of the name, size of the name, flags
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")
_KINDS = {1: "compute", 2: "sm"}  # PTX and machine code; GPUs cannot run other kinds, such as input for the linker
_SPECIFIC, _FAMILY = 1 << 20, 1 << 21  # flags of architecture-specific code (sm_90a) and of family code (sm_100f)

_MOST_ENTRIES = 1 << 18  # libtorch_cuda has about 10000
_MOST_PADDING = 1 << 24  # the most bytes between two containers
_BLOCK = 1 << 16


@dataclass(frozen=True)
class DeviceCode:
    """The GPU architectures of a file's device code.

    `architectures`: sorted, without duplicates, and written as in torch: "sm_90" and "sm_90a" are machine code,
    "compute_90" is PTX. `damaged`: whether a part of the section could not be read.
    """

    architectures: tuple[str, ...] = ()
    damaged: bool = False


def read(path: str) -> DeviceCode | None:
    """Return the GPU architectures of the device code in a file. The code itself is not read, only its headers. The
    result is None if the file cannot be read, is not an ELF file, or has no section .nv_fatbin."""
    with elf_reader.open_elf(path) as file:
        try:
            found = elf_reader.find_section(file, SECTION) if file else None
            return _walked(file, *found) if file and found else None
        except OSError:
            return None


class _Damaged(Exception):
    """Raised at the first invalid data of the section; the data after it is not read."""


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
    """Yield (kind, SM, suffix) of each entry.

    Raises _Damaged if a header is invalid, if an entry extends beyond its container, or if there are too many headers.
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
    """Return the offset of the next container, which is after the zeros that may follow the previous container."""
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
