"""Writes files as one gzip layer without recompressing them: a tar in a gzip file of many members.

Most members of a wheel are deflate streams, and so is the content of a gzip member: each is copied as it is. Between
them are tar headers, padding, generated files and the uncompressed members of wheels, in stored (uncompressed) blocks.
The layer's bytes therefore depend only on the files, not on a compressor's version. Order, times, owners and modes are
fixed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from isal import isal_zlib

from envbuild.image.debian_base_tar import SOURCE_DATE_EPOCH
from envbuild.image.layers import gzip_members
from envbuild.image.layers.wheel_reader import WheelMember, WheelReader
from envbuild.util.errors import BuildError, LockError

WRITER_VERSION = 1
"""Increment this number with every change that gives a different layer for the same files."""

MODE, EXECUTABLE = 0o644, 0o755
TAR_BLOCK = 512
_STORED = 65535  # bytes, the most in one stored block
_LARGEST_OCTAL, _LARGEST_ID = 8**11, 8**7  # these and larger sizes (bytes) and ids do not fit into a tar header
_LONGEST_NAME = 100  # bytes


@dataclass(frozen=True)
class WheelContent:
    """The content of a wheel's member. `sha256`: hex, from RECORD; None if RECORD has no hash of it."""

    wheel: WheelReader
    member: WheelMember
    sha256: str | None = None

    def text(self) -> bytes:
        """Return the content of a small member. Raises WheelRefused if it is not the recorded one."""
        text = self.wheel.text(self.member)
        self.check(hashlib.sha256(text).hexdigest())
        return text

    def check(self, found: str) -> None:
        """Raise WheelRefused if the content has the sha256 `found`, and RECORD has a different one."""
        if self.sha256 not in (None, found):
            raise self.wheel.refused(self.member.name, f"sha256 {found}, in RECORD {self.sha256}")


@dataclass(frozen=True)
class LayerFile:
    """A regular file of a layer. Paths of layers have no leading slash."""

    path: str
    content: bytes | WheelContent
    executable: bool = False


@dataclass(frozen=True)
class LayerFolder:
    """A folder. `uid`, `gid`: its owner and its group."""

    path: str
    mode: int = EXECUTABLE
    uid: int = 0
    gid: int = 0


@dataclass(frozen=True)
class LayerLink:
    """A symbolic link."""

    path: str
    target: str


LayerEntry = LayerFile | LayerFolder | LayerLink


@dataclass(frozen=True)
class WrittenFile:
    """A file or link of a written layer. `sha256`: that of its content, hex; None for a link, and for a file whose
    content was not hashed because the layer is known."""

    path: str
    mode: int
    size: int
    sha256: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class WrittenLayer:
    """A layer. `digest`, `size`: those of the compressed layer; `diff_id`, `diff_size`: those of the tar in it. Both
    digests begin with "sha256:". `files`: its files and links in order; empty for a layer that is not new."""

    digest: str
    size: int
    diff_id: str
    diff_size: int
    files: tuple[WrittenFile, ...] = field(default=(), compare=False)


def drop(block: bytes) -> None:
    """Ignore bytes. For a known layer, `write_layer` does not even compute the bytes that this function would
    receive."""


def write_layer(
    entries: Iterable[LayerEntry],
    packed: Callable[[bytes], object] = drop,
    plain: Callable[[bytes], object] = drop,
    known: WrittenLayer | None = None,
) -> WrittenLayer:
    """Write a layer. `packed` gets the bytes of its gzip file, `plain` those of the tar in it. Reads every member once,
    block by block. `known`: the layer as it was written before. Then the digests of the bytes that `packed` and `plain`
    get are compared with the known digests, and the hashes of the members are not checked. Bytes that only `drop` would
    get are not computed. This takes a fifth of the time for `packed` alone, and two thirds for `plain`.

    Raises WheelRefused for a member whose content is not the recorded one, LockError if two files or links have one
    path, or one of them has the path of a folder, and BuildError if the layer is not the known one. What was written
    until then must be discarded.
    """
    writer = _Writer(packed, plain, known)
    files = [written for entry in _sorted(entries) if (written := writer.add(entry))]
    writer.store(b"\0" * 2 * TAR_BLOCK)
    writer.end_stored()
    return writer.written(files)


