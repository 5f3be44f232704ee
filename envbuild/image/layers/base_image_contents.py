"""Reads from the layers of a base image what envbuild needs to know: its Python, its CUDA toolkit, where its links lead
from the toolkit's usual folders, and the owners and modes of its folders.

Reading the layers of a large image takes a minute, so the result is kept in the cache, with a hash of itself.
"""

from __future__ import annotations

import functools
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from envbuild.fetch import sha256_file_store
from envbuild.fetch.archive_spec import FOLDERS, TOOLKIT
from envbuild.image.layers.archive_layers import NVCC_RELEASE
from envbuild.image.layers.file_tree_of_layers import (
    MAX_FILES,
    PLAIN,
    FileTree,
    FolderOwnership,
    LayerChange,
    TreeFile,
    TreeFolder,
)
from envbuild.registry import image_content_reader
from envbuild.registry.oci_types import BlobSource
from envbuild.resolve.plan_resolver import SEARCH_PATH, VENV
from envbuild.util import atomic_files, strict_and_canonical_json, user_folders
from envbuild.util.errors import BuildError, printable
from envbuild.util.untrusted_input_errors import Malformed, Refusal

VERSION = 2
"""Increment it with every change that may give other contents for the same layers."""
_MOST_FOLDERS = 1000  # in PATH
_INVALID_ID = 2**32 - 1  # (uid_t) -1 means no user
_LARGEST_TEMPLATE, _ALL_TEMPLATES = 1 << 18, 1 << 24  # bytes
_OVERLAP = 256  # bytes, more than a searched text has
_STANDARD_LIBRARY = ("lib", "lib64")  # below the prefix; Red Hat has it in lib64
_LIBRARY = re.compile(r"lib[A-Za-z0-9_.+-]+")
_HOME = FOLDERS[TOOLKIT]


@dataclass(frozen=True)
class BaseLayerRef:
    """A layer of a base image. `digest`, `size`: of its blob; `diff_id`: of the tar in it; `media_type`: as in a
    manifest of OCI."""

    digest: str
    size: int
    diff_id: str
    media_type: str


@dataclass(frozen=True)
class BaseFolder:
    """A folder of a base image whose mode or owner differs from 0755 root:root, with which envbuild writes folders."""

    path: str
    ownership: FolderOwnership


@dataclass(frozen=True)
class BaseContents:
    """What was read from a base image. `interpreter`: the path of Python by the image's PATH, or `executable` if that
    Python is in a virtual environment; `executable`: the path behind all links; `version`: such as "3.11.2";
    `templates`: the activation scripts of its module venv. `nvcc`: the CUDA release of the toolkit's nvcc, empty if
    nvcc is missing or does not contain its release; `library_folder`: the toolkit's lib64 (its lib, if lib64 is
    missing), behind all links; `libraries`: the names of the libraries in it; `lib64`: the path of lib64 if it is
    missing, otherwise empty. `folders`: for each kind of archive, the folder to which the image's symbolic links lead
    from the kind's usual folder. `odd_folders`: among /opt, `folders`, `library_folder`, `lib64` and all their parents,
    the folders whose mode or owner is not 0755 root:root."""

    interpreter: str
    executable: str
    version: str
    templates: dict[str, str]
    nvcc: str
    library_folder: str
    libraries: tuple[str, ...]
    lib64: str
    folders: dict[str, str]
    odd_folders: tuple[BaseFolder, ...] = ()


@dataclass(frozen=True)
class _CachedContents:
    contents: BaseContents
    check: str


def base_contents(
    place: BlobSource, layers: Sequence[BaseLayerRef], python: str, environment: Mapping[str, str]
) -> BaseContents:
    """Read the layers of a base image, unless the contents are known. `python`: such as "3.11"; `environment`: the
    image's variables.

    Raises BuildError if the image does not have this Python with its module venv, if the version of Python cannot be
    read, if /opt/venv exists already, or if /opt is not a folder that all users can enter; Refusal for an invalid
    layer.
    """
    if known := known_contents(layers, python, environment):
        return known
    file, search = contents_file(layers, python, environment), _search_path(environment)
    contents = _contents(_read_tree(place, layers, python), python, search)
    strict_and_canonical_json.require_unicode(asdict(contents), "the base image has a path that is not UTF-8")
    atomic_files.write_atomically(
        file, strict_and_canonical_json.encode({"contents": asdict(contents), "check": _check(file, contents)})
    )
    return contents


def known_contents(layers: Sequence[BaseLayerRef], python: str, environment: Mapping[str, str]) -> BaseContents | None:
    """Return the contents of a base image if they are in the cache. The parameters are those of `base_contents`."""
    file = contents_file(layers, python, environment)
    known = sha256_file_store.noted(file, _CachedContents)
    return known.contents if known and known.check == _check(file, known.contents) else None


