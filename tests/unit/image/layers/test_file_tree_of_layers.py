"""The files that layers give together, by the rules of the OCI specification and of engines."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from envbuild.image.layers import file_tree_of_layers
from envbuild.image.layers.file_tree_of_layers import FileTree, FolderOwnership, LayerChange, TreeFile, TreeFolder
from envbuild.util.untrusted_input_errors import Malformed, Refusal


def change(line: str) -> LayerChange:
    """Parse "a/", a folder; "a", a file whose note is its path; "a -> b", a link; "a => b", a hard link."""
    path, symbolic, target = line.partition(" -> ")
    if symbolic:
        return LayerChange(path, TreeFile(target=target))
    path, hard, target = line.partition(" => ")
    if hard:
        return LayerChange(path, same_as=target)
    return LayerChange(path) if path.endswith("/") else LayerChange(path, TreeFile(note=path))


def tree_of(*layers: str) -> FileTree:
    """Return the tree of layers, each a text of entries with ", " between them."""
    tree = FileTree()
    for layer in layers:
        tree.add_layer([change(line) for line in layer.split(", ")])
    return tree


def paths(tree: FileTree, folder: str = "") -> Iterator[str]:
    """Yield all paths, those of folders with a slash at the end."""
    for name, node in tree.folder(folder or "/"):
        if isinstance(node, TreeFile):
            yield f"{folder}/{name}"
        else:
            yield f"{folder}/{name}/"
            yield from paths(tree, f"{folder}/{name}")


def resolved(tree: FileTree, path: str) -> tuple[str, str] | None:
    """Return the path behind all links and the note of the file; "folder" for a folder."""
    found: tuple[str, TreeFile | TreeFolder] | None = tree.resolve(path)
    return found and (found[0], found[1].note if isinstance(found[1], TreeFile) else "folder")


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (["a/, a/b, c/d/e"], "/a/ /a/b /c/ /c/d/ /c/d/e"),
        (["./a/, ./a/b"], "/a/ /a/b"),
        (["/a/b, //c//d, ./"], "/a/ /a/b /c/ /c/d"),
        (["a/b", "a/"], "/a/ /a/b"),
        (["a/b", "a"], "/a"),
        (["a", "a/"], "/a/"),
        (["a/b, a/c", "a/.wh.b"], "/a/ /a/c"),
        (["a/b/c, a/d", "a/.wh.b"], "/a/ /a/d"),
        (["a/b", "a/.wh.b, a/b"], "/a/ /a/b"),
        (["a/b", "a/b, a/.wh.b"], "/a/ /a/b"),  # the mark is for the layers below
        (["a/b, a/c/d", "a/.wh..wh..opq, a/e"], "/a/ /a/e"),
        (["a/b", "a/c, a/.wh..wh..opq"], "/a/ /a/c"),
        (["a/b", ".wh..wh..opq, c"], "/c"),
        (["a/b", "x/.wh.b, .wh.x"], "/a/ /a/b"),
        (["a/.wh.b"], ""),
        (["a/b, l -> a", "l/.wh.b"], "/a/ /a/b /l"),  # not through a link of a layer below
    ],
)
def test_layers_add_replace_and_remove_files(layers: list[str], expected: str) -> None:
    assert " ".join(paths(tree_of(*layers))) == expected


@pytest.mark.parametrize("mark", [".wh.", "a/.wh..", "a/.wh..."])
def test_a_mark_that_removes_its_own_folder_is_refused(mark: str) -> None:
    """For such a mark, an engine removes the folder that contains the mark, or that folder's parent."""
    with pytest.raises(Malformed, match=r"invalid mark of a removed file: \.wh"):
        tree_of("a/b", mark)


@pytest.mark.parametrize("entry", ["../a", "a/../../b", "a/..", "a => ../b", "../.wh.a", "a/../b/.wh.c"])
def test_a_path_outside_the_root_is_refused(entry: str) -> None:
    with pytest.raises(Malformed, match="outside its root"):
        tree_of(entry)


