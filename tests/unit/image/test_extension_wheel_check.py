"""A wheel built from source: one that matches the request, and every deviation."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from selftest.device import elf_with, library

from envbuild.facts import database
from envbuild.facts.database import Suite
from envbuild.image import extension_wheel_check

SUFFIX = "cpython-311-x86_64-linux-gnu.so"
TAG = "cp311-cp311-linux_x86_64"
GOOD = {
    "apex/__init__.py": b"",
    "apex/normalization/__init__.py": b"",
    f"amp_C.{SUFFIX}": library("sm_90"),
    f"fused_layer_norm_cuda.{SUFFIX}": library("sm_90"),
    f"apex_C.{SUFFIX}": library(),  # host code
}
ASKED = {"name": "apex", "modules": ("amp_C", "apex_C", "fused_layer_norm_cuda", "apex.normalization"), "arch": "9.0"}


def wheel(
    folder: Path,
    files: Mapping[str, bytes],
    tag: str = TAG,
    stated_tag: str | None = None,
    name: str = "apex",
    info: str = "apex-0.1.dist-info",
) -> Path:
    """`stated_tag`: the tag in WHEEL; `info`: the folder of its metadata."""
    file = folder / f"apex-0.1-{tag}.whl"
    about = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nTag: {stated_tag or tag}\n".encode(),
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in {**files, **about}.items():
            archive.writestr(path, content)
    return file


def test_a_wheel_as_asked(tmp_path: Path) -> None:
    made = wheel(tmp_path, GOOD)
    assert extension_wheel_check.wheel_faults(made, **ASKED) == []  # type: ignore[arg-type]
    assert extension_wheel_check.wheel_faults(made, **ASKED, python="3.11") == []  # type: ignore[arg-type]
    found = {item.file.module: item.file.architectures for item in extension_wheel_check.contents(made)}
    assert found == {"amp_C": ("sm_90",), "fused_layer_norm_cuda": ("sm_90",), "apex_C": None}


def test_a_wheel_of_host_code_alone_is_asked_for_no_architecture(tmp_path: Path) -> None:
    made = wheel(tmp_path, {"host.abi3.so": library()}, "cp39-abi3-linux_x86_64")
    assert extension_wheel_check.wheel_faults(made, name="apex", modules=("host",), arch="", python="3.11") == []


def test_modules_of_a_data_folder_are_where_they_will_be(tmp_path: Path) -> None:
    made = wheel(tmp_path, {f"apex-0.1.data/platlib/amp_C.{SUFFIX}": library("sm_90")})
    assert extension_wheel_check.wheel_faults(made, name="apex", modules=("amp_C",), arch="9.0") == []


def test_a_wheel_may_have_commands(tmp_path: Path) -> None:
    made = wheel(tmp_path, {**GOOD, "apex-0.1.data/scripts/ds_report": b"#!python\n"})
    assert extension_wheel_check.wheel_faults(made, **ASKED) == []  # type: ignore[arg-type]


def test_a_wheel_for_any_python_is_read_as_the_newest_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        database, "suites", lambda: {"next": Suite("next", "3.20", "2.50", 16), "old": Suite("old", "3.9", "2", 10)}
    )
    made = wheel(tmp_path, {"amp_C.cpython-320-x86_64-linux-gnu.so": library()}, "py3-none-linux_x86_64")
    assert extension_wheel_check.wheel_faults(made, name="apex", modules=("amp_C",), arch="") == []


def without(name: str) -> dict[str, bytes]:
    return {path: content for path, content in GOOD.items() if not path.startswith(name)}


def packed(folder: Path, method: int) -> Path:
    """Return the good wheel with each file compressed by this method."""
    made = wheel(folder, GOOD)
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(made, "w", method) as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return made


Make = Callable[[Path], Path]
FAULTS: dict[str, tuple[Make, str]] = {
    "built without its extensions": (
        lambda at: wheel(at, {"apex/__init__.py": b""}, "py3-none-any"),
        "its tag is py3-none-any: it was built without its compiled modules",
    ),
    "a module missing": (lambda at: wheel(at, without("fused")), "the module fused_layer_norm_cuda is not in it"),
    "a module of another Python": (
        lambda at: wheel(at, {**without("amp_C"), "amp_C.cpython-310-x86_64-linux-gnu.so": GOOD[f"amp_C.{SUFFIX}"]}),
        "'amp_C.cpython-310-x86_64-linux-gnu.so' is for another Python",
    ),
    "a wheel of another Python": (
        lambda at: wheel(at, GOOD, "cp310-cp310-linux_x86_64"),
        "its tag is cp310-cp310-linux_x86_64, which Python 3.11 on linux x86_64 does not accept",
    ),
    "a wheel of another ABI": (lambda at: wheel(at, GOOD, "cp311-cp311d-linux_x86_64"), "does not accept"),
    "a wheel of another platform": (lambda at: wheel(at, GOOD, "cp311-cp311-linux_aarch64"), "does not accept"),
    "another name in the metadata": (lambda at: wheel(at, GOOD, name="other"), "says Name: other, not apex"),
    "another name of the file": (
        lambda at: wheel(at, GOOD).rename(at / f"apexx-0.1-{TAG}.whl"),
        "the wheel is of apexx, but apex was requested",
    ),
    "no name of a wheel": (lambda at: wheel(at, GOOD).rename(at / "apex.whl"), "is not a wheel's name"),
    "another tag within": (lambda at: wheel(at, GOOD, stated_tag="py3-none-any"), f"says Tag: py3-none-any, not {TAG}"),
    "another card's code": (
        lambda at: wheel(at, {**GOOD, f"amp_C.{SUFFIX}": library("sm_80")}),
        f"'amp_C.{SUFFIX}' has no device code for compute capability 9.0: it has sm_80",
    ),
    "only PTX": (
        lambda at: wheel(at, {**GOOD, f"amp_C.{SUFFIX}": library("compute_80")}),
        "compute capability 9.0: it has compute_80",
    ),
    "no device code at all": (
        lambda at: wheel(at, {path: library() if ".so" in path else text for path, text in GOOD.items()}),
        "no file in it has device code, but code for 9.0 was requested",
    ),
    "another processor": (
        lambda at: wheel(at, {**GOOD, f"amp_C.{SUFFIX}": library("sm_90", machine=183)}),
        f"'amp_C.{SUFFIX}' is not for x86_64",
    ),
    "text for a library": (
        lambda at: wheel(at, {**GOOD, f"amp_C.{SUFFIX}": b"#!/bin/sh"}),
        f"'amp_C.{SUFFIX}' is not a shared library",
    ),
    "device code that makes no sense": (
        lambda at: wheel(at, {**GOOD, f"amp_C.{SUFFIX}": elf_with({".nv_fatbin": b"junk" * 9})}),
        "its device code cannot be read",
    ),
    "a way out": (
        lambda at: wheel(at, {**GOOD, "../evil.py": b""}),
        "'../evil.py' would be written outside the target",
    ),
    "an absolute path": (
        lambda at: wheel(at, {**GOOD, "/etc/passwd": b""}),
        "'/etc/passwd' would be written outside the target",
    ),
    "a control character": (
        lambda at: wheel(at, {**GOOD, "a\x1b[2Jb": b""}),
        r"'a\x1b[2Jb' would be written outside the target",
    ),
    "no wheel": (lambda at: text(at, b"not a zip"), "is not a wheel, or is damaged"),
    "nothing": (lambda at: text(at, b""), "is not a wheel, or is damaged"),
    "a link": (lambda at: added(at, linked()), "'link.so' is not a regular file"),
    "a file twice": (lambda at: added(at, zipfile.ZipInfo("apex/__init__.py")), "'apex/__init__.py' occurs twice"),
    "a file twice once installed": (
        lambda at: wheel(at, {**GOOD, "apex-0.1.data/platlib/apex/__init__.py": b""}),
        "'apex/__init__.py' occurs twice",
    ),
    "a program": (
        lambda at: wheel(at, {**GOOD, "apex-0.1.data/scripts/python": b""}),
        "'apex-0.1.data/scripts/python' would replace a file of the environment",
    ),
    "a program in a folder": (
        lambda at: wheel(at, {**GOOD, "apex-0.1.data/scripts/lib/a": b""}),
        "'apex-0.1.data/scripts/lib/a' would be installed outside site-packages and bin/",
    ),
    "data": (lambda at: wheel(at, {**GOOD, "x.data/data/etc/evil": b""}), "outside site-packages"),
    "another's metadata": (
        lambda at: wheel(at, GOOD, info="evil-1.0.dist-info"),
        "'evil-1.0.dist-info' belongs to another distribution",
    ),
    "another version's metadata": (lambda at: wheel(at, GOOD, info="apex-0.2.dist-info"), "or version"),
    "metadata without a version": (lambda at: wheel(at, GOOD, info="apex.dist-info"), "or version"),
    "a second one's metadata": (
        lambda at: wheel(at, {**GOOD, "apex-0.1.data/purelib/evil-1.0.dist-info/METADATA": b""}),
        "a wheel has one .dist-info folder, this one 2",
    ),
    "a flipped byte": (lambda at: flipped(wheel(at, GOOD)), "is damaged"),
}


def text(folder: Path, content: bytes) -> Path:
    file = folder / f"apex-0.1-{TAG}.whl"
    file.write_bytes(content)
    return file


def linked() -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("link.so")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def added(folder: Path, info: zipfile.ZipInfo) -> Path:
    file = wheel(folder, GOOD)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr(info, b"/etc/passwd")
    return file


def flipped(file: Path) -> Path:
    content = bytearray(file.read_bytes())
    content[content.index(b"amp_C") + 60] ^= 0xFF
    file.write_bytes(bytes(content))
    return file


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_is_named(case: str, tmp_path: Path) -> None:
    make, expected = FAULTS[case]
    found = extension_wheel_check.wheel_faults(make(tmp_path), **ASKED, python="3.11")  # type: ignore[arg-type]
    assert any(expected in fault for fault in found), found
    assert all(fault.isprintable() for fault in found)


def test_all_faults_at_once(tmp_path: Path) -> None:
    """The build of apex leaves such a wheel if the build ignores its flags."""
    made = wheel(tmp_path, {"apex/__init__.py": b""}, "py3-none-any", name="other")
    assert extension_wheel_check.wheel_faults(made, name="apex", modules=("amp_C", "apex_C"), arch="9.0") == [
        "its tag is py3-none-any: it was built without its compiled modules",
        "its METADATA says Name: other, not apex",
        "the module amp_C is not in it",
        "the module apex_C is not in it",
        "no file in it has device code, but code for 9.0 was requested",
    ]


def test_a_wheel_that_is_too_large_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_wheel_check, "_LARGEST", 1 << 20)
    made = wheel(tmp_path, {**GOOD, "zeros": bytes((1 << 20) + 1)})
    (fault,) = extension_wheel_check.wheel_faults(made, **ASKED)  # type: ignore[arg-type]
    assert "unpacked, it is larger" in fault
    monkeypatch.setattr(extension_wheel_check, "_MOST_MEMBERS", 3)
    (fault,) = extension_wheel_check.wheel_faults(made, **ASKED)  # type: ignore[arg-type]
    assert fault == "it has 9 files, at most 3 are allowed"


def test_a_file_that_is_longer_than_it_says_is_damaged(tmp_path: Path) -> None:
    """The archive's directory says 1 byte; unpacking stops there."""
    made = wheel(tmp_path, {"zeros": bytes(1 << 20)})
    content = made.read_bytes()
    size = (1 << 20).to_bytes(4, "little")
    made.write_bytes(content.replace(size, (1).to_bytes(4, "little")))
    found = extension_wheel_check.wheel_faults(made, name="apex", modules=(), arch="")
    assert any("'zeros' is damaged" in fault for fault in found), found