def contents_file(layers: Sequence[BaseLayerRef], python: str, environment: Mapping[str, str]) -> Path:
    """Return the file in the cache for what `base_contents` reads, with the same parameters. The file may be
    missing."""
    content = [VERSION, [layer.diff_id for layer in layers], python, _search_path(environment)]
    key = strict_and_canonical_json.canonical_digest(content)
    return user_folders.cache_folder("image-contents", make=False) / f"{key}.json"


def _search_path(environment: Mapping[str, str]) -> str:
    search = environment.get("PATH") or SEARCH_PATH
    if search.count(":") >= _MOST_FOLDERS:
        raise Malformed(f"PATH of the base image has more than {_MOST_FOLDERS} folders")
    return search


def _check(file: Path, contents: BaseContents) -> str:
    return strict_and_canonical_json.canonical_digest([file.stem, asdict(contents)])


def _read_tree(place: BlobSource, layers: Sequence[BaseLayerRef], python: str) -> FileTree:
    tree = FileTree()
    note = _noter(python)
    for layer in layers:
        changes = list[LayerChange]()
        for member, archive in image_content_reader.entries(place, layer.digest, layer.diff_id):
            if len(changes) >= MAX_FILES:
                raise Refusal("too-large", f"the layer {layer.digest} has more than {MAX_FILES} files")
            changes.append(_change(member, archive, note))
        tree.add_layer(changes)
    return tree


def _change(
    member: tarfile.TarInfo, archive: tarfile.TarFile, note: Callable[[str, Iterator[bytes]], str]
) -> LayerChange:
    if member.isdir():
        return LayerChange(member.name, ownership=_ownership(member.mode & 0o7777, member.uid, member.gid))
    if member.islnk():
        return LayerChange(member.name, same_as=member.linkname)
    if member.issym():
        return LayerChange(member.name, TreeFile(target=member.linkname))
    return LayerChange(member.name, TreeFile(note=note(member.name, image_content_reader.content(member, archive))))


_ownership = functools.lru_cache(1000)(FolderOwnership)  # most of the many folders of an image have the same


def _noter(python: str) -> Callable[[str, Iterator[bytes]], str]:
    """Return a function that reads those files whose content is needed. The function returns the version of a Python,
    the release of an nvcc, or the text of a template; for any other file an empty text."""
    minor, left = re.escape(python), _ALL_TEMPLATES
    # python3.N may be a hard link to python3.
    has_version = re.compile(rf"(?:.*/)?(?:python(?:3|{minor})?|libpython{minor}[a-z]*\.so[.\d]*)")
    template = re.compile(rf"(?:.*/)?lib(?:64)?/python{minor}/venv/scripts/(?:common|posix)/[^/]+")
    # The file contains the value of the macro PY_VERSION as a separate string, because Py_GetVersion uses it.
    version = re.compile(rb"(?<![\w.])(" + minor.encode() + rb"\.\d+)[a-z0-9+]*\0")

    def note(path: str, blocks: Iterator[bytes]) -> str:
        nonlocal left
        if has_version.fullmatch(path):
            return _search(version, blocks)
        if path.endswith("/bin/nvcc"):
            return _search(NVCC_RELEASE, blocks)
        found = _text(blocks) if left > 0 and template.fullmatch(path) else ""
        left -= len(found)
        return found

    return note


def _search(pattern: re.Pattern[bytes], blocks: Iterator[bytes]) -> str:
    """Return the first group of the first match in the content, or an empty text."""
    tail = b""
    for block in blocks:
        both = tail + block
        # not from the first byte of a tail: whether the pattern matches there depends on the byte before it
        if found := pattern.search(both, min(len(tail), 1)):
            return found[1].decode()
        tail = both[-_OVERLAP:]
    return ""


def _text(blocks: Iterator[bytes]) -> str:
    raw = b""
    for block in blocks:
        raw += block
        if len(raw) > _LARGEST_TEMPLATE:
            return ""
    return raw.decode("utf-8", "replace")


def _contents(tree: FileTree, python: str, search: str) -> BaseContents:
    _require_free_venv(tree)
    interpreter, executable = _interpreter(tree, python, search)
    prefix = str(Path(executable).parent.parent)
    home = prefix.rstrip("/")
    libraries = [f"{home}/{folder}/python{python}" for folder in _STANDARD_LIBRARY]
    scripts = [f"{folder}/venv/scripts/{kind}" for folder in libraries for kind in ("common", "posix")]
    templates = dict(item for folder in scripts for item in _notes(tree, folder))
    if not templates:
        raise BuildError(
            f"the base image has no module venv for {printable(interpreter)[:200]}",
            hint="install it in the base image; Debian has it in python3-venv",
        )
    version = _version(tree, executable, home, python)
    folders = {kind: _real_path(tree, folder) for kind, folder in FOLDERS.items()}
    toolkit = _toolkit(tree)
    _, library_folder, _, lib64 = toolkit
    written = [VENV, *folders.values(), library_folder, lib64]
    odd_folders = tuple(_odd_folders(tree, written))
    return BaseContents(interpreter, executable, version, templates, *toolkit, folders, odd_folders)


