"""Reads a wheel by seeking, without unpacking it, and refuses a zip file that two readers could understand differently.

Every member is verified while it is inflated: its deflate stream ends exactly at the recorded size, and its CRC agrees.
"""

from __future__ import annotations

import contextlib
import struct
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from isal import isal_zlib

from envbuild.fetch.wheel_file_lists_and_clashes import BROKEN, PACKED, has_second_name, is_inside
from envbuild.util.errors import LockError, printable

LARGEST_TEXT = 16 << 20
"""The most bytes of a member that is read into memory: RECORD, entry points, a script. torch's RECORD has 1.3 MB."""

_INVALID: type[Exception] = isal_zlib.error  # type: ignore[assignment]
_BLOCK = 1 << 18  # bytes read at a time
_MOST = 1 << 20  # bytes inflated at a time: a block can expand to a thousand times its size
_LOCAL = struct.Struct("<4s5H3I2H")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = 46  # bytes of an entry of the directory, without its name, extra fields and comment
_NEWEST = 63  # zip version 6.3: uv refuses later ones
_LOCATOR = 20  # bytes of the zip64 locator, which is between the zip64 end record and the end record
_ENCRYPTED = 0x1 | 0x40 | 0x2000  # refused
_SPEED, _DESCRIPTOR, _UTF8 = 0x6, 0x8, 0x800  # the only zip flags that are accepted
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF


class WheelRefused(LockError):
    """The error for a wheel that is damaged or ambiguous, or that cannot be installed."""

    def __init__(self, wheel: str, why: str, member: str | None = None) -> None:
        where = f"{wheel}: {printable(member)!r}" if member is not None else wheel
        super().__init__(f"{where}: {why}", hint="lock another version of it")


@dataclass(frozen=True)
class WheelMember:
    """A file or folder of a wheel; the name of a folder ends with a slash. `size`: bytes after inflating; `offset`: the
    position of its data in the wheel."""

    name: str
    executable: bool
    deflated: bool
    crc: int
    size: int
    packed_size: int
    offset: int

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")


