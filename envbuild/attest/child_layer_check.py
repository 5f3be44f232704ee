"""Checks that a child image's lowest layers are those of its verified base, and that no other layer replaces locked
files.

The check finds files that overwrite locked files, and files that Python or the dynamic loader would use instead of
locked ones. It ignores all other files.
"""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePosixPath

from packaging.utils import canonicalize_name

from envbuild.attest import child_config_check, dynamic_loader_config_check
from envbuild.attest.trusted_statements import SignedBuild
from envbuild.evidence.run_record_schema import RunRecord
from envbuild.facts import database
from envbuild.fetch.archive_spec import FOLDERS
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.image_content_reader import Config, StoredImage
from envbuild.selftest.inventory import startup_files
from envbuild.util.untrusted_input_errors import Reason, Refusal

# The symbolic links in every image that envbuild builds. Wheels contain no links, and an archive's links lead to its
# own folder. A base image that the profile names by digest may contain further links. They are unknown here, because
# its layers are not read.
_LINKS = {
    **{name: f"usr/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32")},
    "usr/bin/X11": ".",  # from Debian's package x11-common, which the packages under `apt` in a profile may need
    "opt/venv/lib64": "lib",
}
_LOADER = dict.fromkeys(("lib/ld.so", "lib64/ld.so"), "the dynamic loader")
# OpenSSL's configuration names libraries that OpenSSL loads, also when Python's ssl and hashlib use it. The second path
# is a link to the first.
_OPENSSL = dict.fromkeys(("etc/ssl/openssl.cnf", "usr/lib/ssl/openssl.cnf"), "OpenSSL's configuration")
_LARGEST = 8 << 20  # bytes; the content of larger files is not read
_PACKAGES = ("site-packages", "dist-packages")
_FILES = (".py", ".pyc", ".so")  # suffixes of modules
_PREFIXES = ("opt/venv/", "usr/", "usr/local/")  # prefixes of Python installations
_NOT_IMPORTED = (*_PACKAGES, "EXTERNALLY-MANAGED")  # names in Python's library folder that are not modules


def child_objections(
    child: StoredImage,
    base: Config,
    build: SignedBuild,
    records: Sequence[RunRecord],
    forbidden: Collection[str] = (),
) -> Iterator[Reason]:
    """Yield the reasons why the verification of `base` does not extend to `child`. Reads the child's additional layers.

    `build`, `records`: the build statement and the run records of the base. `forbidden`: keys of the configuration that
    the policy does not allow a child to set.
    """
    if child.config.layers[: len(base.layers)] != base.layers:
        yield Reason("base", f"the image is not built on the proved image {base.id}")
        return
    yield from child_config_check.configuration_objections(child.config, base, forbidden)
    watch = _Watch(build, records)
    for item, diff_id in list(zip(child.manifest.layers, child.config.layers, strict=True))[len(base.layers) :]:
        for member, archive in image_content_reader.entries(child.place, oci_types.digest_in(item), diff_id):
            watch.see(member, archive)
    yield from watch.reasons()


