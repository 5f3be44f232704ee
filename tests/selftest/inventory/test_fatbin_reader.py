"""The reader of device code on output of nvcc, compared with cuobjdump, and on hostile files."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from envbuild.selftest.inventory import extension_file_reader, fatbin_reader
from envbuild.selftest.inventory.fatbin_reader import DeviceCode
from selftest.device import HEADS, container, elf_with, library

KERNEL = """
__global__ void add(float* x, int n) { int i = threadIdx.x; if (i < n) x[i] += 1; }
extern "C" void run(float* x, int n) { add<<<1, 32>>>(x, n); }
"""
NVCC, CUOBJDUMP = shutil.which("nvcc"), shutil.which("cuobjdump")


def found(folder: Path, content: bytes) -> DeviceCode | None:
    path = folder / "module.so"
    path.write_bytes(content)
    return fatbin_reader.read(str(path))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_as_nvcc_wrote_it(name: str, tmp_path: Path) -> None:
    assert found(tmp_path, library(name)) == DeviceCode((name.partition(" ")[0],))


def test_several_units_with_padding_between_them(tmp_path: Path) -> None:
    units = container("sm_90a", "compute_80") + bytes(24) + container() + container("sm_80", "sm_120") + bytes(8)
    code = found(tmp_path, elf_with({".data": b"x", ".nv_fatbin": units}))
    assert code == DeviceCode(("sm_80", "sm_90a", "sm_120", "compute_80"))


def test_host_code_alone_is_distinguished_from_a_file_without_architectures(tmp_path: Path) -> None:
    assert found(tmp_path, library()) is None
    assert found(tmp_path, elf_with({".nv_fatbin": container()})) == DeviceCode()
    assert found(tmp_path, b"no ELF file") is None


def _cut(at: int, size: int, value: int) -> bytes:
    good = bytearray(container("sm_80", "sm_90"))
    good[at : at + size] = value.to_bytes(size, "little")
    return bytes(good)


ENTRY = 16 + 64 + 64  # where the second entry begins, after the file's head and the first entry's head and code
DAMAGED = {
    "another magic": _cut(0, 4, 0xBA55ED51),
    "a container of no length": _cut(6, 2, 0),
    "a container that ends outside": _cut(8, 8, (1 << 64) - 1),
    "an entry that ends outside": _cut(ENTRY + 8, 8, 1 << 40),
    "an entry of no length": _cut(ENTRY + 4, 4, 0),
    "text": b"hello",
    "a container that is cut": container("sm_80")[:-5],
    "half a head": container("sm_80")[:30],
    "containers without end": struct.pack("<IHHQ", 0xBA55ED50, 1, 16, 0) * (1 << 18 | 1),
    "nothing but padding": bytes((1 << 24) + (1 << 18)) + b"x",
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_reported_and_what_was_read_before_is_kept(case: str, tmp_path: Path) -> None:
    code = found(tmp_path, elf_with({".nv_fatbin": DAMAGED[case]}))
    assert code is not None and code.damaged
    assert code.architectures == (("sm_80",) if "entry" in case else ())


def test_no_byte_that_is_changed_and_no_cut_breaks_the_reader(tmp_path: Path) -> None:
    whole = library("sm_80", "compute_90a")
    for at in range(len(whole)):
        for value in (0, 0x7F, 0xFF):
            found(tmp_path, whole[:at] + bytes([value]) + whole[at + 1 :])
        found(tmp_path, whole[:at])


def test_a_file_is_classified_by_name_and_content(tmp_path: Path) -> None:
    path = tmp_path / "file.so"
    path.write_bytes(library("sm_90"))
    read = extension_file_reader.read(str(path), "xformers/_C.cpython-311-x86_64-linux-gnu.so")
    assert (read.module, read.abi, read.machine, read.architectures) == ("xformers._C", "cpython-311", 62, ("sm_90",))
    assert read.is_extension and not read.links_torch and not read.damaged
    for name, module in {
        "amp_C.so": ("amp_C", None),
        "a/b.abi3.so": ("a.b", "abi3"),
        "libfoo.so": (None, None),
        "a/libfoo.so.1.2": (None, None),
        "a-b/c.so": (None, None),
    }.items():
        assert extension_file_reader.module_of(name) == module


@pytest.mark.slow
@pytest.mark.skipif(not NVCC, reason="no nvcc to compile with")
@pytest.mark.parametrize("packing", ["", "--no-compress", "-Xfatbin -compress-all"])
def test_output_of_nvcc_is_read(packing: str, tmp_path: Path) -> None:
    source, built = tmp_path / "k.cu", tmp_path / "k.so"
    source.write_text(KERNEL, encoding="utf-8")
    codes = ["-gencode=arch=compute_90,code=sm_90", "-gencode=arch=compute_80,code=[sm_80,compute_80]"]
    subprocess.run(
        [str(NVCC), "-shared", "-Xcompiler", "-fPIC", *packing.split(), *codes, "-o", str(built), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    assert fatbin_reader.read(str(built)) == DeviceCode(("sm_80", "sm_90", "compute_80"))
    if CUOBJDUMP:
        listing = subprocess.run([CUOBJDUMP, str(built)], check=True, capture_output=True, text=True).stdout
        kinds = {"elf": "sm", "ptx": "compute"}
        pairs = re.findall(r"Fatbin (elf|ptx) code:\n=+\narch = sm_(\w+)", listing)
        assert {f"{kinds[kind]}_{number}" for kind, number in pairs} == {"sm_80", "sm_90", "compute_80"}
