"""dockerfiles/unpack, as the build runs it: accepted and refused archives."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envbuild.fetch.archive_spec import UNPACKER
from unit.support import write_tar

LINK, HARD = tarfile.SYMTYPE, tarfile.LNKTYPE
Members = Mapping[str, bytes | Mapping[str, Any]]

LIBRARY = "usr/local/cuda-13.0/compat/libcuda.so.580.95.05"
COMPAT: Members = {
    "usr/": {"type": tarfile.DIRTYPE},
    LIBRARY: b"the driver's",
    "usr/local/cuda-13.0/compat/libcuda.so.1": {"type": LINK, "linkname": "libcuda.so.580.95.05"},
    "usr/share/doc/changelog": b"not wanted",
}
TOOLKIT: Members = {
    "cuda/bin/nvcc": b"#!/bin/sh\n",
    "cuda/version.json": b'{"cuda": {"version": "12.6.3"}}',
    "cuda/lib64": {"type": LINK, "linkname": "targets/x86_64-linux/lib"},
    "cuda/targets/x86_64-linux/lib/libcudart.so.12": b"the runtime",
    "cuda/targets/x86_64-linux/include/a.h": {"type": HARD, "linkname": "cuda/version.json"},
    "cuda/nvvm/up": {"type": LINK, "linkname": "../bin/nvcc"},
}


def unpack(kind: str, file: Path, *target: Path) -> tuple[int, str]:
    """Return the exit code and the output."""
    command: list[str | Path] = [sys.executable, UNPACKER, kind, file, *target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done.returncode, (done.stdout + done.stderr).strip()


def held(folder: Path) -> dict[str, str]:
    """Return path -> content, or "-> target" of a link."""
    return {
        str(path.relative_to(folder)): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("mode", ["w:gz", "w:xz", "w:bz2", "w"])
def test_the_folder_of_the_drivers_library_is_taken_and_nothing_else(tmp_path: Path, mode: str) -> None:
    write_tar(tmp_path / "compat", COMPAT, mode)
    assert unpack("cuda-compat", tmp_path / "compat", tmp_path / "out") == (0, "580.95.05")
    wanted = {"libcuda.so.580.95.05": "the driver's", "libcuda.so.1": "-> libcuda.so.580.95.05"}
    assert held(tmp_path / "out") == wanted


def test_a_toolkit_is_taken_with_its_links(tmp_path: Path) -> None:
    write_tar(tmp_path / "toolkit", TOOLKIT)
    assert unpack("cuda-toolkit", tmp_path / "toolkit", tmp_path / "out") == (0, "12.6.3")
    assert held(tmp_path / "out") == {
        "bin/nvcc": "#!/bin/sh\n",
        "version.json": '{"cuda": {"version": "12.6.3"}}',
        "lib64": "-> targets/x86_64-linux/lib",
        "targets/x86_64-linux/lib/libcudart.so.12": "the runtime",
        "targets/x86_64-linux/include/a.h": '{"cuda": {"version": "12.6.3"}}',
        "nvvm/up": "-> ../bin/nvcc",
    }
    assert os.access(tmp_path / "out" / "bin" / "nvcc", os.X_OK)


def test_looking_writes_nothing(tmp_path: Path) -> None:
    write_tar(tmp_path / "toolkit", TOOLKIT)
    assert unpack("cuda-toolkit", tmp_path / "toolkit") == (0, "12.6.3")
    assert [path.name for path in tmp_path.iterdir()] == ["toolkit"]


def test_owners_and_odd_modes_are_not_kept(tmp_path: Path) -> None:
    """Otherwise a set-uid program of root in the archive would be a set-uid program of root in the image too."""
    write_tar(tmp_path / "a", {"libcuda.so.1.2": b"x", "plain": {"mode": 0o666}, "suid": {"mode": 0o4777, "uid": 42}})
    assert unpack("cuda-compat", tmp_path / "a", tmp_path / "out")[0] == 0
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in (tmp_path / "out").iterdir()}
    assert modes == {"libcuda.so.1.2": "0o755", "plain": "0o644", "suid": "0o755"}
    assert (tmp_path / "out" / "suid").stat().st_uid == os.getuid()


def test_a_debian_package_is_an_archive_too(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: cuda-compat-13-0\nVersion: 580.95.05-0\nArchitecture: amd64\nMaintainer: x <x@x>\nDescription: x\n"
    )
    library = root / LIBRARY
    library.parent.mkdir(parents=True)
    library.write_text("the driver's")
    built = subprocess.run(["dpkg-deb", "-Zxz", "--build", root, tmp_path / "a.deb"], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert unpack("cuda-compat", tmp_path / "a.deb", tmp_path / "out") == (0, "580.95.05")
    assert held(tmp_path / "out") == {"libcuda.so.580.95.05": "the driver's"}


def package(*members: tuple[bytes, bytes]) -> bytes:
    """Return an ar archive of these members, each with the size in its header."""
    blocks = [name.ljust(48) + size.ljust(10) + b"`\n" for name, size in members]
    return b"!<arch>\n" + b"".join(blocks)


def test_a_package_with_a_size_below_zero_ends(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(package((b"debian-binary", b"-60")))
    assert unpack("cuda-compat", tmp_path / "a")[0] == 1


def test_a_large_package_is_not_read_into_memory(tmp_path: Path) -> None:
    """Two GB of zeros follow the library; a quarter of that is available as memory."""
    members: Members = {"libcuda.so.1.2": b"x"}
    write_tar(tmp_path / "tar", members, "w")
    size = 2 << 30
    with (tmp_path / "a").open("wb") as file:
        file.write(package((b"data.tar", str(size).encode())) + (tmp_path / "tar").read_bytes())
        file.truncate(68 + size)
    limited = ["sh", "-c", 'ulimit -v 524288; exec "$@"', "sh", sys.executable]
    limited += [str(UNPACKER), "cuda-compat", str(tmp_path / "a")]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "1.2", "")


REFUSED: dict[str, tuple[Members, str]] = {
    "an absolute name": ({"/tmp/evil": b"x"}, "leads out of the archive"),
    "a climbing name": ({"usr/../../evil": b"x"}, "leads out of the archive"),
    "a device": ({"dev/sda": {"type": tarfile.BLKTYPE}}, "is not a file, folder or link"),
    "a pipe": ({"fifo": {"type": tarfile.FIFOTYPE}}, "is not a file, folder or link"),
    "an absolute link": ({"usr/local/cuda-13.0/compat/l": {"type": LINK, "linkname": "/etc"}}, "outside the folder"),
    "a climbing link": ({"usr/local/cuda-13.0/compat/l": {"type": LINK, "linkname": "../../x"}}, "outside the folder"),
    "a link that climbs by one": (
        {"usr/local/cuda-13.0/compat/l": {"type": LINK, "linkname": "../x"}},
        "outside the folder",
    ),
    "a link that climbs later": (
        {"usr/local/cuda-13.0/compat/a/l": {"type": LINK, "linkname": "b/../../../x"}},
        "outside the folder",
    ),
    "a file behind a link": (
        {
            "usr/local/cuda-13.0/compat/l": {"type": LINK, "linkname": "."},
            "usr/local/cuda-13.0/compat/l/x": b"x",
        },
        "which is not a folder",
    ),
    "a file behind a file": ({f"{LIBRARY}/x": b"x"}, "which is not a folder"),
    "a hard link to elsewhere": (
        {"usr/local/cuda-13.0/compat/l": {"type": HARD, "linkname": "usr/share/doc/changelog"}},
        "is not a file in the same folder",
    ),
    "a hard link out of the archive": (
        {"usr/local/cuda-13.0/compat/l": {"type": HARD, "linkname": "../../etc/shadow"}},
        "is not a file in the same folder",
    ),
    "a hard link to nothing": (
        {"usr/local/cuda-13.0/compat/l": {"type": HARD, "linkname": LIBRARY.replace("usr", "etc")}},
        "is not a file in the same folder",
    ),
    "two drivers": ({"usr/local/cuda-13.0/compat/libcuda.so.550.54.14": b"x"}, "one file libcuda.so.<driver>"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_path_that_leaves_its_folder_is_refused(tmp_path: Path, case: str) -> None:
    members, words = REFUSED[case]
    (tmp_path / "box" / "in").mkdir(parents=True)
    write_tar(tmp_path / "box" / "a", {**COMPAT, **members})
    for target in ([], [tmp_path / "box" / "in" / "out"]):
        code, output = unpack("cuda-compat", tmp_path / "box" / "a", *target)
        assert code == 1
        assert output.startswith("error: invalid archive for cuda-compat: ")
        assert words in output
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == ["box", "box/a", "box/in"]


def test_a_member_that_comes_twice_is_refused(tmp_path: Path) -> None:
    """The first member is a link. The second is a file with the same path, which would be written through the link."""
    write_tar(tmp_path / "a", {"libcuda.so.1.2": b"x", "./x": {"type": LINK, "linkname": "y"}, "x": b"x"})
    code, output = unpack("cuda-compat", tmp_path / "a")
    assert (code, "occurs twice" in output) == (1, True)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"a": b"x"}, "one file bin/nvcc, and contains none"),
        ({"a/bin/nvcc": b"x", "b/bin/nvcc": b"x"}, "contains 'a/bin/nvcc', 'b/bin/nvcc'"),
        ({"bin/nvcc": {"type": LINK, "linkname": "other"}}, "one file bin/nvcc, and contains none"),
        ({"bin/nvcc": b"x"}, "no version.json"),
        ({"bin/nvcc": b"x", "version.json": b"{"}, "no version.json"),
        ({"bin/nvcc": b"x", "version.json": b"[]"}, "no version.json"),
        ({"bin/nvcc": b"x", "version.json": b'{"cuda": {"version": "12; rm"}}'}, "no version.json"),
        ({"bin/nvcc": b"x", "version.json": {"type": tarfile.DIRTYPE}}, "no version.json"),
        ({"bin/nvcc": b"x", "version.json": b"[" * 500_000}, "no version.json"),
        ({"bin/nvcc": b"x", "version.json": b" " * 1_000_001}, "version.json is larger than 1000000 bytes"),
        (
            {
                "bin/nvcc": b"x",
                "a": b" " * 1_000_001,
                "version.json": {"type": HARD, "linkname": "a"},
            },
            "version.json is larger than 1000000 bytes",
        ),
    ],
)
def test_an_archive_that_is_not_a_toolkit_is_refused(tmp_path: Path, members: Members, words: str) -> None:
    write_tar(tmp_path / "a", members)
    code, output = unpack("cuda-toolkit", tmp_path / "a")
    assert code == 1
    assert words in output


@pytest.mark.parametrize(
    "content", [b"", b"x" * 2000, b"!<arch>\n", b"!<arch>\n" + b"x" * 60, b"\x1f\x8b\x08\x00", b"PK"]
)
def test_a_file_that_is_not_an_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    code, output = unpack("cuda-compat", tmp_path / "a")
    assert (code, output.startswith("error: ")) == (1, True)


def test_a_cut_archive_is_refused(tmp_path: Path) -> None:
    for mode in ("w:gz", "w:xz", "w"):
        write_tar(tmp_path / "a", {**COMPAT, "large": os.urandom(100_000)}, mode)
        whole = (tmp_path / "a").read_bytes()
        (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
        assert unpack("cuda-compat", tmp_path / "a")[0] == 1


def test_a_folder_that_is_there_is_not_written_into(tmp_path: Path) -> None:
    """For example if the base image already has a toolkit."""
    write_tar(tmp_path / "a", TOOLKIT)
    (tmp_path / "out").mkdir()
    code, output = unpack("cuda-toolkit", tmp_path / "a", tmp_path / "out")
    assert (code, "File exists" in output) == (1, True)
    assert list((tmp_path / "out").iterdir()) == []
