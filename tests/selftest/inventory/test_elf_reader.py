"""The ELF reader on files from a linker and on hostile files."""

import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from envbuild.selftest.inventory import elf_reader
from selftest.environments import built, library

needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc to build a library with")


@pytest.fixture
def cublas(tmp_path: Path) -> Path:
    path = tmp_path / "libcublas.so.12"
    path.write_bytes(library("cublas", "12.1.3.1"))
    return path


@needs_gcc
def test_output_of_the_linker_is_read(cublas: Path) -> None:
    found = elf_reader.read(str(cublas))
    assert found is not None
    assert (found.soname, found.runpath, found.rpath) == ("libcublas.so.12", "$ORIGIN", None)
    assert found.needed[0] == "libcublasLt.so.12"
    notes = subprocess.run(["readelf", "-n", cublas], capture_output=True, text=True).stdout
    assert f"Build ID: {found.build_id}\n" in notes


@needs_gcc
def test_rpath_and_runpath_are_distinguished(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    flags = ("-Wl,--disable-new-dtags,-rpath,$ORIGIN/../a:/b", "-Wl,--build-id=none")
    path.write_bytes(built("", "lib.so", *flags, linked={}))
    found = elf_reader.read(str(path))
    assert found is not None
    assert (found.rpath, found.runpath, found.build_id) == ("$ORIGIN/../a:/b", None, None)


@needs_gcc
def test_a_file_cut_anywhere_is_read_as_far_as_it_goes(cublas: Path) -> None:
    whole = cublas.read_bytes()
    for length in [*range(0, 1200, 7), *range(1200, len(whole), 501)]:
        cublas.write_bytes(whole[:length])
        assert (elf_reader.read(str(cublas)) is None) == (length < 64)


@pytest.mark.slow
@needs_gcc
def test_no_byte_that_is_changed_breaks_the_reader(cublas: Path) -> None:
    whole = cublas.read_bytes()
    header, notes = range(16, 64 + 56 * 12), range(0x200, 0x600)
    for at in (*header, *notes):
        for value in (0, 0x7F, 0xFF):
            cublas.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            found = elf_reader.read(str(cublas))
            assert found is None or len(found.needed) <= 256


def segments(*rows: tuple[int, int, int, int], count: "int | None" = None) -> bytes:
    """Return an ELF header with program headers of (kind, offset, address, size)."""
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 3, 62, 1, 0, 64, 0, 0, 64, 56,
                       len(rows) if count is None else count, 0, 0, 0)  # fmt: skip
    return head + b"".join(struct.pack("<IIQQQQQQ", kind, 4, o, a, a, size, size, 8) for kind, o, a, size in rows)


HUGE = (1 << 64) - 1
HOSTILE = {
    "nothing": b"",
    "text": b"hello" * 100,
    "32 bits": b"\x7fELF\x01\x01" + bytes(100),
    "no program headers": segments(),
    "headers that are not there": segments(count=65535),
    "a dynamic section outside the file": segments((2, HUGE, 0, HUGE)),
    "a dynamic section without strings": segments((2, 120, 0, HUGE)) + struct.pack("<qQ", 14, 5) * 1000,
    "strings outside the file": segments((2, 176, 0, 48), (1, HUGE - 5, 0, HUGE))
    + struct.pack("<qQqQqQ", 5, 100, 10, HUGE, 14, HUGE - 1),
    "an endless string": segments((2, 176, 0, 64), (1, 0, 0, HUGE))
    + struct.pack("<qQqQqQqQ", 5, 240, 10, HUGE, 14, 0, 0, 0)
    + b"x" * 10000,
    "100000 needs": segments((2, 176, 0, HUGE), (1, 0, 0, HUGE))
    + struct.pack("<qQqQ", 5, 0, 10, HUGE)
    + struct.pack("<qQ", 1, 1) * 100_000,
    "a note of no end": segments((4, 120, 0, HUGE)) + struct.pack("<III", 0xFFFFFFFF, 0xFFFFFFFF, 3) * 10,
    "notes of no length": segments((4, 120, 0, HUGE)) + bytes(1 << 17),
    "a long build id": segments((4, 120, 0, HUGE)) + struct.pack("<III", 4, 5000, 3) + b"GNU\0" + b"x" * 5000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_read_within_bounds(case: str, tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(HOSTILE[case])
    found = elf_reader.read(str(path))
    if found is not None:
        assert (found.soname, found.build_id) == (None, None)
        assert len(found.needed) <= 256


def test_a_file_that_is_not_regular_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.so")
    for path in ("pipe.so", "absent.so", "."):
        assert elf_reader.read(str(tmp_path / path)) is None
    assert elf_reader.read("/dev/zero") is None
    assert elf_reader.read("a\0b") is None