class _Watch:
    """Checks each entry of the layers above the verified ones, at every path to which an engine may write it."""

    def __init__(self, build: SignedBuild, records: Sequence[RunRecord]) -> None:
        python = build.lock.python
        self._site = f"opt/venv/lib/python{python}/site-packages"
        self._versions = {canonicalize_name(name): version for name, version in build.lock.versions.items()}
        self._archives = {FOLDERS[item.name].lstrip("/"): item.name for item in build.lock.archives}
        roots = {f"{self._site}/{root}": name for name, roots in build.roots.items() for root in roots}
        self._owners = {**roots, **self._archives, **dict.fromkeys(_of_python(python), "Python"), **_OPENSSL}
        above = ((path, name) for path, name in (*self._owners.items(), *_LOADER.items()))
        self._parents = {str(folder): name for path, name in above for folder in PurePosixPath(path).parents}
        self._known = {*self._owners, *self._parents}
        self._modules = {module: name for path, name in roots.items() if (module := _module(path))}
        self._library = {f"{prefix}lib/python{python}" for prefix in ("usr/", "usr/local/")}
        self._cuda = {
            str(loaded.name)
            for record in records
            for loaded in record.libraries
            if database.library_of(loaded.distribution[0])
        }
        self._links = Links(_LINKS)
        # Debian's Python also searches dist-packages of a virtual environment (site.getsitepackages).
        folders = (f"lib/python{python}", f"local/lib/python{python}", "lib/python3")
        self._sites = {self._site, *(f"opt/venv/{folder}/dist-packages" for folder in folders)}
        self._files: set[str] = set()
        # (folder that must be on Python's path for the file to run, file)
        self._customizers: list[tuple[str, str]] = []
        self._path = {*self._sites, *self._library, *(f"{folder}/lib-dynload" for folder in self._library)}
        self._found: dict[tuple[str, str], list[str]] = {}

    def see(self, member: tarfile.TarInfo, archive: tarfile.TarFile) -> None:
        """Check one entry. Raises Refusal if its path or its links cannot be resolved."""
        path = _normal(member.name)
        if any(".overlay." in key for key in member.pax_headers):
            self._note("layer", "an attribute of the overlay file system is set", path)

        @cache
        def content() -> bytes | None:
            """Return the entry's content; None for a link, and for a file of more than _LARGEST bytes."""
            small = member.isreg() and member.size <= _LARGEST
            return b"".join(image_content_reader.content(member, archive)) if small else None

        places = self._links.places(path)
        if not (member.isdir() or member.issym()):
            self._files |= places
        for place in places:
            self._at(PurePosixPath(place), member, content)
        if member.issym():
            for place in places:
                self._links.add(place, member.linkname)
        elif member.islnk():
            for place in self._links.places(_normal(member.linkname)):
                self._over(PurePosixPath(place), "hard-links to")

    def _at(self, path: PurePosixPath, member: tarfile.TarInfo, content: Callable[[], bytes | None]) -> None:
        if path.name == ".wh..wh..opq":
            self._over(path.parent, "empties")
        elif path.name.startswith(".wh."):
            # engines append the rest of the name to the folder: `.wh.` removes the folder itself, `.wh...` its parent
            gone = _normal(f"{path.parent}/{path.name.removeprefix('.wh.')}")
            self._over(PurePosixPath(gone), "removes")
        elif member.isdir():
            # A layer also lists the folders that contain its new files. So the layer may list a folder of the locked
            # files, but it must not add a folder in one.
            if path.suffix in _FILES or str(path) not in self._known:
                self._over(path, "replaces")
        else:
            self._over(path, "replaces")
            self._duplicates(path)
            self._loaded(path, content)

    def _over(self, path: PurePosixPath, verb: str) -> None:
        """Note the path if it belongs to the verified layers. `verb`: what the child image's layer does to the file."""
        if str(path) in self._parents:
            return self._note("replaced", f"a layer of the child image {verb} {self._parents[str(path)]}", str(path))
        for part in (path, *path.parents):
            name = self._owners.get(str(part)) or self._modules.get(_module(str(part)) or "")
            if name is None and part.parent.name == "__pycache__":  # six.cpython-311.pyc belongs to six.py
                name = self._modules.get(str(part.parent.parent / part.name.partition(".")[0]))
            if str(part.parent) in self._library and _module(part.name) and part.name not in _NOT_IMPORTED:
                name = "Python"
            if name is not None:
                return self._note("replaced", f"a layer of the child image {verb} {name}", str(path))
        if dynamic_loader_config_check.is_system_library(path):
            self._note("replaced", f"a layer of the child image {verb} {path.name}", str(path))

    def _duplicates(self, path: PurePosixPath) -> None:
        """Find second copies of locked files: a distribution's metadata with a different version, and a CUDA library
        that the dynamic loader may find first."""
        folder = path.parent.name
        if folder.endswith(".dist-info") and str(path.parent.parent) == self._site:
            name, _, version = folder.removesuffix(".dist-info").partition("-")
            locked = self._versions.get(canonicalize_name(name))
            if locked not in (None, version):
                text = f"{canonicalize_name(name)} {version} is in a layer of the child image, but {locked} is locked"
                self._note("replaced", text, str(path))
        if path.name in self._cuda and not set(_PACKAGES) & set(path.parts):
            self._note("shadowed", f"a layer of the child image adds a second {path.name}", str(path))

    def _loaded(self, path: PurePosixPath, content: Callable[[], bytes | None]) -> None:
        """Find files that decide which code Python runs when it starts, or what the dynamic loader loads."""
        text = str(path)
        for part in (path, path.parent):
            if part.name.partition(".")[0] in startup_files.MODULES:
                self._customizers.append((str(part.parent), text))
        if text.startswith("etc/ld.so."):
            for change in dynamic_loader_config_check.of_loader(text, content(), self._cuda, self._archives):
                self._note("environment", change, text)
        if path.name.endswith("._pth") and text.startswith(_PREFIXES):
            self._note("environment", "a ._pth file replaces Python's path", text)
        if path.name.endswith(".pth") and str(path.parent) in self._sites:
            self._named(path, content())

    def _named(self, path: PurePosixPath, pth: bytes | None) -> None:
        """Add the folders in a .pth file to Python's path.

        Releases of Python decode .pth files and split their lines in different ways. So a file with invalid UTF-8 or
        with control characters is refused like an unreadable one.
        """
        decoded = (pth or b"").decode(errors="replace")
        if pth is None or "\ufffd" in decoded or not decoded.translate(dict.fromkeys(b"\t\r\n")).isprintable():
            return self._note("environment", "a .pth file cannot be read, or has control characters", str(path))
        for line in startup_files.pth_lines(pth):
            if startup_files.runs(line):
                self._note("environment", "a .pth file runs code when Python starts", str(path))
            else:
                self._path.add(_normal(posixpath.join(f"/{path.parent}", line.rstrip())))

    def _note(self, kind: str, text: str, path: str) -> None:
        self._found.setdefault((kind, text), []).append(path)

    def reasons(self) -> Iterator[Reason]:
        taken = {str(PurePosixPath(place).parent) for entry in self._path for place in self._links.places(f"{entry}/_")}
        for entry in sorted(taken):
            for file in self._files.intersection((entry, *map(str, PurePosixPath(entry).parents))) - self._known:
                self._note("environment", "a .pth file names a file, which may contain modules", file)
        for folder, path in self._customizers:
            if folder in taken:
                self._note("environment", "code is added that Python runs when it starts", path)
        for (kind, text), paths in self._found.items():
            different = list(dict.fromkeys(paths))
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            yield Reason(kind, f"{text}: /{different[0]}{more}")


