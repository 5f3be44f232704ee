"""The bytes of a layer: several programs read them back, every machine writes the same, and a wheel with false metadata
is refused."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild.image.layers import layer_writer, wheel_reader
from envbuild.image.layers.layer_writer import LayerEntry, LayerFile, LayerFolder, LayerLink, tar_header, write_layer
from envbuild.image.layers.wheel_installed_files import installed_files
from envbuild.image.layers.wheel_reader import WheelReader, WheelRefused, open_wheel
from envbuild.util.errors import LockError
from unit.image.layers.odd_wheels import STORED, Item, odd_wheel
from unit.image.layers.uv_oracle import read_layer

FILES: dict[str, bytes | Item] = {
    "odd/__init__.py": b"print(1)\n" * 5000,
    "odd/data.bin": Item(bytes(range(256)) * 2000, method=STORED),
    "odd/run": Item(b"#!/bin/sh\n", 0o100755),
    f"odd/{'long/' * 30}name": b"1",
    "odd/\u00fc.txt": b"2",
    "odd-1.0.data/scripts/odd": b"#!python\n",
}


def written(wheel: Path) -> tuple[layer_writer.WrittenLayer, bytes]:
    packed = io.BytesIO()
    with open_wheel(wheel) as reader:
        return write_layer(installed_files(reader, "3.11"), packed.write), packed.getvalue()


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return odd_wheel(tmp_path, FILES, entry_points="[console_scripts]\nodd2 = odd:main\n")


def test_the_result_describes_the_bytes(wheel: Path) -> None:
    layer, packed = written(wheel)
    tar = gzip.decompress(packed)
    assert (layer.digest, layer.size) == (f"sha256:{hashlib.sha256(packed).hexdigest()}", len(packed))
    assert (layer.diff_id, layer.diff_size) == (f"sha256:{hashlib.sha256(tar).hexdigest()}", len(tar))
    found = {path: about for path, about in read_layer(packed).items() if about[1] is not None}
    assert [file.path for file in layer.files] == sorted(found)
    for file in layer.files:
        mode, content = found[file.path]
        assert content is not None
        assert (file.mode, file.size, file.sha256) == (mode, len(content), hashlib.sha256(content).hexdigest())


def test_the_plain_bytes_are_the_tar_in_it(wheel: Path) -> None:
    packed, plain = io.BytesIO(), io.BytesIO()
    with open_wheel(wheel) as reader:
        write_layer(installed_files(reader, "3.11"), packed.write, plain.write)
    assert gzip.decompress(packed.getvalue()) == plain.getvalue()


def test_deflate_streams_are_copied_and_nothing_else_is_compressed(wheel: Path) -> None:
    _, packed = written(wheel)
    with open_wheel(wheel) as reader:
        member = reader.by_name["odd/__init__.py"]
        stream = b"".join(raw for raw, _ in reader.blocks(member))
    assert stream in packed
    assert bytes(range(256)) * 200 in packed


def test_gnu_tar_reads_it(wheel: Path, tmp_path: Path) -> None:
    _, packed = written(wheel)
    (tmp_path / "layer.tar.gz").write_bytes(packed)
    (tmp_path / "out").mkdir()
    subprocess.run(
        ["tar", "--extract", "--gzip", "--preserve-permissions", "--file", tmp_path / "layer.tar.gz"],
        cwd=tmp_path / "out", check=True, env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    subprocess.run(["gzip", "--test", tmp_path / "layer.tar.gz"], check=True)
    out = tmp_path / "out"
    found = {str(p.relative_to(out)): (p.stat().st_mode & 0o7777, None if p.is_dir() else p.read_bytes())
             for p in out.rglob("*")}  # fmt: skip
    assert found == read_layer(packed)


def test_members_are_sorted_after_their_folders_which_are_the_same_in_each_layer(wheel: Path) -> None:
    _, packed = written(wheel)
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        members = tar.getmembers()
    names = [member.name for member in members]
    assert names == sorted(names)
    folders = {member.name: member for member in members if member.isdir()}
    assert {name.rpartition("/")[0] for name in names} - {""} == set(folders)
    assert {(folder.mode, folder.mtime, folder.uid, folder.gid) for folder in folders.values()} == {
        (0o755, 1704067200, 0, 0)
    }


def test_the_order_of_entries_does_not_count() -> None:
    entries: list[LayerEntry] = [
        LayerFile("a/b", b"1"),
        LayerLink("a/c", "b"),
        LayerFolder("a/d"),
        LayerFile("a-b", b"2", True),
    ]
    assert write_layer(entries) == write_layer(reversed(entries))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([LayerFile("a", b"1"), LayerFile("a", b"2")], "two files of one layer have the path a"),
        ([LayerFile("a", b"1"), LayerFile("a/b", b"2")], "a is a file and a folder in one layer"),
        ([LayerLink("a", "x"), LayerFolder("a")], "a is a file and a folder in one layer"),
    ],
)
def test_entries_that_hide_each_other_are_refused(entries: Sequence[LayerEntry], words: str) -> None:
    with pytest.raises(LockError, match=words):
        write_layer(entries)


# reproducibility

_ELSEWHERE = """
import sys, time
time.time = lambda: 4_000_000_000.0
from pathlib import Path
from envbuild.image.layers.wheel_installed_files import installed_files
from envbuild.image.layers.layer_writer import write_layer
from envbuild.image.layers.wheel_reader import open_wheel
with open_wheel(Path(sys.argv[1])) as reader:
    print(write_layer(installed_files(reader, "3.11")).digest)
