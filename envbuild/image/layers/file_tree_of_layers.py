"""The tree of files that the layers of an image give together, with the marks of the OCI specification that remove
files ("whiteouts"). Pure.

An engine unpacks each layer into a folder of its own. So a folder in an upper layer replaces a symbolic link below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from envbuild.util.untrusted_input_errors import Malformed

_REMOVED, _OPAQUE = ".wh.", ".wh..wh..opq"
_MOST_LINKS = 40  # that are followed, as by Linux


@dataclass(frozen=True)
class TreeFile:
    """A file that is not a folder. `target`: of a symbolic link; `note`: what the reader of the layer noted about the
    content."""

    target: str | None = None
    note: str = ""


@dataclass(frozen=True)
class LayerChange:
    """One entry of a layer. `file`: None for a folder; `same_as`: the path of the file that a hard link names."""

    path: str
    file: TreeFile | None = None
    same_as: str | None = None


TreeFolder = dict[str, "TreeFile | TreeFolder"]


class FileTree:
    """The files of an image. Paths of its methods begin with "/"."""

    def __init__(self) -> None:
        self._root: TreeFolder = {}

    def add_layer(self, changes: list[LayerChange]) -> None:
        """Add the next layer. What it removes is removed from the layers below, whatever the order of its entries.
        Raises Malformed for a path outside the root."""
        added = [change for change in changes if not PurePosixPath(change.path).name.startswith(_REMOVED)]
        for path in (PurePosixPath(change.path) for change in changes):
            if path.name.startswith(_REMOVED) and isinstance(folder := self._node(_parts(path.parent)), dict):
                if path.name == _OPAQUE:
                    folder.clear()
                else:
                    folder.pop(path.name.removeprefix(_REMOVED), None)
        for change in added:
            self._add(change)

    def _add(self, change: LayerChange) -> None:
        parts = _parts(PurePosixPath(change.path))
        if not parts:
            return
        folder = self._root
        for part in parts[:-1]:
            inner = folder.get(part)
            if not isinstance(inner, dict):
                inner = folder[part] = {}
            folder = inner
        name, before = parts[-1], folder.get(parts[-1])
        if change.same_as is not None:
            found = self._node(_parts(PurePosixPath(change.same_as)))
            folder[name] = found if isinstance(found, TreeFile) else TreeFile()
        elif change.file is not None:
            folder[name] = change.file
        elif not isinstance(before, dict):
            folder[name] = {}

    def _node(self, parts: list[str]) -> TreeFile | TreeFolder | None:
        node: TreeFile | TreeFolder | None = self._root
        for part in parts:
            node = node.get(part) if isinstance(node, dict) else None
        return node

    def resolve(self, path: str) -> tuple[str, TreeFile | TreeFolder] | None:
        """Return the path behind all symbolic links, and the file or folder there; None if it is missing, or after too
        many links."""
        waiting, real = _parts(PurePosixPath(path), up=True)[::-1], list[str]()
        for _ in range(_MOST_LINKS + 1):
            node: TreeFile | TreeFolder | None = self._node(real)
            while waiting and isinstance(node, dict):
                part = waiting.pop()
                if part == "..":
                    real = real[:-1]
                    node = self._node(real)
                    continue
                node = node.get(part)
                if isinstance(node, TreeFile) and node.target is not None:
                    break
                real.append(part)
            if isinstance(node, TreeFile) and node.target is not None:
                real = [] if node.target.startswith("/") else real
                waiting += _parts(PurePosixPath(node.target), up=True)[::-1]
                continue
            return None if waiting or node is None else (f"/{'/'.join(real)}", node)
        return None

    def folder(self, path: str) -> Iterator[tuple[str, TreeFile | TreeFolder]]:
        """Yield the names in a folder and what they are, sorted; nothing if it is not a folder."""
        found = self.resolve(path)
        if found and isinstance(found[1], dict):
            yield from sorted(found[1].items())


def _parts(path: PurePosixPath, *, up: bool = False) -> list[str]:
    """`up`: allow "..", as in the target of a link."""
    parts = [part for part in path.parts if part != "/"]
    if ".." in parts and not up:
        raise Malformed("a layer has a path outside its root")
    return parts