def tar_size(entries: Iterable[LayerEntry]) -> int:
    """Return the size in bytes of the tar that `write_layer` would write. Raises LockError as `write_layer` does."""
    sizes = ((len(_header(entry)), _content_size(entry)) for entry in _sorted(entries))
    return sum(header + size + -size % TAR_BLOCK for header, size in sizes) + 2 * TAR_BLOCK


def require_same_layer(found: str, before: str) -> None:
    """Raise BuildError if the digest of a layer differs from the digest that it had before."""
    if found != before:
        raise BuildError(
            f"not reproducible: a layer has the digest {found}, before {before}",
            hint="please report this: layers must be reproducible",
        )


def _sorted(entries: Iterable[LayerEntry]) -> Iterator[LayerEntry]:
    """Sort by path, and add the parent folders of each entry."""
    found: dict[str, LayerEntry] = {}
    parents: set[str] = set()
    folders: dict[str, LayerFolder] = {}
    for entry in entries:
        parents.update(str(parent) for parent in PurePosixPath(entry.path).parents if parent.name)
        if isinstance(entry, LayerFolder):
            folders[entry.path] = entry
        elif found.setdefault(entry.path, entry) is not entry:
            raise LockError(f"two files of one layer have the path {entry.path}")
    folders = {path: LayerFolder(path) for path in parents} | folders
    both = sorted(folders.keys() & found.keys())
    if both:
        raise LockError(f"{both[0]} is a file and a folder in one layer")
    everything = found | folders
    return (everything[path] for path in sorted(everything))


def _content_size(entry: LayerEntry) -> int:
    if not isinstance(entry, LayerFile):
        return 0
    return len(entry.content) if isinstance(entry.content, bytes) else entry.content.member.size


def _mode(entry: LayerFile) -> int:
    return EXECUTABLE if entry.executable else MODE


def _header(entry: LayerEntry) -> bytes:
    match entry:
        case LayerFolder():
            return tar_header(f"{entry.path}/", b"5", entry.mode, owner=(entry.uid, entry.gid))
        case LayerLink():
            return tar_header(entry.path, b"2", 0o777, target=entry.target)
        case LayerFile():
            return tar_header(entry.path, b"0", _mode(entry), _content_size(entry))


