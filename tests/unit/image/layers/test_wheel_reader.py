"""Hostile wheels: each is refused with the names of the wheel and the member, or gives the tree that uv installs."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from envbuild.image.layers import wheel_reader
from envbuild.image.layers.wheel_reader import WheelMember, WheelReader, WheelRefused, open_wheel
from envbuild.util.errors import LockError
from unit.image.layers.odd_wheels import STORED, Item, odd_wheel, zipped
from unit.image.layers.uv_oracle import UvOracle, UvRefused, differences

TEXT = b"print(1)\n" * 40


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> UvOracle:
    return UvOracle(tmp_path_factory.mktemp("uv"))


def read_all(raw: bytes) -> dict[str, bytes]:
    reader = WheelReader(io.BytesIO(raw), "w-1-py3-none-any.whl")
    return {member.name: b"".join(plain for _, plain in reader.blocks(member)) for member in reader.members}


def sound() -> bytes:
    return zipped({"a": Item(TEXT), "b": Item(b"stored", method=STORED), "c": Item(b"")})


def test_a_sound_wheel_is_read() -> None:
    assert read_all(sound()) == {"a": TEXT, "b": b"stored", "c": b""}


class _Pipe(io.RawIOBase):
    """A stream without seek: zipfile then writes data descriptors."""

    def __init__(self) -> None:
        self.raw = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.raw += data
        return len(data)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("zip64", [False, True])
def test_zip64_and_data_descriptors_are_read(streamed: bool, zip64: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = _Pipe() if streamed else io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in "ab":
            with archive.open(name, "w", force_zip64=zip64) as member:
                member.write(TEXT)
        if zip64:
            monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    raw = bytes(sink.raw) if isinstance(sink, _Pipe) else sink.getvalue()
    assert (b"PK\6\7" in raw, b"PK\7\10" in raw) == (zip64, streamed)
    assert read_all(raw) == {"a": TEXT, "b": TEXT}


def test_a_false_data_descriptor_is_refused() -> None:
    sink = _Pipe()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a", b"x")
    at = sink.raw.index(b"PK\7\10")
    sink.raw[at + 4] ^= 1
    with pytest.raises(WheelRefused, match="'a': the data descriptor differs"):
        read_all(bytes(sink.raw))


def patched(mark: bytes, offset: int, value: bytes, number: int = 0) -> bytes:
    """Return the sound wheel with bytes replaced `offset` after occurrence `number` of a marker."""
    raw, at = sound(), -1
    for _ in range(number + 1):
        at = raw.index(mark, at + 1)
    return raw[: at + offset] + value + raw[at + offset + len(value) :]


LOCAL, CENTRAL, END = b"PK\3\4", b"PK\1\2", b"PK\5\6"


def both(local: int, central: int, value: bytes) -> bytes:
    """Make the same change in the first member's local header and in the directory."""
    raw = patched(LOCAL, local, value)
    at = raw.index(CENTRAL) + central
    return raw[:at] + value + raw[at + len(value) :]


def repacked(change: Callable[[bytes], bytes], size: int | None = None) -> bytes:
    """Change the deflate stream of one member, with matching sizes and CRC."""
    packer = zlib.compressobj(wbits=-15)
    stream = change(packer.compress(TEXT) + packer.flush())
    length = len(TEXT) if size is None else size
    about = struct.pack("<HHHHIII", 0, 8, 0, 33, zlib.crc32(TEXT), len(stream), length)
    local = LOCAL + struct.pack("<H", 20) + about + struct.pack("<HH", 1, 0) + b"a" + stream
    central = (
        CENTRAL + struct.pack("<HH", 0x314, 20) + about + struct.pack("<HHHHHII", 1, 0, 0, 0, 0, 0o100644 << 16, 0)
    )
    central += b"a"
    return local + central + END + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)


def renamed(name: str) -> bytes:
    return zipped({name: Item(b"x")})


def overlapping() -> bytes:
    """Make two entries of the directory point to the same data."""
    raw = sound()
    second = raw.index(CENTRAL, raw.index(CENTRAL) + 1)
    return raw[: second + 42] + bytes(4) + raw[second + 46 :]


