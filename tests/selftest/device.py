"""Creates files with device code: headers as nvcc 13.0 writes them, inside an ELF file."""

from __future__ import annotations

import struct

# Entry headers, each from a real file; the code after them is left out, and its length is set.
HEADS = {
    "sm_80": "02000101 40000000 b80b0000 00000000 00000000 00000000 08000100 50000000"
    "00000000 00000000 11000000 00000000 00000000 00000000 00000000 00000000",
    "sm_80 compressed": "02000101 40000000 80030000 00000000 7d030000 00000000 08000100 50000000"
    "00000000 00000000 11800000 00000000 00000000 00000000 280c0000 00000000",
    "compute_80": "01000101 50000000 60020000 00000000 00000000 40000000 00000900 50000000"
    "00000000 00000000 11000000 00000000 00000000 00000000 00000000 00000000 48000000 00000000 00000000 00000000",
    "compute_80 compressed": "01000101 50000000 58010000 00000000 55010000 40000000 00000900 50000000"
    "00000000 00000000 11800000 00000000 00000000 00000000 5b020000 00000000 48000000 00000000 00000000 00000000",
    "sm_90": "02000101 40000000 78080000 00000000 00000000 00000000 08000100 5a000000"
    "00000000 00000000 11000000 00000000 00000000 00000000 00000000 00000000",
    "sm_90a": "02000101 40000000 780e0000 00000000 00000000 00000000 08000100 5a000000"
    "00000000 00000000 11001000 00000000 00000000 00000000 00000000 00000000",
    "compute_90a": "01000101 50000000 58010000 00000000 57010000 40000000 00000900 5a000000"
    "00000000 00000000 11801000 00000000 00000000 00000000 5c020000 00000000 48000000 00000000 00000000 00000000",
    "sm_100f": "02000101 60000000 60060000 00000000 00000000 40000000 08000100 64000000"
    "00000000 00000000 11002001 00000000 00000000 00000000 00000000 00000000 48000000 10000000"
    "00020900 00040b08 00000000 00000000 00000000 00000000",
    "sm_120": "02000101 60000000 70060000 00000000 00000000 40000000 08000100 78000000"
    "00000000 00000000 11000001 00000000 00000000 00000000 00000000 00000000 48000000 10000000"
    "00020900 00040b08 00000000 00000000 00000000 00000000",
}
CODE = b"code" * 16


def container(*names: str) -> bytes:
    """Return the fatbin container of one translation unit."""
    entries = b""
    for name in names:
        head = bytes.fromhex(HEADS[name])
        entries += head[:8] + struct.pack("<Q", len(CODE)) + head[16:] + CODE
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def elf_with(sections: dict[str, bytes], machine: int = 62) -> bytes:
    """Return an ELF file with only these sections; it cannot be loaded."""
    table, rows, content = b"\0", [bytes(64)], b""
    for name, data in {**sections, ".shstrtab": b""}.items():
        at = len(table)
        table += name.encode() + b"\0"
        data = data or table
        rows.append(struct.pack("<IIQQQQIIQQ", at, 1, 2, 0, 64 + len(content), len(data), 0, 0, 8, 0))
        content += data
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, machine, 1, 0, 0, 64 + len(content), 0, 64,
                       56, 0, 64, len(rows), len(rows) - 1)  # fmt: skip
    return head + content + b"".join(rows)


def library(*names: str, machine: int = 62) -> bytes:
    """Return a shared library with this device code; without names, with host code only."""
    return elf_with({".text": b"text", **({".nv_fatbin": container(*names)} if names else {})}, machine)
