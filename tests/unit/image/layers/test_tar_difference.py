"""A difference applied on the first tar gives the second, whatever the two contain."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envbuild.image.layers.tar_difference import difference_blocks
from envbuild.util.errors import BuildError

FILE, FOLDER, LINK, HARD = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@dataclass(frozen=True)
class Node:
    """An entry. `group`: the names of a file that has several hard links."""

    kind: bytes = FILE
    content: bytes = b""
    target: str = ""
    mode: int = 0o644
    mtime: float = 1.0
    attributes: tuple[tuple[str, str], ...] = ()
    group: tuple[str, ...] = ()


Tree = Mapping[str, Node]


def write(file: Path, tree: Tree) -> Path:
    """Write a tree as mmdebstrap writes a base: sorted, and with names that begin with "./". The first name of a group
    is a file, the other names are hard links to this file."""
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        for path, node in sorted({"": Node(FOLDER, mode=0o755), **tree}.items()):
            member = tarfile.TarInfo(f"./{path}")
            member.type, member.mode, member.mtime, member.linkname = node.kind, node.mode, node.mtime, node.target
            member.pax_headers = dict(node.attributes)
            if node.group and path != min(node.group):
                member.type, member.linkname = HARD, f"./{min(node.group)}"
            content = node.content if member.type == FILE else b""
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return file


def members(raw: bytes) -> Iterator[tuple[str, tarfile.TarInfo, bytes]]:
    with tarfile.open(fileobj=io.BytesIO(raw)) as archive:
        for member in archive:
            stream = archive.extractfile(member) if member.isreg() else None
            path = "" if member.name == "." else member.name.removeprefix("./")
            yield path, member, stream.read() if stream else b""


def applied(first: Tree, raw: bytes) -> Tree:
    """Apply a layer as the image specification defines; the target of a hard link must be in the layer."""
    tree, layer = dict(first), set[str]()
    for path, member, content in members(raw):
        folder, _, name = path.rpartition("/")
        assert name != ".wh..wh..opq"
        if name.startswith(".wh."):
            gone = f"{folder}/{name.removeprefix('.wh.')}".lstrip("/")
            assert gone in tree
            assert gone not in layer
            tree = {other: node for other, node in tree.items() if other != gone and not other.startswith(f"{gone}/")}
            continue
        if member.type != FOLDER or (path in tree and tree[path].kind != FOLDER):
            tree = {other: node for other, node in tree.items() if other != path and not other.startswith(f"{path}/")}
        attributes = tuple(sorted(item for item in member.pax_headers.items() if item[0].startswith("SCHILY")))
        node = Node(member.type, content, member.linkname, member.mode, member.mtime, attributes)
        layer.add(path)
        if member.type == HARD:
            target = member.linkname.removeprefix("./")
            assert target in layer
            node = tree[target]
            node = replace(node, group=tuple(sorted({*(node.group or (target,)), path})))
            tree.update(dict.fromkeys(node.group, node))
        tree[path] = node
    tree.pop("", None)
    return tree


def difference(first: Tree, second: Tree) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        one, two = write(Path(folder, "one"), first), write(Path(folder, "two"), second)
        return b"".join(difference_blocks(one, two))


def check(first: Tree, second: Tree) -> list[str]:
    """Return the names in the difference, which must give the second tree."""
    raw = difference(first, second)
    assert applied(first, raw) == second
    assert raw == difference(first, second)
    assert len(raw) % 512 == 0
    return [path for path, _, _ in members(raw)]


A, B, D = Node(content=b"a"), Node(content=b"b"), Node(FOLDER, mode=0o755)


def linked(names: str, content: bytes = b"x") -> Tree:
    group = tuple(names.split())
    return dict.fromkeys(group, Node(content=content, group=tuple(sorted(group))))


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"d": D, "d/a": A}, {"d": D, "d/a": A}, []),
        ({"d": D, "d/a": A}, {"d": D, "d/a": B}, ["", "d", "d/a"]),
        ({"d": D, "d/a": A, "d/b": A}, {"d": D, "d/b": A}, ["", "d", "d/.wh.a"]),
        ({"d": D, "d/e": D, "d/e/f": A}, {}, ["", ".wh.d"]),
        ({"a": A}, {"a": D, "a/b": B}, ["", "a", "a/b"]),
        ({"a": D, "a/b": B, "a/c": D, "a/c/d": A}, {"a": A}, ["", "a"]),
        ({"a": D, "a/b": B}, {"a": Node(LINK, target="c"), "c": D}, ["", "a", "c"]),
        ({"a": Node(LINK, target="c"), "c": D, "c/x": A}, {"a": D, "a/x": B, "c": D, "c/x": A}, ["", "a", "a/x"]),
        ({"a": Node(LINK, target="c")}, {"a": Node(LINK, target="d")}, ["", "a"]),
        ({"a": A}, {"a": replace(A, mode=0o755)}, ["", "a"]),
        ({"a": A}, {"a": replace(A, mtime=2.5)}, ["", "a"]),
        ({"a": A}, {"a": replace(A, attributes=(("SCHILY.xattr.security.capability", "x"),))}, ["", "a"]),
        ({"d": D}, {"d": replace(D, mode=0o700)}, ["", "d"]),
        (linked("a b c"), linked("a b c"), []),
        (linked("a b"), linked("a b", b"y"), ["", "a", "b"]),
        (linked("a b c"), linked("a b"), ["", ".wh.c", "a", "b"]),
        (linked("a b"), {**linked("b c")}, ["", ".wh.a", "b", "c"]),
        (linked("b c"), linked("a b c"), ["", "a", "b", "c"]),
        ({"b": A}, linked("a b", b"a"), ["", "a", "b"]),
        (linked("a b", b"a"), {"a": A, "b": A}, ["", "a", "b"]),
        ({"é" * 80: A}, {"é" * 80: B, "x" * 200: A}, ["", "x" * 200, "é" * 80]),
    ],
)
def test_the_difference_has_only_what_changed(first: Tree, second: Tree, names: list[str]) -> None:
    assert check(first, second) == names


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    names = st.sampled_from(["a", "b", "c", "aa", "a.b"])
    paths = draw(st.lists(st.lists(names, min_size=1, max_size=3).map("/".join), max_size=9, unique=True))
    tree: dict[str, Node] = {}
    for path in sorted(paths):
        parent = path.rpartition("/")[0]
        if parent and (parent not in tree or tree[parent].kind != FOLDER):
            continue
        mode, mtime = draw(st.sampled_from([0o644, 0o755])), draw(st.sampled_from([1.0, 2.0, 1.5]))
        kind = draw(st.sampled_from([FOLDER, FOLDER, FILE, FILE, LINK]))
        content = draw(st.sampled_from([b"", b"x", b"y" * 700])) if kind == FILE else b""
        target = draw(st.sampled_from(["a", "b/c"])) if kind == LINK else ""
        tree[path] = Node(kind, content, target, mode, mtime)
    files = sorted(path for path, node in tree.items() if node.kind == FILE)
    group = sorted(draw(st.sets(st.sampled_from(files), max_size=3))) if files else []
    if len(group) > 1:
        tree.update(dict.fromkeys(group, replace(tree[group[0]], group=tuple(group))))
    return tree


@settings(max_examples=60, deadline=None)
@given(trees(), trees())
def test_a_difference_gives_the_second_tar(first: Tree, second: Tree) -> None:
    check(first, second)


@pytest.mark.parametrize("name", [".wh.a", "d/.wh..wh..opq"])
def test_a_name_of_whiteouts_is_refused(name: str) -> None:
    with pytest.raises(BuildError, match="cannot be in a layer"):
        difference({}, {"d": D, name: A})


def test_a_tar_need_not_have_its_root(tmp_path: Path) -> None:
    for name, paths in (("one", ["a", "b"]), ("two", ["b"])):
        with tarfile.open(tmp_path / name, "w") as archive:
            for path in paths:
                archive.addfile(tarfile.TarInfo(path))
    raw = b"".join(difference_blocks(tmp_path / "one", tmp_path / "two"))
    assert [path for path, _, _ in members(raw)] == [".wh.a"]


def test_sparse_files_and_global_headers_are_refused(tmp_path: Path) -> None:
    plain, other = write(tmp_path / "plain", {"a": A}), tmp_path / "other"
    with tarfile.open(other, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "x"}) as archive:
        archive.addfile(tarfile.TarInfo("a"))
    with pytest.raises(BuildError, match="sparse files or global headers"):
        b"".join(difference_blocks(plain, other))
    with tarfile.open(other, "w", format=tarfile.PAX_FORMAT) as archive:
        member = tarfile.TarInfo("a")
        member.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "100"}
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    with pytest.raises(BuildError, match="sparse files or global headers"):
        b"".join(difference_blocks(plain, other))