def gap() -> bytes:
    raw = sound()
    start = raw.index(CENTRAL)
    end = raw.index(END)
    fixed = raw[end : end + 16] + struct.pack("<I", start + 4) + raw[end + 20 :]
    return raw[:start] + b"more" + raw[start:end] + fixed


def duplicate() -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive, pytest.warns(UserWarning):
        archive.writestr("a", b"1")
        archive.writestr("a", b"2")
    return raw.getvalue()


HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "encrypted": (lambda: both(6, 8, b"\1\0"), "'a': encrypted"),
    "strongly encrypted": (lambda: both(6, 8, b"\x40\0"), "'a': encrypted"),
    "patched data": (lambda: both(6, 8, b"\x20\0"), "unsupported zip flags"),
    "bzip2": (lambda: zipped({"a": Item(TEXT, method=zipfile.ZIP_BZIP2)}), "neither stored nor deflated"),
    "lzma": (lambda: zipped({"a": Item(TEXT, method=zipfile.ZIP_LZMA)}), "neither stored nor deflated"),
    "deflate64": (lambda: both(8, 10, b"\x09\0"), "neither stored nor deflated"),
    "a name in the local header": (lambda: patched(LOCAL, 30, b"z"), "local header differs"),
    "a method in the local header": (lambda: patched(LOCAL, 8, b"\0\0"), "local header differs"),
    "a CRC in the local header": (lambda: patched(LOCAL, 14, b"zzzz"), "local header differs"),
    "a size in the local header": (lambda: patched(LOCAL, 22, b"zzzz"), "local header differs"),
    "flags in the local header": (lambda: patched(LOCAL, 6, b"\2\0"), "local header differs"),
    "a version in the local header": (lambda: patched(LOCAL, 4, b"\x40"), "unsupported zip version 64"),
    "no local header": (lambda: patched(LOCAL, 0, b"XXXX"), "local header differs"),
    "a wrong CRC": (lambda: both(14, 16, b"zzzz"), "'a': wrong CRC"),
    "a smaller size": (lambda: repacked(lambda s: s, len(TEXT) - 1), "more than the recorded"),
    "a larger size": (lambda: repacked(lambda s: s, len(TEXT) + 1), "recorded: "),
    "data after the stream": (lambda: repacked(lambda s: s + b"x"), "data after the end"),
    "much data after the stream": (lambda: repacked(lambda s: s + bytes(1 << 19)), "data after the end"),
    "a stream that is cut": (lambda: repacked(lambda s: s[:-1]), "does not end|invalid deflate"),
    "no stream": (lambda: repacked(lambda s: b""), "does not end"),
    "an invalid stream": (lambda: repacked(lambda s: b"\xff" * 20), "invalid deflate"),
    "two members of one name": (duplicate, "'a': duplicate member"),
    "a file and a folder of one name": (
        lambda: zipped({"a": Item(b"1"), "a/": Item(mode=0o40755, method=STORED)}),
        "duplicate member",
    ),
    "overlapping members": (overlapping, "overlaps another member"),
    "data that is not listed": (gap, "the end record differs"),
    "data before it": (lambda: b"#!/bin/sh\n" + sound(), "unlisted data before it"),
    "data after it": (lambda: sound() + b"x", "data after the zip directory|not a readable zip"),
    "a comment": (lambda: patched(END, 20, b"\1\0") + b"x", "a comment"),
    "another number of members": (lambda: patched(END, 8, struct.pack("<HH", 2, 2)), "end record differs"),
    "no end": (lambda: sound()[:-30], "not a readable zip"),
    "nothing": (lambda: b"", "not a readable zip"),
    "a climbing name": (lambda: renamed("../a"), "leaves the environment"),
    "a climbing name inside": (lambda: renamed("b/../../a"), "leaves the environment"),
    "an absolute name": (lambda: renamed("/etc/passwd"), "leaves the environment"),
    "a name with a backslash": (lambda: renamed("a\\b"), "ambiguous"),
    "a name with an escape": (lambda: renamed("a\x1b[2J"), "ambiguous"),
    "an empty part": (lambda: renamed("a//b"), "ambiguous"),
    "a dot": (lambda: renamed("./a"), "ambiguous"),
    "a name that NUL ends": (lambda: both(30, 46, b"\0"), "ambiguous"),
    "a folder with content": (lambda: zipped({"a/": Item(b"x", 0o40755)}), "a folder with content"),
    "a name in another encoding": (lambda: both(30, 46, b"\xe9"), "encoding is ambiguous"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_zip_is_refused_by_name(case: str) -> None:
    make, words = HOSTILE[case]
    raw = make()
    with pytest.raises(WheelRefused, match=rf"^w-1-py3-none-any\.whl: .*(?:{words})") as refusal:
        read_all(raw)
    assert refusal.value.message.isprintable()


def test_a_large_text_is_not_read_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = WheelReader(io.BytesIO(sound()), "w")
    monkeypatch.setattr(wheel_reader, "LARGEST_TEXT", 10)
    with pytest.raises(WheelRefused, match="too large"):
        reader.text(reader.by_name["a"])


# changed bytes


def mutated(raw: bytes, number: int) -> bytes:
    """Change one to three bytes, more often near the headers, or cut out or double a part."""
    dice = random.Random(number)
    changed = bytearray(raw)
    marks = [at for mark in (LOCAL, CENTRAL, END) for at in _all(raw, mark)]
    for _ in range(dice.randint(1, 3)):
        at = dice.choice(marks) + dice.randrange(60) if dice.random() < 0.8 else dice.randrange(len(changed))
        changed[at % len(changed)] = dice.choice((0, 1, 255, dice.randrange(256)))
    if dice.random() < 0.1:
        start = dice.randrange(len(changed))
        changed[start : start + dice.randrange(40)] = bytes(changed[: dice.randrange(40)])
    return bytes(changed)


def _all(raw: bytes, mark: bytes) -> list[int]:
    return [at for at in range(len(raw)) if raw.startswith(mark, at)]


@pytest.mark.slow
def test_a_mutated_wheel_gives_uvs_tree_or_a_refusal(tmp_path: Path, oracle: UvOracle) -> None:
    """If we accept a wheel, uv accepts it too, and both install the same tree. Most mutations are refused."""
    files: dict[str, bytes | Item] = {
        "odd/a.py": TEXT,
        "odd/b": Item(b"stored", 0o100755, STORED),
        "odd-1.0.data/scripts/s": b"#!python\n1\n",
        "odd/e/": Item(mode=0o40755, method=STORED),
    }
    wheel = odd_wheel(tmp_path, files, entry_points="[console_scripts]\nodd = odd.a:main\n")
    raw = wheel.read_bytes()
    accepted = 0
    for number in range(1500):
        wheel.write_bytes(mutated(raw, number))
        try:
            found = oracle.written(wheel)
        except LockError as refusal:
            assert "odd-1.0" in refusal.message or "in one layer" in refusal.message
            continue
        if accepted < 40:
            accepted += 1
            try:
                wanted = oracle.install(wheel)
            except UvRefused as refused:
                pytest.fail(f"mutation {number}: uv refuses it: {refused}")
            assert differences(found, wanted) == [], f"mutation {number}"
    assert accepted > 10


# the tests above fail without the checks


@pytest.mark.parametrize(
    ("check", "case"),
    [("crc", "a wrong CRC"), ("size", "a larger size"), ("end", "data after the stream")],
)
def test_without_its_check_a_hostile_zip_is_read(check: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hostile zip has only the fault that this check detects, so no other check refuses the zip."""
    raw = HOSTILE[case][0]()

    def unchecked(self: WheelReader, member: WheelMember) -> object:
        packed = b"".join(self._packed(member))
        if not member.deflated:
            yield packed, packed
            return
        inflater = zlib.decompressobj(-15)
        yield packed, inflater.decompress(packed)
        assert inflater.eof
        assert not inflater.unused_data or check == "end"

    monkeypatch.setattr(WheelReader, "blocks" if check != "end" else "_inflated", unchecked)
    assert read_all(raw)["a"] == TEXT


def test_a_wheel_is_closed(tmp_path: Path) -> None:
    with open_wheel(odd_wheel(tmp_path, {})) as reader:
        stream = reader._stream
    assert stream.closed