class _Writer:
    """Writes a layer, and counts and hashes the bytes of the gzip file, of the tar in it, and of each file. The
    parameters are those of `write_layer`."""

    def __init__(
        self, packed: Callable[[bytes], object], plain: Callable[[bytes], object], known: WrittenLayer | None
    ) -> None:
        self._known = known
        # None: these bytes are neither computed nor compared
        self._packed = None if known and packed is drop else packed
        self._plain = None if known and plain is drop else plain
        self._packed_sha256, self._plain_sha256 = hashlib.sha256(), hashlib.sha256()
        self._packed_size = self._plain_size = 0
        self._waiting = bytearray()  # bytes for the next stored block
        self._crc = self._stored = 0
        self._begun = False

    def add(self, entry: LayerEntry) -> WrittenFile | None:
        """Add an entry. Return how it was written, or None for a folder."""
        self.store(_header(entry))
        if isinstance(entry, LayerFolder):
            return None
        if isinstance(entry, LayerLink):
            return WrittenFile(entry.path, 0o777, 0, target=entry.target)
        if isinstance(entry.content, bytes):
            sha256: str | None = hashlib.sha256(entry.content).hexdigest()
            self.store(entry.content)
        else:
            sha256 = self._add_member(entry.content)
        size = _content_size(entry)
        self.store(b"\0" * (-size % TAR_BLOCK))
        return WrittenFile(entry.path, _mode(entry), size, sha256)

    def written(self, files: Iterable[WrittenFile]) -> WrittenLayer:
        """Return the layer, when all its bytes were written. Raises BuildError if the layer is not the known one."""
        digest, diff_id = (f"sha256:{found.hexdigest()}" for found in (self._packed_sha256, self._plain_sha256))
        if self._known is None:
            return WrittenLayer(digest, self._packed_size, diff_id, self._plain_size, tuple(files))
        if self._packed:
            require_same_layer(digest, self._known.digest)
        if self._plain:
            require_same_layer(diff_id, self._known.diff_id)
        return self._known

    def _add_member(self, content: WheelContent) -> str | None:
        """Return the sha256 of the content, or None if the layer is known."""
        wheel, member = content.wheel, content.member
        found = None if self._known else hashlib.sha256()
        if member.deflated:
            self.end_stored()
            self._write_packed(gzip_members.HEADER)
        copied = member.deflated and found is None and self._plain is None
        for packed, plain in wheel.packed_blocks(member) if copied else wheel.blocks(member):
            if found:
                found.update(plain)
            if member.deflated:
                self._write_packed(packed)
                self._write_plain(plain)
            else:
                self.store(plain)
        if member.deflated:
            self._write_packed(gzip_members.trailer(member.crc, member.size))
        if found is None:
            return None
        sha256 = found.hexdigest()
        content.check(sha256)
        return sha256

    def store(self, raw: bytes) -> None:
        """Add bytes in stored blocks. All but the last block of a gzip member are full, however the bytes arrive."""
        self._write_plain(raw)
        if self._packed is None:
            return
        self._crc = isal_zlib.crc32(raw, self._crc)
        self._stored += len(raw)
        self._waiting += raw
        while len(self._waiting) > _STORED:
            self._write_block(last=False)

    def end_stored(self) -> None:
        """End the gzip member with stored blocks, if one was begun."""
        if self._stored:
            self._write_block(last=True)
            self._write_packed(gzip_members.trailer(self._crc, self._stored))
            self._crc = self._stored = 0
            self._begun = False

    def _write_block(self, last: bool) -> None:
        if not self._begun:
            self._write_packed(gzip_members.HEADER)
            self._begun = True
        block = bytes(self._waiting[:_STORED])
        del self._waiting[:_STORED]
        self._write_packed(struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF) + block)

    def _write_packed(self, raw: bytes) -> None:
        if self._packed:
            self._packed_sha256.update(raw)
            self._packed_size += len(raw)
            self._packed(raw)

    def _write_plain(self, raw: bytes) -> None:
        if self._plain:
            self._plain_sha256.update(raw)
            self._plain_size += len(raw)
            self._plain(raw)


def tar_header(
    path: str, kind: bytes, mode: int, size: int = 0, target: str = "", owner: tuple[int, int] = (0, 0)
) -> bytes:
    """Return the header of a tar member, after a PAX header if a name or a number does not fit. `owner`: the ids of the
    user and the group. tarfile is not used, because the bytes must be the same in all versions of Python."""
    records = {key: str(number) for key, number in zip(("uid", "gid"), owner, strict=True) if number >= _LARGEST_ID}
    for key, text in (("linkpath", target), ("path", path)):
        if len(text.encode()) > _LONGEST_NAME or not text.isascii():
            records[key] = text
    if size >= _LARGEST_OCTAL:
        records["size"] = str(size)
    extended = b"".join(_pax_record(key, value) for key, value in sorted(records.items()))
    prefix = b""
    if extended:
        padding = b"\0" * (-len(extended) % TAR_BLOCK)
        prefix = _ustar("PaxHeader", b"x", MODE, len(extended), "") + extended + padding
    uid, gid = (number if number < _LARGEST_ID else 0 for number in owner)
    return prefix + _ustar(path, kind, mode, 0 if "size" in records else size, target, uid, gid)


def _pax_record(key: str, value: str) -> bytes:
    """Return "LENGTH KEY=VALUE" and a line end; the length includes its own digits."""
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while length != len(rest) + len(str(length)):
        length = len(rest) + len(str(length))
    return str(length).encode() + rest


def _ustar(path: str, kind: bytes, mode: int, size: int, target: str, uid: int = 0, gid: int = 0) -> bytes:
    """Return a header of 512 bytes."""
    name, link = (text.encode("ascii", "replace")[:_LONGEST_NAME] for text in (path, target))
    fields = (
        name.ljust(100, b"\0"),
        b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, uid, gid, size, SOURCE_DATE_EPOCH),
        b" " * 8,  # the checksum counts as spaces
        kind,
        link.ljust(100, b"\0"),
        b"ustar\x0000".ljust(8 + 32 + 32 + 8 + 8 + 155 + 12, b"\0"),
    )
    raw = b"".join(fields)
    return raw[:148] + b"%06o\0 " % sum(raw) + raw[156:]