@pytest.mark.slow
def test_no_cut_and_no_changed_byte_ends_in_a_traceback(tmp_path: Path) -> None:
    whole = wheel(tmp_path, GOOD).read_bytes()
    for at in range(0, len(whole), 11):
        for content in (whole[:at], whole[:at] + b"\xff" + whole[at + 1 :]):
            extension_wheel_check.wheel_faults(text(tmp_path, content), **ASKED)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
def test_files_that_installers_skip_are_not_unpacked(tmp_path: Path, method: int) -> None:
    """An LZMA header can request 4 GiB of memory, and the decoder of LZMA raises errors of its own."""
    made = packed(tmp_path, method)
    found = extension_wheel_check.wheel_faults(made, **ASKED)  # type: ignore[arg-type]
    assert "'apex/__init__.py' is neither stored nor deflated" in found
    with pytest.raises(ValueError, match="neither stored nor deflated"):
        extension_wheel_check.contents(made)


def test_a_stored_wheel_is_as_good(tmp_path: Path) -> None:
    assert extension_wheel_check.wheel_faults(packed(tmp_path, zipfile.ZIP_STORED), **ASKED) == []  # type: ignore[arg-type]


def test_a_file_without_a_name_is_refused(tmp_path: Path) -> None:
    made = wheel(tmp_path, {**GOOD, "~x": b""})
    made.write_bytes(made.read_bytes().replace(b"~x", b"\0x"))  # for zipfile, a NUL ends the name
    assert extension_wheel_check.wheel_faults(made, **ASKED) == ["'' would be written outside the target"]  # type: ignore[arg-type]
