"""Computes the difference of two tars as the tar of a layer: applied to the first tar's content, it gives the second's.

The entries of the second tar are copied byte for byte, so that attributes, times and owners stay. Hard links are copied
together with all names of their file, because a layer cannot link to a file in a lower layer.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from envbuild.image.layers.layer_writer import TAR_BLOCK, tar_header
from envbuild.util.errors import BuildError, printable

VERSION = 1
"""Increment this number with every change that gives a different result for the same tars."""
_BLOCK = 1 << 20
_WHITEOUT = ".wh."
_TIMES = ("mtime", "atime", "ctime")


@dataclass(frozen=True)
class _Entry:
    """An entry of a tar. `identity`: all properties that are compared; `start`, `end`: the position of its bytes in the
    tar, headers and padding included."""

    kind: bytes
    identity: tuple[Any, ...]
    start: int
    end: int


def difference_blocks(first: Path, second: Path) -> Iterator[bytes]:
    """Yield the blocks of a tar with the entries of `second` that `first` lacks or has with other properties or
    content, the parent folders of these entries, and a whiteout for each path that `second` lacks. Both tars must
    contain each path once, and each hard link after its file.

    Raises BuildError for a name that is reserved for whiteouts, and for tars that cannot be copied entry by entry,
    because they have sparse files or global headers.
    """
    before, after = _entries(first), _entries(second)
    changed = {path for path, entry in after.items() if path not in before or before[path].identity != entry.identity}
    removed = [path for path in before if path not in after and _is_folder_in(before, after, _parent(path))]
    folders = {parent for path in (*changed, *removed) for parent in _parents(path)}
    wanted = {path: after[path] for path in changed | folders if path in after}
    links = {path for path, entry in wanted.items() if entry.kind == tarfile.LNKTYPE}
    whiteouts = {f"{_parent(path)}/{_WHITEOUT}{path.rpartition('/')[2]}".lstrip("/"): path for path in removed}
    with second.open("rb") as stream:
        for path in sorted((wanted.keys() - links) | whiteouts.keys(), key=_order):
            if path in whiteouts:
                yield tar_header(path, b"0", 0o644)
            else:
                yield from _copied(stream, wanted[path])
        # hard links come last, in their order in the second tar: there, each comes after the file that it links to
        for path in sorted(links, key=lambda path: wanted[path].start):
            yield from _copied(stream, wanted[path])
    yield b"\0" * 2 * TAR_BLOCK


def _order(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")) if path else ()


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _parents(path: str) -> Iterator[str]:
    while path:
        path = _parent(path)
        yield path


def _is_folder_in(before: dict[str, _Entry], after: dict[str, _Entry], path: str) -> bool:
    """Whether a whiteout below this path is needed and possible: the path must be a folder in both tars. The root
    always is."""
    return not path or all(path in entries and entries[path].kind == tarfile.DIRTYPE for entries in (before, after))


def _entries(file: Path) -> dict[str, _Entry]:
    """Return the entries of a tar by path; the root has the empty path."""
    with tarfile.open(file) as archive, file.open("rb") as stream:
        members = {_path(member.name): member for member in archive}
        if archive.pax_headers or any(member.issparse() for member in members.values()):
            raise BuildError(f"{file.name} has sparse files or global headers", hint="make it with GNU tar's defaults")
        names: dict[str, list[str]] = {}  # all names of each file that has several
        for path, member in members.items():
            if member.islnk():
                names.setdefault(_target(member), [_target(member)]).append(path)
        contents = {path: _content(stream, member) for path, member in members.items() if member.isreg()}
        found = {}
        for path, member in members.items():
            of = members[_target(member)] if member.islnk() else member
            group = tuple(sorted(names.get(_path(of.name), ())))
            identity = (
                *(of.type, of.mode, of.uid, of.gid, of.mtime, of.linkname, of.devmajor, of.devminor),
                *(sorted(item for item in of.pax_headers.items() if item[0] not in _TIMES), group),
                contents.get(_path(of.name)),
            )
            end = member.offset_data + (-(-member.size // TAR_BLOCK) * TAR_BLOCK if member.isreg() else 0)
            found[path] = _Entry(member.type, identity, member.offset, end)
    return found


def _path(name: str) -> str:
    path = name.removeprefix("./").strip("/")
    if path.rpartition("/")[2].startswith(_WHITEOUT):
        raise BuildError(
            f"{printable(name)!r} cannot be in a layer: there, names that begin with {_WHITEOUT} delete files",
            hint="leave its package out",
        )
    return "" if path == "." else path


def _target(member: tarfile.TarInfo) -> str:
    return _path(member.linkname)


def _content(stream: IO[bytes], member: tarfile.TarInfo) -> str:
    stream.seek(member.offset_data)
    found, left = hashlib.sha256(), member.size
    while left and (block := stream.read(min(left, _BLOCK))):
        found.update(block)
        left -= len(block)
    return found.hexdigest()


def _copied(stream: IO[bytes], entry: _Entry) -> Iterator[bytes]:
    stream.seek(entry.start)
    left = entry.end - entry.start
    while left and (block := stream.read(min(left, _BLOCK))):
        left -= len(block)
        yield block
