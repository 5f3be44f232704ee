"""Layers of archives, and the links of nvcc: an archive's files are those that dockerfiles/unpack makes."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from envbuild.fetch.archive_spec import COMPAT, TOOLKIT, UNPACKER
from envbuild.fetch.sha256_file_store import file_digest
from envbuild.image.layers import layer_cache
from envbuild.image.layers.archive_layers import ArchiveLayer
from envbuild.image.layers.nvcc_links import NvccLinksLayer, missing_links
from envbuild.image.layers.wheel_layers import WheelOfLayer
from envbuild.util.errors import BuildError, HashMismatch
from unit.image.layers.odd_wheels import odd_wheel
from unit.image.layers.uv_oracle import read_layer
from unit.image.test_unpack import COMPAT as COMPAT_MEMBERS
from unit.image.test_unpack import HARD, LINK, Members
from unit.image.test_unpack import TOOLKIT as TOOLKIT_MEMBERS
from unit.support import write_tar

HOME = "opt/venv/lib/python3.11/site-packages/nvidia/cu13"


def packed(recipe: ArchiveLayer | NvccLinksLayer) -> bytes:
    blocks: list[bytes] = []
    layer = layer_cache.stream_layer(recipe, blocks.append)
    assert layer.digest == f"sha256:{hashlib.sha256(b''.join(blocks)).hexdigest()}"
    return b"".join(blocks)


def unpacked(raw: bytes, folder: Path) -> Path:
    folder.mkdir()
    subprocess.run(["tar", "-xz", "-C", folder], input=raw, check=True)
    return folder


def listing(folder: Path) -> dict[str, tuple[int, str, int]]:
    """Return path -> mode, content or target, and the number of hard links of a file."""
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content = f"-> {path.readlink()}" if path.is_symlink() else path.read_text() if path.is_file() else ""
        found[str(path.relative_to(folder))] = (about.st_mode, content, about.st_nlink if path.is_file() else 0)
    return found


@pytest.mark.parametrize(
    ("kind", "members", "folder"),
    [(COMPAT, COMPAT_MEMBERS, "usr/local/cuda/compat"), (TOOLKIT, TOOLKIT_MEMBERS, "usr/local/cuda")],
)
def test_the_layer_has_what_the_unpacker_makes(tmp_path: Path, kind: str, members: Members, folder: str) -> None:
    sha256 = write_tar(tmp_path / "archive", members)
    layer = unpacked(packed(ArchiveLayer(tmp_path / "archive", kind, sha256)), tmp_path / "layer")
    os.umask(os.umask(0o022))
    subprocess.run([sys.executable, UNPACKER, kind, tmp_path / "archive", tmp_path / "made"], check=True)
    assert listing(layer / folder) == listing(tmp_path / "made")


def test_the_folder_may_be_another_one(tmp_path: Path) -> None:
    """The other folder is the one to which the links of a base image lead."""
    sha256 = write_tar(tmp_path / "archive", TOOLKIT_MEMBERS)
    plain, moved = (ArchiveLayer(tmp_path / "archive", TOOLKIT, sha256, folder=name) for name in ("", "/srv/cuda-12.6"))
    one, two = unpacked(packed(plain), tmp_path / "one"), unpacked(packed(moved), tmp_path / "two")
    assert listing(one / "usr/local/cuda") == listing(two / "srv/cuda-12.6")
    assert [path.name for path in two.iterdir()] == ["srv"]
    assert plain.key != moved.key


_DIGEST = """
import os, sys
from pathlib import Path
from envbuild.image.layers.archive_layers import ArchiveLayer
os.umask(int(sys.argv[3], 8))
print(ArchiveLayer(Path(sys.argv[1]), "cuda-toolkit", sys.argv[2]).write(len, len).digest)
"""


def test_the_digest_depends_on_neither_locale_nor_umask_nor_time_zone(tmp_path: Path) -> None:
    members: Members = {**TOOLKIT_MEMBERS, "cuda/\u00e4": b"x", "cuda/z": {"type": LINK, "linkname": "\u00e4"}}
    sha256 = write_tar(tmp_path / "archive", members)
    environments = [
        {"LC_ALL": "C.UTF-8", "TZ": "UTC", "umask": "022"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "TZ": "Asia/Tokyo", "umask": "077"},
    ]
    digests = {
        subprocess.run(
            [sys.executable, "-c", _DIGEST, tmp_path / "archive", sha256, variables.pop("umask")],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
            check=True, capture_output=True, text=True,
        ).stdout
        for variables in environments
    }  # fmt: skip
    assert len(digests) == 1 and "sha256:" in digests.pop()


def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for members in ({"cuda/\udcff": b"x"}, {"cuda/z": {"type": LINK, "linkname": "\udcff"}}):
        sha256 = write_tar(tmp_path / "archive", {**TOOLKIT_MEMBERS, **members})
        with pytest.raises(BuildError, match="not UTF-8"):
            ArchiveLayer(tmp_path / "archive", TOOLKIT, sha256).write(len, len)


def test_files_that_are_hard_links_stay_so(tmp_path: Path) -> None:
    members: Members = {**TOOLKIT_MEMBERS, "cuda/b": b"x" * 5000, "cuda/a": {"type": HARD, "linkname": "cuda/b"}}
    sha256 = write_tar(tmp_path / "archive", members)
    raw = packed(ArchiveLayer(tmp_path / "archive", TOOLKIT, sha256))
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        assert archive.getmember("usr/local/cuda/b").linkname == "usr/local/cuda/a"
        times = {member.mtime for member in archive}
    assert times == {1704067200}
    again = packed(ArchiveLayer(tmp_path / "archive", TOOLKIT, sha256))
    assert again == raw


def test_a_toolkit_gets_the_links_that_linkers_look_for(tmp_path: Path) -> None:
    members: Members = {
        "bin/nvcc": b"\0Cuda compilation tools, release 12.6, V12.6.85\0",
        "version.json": b'{"cuda": {"version": "12.6.3"}}',
        "lib/libcudart.so.12.6": b"x",
        "lib/libcudart.so.12": {"type": LINK, "linkname": "libcudart.so.12.6"},
        "lib/libgone.so.1": {"type": LINK, "linkname": "nowhere"},
    }
    sha256 = write_tar(tmp_path / "archive", members)
    tree = read_layer(packed(ArchiveLayer(tmp_path / "archive", TOOLKIT, sha256, "12.6")))
    assert tree["usr/local/cuda/lib64"] == (0o777, b"-> lib")
    assert tree["usr/local/cuda/lib/libcudart.so"] == (0o777, b"-> libcudart.so.12")
    assert "usr/local/cuda/lib/libgone.so" not in tree
    keys = {ArchiveLayer(tmp_path, TOOLKIT, sha256, release).key for release in ("12.6", "")}
    assert len(keys | {ArchiveLayer(tmp_path, COMPAT, sha256).key}) == 3


@pytest.mark.parametrize(
    ("nvcc", "says"),
    [
        (b"#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.131'", "is of CUDA 12.4"),
        (b"another", "names no release"),
    ],
)
def test_an_nvcc_of_another_release_is_refused(tmp_path: Path, nvcc: bytes, says: str) -> None:
    members: Members = {"bin/nvcc": nvcc, "version.json": b'{"cuda": {"version": "12.6.3"}}'}
    sha256 = write_tar(tmp_path / "archive", members)
    with pytest.raises(BuildError, match=f"/usr/local/cuda/bin/nvcc .*{says}; torch needs CUDA 12.6"):
        packed(ArchiveLayer(tmp_path / "archive", TOOLKIT, sha256, "12.6"))


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    sha256 = write_tar(tmp_path / "archive", COMPAT_MEMBERS)
    (tmp_path / "archive").write_bytes(b"x")
    recipe = ArchiveLayer(tmp_path / "archive", COMPAT, sha256)
    with pytest.raises(HashMismatch, match="not the locked archive"):
        packed(recipe)
    assert layer_cache.known_layer(recipe) is None


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    sha256 = write_tar(tmp_path / "archive", {"a": b""})
    with pytest.raises(BuildError, match="cuda-compat cannot be unpacked") as caught:
        packed(ArchiveLayer(tmp_path / "archive", COMPAT, sha256))
    assert "must contain exactly one file" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("names", "links"),
    [
        (set(), {}),
        ({"libcudart.so.13"}, {"libcudart.so": "libcudart.so.13"}),
        ({"libcudart.so.13", "libcudart.so"}, {}),
        ({"liba.so.1.2", "liba.so.1"}, {"liba.so": "liba.so.1"}),
        ({"liba.a", "README", "b.so.1", "libc.so.1.so.2"}, {"libc.so": "libc.so.1.so.2"}),
    ],
)
def test_links_are_made_where_they_are_missing(names: set[str], links: dict[str, str]) -> None:
    assert missing_links(names) == links


def toolchain(folder: Path, release: str) -> NvccLinksLayer:
    files = {"nvidia/cu13/bin/nvcc": b"", "nvidia/cu13/lib/libcudart.so.13": b"", "nvidia/cu13/lib/sub/libx.so.1": b""}
    wheels = (odd_wheel(folder, files), odd_wheel(folder, {"other/lib/liby.so.1": b""}, name="other"))
    parts = tuple(WheelOfLayer(wheel, file_digest(wheel)) for wheel in wheels)
    return NvccLinksLayer("3.11", parts, f"/{HOME}", release)


def test_nvcc_of_wheels_gets_links(tmp_path: Path) -> None:
    raw = packed(toolchain(tmp_path, "1"))
    tree = {path: content for path, (_, content) in read_layer(raw).items() if content}
    assert tree == {f"{HOME}/lib64": b"-> lib", f"{HOME}/lib/libcudart.so": b"-> libcudart.so.13"}
    assert gzip.decompress(raw)


def test_nvcc_of_another_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"nvcc is of CUDA 1\.0, torch of 13\.0"):
        packed(toolchain(tmp_path, "13.0"))