def _normal(name: str) -> str:
    return posixpath.normpath(f"/{name}").lstrip("/")


def _of_python(version: str) -> Iterator[str]:
    """Yield the files and folders that decide which Python runs, except the modules of its library."""
    yield from (f"opt/venv/bin/{name}" for name in ("python", "python3", f"python{version}"))
    yield f"etc/python{version}"
    for prefix in _PREFIXES:
        yield from (f"{prefix}{file}" for file in ("pyvenv.cfg", "bin/pyvenv.cfg", "bin/pybuilddir.txt"))
        yield from (f"{prefix}bin/python{version}", f"{prefix}lib/python{version.replace('.', '')}.zip")
    yield f"usr/local/lib/libpython{version}.so.1.0"  # Debian's python does not load this file


def _module(path: str) -> str | None:
    """Return the module path of a file or folder, without suffixes; None for a file with a suffix that modules do not
    have. A name without a dot may be a package's folder."""
    folder, name = posixpath.split(path)
    stem, dot, _ = name.partition(".")
    return posixpath.join(folder, stem) if not dot or name.endswith(_FILES) else None


_LONGEST = 4096  # PATH_MAX of Linux
_HOPS = 40  # links that Linux follows in one path
_STEPS = 2000  # steps to resolve one path; ordinary images need a handful
_TOTAL = 64 << 20  # characters of all links


class Links:
    """The symbolic links of an image. `known`: path of a link -> target, as for `add`."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._targets: dict[str, set[str]] = {}
        self._total = 0
        for path, target in known.items():
            self.add(path, target)

    def add(self, path: str, target: str) -> None:
        """Add a link at `path`, relative to the root. Raises Refusal if all links together have too many characters."""
        self._total += len(path) + len(target)
        if self._total > _TOTAL:
            raise Refusal("too-large", "the layers have too many symbolic links")
        self._targets.setdefault(path, set()).add(target)

    def places(self, path: str) -> set[str]:
        """Return every path to which an engine may write the entry `path`.

        Links are followed only for its folder: a link at `path` itself is replaced. Raises Refusal if the path is too
        long or passes through too many links.
        """
        if len(path) > _LONGEST:
            raise Refusal("layer", f"a layer has a path of {len(path)} characters")
        folder, name = posixpath.split(path)
        return {f"{place}/{name}" if place else name for place in self._folders(folder)}

    def _folders(self, path: str) -> set[str]:
        found = set()
        todo = [("", path.split("/"), 0)]
        steps = 0
        while todo:
            at, rest, hops = todo.pop()
            for index, name in enumerate(rest):
                steps += 1
                if steps > _STEPS:
                    raise Refusal("layer", f"a path in a layer passes through too many symbolic links: /{path[:200]}")
                if name == "..":
                    at = posixpath.dirname(at)
                elif name not in ("", "."):
                    at = f"{at}/{name}" if at else name
                    for target in self._targets.get(at, ()) if hops < _HOPS else ():
                        start = "" if target.startswith("/") else posixpath.dirname(at)
                        todo.append((start, [*target.split("/"), *rest[index + 1 :]], hops + 1))
            found.add(at)
        return found