def _odd_folders(tree: FileTree, written: Iterable[str]) -> Iterator[BaseFolder]:
    """Yield those folders among `written` and their parents that a layer of envbuild would change. Raises Malformed for
    an owner that Linux does not have."""
    folders = {str(one) for text in written if text for one in (PurePosixPath(text), *PurePosixPath(text).parents)}
    for path in sorted(folders):
        found = tree.resolve(path)
        if found and path == found[0] != "/" and isinstance(found[1], TreeFolder) and found[1].ownership != PLAIN:
            ownership = found[1].ownership
            if not all(0 <= number < _INVALID_ID for number in (ownership.uid, ownership.gid)):
                raise Malformed("the base image has a folder with an invalid owner")
            yield BaseFolder(path, ownership)


def _notes(tree: FileTree, folder: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the note of each file in a folder, without the files that have no note."""
    for name, _ in tree.folder(folder):
        found = tree.resolve(f"{folder}/{name}")
        if found and isinstance(found[1], TreeFile) and found[1].note:
            yield name, found[1].note


def _real_path(tree: FileTree, path: str) -> str:
    """Return where the links lead from a path, which may be missing."""
    found = tree.resolve(path)
    if found:
        return found[0]
    parent, _, name = path.rpartition("/")
    return f"{_real_path(tree, parent)}/{name}" if parent else path


def _require_free_venv(tree: FileTree) -> None:
    parent, _, name = VENV.rpartition("/")
    there = tree.resolve(parent)
    if there and (there[0] != parent or not isinstance(there[1], TreeFolder)):
        raise BuildError(f"{parent} of the base image is not a folder", hint="name a base image with a plain /opt")
    if there and isinstance(there[1], TreeFolder) and not there[1].ownership.mode & stat.S_IXOTH:
        raise BuildError(
            f"{parent} of the base image has mode {there[1].ownership.mode:04o}, so that other users cannot enter it",
            hint=f"name a base image in which all users may enter {parent}, as with mode 0755",
        )
    if any(found == name for found, _ in tree.folder(parent)):
        raise BuildError(
            f"the base image has {VENV} already, where envbuild installs", hint="name a base image without it"
        )


def _interpreter(tree: FileTree, python: str, search: str) -> tuple[str, str]:
    """Return the first python3.N of the search path, and the file behind its links. Return that file twice if python3.N
    is in a virtual environment."""
    for folder in search.split(":"):
        path = f"{folder}/python{python}"
        found = tree.resolve(path) if folder.startswith("/") else None
        if found and isinstance(found[1], TreeFile):
            # In a virtual environment, python is a link. The file behind it is used, because a virtual environment must
            # not be the home of another one.
            is_environment = tree.resolve(f"{folder}/../pyvenv.cfg") is not None
            return found[0] if is_environment else path, found[0]
    raise BuildError(
        f"the base image has no python{python} in {printable(search)[:500]}",
        hint=f"name a base image with Python {python}, or another python: in the profile",
    )


def _version(tree: FileTree, executable: str, home: str, python: str) -> str:
    """Return the version of Python: from the interpreter's file, or from the file of its library."""
    folders = [f"{home}/lib", f"{home}/lib/x86_64-linux-gnu", f"{home}/lib64"]
    names = ((folder, name) for folder in folders for name, _ in tree.folder(folder))
    libraries = [f"{folder}/{name}" for folder, name in names if name.startswith(f"libpython{python}")]
    found = [tree.resolve(path) for path in (executable, *libraries)]
    notes = [one[1].note for one in found if one and isinstance(one[1], TreeFile)]
    version = next(filter(None, notes), "")
    if not version:
        raise BuildError(
            f"the version of {printable(executable)[:200]} in the base image cannot be read from it or its library",
            hint="name a base image with CPython",
        )
    return version


def _toolkit(tree: FileTree) -> tuple[str, str, tuple[str, ...], str]:
    """Return nvcc's release, the folder of the libraries and their names, and the path of a missing lib64."""
    nvcc = tree.resolve(f"{_HOME}/bin/nvcc")
    if nvcc is None or not isinstance(nvcc[1], TreeFile):
        return "", "", (), ""
    home, lib64 = tree.resolve(_HOME), tree.resolve(f"{_HOME}/lib64")
    folder = lib64 or tree.resolve(f"{_HOME}/lib")
    if folder is None or home is None or not isinstance(folder[1], TreeFolder):
        return nvcc[1].note, "", (), ""
    return (
        nvcc[1].note,
        folder[0],
        tuple(name for name in sorted(filter(_LIBRARY.fullmatch, folder[1])) if tree.resolve(f"{folder[0]}/{name}")),
        "" if lib64 else f"{home[0]}/lib64",
    )