class WheelReader:
    """An open wheel whose directory was checked. Its methods raise WheelRefused, with the wheel's and the member's
    name."""

    def __init__(self, stream: IO[bytes], name: str) -> None:
        self.name = name
        self._stream = stream
        self._texts: dict[WheelMember, bytes] = {}
        try:
            self.members = self._read_directory()
        except (*BROKEN, struct.error) as error:
            raise WheelRefused(name, f"not a readable zip file: {printable(str(error))[:200]}") from None
        self.by_name = {member.name: member for member in self.members}

    def refused(self, member: str | None, why: str) -> WheelRefused:
        return WheelRefused(self.name, why, member)

    # the directory

    def _read_directory(self) -> tuple[WheelMember, ...]:
        with zipfile.ZipFile(self._stream) as archive:
            infos = archive.infolist()
        seen: set[str] = set()
        for info in infos:
            self._check_entry(info)
            if info.filename.rstrip("/") in seen:
                raise self.refused(info.filename, "duplicate member")
            seen.add(info.filename.rstrip("/"))
        # a hidden member between two others would be installed by a reader that does not use the directory
        position, members = 0, {}
        for info in sorted(infos, key=lambda info: info.header_offset):
            if info.header_offset != position:
                overlap = info.header_offset < position
                raise self.refused(info.filename, "overlaps another member" if overlap else "unlisted data before it")
            member, position = self._read_local_header(info)
            members[info.filename] = member
        self._check_end(position, len(infos))
        return tuple(members[info.filename] for info in infos)

    def _check_entry(self, info: zipfile.ZipInfo) -> None:
        """Raise WheelRefused for a fault that an entry of the directory shows by itself."""
        name = info.orig_filename
        if info.flag_bits & _ENCRYPTED:
            raise self.refused(name, "encrypted")
        if info.flag_bits & ~(_SPEED | _DESCRIPTOR | _UTF8):
            raise self.refused(name, f"unsupported zip flags {info.flag_bits:#x}")
        if info.compress_type not in PACKED:
            raise self.refused(name, "neither stored nor deflated")
        if info.compress_type == zipfile.ZIP_STORED and info.compress_size != info.file_size:
            raise self.refused(name, "stored with two different sizes")
        if not is_inside(name) or name.endswith("//") or info.filename != name:
            raise self.refused(name, "the name is ambiguous or leaves the environment")
        if has_second_name(info.extra) or not (name.isascii() or info.flag_bits & _UTF8):
            raise self.refused(name, "the name's encoding is ambiguous")
        if info.is_dir() and info.file_size:
            raise self.refused(name, "a folder with content")

    def _read_local_header(self, info: zipfile.ZipInfo) -> tuple[WheelMember, int]:
        """Compare the local header with the directory. Return the member, and the offset at which the next one begins.

        With a data descriptor the local header has no CRC and sizes; with zip64 it has the sizes in an extra field.
        """
        name = info.filename
        self._stream.seek(info.header_offset)
        mark, version, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = _LOCAL.unpack(
            self._exactly(_LOCAL.size, name)
        )
        if version > _NEWEST:
            raise self.refused(name, f"unsupported zip version {version}")
        raw_name, extra = self._exactly(name_bytes, name), self._exactly(extra_bytes, name)
        large = [value for value in (info.file_size, info.compress_size) if value >= _MAX32]
        wanted = (info.CRC, info.compress_size, info.file_size)
        found = _with_zip64((crc, packed, size), extra)
        streamed = bool(flags & _DESCRIPTOR) and crc == 0 and {packed, size} <= {0, _MAX32}
        if (mark, flags, method, raw_name) != (b"PK\3\4", info.flag_bits, info.compress_type, name.encode()):
            raise self.refused(name, "the local header differs from the zip directory")
        if has_second_name(extra) or not (streamed or found == wanted):
            raise self.refused(name, "the local header differs from the zip directory")
        offset = self._stream.tell()
        end = offset + info.compress_size
        if flags & _DESCRIPTOR:
            end += self._descriptor_size(info, end, bool(large))
        executable = bool(info.external_attr >> 16 & 0o111)
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        return WheelMember(name, executable, deflated, info.CRC, info.file_size, info.compress_size, offset), end

    def _descriptor_size(self, info: zipfile.ZipInfo, offset: int, large: bool) -> int:
        """Return the size of the data descriptor in bytes. Its content must match the directory."""
        self._stream.seek(offset)
        found = self._stream.read(24)
        for layout in ("<IQQ", "<III") if large else ("<III", "<IQQ"):
            with contextlib.suppress(struct.error):
                plain = struct.pack(layout, info.CRC, info.compress_size, info.file_size)
                for wanted in (b"PK\7\10" + plain, plain):
                    if found.startswith(wanted):
                        return len(wanted)
        raise self.refused(info.filename, "the data descriptor differs from the zip directory")

    def _check_end(self, start: int, count: int) -> None:
        """Check that the end record ends the file and describes the directory. `start`: where the members end."""
        self._stream.seek(0, 2)
        end = self._stream.tell() - _END.size
        self._stream.seek(end)
        mark, disk, first, here, entries, size, offset, comment = _END.unpack(self._exactly(_END.size, None))
        if (mark, disk, first, comment, here) != (b"PK\5\6", 0, 0, 0, entries):
            raise self.refused(None, "data after the zip directory, a comment, or more than one part")
        self._stream.seek(max(0, end - _LOCATOR - _END64.size))
        tail = self._exactly(min(end, _LOCATOR + _END64.size), None)
        if tail[-_LOCATOR : -_LOCATOR + 4] == b"PK\6\7":
            end -= len(tail)
            wide = _END64.unpack(tail[: _END64.size])
            locator = struct.unpack("<IQI", tail[-_LOCATOR + 4 :])
            if (
                wide[:2] != (b"PK\6\6", 44)
                or wide[4:] != (0, 0, count, count, end - start, start)
                or locator != (0, end, 1)
            ):
                raise self.refused(None, "the zip64 end record differs from the zip directory")
            narrow = ((entries, _MAX16), (size, _MAX32), (offset, _MAX32))
            agrees = all(
                value in (most, true) for (value, most), true in zip(narrow, (count, end - start, start), strict=True)
            )
        else:
            agrees = (entries, size, offset) == (count, end - start, start)
        if not agrees:
            raise self.refused(None, "the end record differs from the zip directory")
        self._check_lengths(start, end, count)

    def _check_lengths(self, start: int, end: int, count: int) -> None:
        """Check that the entries of the directory fill the directory exactly: zipfile reads the last entry even if that
        entry is cut off."""
        self._stream.seek(start)
        directory = self._exactly(end - start, None)
        position = 0
        for _ in range(count):
            lengths = struct.unpack_from("<3H", directory[position : position + _ENTRY], 28)
            position += _ENTRY + sum(lengths)
        if position != len(directory):
            raise self.refused(None, "the entries of the zip directory do not fill it")

    def _exactly(self, count: int, member: str | None) -> bytes:
        found = self._stream.read(count)
        if len(found) != count:
            raise self.refused(member, "the file ends too early")
        return found

    # the content

    def head(self, member: WheelMember, count: int) -> bytes:
        """Return the first bytes of a member, at most `count`, unverified."""
        self._stream.seek(member.offset)
        packed = self._stream.read(min(member.packed_size, _BLOCK))
        if not member.deflated:
            return packed[:count]
        try:
            return isal_zlib.decompressobj(-15).decompress(packed, count)
        except _INVALID:
            raise self.refused(member.name, "invalid deflate stream") from None

    def text(self, member: WheelMember) -> bytes:
        """Return the content of a small member, and keep it, so that it is inflated only once."""
        if member not in self._texts:
            if member.size > LARGEST_TEXT:
                raise self.refused(member.name, f"larger than {LARGEST_TEXT} bytes, too large for a file of this kind")
            self._texts[member] = b"".join(plain for _, plain in self.blocks(member))
        return self._texts[member]

    def blocks(self, member: WheelMember) -> Iterator[tuple[bytes, bytes]]:
        """Yield pairs: packed bytes of a member as they are in the wheel, and inflated bytes, at most 1 MiB. Either may
        be empty. Raises WheelRefused, at the latest after the last pair, unless size, CRC and the end of the stream
        match. For a member that `text` has returned, the last pair has all inflated bytes, and nothing is checked
        again."""
        if member in self._texts:
            yield from self.packed_blocks(member)
            yield b"", self._texts[member]
            return
        size = crc = 0
        for packed, plain in (
            self._inflated(member) if member.deflated else ((raw, raw) for raw in self._packed(member))
        ):
            size += len(plain)
            if size > member.size:
                raise self.refused(member.name, f"more than the recorded {member.size} bytes")
            crc = isal_zlib.crc32(plain, crc)
            yield packed, plain
        if size != member.size:
            raise self.refused(member.name, f"{size} bytes, recorded: {member.size}")
        if crc != member.crc:
            raise self.refused(member.name, "wrong CRC")

    def packed_blocks(self, member: WheelMember) -> Iterator[tuple[bytes, bytes]]:
        """Yield pairs like `blocks`, but with no inflated bytes in any pair, and check nothing."""
        return ((packed, b"") for packed in self._packed(member))

    def _packed(self, member: WheelMember) -> Iterator[bytes]:
        position, end = member.offset, member.offset + member.packed_size
        while position < end:
            self._stream.seek(position)
            block = self._exactly(min(_BLOCK, end - position), member.name)
            position += len(block)
            yield block

    def _inflated(self, member: WheelMember) -> Iterator[tuple[bytes, bytes]]:
        inflater = isal_zlib.decompressobj(-15)
        try:
            for packed in self._packed(member):
                if inflater.eof:
                    raise self.refused(member.name, "data after the end of the deflate stream")
                plain = inflater.decompress(packed, _MOST)
                yield packed, plain
                while not inflater.eof and (inflater.unconsumed_tail or len(plain) == _MOST):
                    plain = inflater.decompress(inflater.unconsumed_tail, _MOST)
                    yield b"", plain
        except _INVALID:
            raise self.refused(member.name, "invalid deflate stream") from None
        if not inflater.eof:
            raise self.refused(member.name, "the deflate stream does not end")
        if inflater.unused_data:
            raise self.refused(member.name, "data after the end of the deflate stream")


def _with_zip64(values: tuple[int, int, int], extra: bytes) -> tuple[int, int, int]:
    """CRC, packed size and size of a local header; sizes that it lacks are taken from the zip64 field."""
    crc, packed, size = values
    while len(extra) >= 4:
        kind, length = struct.unpack_from("<HH", extra)
        if kind == 1:
            wide = list(struct.unpack_from(f"<{min(length, len(extra) - 4) // 8}Q", extra, 4))
            size = wide.pop(0) if size == _MAX32 and wide else size
            packed = wide.pop(0) if packed == _MAX32 and wide else packed
        extra = extra[4 + length :]
    return crc, packed, size


@contextlib.contextmanager
def open_wheel(path: Path) -> Iterator[WheelReader]:
    """Yield an open wheel. Raises WheelRefused."""
    with path.open("rb") as stream:
        yield WheelReader(stream, path.name)
