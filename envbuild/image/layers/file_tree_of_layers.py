"""The tree of files that the layers of an image give together, with the marks of the OCI specification that remove
files ("whiteouts"). Pure.

An engine unpacks each layer into a folder of its own. So a folder in an upper layer replaces a symbolic link of a lower
layer that has the same path, while a link of the same layer is followed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.util.untrusted_input_errors import Malformed, Refusal

MAX_FILES = 2_000_000
"""The most files and folders that the layers of an image may add together; a large image has 400,000."""
_REMOVED, _OPAQUE = ".wh.", ".wh..wh..opq"
_MOST_LINKS = 40  # that are followed, as by Linux
_LONGEST_PATH = 4096  # characters, as in Linux


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file that is not a folder. `target`: of a symbolic link; `note`: what the reader of the layer noted about the
    content."""

    target: str | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class FolderOwnership:
    """The mode of a folder, and the ids of its owner and group. The default is that of a folder without an entry."""

    mode: int = 0o755
    uid: int = 0
    gid: int = 0


PLAIN = FolderOwnership()


@dataclass(frozen=True, slots=True)
class LayerChange:
    """One entry of a layer. `file`: None for a folder and for a hard link; `same_as`: for a hard link, the path of the
    file that it names, otherwise None; `ownership`: that of a folder."""

    path: str
    file: TreeFile | None = None
    same_as: str | None = None
    ownership: FolderOwnership = PLAIN


class TreeFolder(dict[str, "TreeFile | TreeFolder"]):
    """The content of a folder by name, and the folder's ownership."""

    __slots__ = ("ownership",)

    def __init__(self, ownership: FolderOwnership = PLAIN) -> None:
        super().__init__()
        self.ownership = ownership


class FileTree:
    """The files of an image, built layer by layer. `add_layer` takes paths as they are in the tar; `resolve` and
    `folder` take absolute paths, and `resolve` returns one."""

    def __init__(self) -> None:
        self._root = TreeFolder()
        self._count = 0

    def add_layer(self, changes: list[LayerChange]) -> None:
        """Add the next layer. Entries that the layer removes are removed from the layers below, whatever the order of
        the layer's entries.

        Raises Malformed for a path that is outside the root, too long, or behind too many links, and for a mark that
        names no file; Refusal for too many files.
        """
        added = list[tuple[list[str], LayerChange]]()
        for change in changes:
            parts = _inner_parts(change.path)
            if parts and parts[-1].startswith(_REMOVED):
                self._remove(parts[:-1], parts[-1])
            elif parts:
                added.append((parts, change))
        links: set[tuple[str, ...]] = set()
        for parts, change in added:
            self._add(parts, change, links)

    def _remove(self, parent: list[str], mark: str) -> None:
        removed = mark.removeprefix(_REMOVED)
        if removed in ("", ".", ".."):
            raise Malformed(f"a layer has an invalid mark of a removed file: {mark}")
        folder = self._node(parent)
        if isinstance(folder, TreeFolder):
            if mark == _OPAQUE:
                folder.clear()
            else:
                folder.pop(removed, None)

    def _add(self, parts: list[str], change: LayerChange, links: set[tuple[str, ...]]) -> None:
        """`links`: the paths of the symbolic links that this layer has added."""
        real, name, file = self._behind_links(parts[:-1], links), parts[-1], change.file
        folder = self._folder_at(real)
        if change.same_as is not None:
            *parents, last = _inner_parts(change.same_as) or [""]
            found = self._node([*self._behind_links(parents, links), last])
            file = found if isinstance(found, TreeFile) else TreeFile()
        if file is not None:
            self._set(folder, name, file)
            if file.target is not None:
                links.add((*real, name))
        elif isinstance(there := folder.get(name), TreeFolder):
            there.ownership = change.ownership
        else:
            self._set(folder, name, TreeFolder(change.ownership))

    def _behind_links(self, parts: list[str], links: set[tuple[str, ...]]) -> list[str]:
        """Return the path of a folder, which may be missing, behind the symbolic links of the same layer."""
        waiting, real, followed = parts[::-1], list[str](), 0
        node: TreeFile | TreeFolder | None = self._root
        while waiting:
            part = waiting.pop()
            if part == "..":
                real = real[:-1]
                node = self._node(real)
                continue
            inner = node.get(part) if isinstance(node, TreeFolder) else None
            if not isinstance(inner, TreeFile) or inner.target is None or (*real, part) not in links:
                real, node = [*real, part], inner
                continue
            followed += 1
            if followed > _MOST_LINKS:
                raise Malformed("a layer has a file behind too many symbolic links")
            if inner.target.startswith("/"):
                real, node = [], self._root
            waiting += _parts(inner.target)[::-1]
        return real

    def _folder_at(self, real: list[str]) -> TreeFolder:
        """Return the folder of a path, which is made if it is missing; a new folder replaces a file or a link of that
        path."""
        folder = self._root
        for part in real:
            inner = folder.get(part)
            if not isinstance(inner, TreeFolder):
                inner = TreeFolder()
                self._set(folder, part, inner)
            folder = inner
        return folder

    def _set(self, folder: TreeFolder, name: str, node: TreeFile | TreeFolder) -> None:
        if name not in folder:
            self._count += 1
            if self._count > MAX_FILES:
                raise Refusal("too-large", f"an image has more than {MAX_FILES} files")
        folder[name] = node

    def _node(self, parts: list[str]) -> TreeFile | TreeFolder | None:
        node: TreeFile | TreeFolder | None = self._root
        for part in parts:
            node = node.get(part) if isinstance(node, TreeFolder) else None
        return node

    def resolve(self, path: str) -> tuple[str, TreeFile | TreeFolder] | None:
        """Return the path behind all symbolic links, and the file or folder there; None if it is missing, or after too
        many links."""
        waiting, real = _parts(path)[::-1], list[str]()
        for _ in range(_MOST_LINKS + 1):
            node: TreeFile | TreeFolder | None = self._node(real)
            while waiting and isinstance(node, TreeFolder):
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
                waiting += _parts(node.target)[::-1]
                continue
            return None if waiting or node is None else (f"/{'/'.join(real)}", node)
        return None

    def folder(self, path: str) -> Iterator[tuple[str, TreeFile | TreeFolder]]:
        """Yield the names in a folder and what they are, sorted; nothing if it is not a folder."""
        found = self.resolve(path)
        if found and isinstance(found[1], TreeFolder):
            yield from sorted(found[1].items())


def _inner_parts(path: str) -> list[str]:
    """Return the parts of an entry's path, or of the path that a hard link names."""
    parts = _parts(path)
    if ".." in parts:
        raise Malformed("a layer has a path outside its root")
    return parts


def _parts(path: str) -> list[str]:
    if len(path) > _LONGEST_PATH:
        raise Malformed(f"an image has a path of more than {_LONGEST_PATH} characters")
    return [part for part in path.split("/") if part not in ("", ".")]
