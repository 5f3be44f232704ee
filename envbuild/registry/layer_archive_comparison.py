"""Compares two archives of a layer: their files, and the order of these files if it matters.

An engine may write a layer's files in different orders (docs/decisions/0019), which changes the layer's digest.
"""

from __future__ import annotations

import hashlib
import posixpath
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from envbuild.registry import image_content_reader
from envbuild.registry.oci_types import ImageSource

Where = tuple[ImageSource, str, str]  # a layer: its source, its digest in that source, its diff id
Facts = tuple[object, ...]

_KINDS = ("kind", "mode", "owner", "group", "time", "link", "size", "device", "attributes", "content")
_BLOCK = 512
_FILES, _WITHOUT_CONTENT, _BEFORE_ANOTHER = b"\x000", b"123456", b"xLK"  # types of tar headers
_NOTHING = bytes(_BLOCK)
_OTHER = "the same files, but the archives differ"


def difference(there: Where, here: Where, names: tuple[str, str]) -> str | None:
    """Return how the layer `there` differs from our layer `here`; None if the two are the same, or differ only in an
    order that does not matter. `names`: what messages call the sources of the two layers.

    Only the entries of our layer are kept in memory, because the other layer is untrusted. Raises Refusal for an
    invalid layer.
    """
    if there[2] == here[2]:
        return None
    ours: dict[tuple[str, int], Facts] = {}
    pieces: Counter[bytes] = Counter()
    above: set[str] = set()
    why_ordered: str | None = None

    def taken(piece: bytes) -> None:
        pieces[piece if pieces[piece] else b""] -= 1  # negative for a piece that our layer does not have

    own, other = Pieces(lambda piece: pieces.update([piece])), Pieces(taken)
    for path, before, facts, fixed in _entries(here, own):
        ours[path, before] = facts
        fixed = fixed or ("comes after the files in it" if path in above else None)
        why_ordered = why_ordered or (fixed and f"{path} {fixed}")
        above.update(_above(path))
    whole = own.plain and pieces.total() == len(ours)
    for path, before, facts, _ in _entries(there, other):
        wanted = ours.pop((path, before), None)
        if wanted is None:
            return f"{path} is only in {names[0]}"
        if facts != wanted:
            return f"{path} differs in {', '.join(k for k, a, b in zip(_KINDS, facts, wanted, strict=True) if a != b)}"
        if not why_ordered and any((folder, 0) in ours for folder in _above(path)):  # the path may lead through a link
            why_ordered = f"{path} comes before its folder"
    if ours:
        return f"{next(iter(ours))[0]} is only in {names[1]}"
    if any(pieces.values()) or own.end != other.end or not whole:
        return _OTHER
    return f"the same files in a different order, which matters: {why_ordered}" if why_ordered else None


def _above(path: str) -> Iterator[str]:
    return map(str, PurePosixPath(path).parents)


class Pieces:
    """Splits a tar into pieces, each an entry with its headers, and calls `tell` with the digest of each piece.

    From two tars with the same pieces and the same end, every reader gets the same entries. A comparison of tarfile's
    entries would not be enough: entries that are equal for tarfile may differ for another reader. `plain`: whether no
    piece affects how others are read.
    """

    def __init__(self, tell: Callable[[bytes], object]) -> None:
        self.plain = True
        self._tell = tell
        self._head = bytearray()
        self._left = 0  # bytes of content
        self._more = False  # the next header belongs to this piece
        self._piece = hashlib.sha256()
        self._tail: hashlib._Hash | None = None

    @property
    def end(self) -> tuple[object, ...]:
        """The state after the last piece, which two tars must share to be equal."""
        return bytes(self._head), self._left, self._more, self._tail and self._tail.hexdigest()

    def feed(self, block: bytes) -> None:
        """Process the next block of the archive. Raises ValueError for an invalid tar."""
        rest = memoryview(block)
        while rest:
            if self._tail:
                self._tail.update(rest)
                return
            if self._left:
                part, rest = rest[: self._left], rest[self._left :]
                self._left -= len(part)
                self._piece.update(part)
            else:
                lacking = _BLOCK - len(self._head)
                self._head += rest[:lacking]
                rest = rest[lacking:]
                if len(self._head) < _BLOCK:
                    return
                self._begin(bytes(self._head))
                self._head.clear()
            if not self._left and not self._more and not self._tail:
                self._tell(self._piece.digest())
                self._piece = hashlib.sha256()

    def _begin(self, head: bytes) -> None:
        if head == _NOTHING:
            self._tail = hashlib.sha256(head)
            return
        self._piece.update(head)
        kind = head[156:157]
        self._more = kind in _BEFORE_ANOTHER
        self.plain &= kind in _FILES + _WITHOUT_CONTENT + _BEFORE_ANOTHER
        if kind not in _WITHOUT_CONTENT:
            try:
                size = tarfile.nti(head[124:136])  # type: ignore[attr-defined]
            except tarfile.TarError as error:
                raise ValueError(str(error)) from None
            self._left = -(-max(size, 0) // _BLOCK) * _BLOCK


def _entries(where: Where, pieces: Pieces) -> Iterator[tuple[str, int, Facts, str | None]]:
    """For each entry, yield its path, the number of earlier entries with this path, the properties to compare, and why
    its position matters (None if it does not)."""
    before: Counter[str] = Counter()
    for member, archive in image_content_reader.entries(*where, pieces.feed):
        path = posixpath.normpath(f"/{member.name.lstrip('/')}")
        facts = (
            member.type, member.mode, member.uid, member.gid, member.mtime, member.linkname, member.size,
            (member.devmajor, member.devminor), _attributes(member), _content(member, archive),
        )  # fmt: skip
        yield path, before[path], facts, _fixed(member, path, before[path])
        before[path] += 1


def _attributes(member: tarfile.TarInfo) -> Facts:
    return tuple(sorted(item for item in member.pax_headers.items() if ".xattr." in item[0]))


def _fixed(member: tarfile.TarInfo, path: str, before: int) -> str | None:
    """Return why the position of an entry among the others matters; None if it does not."""
    if before:
        return "occurs more than once"
    if member.islnk():
        return "is a hard link"
    if posixpath.basename(path).startswith(".wh."):
        return "is a whiteout"
    # Pieces reads the size from the header's own field, not from a PAX header
    return "has its size in a PAX header" if "size" in member.pax_headers else None


def _content(member: tarfile.TarInfo, archive: tarfile.TarFile) -> str:
    seen = hashlib.sha256()
    for block in image_content_reader.content(member, archive):
        seen.update(block)
    return seen.hexdigest()