"""


@pytest.mark.parametrize("change", ["clock and locale", "umask", "user"])
def test_the_digest_is_the_same_elsewhere(wheel: Path, tmp_path: Path, change: str) -> None:
    place = tmp_path / "elsewhere"
    place.mkdir()
    moved = place / wheel.name
    shutil.copyfile(wheel, moved)
    os.utime(moved, (1, 1))
    command = [sys.executable, "-c", _ELSEWHERE, str(moved)]
    settings_of: dict[str, str] = {"clock and locale": "LC_ALL=tr_TR.UTF-8 TZ=Asia/Kathmandu"}
    if change == "umask":
        command = ["sh", "-c", 'umask 077; exec "$@"', "sh", *command]
    if change == "user":
        if os.geteuid() or not shutil.which("unshare"):
            pytest.skip("needs root and unshare")
        command = ["unshare", "--user", *command]  # without a mapping of users: the user nobody
    more = dict(word.split("=") for word in settings_of.get(change, "").split())
    root = str(Path(layer_writer.__file__).parents[3])
    done = subprocess.run(command, env={"PATH": os.defpath, "PYTHONPATH": root, **more}, capture_output=True, text=True)
    assert done.stdout.strip() == written(wheel)[0].digest, done.stderr


def test_the_digest_is_the_same_with_another_zlib(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written(wheel)
    other = SimpleNamespace(decompressobj=zlib.decompressobj, crc32=zlib.crc32, error=zlib.error)
    monkeypatch.setattr(wheel_reader, "isal_zlib", other)
    monkeypatch.setattr(layer_writer, "isal_zlib", other)
    assert written(wheel) == expected


def test_the_digest_is_that_of_this_version_of_the_writer() -> None:
    """If the digest changes, increment WRITER_VERSION."""
    entries: list[LayerEntry] = [
        LayerFile("a/b", b"1" * 70_000),
        LayerLink("a/l", "b"),
        LayerFile("\u00fc" * 60, b"", True),
    ]
    layer = write_layer(entries)
    assert (layer_writer.WRITER_VERSION, layer.digest, layer.size) == (1, GOLDEN_DIGEST, 74_268)


GOLDEN_DIGEST = "sha256:2a8a9033642e34254e9f484bc94807f76a5a8525cc824933e21a610b4a832829"


# every member is read once, and in blocks


def test_every_member_is_inflated_once(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inflated: list[str] = []
    real = WheelReader._inflated

    def counted(self: WheelReader, member: wheel_reader.WheelMember) -> object:
        inflated.append(member.name)
        return real(self, member)

    monkeypatch.setattr(WheelReader, "_inflated", counted)
    written(wheel)
    with open_wheel(wheel) as reader:
        assert sorted(inflated) == sorted(m.name for m in reader.members if m.deflated)


@pytest.mark.slow
def test_memory_does_not_grow_with_a_member(tmp_path: Path) -> None:
    """The members are 300 MB of zeros, and 60 MB that are stored uncompressed; the limit is 64 MB above Python's own
    use."""
    wheel = odd_wheel(tmp_path, {"odd/zeros": bytes(300 << 20), "odd/stored": Item(bytes(60 << 20), method=STORED)})
    code = _ELSEWHERE.replace(
        "with open_wheel",
        "import resource\nused = int(open('/proc/self/statm').read().split()[0]) * 4096\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\nwith open_wheel",
    )
    root = str(Path(layer_writer.__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", code, str(wheel)],
        env={"PATH": os.defpath, "PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("sha256:"), done.stderr


# names and sizes

_NAME = st.text(st.characters(codec="utf-8", exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1,
                max_size=90).filter(lambda name: name not in (".", ".."))  # fmt: skip
_PATH = st.lists(_NAME, min_size=1, max_size=4).map("/".join)
_CONTENT = st.integers(0, 1 << 18).map(lambda size: bytes(size)) | st.binary(max_size=2000)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.dictionaries(_PATH, st.tuples(_CONTENT, st.booleans()), max_size=8))
def test_any_names_and_sizes_are_read_back(files: dict[str, tuple[bytes, bool]]) -> None:
    entries = [LayerFile(path, content, executable) for path, (content, executable) in files.items()]
    parents = {str(p) for path in files for p in Path(path).parents if p.name}
    packed = io.BytesIO()
    if parents & files.keys():
        with pytest.raises(LockError):
            write_layer(entries)
        return
    write_layer(entries, packed.write)
    found = {path: about for path, about in read_layer(packed.getvalue()).items() if about[1] is not None}
    assert found == {path: (0o755 if run else 0o644, content) for path, (content, run) in files.items()}


@pytest.mark.parametrize("size", [0, 1, 8**11 - 1, 8**11, 1 << 40])
@pytest.mark.parametrize("path", ["a", "a" * 100, "a" * 101, "\u00fc", "b/" * 300 + "c"])
def test_a_header_is_what_tarfile_reads(path: str, size: int) -> None:
    raw = tar_header(path, b"0", 0o644, size)
    assert len(raw) % 512 == 0
    with tarfile.open(fileobj=io.BytesIO(raw + bytes(1024)), mode="r:") as tar:
        member = tar.next()
    assert member is not None
    assert (member.name, member.size, member.mode) == (path, size, 0o644)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.binary(max_size=100_000), min_size=1, max_size=5))
def test_the_bytes_do_not_depend_on_how_they_arrive(parts: list[bytes]) -> None:
    one, other = (layer_writer._Writer(len, len, None) for _ in range(2))
    for part in parts:
        one.store(part)
    other.store(b"".join(parts))
    one.end_stored()
    other.end_stored()
    assert one._packed_sha256.digest() == other._packed_sha256.digest()


def test_the_size_of_a_tar_is_known_before_it_is_written(wheel: Path) -> None:
    more: list[LayerEntry] = [LayerFolder("opt/\u00e4/b", 0o700, 1 << 21), LayerLink("l" * 101, "t" * 200)]
    with open_wheel(wheel) as reader:
        cases: list[list[LayerEntry]] = [installed_files(reader, "3.11"), [*more, LayerFile("opt/c", b"1" * 512)], []]
        for entries in cases:
            assert layer_writer.tar_size(entries) == write_layer(entries).diff_size


# wheels with false metadata


def test_a_damaged_member_is_refused(tmp_path: Path) -> None:
    wheel = odd_wheel(tmp_path, {"odd/a": Item(b"content", method=STORED)})
    wheel.write_bytes(wheel.read_bytes().replace(b"content", b"Content"))
    with pytest.raises(WheelRefused, match="'odd/a': wrong CRC"):
        written(wheel)