@pytest.mark.parametrize(
    ("layers", "path", "expected"),
    [
        (["a/b"], "/a/b", ("/a/b", "a/b")),
        (["a/b"], "/a/./b/", ("/a/b", "a/b")),
        (["a/b"], "/a", ("/a", "folder")),
        (["a/b"], "/a/c", None),
        (["a/b"], "/a/b/c", None),
        (["a/b, l -> a"], "/l/b", ("/a/b", "a/b")),
        (["a/b, c/l -> ../a/b"], "/c/l", ("/a/b", "a/b")),
        (["a/b, c/l -> /a"], "/c/l/b", ("/a/b", "a/b")),
        (["a/b, c/l -> //a/./b"], "/c/l", ("/a/b", "a/b")),
        (["a/b, c/l -> ../../../../a/b"], "/c/l", ("/a/b", "a/b")),  # the root is its own parent
        (["a/b, l -> a/b, m -> l, n -> /m"], "/n", ("/a/b", "a/b")),
        (["a/b, l -> gone"], "/l", None),
        (["a/b, l -> a/b"], "/l/c", None),
        (["l -> l"], "/l", None),
        (["l -> m, m -> l"], "/l/x", None),
        (["l -> l/x"], "/l", None),
        (["a/b, l -> a"], "/l/../a/b", ("/a/b", "a/b")),
        (["a/x/y, l -> a/x"], "/l/..", ("/a", "folder")),  # above the folder that the link leads to
        (["a/b, c => a/b"], "/c", ("/c", "a/b")),
        (["a/b, l -> a/b, c => l"], "/c", ("/a/b", "a/b")),
        (["a/b, l -> a, c => l/b"], "/c", ("/c", "a/b")),  # a hard link is to the file behind links of its layer
        (["a/b, l -> a, m -> l, x/c => m/b"], "/x/c", ("/x/c", "a/b")),
        (["a/b, x/l -> ../a", "x/l -> ../a, c => x/l/b"], "/c", ("/c", "a/b")),
        (["a/b, l -> a", "c => l/b"], "/c", ("/c", "")),  # an engine unpacks each layer without those below
        (["a/b, c => new/b"], "/new", None),  # the folder of the other file is not made
        (["a/b, l -> new, c => l/b"], "/new", None),
        (["a/, c => a"], "/c", ("/c", "")),
        (["a/b, c => /"], "/c", ("/c", "")),
        (["c => gone"], "/c", ("/c", "")),
        (["a/b, l -> a", "l/c"], "/l", ("/l", "folder")),  # a link of a layer below is replaced
        (["a/b, l -> a", "l/c"], "/a/c", None),
        (["a/b, l -> a, l/c"], "/a/c", ("/a/c", "l/c")),  # a link of the same layer is followed
        (["a/b, l -> /new/folder, l/c"], "/new/folder/c", ("/new/folder/c", "l/c")),
        (["a/x/y, l -> a/x/.., l/c"], "/a/c", ("/a/c", "l/c")),
        (["a/b, l -> a, l/, l/c"], "/a/c", None),
        (["a/b, l -> a, m => l, m/c"], "/a/c", ("/a/c", "m/c")),
        (["a/b, l -> a", "l -> d, l/c"], "/d/c", ("/d/c", "l/c")),
        (["a/b, l -> a", ".wh.l, l/c"], "/a/c", None),
    ],
)
def test_links_lead_where_they_lead_in_a_container(
    layers: list[str], path: str, expected: tuple[str, str] | None
) -> None:
    assert resolved(tree_of(*layers), path) == expected


@pytest.mark.parametrize("count", [40, 41])
def test_as_many_links_are_followed_as_by_linux(count: int) -> None:
    links = [f"l{number} -> l{number + 1}" for number in range(count)]
    found = resolved(tree_of(", ".join(links), f"l{count}"), "/l0")
    assert found == ((f"/l{count}", f"l{count}") if count == 40 else None)


def test_a_layer_with_files_behind_a_loop_of_links_is_refused() -> None:
    with pytest.raises(Malformed, match="too many symbolic links"):
        tree_of("l -> m, m -> l, l/a")
    with pytest.raises(Malformed, match="too many symbolic links"):
        tree_of("l -> m, m -> l, a => l/b")


def test_the_names_in_a_folder_are_sorted() -> None:
    tree = tree_of("a/c, a/b, l -> a")
    assert [name for name, _ in tree.folder("/l")] == ["b", "c"]
    assert list(tree.folder("/a/b")) == list(tree.folder("/gone")) == []


@pytest.mark.parametrize("entry", ["a/" * 2048 + "b", "a => " + "b/" * 2048 + "c"])
def test_a_path_longer_than_in_linux_is_refused(entry: str) -> None:
    with pytest.raises(Malformed, match="more than 4096 characters"):
        tree_of(entry)


def test_a_link_to_a_path_longer_than_in_linux_is_refused_if_it_is_followed() -> None:
    tree = tree_of("l -> " + "b/" * 2048 + "c")
    with pytest.raises(Malformed, match="more than 4096 characters"):
        tree.resolve("/l")


def test_the_number_of_files_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tree_of_layers, "MAX_FILES", 3)
    tree_of("a, b, c", "a, c")
    for layers in (("a, b, c", "d"), ("a/b/c/d",), ("a => x, b -> x, c/, d",)):
        with pytest.raises(Refusal, match="more than 3 files"):
            tree_of(*layers)


# the modes and owners of folders

MINE, SHARED = FolderOwnership(0o700, 1000, 1000), FolderOwnership(0o2775, 0, 50)


def ownership(tree: FileTree, path: str) -> FolderOwnership:
    found = tree.resolve(path)
    assert found and isinstance(found[1], TreeFolder)
    return found[1].ownership


def test_the_last_entry_of_a_folder_gives_its_mode_and_owner() -> None:
    tree = FileTree()
    tree.add_layer([LayerChange("a/b", ownership=MINE), LayerChange("c", TreeFile())])
    assert (ownership(tree, "/a"), ownership(tree, "/a/b")) == (FolderOwnership(), MINE)
    tree.add_layer([change("a/b/d"), change("a/b/.wh..wh..opq")])
    assert ownership(tree, "/a/b") == MINE, "what is in it says nothing about it"
    tree.add_layer([LayerChange("a/b", ownership=SHARED), LayerChange("c", ownership=SHARED)])
    assert (ownership(tree, "/a/b"), ownership(tree, "/c")) == (SHARED, SHARED)
    tree.add_layer([change("a/.wh.b"), change("a/b/x")])
    assert ownership(tree, "/a/b") == FolderOwnership()
