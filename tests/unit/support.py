"""Shared by the tests: plausible profiles and locks, tiny wheels, a simple index, the command line in this process."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import re
import signal
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from packaging.requirements import Requirement

from envbuild.cli import entry
from envbuild.fetch import index_config, sha256_file_store
from envbuild.fetch.apt_resolution_and_download import Deb
from envbuild.fetch.archive_spec import COMPAT, TOOLKIT, Archive, ArchiveRequest
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.image.docker_engine import Image
from envbuild.lock import lock_file
from envbuild.lock.lock_entry_types import Builder, LockedExtension, Nvcc
from envbuild.lock.lock_file import Lock, inputs
from envbuild.profile.extension_spec import Extension
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import plan_resolver, profile_reader_and_overrides
from envbuild.resolve.extension_toolchain_and_contradictions import ExtensionToolchain
from envbuild.resolve.plan_resolver import Plan
from envbuild.util import settings, user_folders
from envbuild.util.host_processes import Completed
from unit import documents
from unit.served import served

MADE = "20261121T000000Z"

PROFILE: dict[str, Any] = {
    "description": "a harmless profile",
    "base": {"bootstrap": "bookworm"},
    "python": "3.11",
    "torch": "2.13.0+cpu",
    "packages": ["numpy"],
    "apt": ["less"],
    "env": {"GREETING": "hello"},
    "selftest": {"level": "quick", "require": ["env.libs"]},
}


def is_locked(file: Path) -> bool:
    """Whether a process holds a lock of `process_locks`."""
    with file.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def as_yaml(data: Mapping[str, Any], indent: int | None = 1) -> str:
    """Encode as JSON, which is valid YAML; this is faster if `indent` is None. Characters from U+007F to U+FFFF are
    escaped. Characters above are not escaped: JSON's escape for these is a pair of surrogates, which YAML refuses."""
    text = json.dumps(data, indent=indent, ensure_ascii=False)
    return re.sub("[\x7f-\uffff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def write_profile(folder: Path, data: Mapping[str, Any], name: str = "sample") -> Path:
    """Write a profile to a file of a project, and return its path."""
    file = folder / "profiles" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(as_yaml(data), encoding="utf-8")
    return file


def profile_of(folder: Path, data: Mapping[str, Any], name: str = "sample") -> LoadedProfile:
    return profile_reader_and_overrides.load(str(write_profile(folder, data, name)))


def plan_of(folder: Path, data: Mapping[str, Any], name: str = "sample") -> Plan:
    return plan_resolver.resolve(profile_of(folder, data, name))


def deb(name: str, version: str = "1.0-1", size: int = 1000) -> Deb:
    file = f"{name}_{version.rpartition(':')[2]}_amd64.deb"
    return Deb(name, version, sha(f"{name} {version}"), size, f"pool/main/{name[0]}/{name}/{file}")


def wheel(name: str, version: str = "1.0", tag: str = "py3-none-any") -> Wheel:
    return Wheel(name, version, f"{name.replace('-', '_')}-{version}-{tag}.whl", sha(f"{name} {version}"))


def pinned(tag: str) -> str:
    """Return the image of a tag as `lock_for` locks it."""
    return f"{tag.rpartition(':')[0]}@sha256:{sha(tag)}"


def lock_for(plan: Plan, made: str = MADE) -> Lock:
    """Return the lock for an index that has one version of everything: the requested version, else 1.0."""
    wheels = []
    for text in (*plan.core, *plan.packages):
        wanted = Requirement(text)
        exact = [part.version for part in wanted.specifier if part.operator == "=="]
        size = 200_000_000 if wanted.name == "torch" else 1_000_000
        layer = "torch" if wanted.name == "torch" else lock_file.PACKAGES if text in plan.packages else lock_file.SMALL
        wheels.append(LockedWheel(wheel(wanted.name, *exact[:1]), size, layer))
    compilers = plan.toolchain.requirements if plan.toolchain else ()
    wheels += [LockedWheel(wheel(Requirement(text).name), 1_000_000, lock_file.TOOLCHAIN) for text in compilers]
    order = (lock_file.SMALL, "torch", lock_file.TOOLCHAIN, lock_file.PACKAGES)
    return Lock(
        made=made,
        inputs=inputs(plan),
        platform=plan.platform,
        python=plan.python,
        suite=plan.suite,
        image=plan.image if plan.image is None or "@" in plan.image else pinned(plan.image),
        image_tag=None if plan.image is None or "@" in plan.image else plan.image,
        base=tuple(deb(name, "1:2.3+deb12u1~x-4") for name in plan.base_packages),
        apt=tuple(deb(name) for name in plan.apt),
        wheels=tuple(sorted(wheels, key=lambda item: (order.index(item.layer), item.wheel.name))),
        environment=plan.environment,
        startup=plan.startup,
        archives=tuple(Archive(a.name, _VERSIONS[a.name], a.sha256, 1_000_000) for a in plan.archives),
        nvcc=Nvcc(plan.toolchain.home, plan.toolchain.release) if plan.toolchain else None,
        extensions=tuple(_extension(item.extension) for item in plan.extension_toolchain.wanted)
        if plan.extension_toolchain
        else (),
        builder=_builder(plan.extension_toolchain, plan.archives) if plan.extension_toolchain else None,
    )


def whole_lock(plan: Plan) -> Lock:
    """Return the lock of `lock_for` with a Python in its base, so that its image can be described."""
    made = lock_for(plan)
    return made if made.image else replace(made, base=(*made.base, deb(f"python{made.python}", "3.11.2-6")))


def _extension(wanted: Extension) -> LockedExtension:
    kind, source = ("git", wanted.commit) if wanted.commit else ("sdist", wanted.sdist and wanted.sdist.sha256)
    tree = "d" * 40 if wanted.commit else None
    build = wanted.build
    return LockedExtension(wanted.name, kind, str(source), wanted.modules, tree, dict(build.env), build.settings)


def _builder(extension_toolchain: ExtensionToolchain, inside: Sequence[ArchiveRequest]) -> Builder:
    names = sorted(
        Requirement(text).name for text in (*extension_toolchain.toolchain.requirements, *extension_toolchain.requires)
    )
    wheels = tuple(LockedWheel(wheel(name), 1_000_000, lock_file.BUILDER) for name in names)
    archive = extension_toolchain.toolchain.archive
    apart = [archive] if archive and archive not in inside else []
    archives = tuple(Archive(item.name, _VERSIONS[item.name], item.sha256, 1_000_000) for item in apart)
    debian, nvcc = (
        extension_toolchain.toolchain.debian,
        Nvcc(extension_toolchain.toolchain.home, extension_toolchain.toolchain.release),
    )
    debs = tuple(deb(name) for name in debian.packages) if debian else ()
    return Builder(extension_toolchain.arch, nvcc, wheels, archives, debs, dict(debian.environment) if debian else {})


_VERSIONS = {COMPAT: "580.95.05", TOOLKIT: "12.6.3"}


def lock_of_this_python(folder: Path, **changes: Any) -> Lock:
    """Return a profile `sample` of the packages that this Python has installed for torch, and its lock; skips if torch
    is not installed."""
    torch = pytest.importorskip("torch")
    profile = {**PROFILE, "base": {"image": f"example/base@sha256:{'0' * 64}"}, "torch": str(torch.__version__)}
    profile |= {"packages": [], "apt": [], "python": ".".join(map(str, sys.version_info[:2])), **changes}
    made = lock_for(plan_of(folder, profile))
    lock_file.write(made, folder / "profiles" / "sample.lock.yaml", "sample")
    return made


def image_of(handle: str = "1") -> Image:
    """Return an image as the engine would describe it; in the classic store, the handle of an image is its id."""
    identity = f"sha256:{sha(handle)}"
    return Image(identity, identity, (f"sha256:{sha('layer')}",), {}, {}, 1_000_000)


# archives


def write_tar(file: Path, members: Mapping[str, bytes | Mapping[str, Any]], mode: str = "w:gz") -> str:
    """Write a tar, and return its sha256. The value of a member is its content, or the attributes of its header."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, mode) as tar:  # type: ignore[call-overload]
        for name, about in members.items():
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            content = about if isinstance(about, bytes) else b""
            info.size = len(content)
            for key, value in {} if isinstance(about, bytes) else about.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    return hashlib.sha256(file.read_bytes()).hexdigest()


# wheels and an index


def write_wheel(
    folder: Path,
    name: str,
    version: str,
    requires: Sequence[str] = (),
    tag: str = "py3-none-any",
    content: str = "",
    extras: Sequence[str] = (),
    files: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """Write a small wheel with an empty RECORD. It installs `files`, and also a module with its name and this content,
    unless `files` has a package with its name."""
    stem = f"{name.replace('-', '_')}-{version}"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
        *(f"Provides-Extra: {extra}" for extra in extras),
    ]
    info = f"{stem.removesuffix(version)}{version.partition('-')[0]}.dist-info"
    module = name.replace("-", "_")
    members = {
        **({} if f"{module}/__init__.py" in files else {f"{module}.py": content}),
        f"{info}/METADATA": "\n".join(lines) + "\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/RECORD": "",
    }
    members[f"{info}/METADATA"] = members[f"{info}/METADATA"].replace(version, version.partition("-")[0])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{stem}-{tag}.whl"
    everything: dict[str, str | bytes] = {**members, **files}
    with zipfile.ZipFile(file, "w") as archive:
        for path, text in everything.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return file


@dataclass
class Index:
    """A simple index (PEP 503) for a folder of wheels, with faults on request."""

    folder: Path
    user: str = ""
    password: str = ""
    spoil: Mapping[str, bytes] = field(default_factory=dict)  # file name -> content that is served instead
    # name of a file -> how many times only half of it is sent; of a project's page, always only half is sent
    cut: dict[str, int] = field(default_factory=dict)
    errors: dict[str, int] = field(default_factory=dict)  # file name -> how many times 500 is answered
    metadata: Mapping[str, str] = field(default_factory=dict)  # file name -> the sha256 of its metadata on its page
    ranges: bool = False  # whether range requests are supported
    dates: Mapping[str, str] = field(
        default_factory=dict
    )  # file name -> upload time; with any, pages are JSON (PEP 700)
    requires: Mapping[str, str] = field(default_factory=dict)  # file name -> Requires-Python
    requests: list[str] = field(default_factory=list)
    connections: int = 0
    port: int = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple"

    def with_credentials(self) -> str:
        return self.address.replace("://", f"://{self.user}:{self.password}@")


class _Handler(BaseHTTPRequestHandler):
    index: Index
    protocol_version = "HTTP/1.1"  # keeps connections

    def setup(self) -> None:
        super().setup()
        self.index.connections += 1

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        index = self.index
        index.requests.append(f"{self.command} {self.path}")
        token = base64.b64encode(f"{index.user}:{index.password}".encode()).decode()
        if index.user and self.headers.get("Authorization") != f"Basic {token}":
            self._answer(401, b"who are you?", {"WWW-Authenticate": 'Basic realm="index"'})
            return
        kind, _, rest = self.path.strip("/").partition("/")
        name = rest.strip("/")
        if kind == "simple":
            self._page(name)
        else:
            self._file(name)

    def _page(self, name: str) -> None:
        found = sorted(f for f in self.index.folder.iterdir() if f.name.partition("-")[0].replace("_", "-") == name)
        if not found:
            self._answer(404, b"no such project")
            return
        if self.index.dates:
            self._json(name, found)
            return
        attributes = {f.name: f' data-core-metadata="sha256={self.index.metadata.get(f.name)}"' for f in found}
        rows = [
            f'<a href="/files/{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}"'
            f"{attributes[file.name] if file.name in self.index.metadata else ''}>{file.name}</a>"
            for file in found
        ]
        page = "\n".join(rows).encode()
        self._answer(200, page, {"Content-Type": "text/html"}, sent=len(page) // 2 if name in self.index.cut else None)

    def _json(self, name: str, files: Sequence[Path]) -> None:
        index = self.index
        listed = [
            {
                "filename": file.name,
                "url": f"/files/{file.name}",
                "hashes": {"sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
                "requires-python": index.requires.get(file.name),
                "yanked": False,
                **({"upload-time": index.dates[file.name]} if file.name in index.dates else {}),
            }
            for file in files
        ]
        page = {"meta": {"api-version": "1.1"}, "name": name, "versions": [], "files": listed}
        self._answer(200, json.dumps(page).encode(), {"Content-Type": "application/vnd.pypi.simple.v1+json"})

    def _file(self, name: str) -> None:
        index = self.index
        if index.errors.get(name, 0) > 0:
            index.errors[name] -= 1
            self._answer(500, b"try again")
            return
        if not (index.folder / name).is_file():
            self._answer(404, b"no such file")
            return
        content = index.spoil.get(name, (index.folder / name).read_bytes())
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        half = index.cut.get(name, 0) > 0
        if half:
            index.cut[name] -= 1
        if index.ranges and part:
            begin, end = int(part[1]), min(int(part[2]), len(content) - 1)
            headers = {"Content-Range": f"bytes {begin}-{end}/{len(content)}"}
            self._answer(206, content[begin : end + 1], headers, sent=(end - begin) // 2 if half else None)
            return
        accepts = {"Accept-Ranges": "bytes"} if index.ranges else None
        self._answer(200, content, accepts, sent=len(content) // 2 if half else None)

    def _answer(
        self, code: int, content: bytes, headers: Mapping[str, str] | None = None, sent: int | None = None
    ) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:sent])
        if sent is not None:  # the client waits for the rest
            self.close_connection = True


@contextlib.contextmanager
def serving(index: Index) -> Iterator[Index]:
    handler = type("Handler", (_Handler,), {"index": index})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    index.port = server.server_port
    with served(server):
        yield index


@contextlib.contextmanager
def serving_locked(project: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    """Lock the profile `sample` of `project`, write the locked wheels to `folder`, and serve them as the configured
    index."""
    quick_pip(monkeypatch)
    made = lock_for(plan_of(project, PROFILE))
    real = []
    for item in made.wheels:
        file = write_wheel(folder, item.wheel.name, item.wheel.version)
        one = replace(item.wheel, file=file.name, sha256=sha256_file_store.file_digest(file))
        real.append(replace(item, wheel=one))
    lock_file.write(replace(made, wheels=tuple(real)), project / "profiles" / "sample.lock.yaml", "sample")
    with serving(Index(folder)) as found:
        monkeypatch.setenv("PIP_INDEX_URL", found.address)
        yield found


def quick_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `pip config list` by a list of only the environment variables, without starting pip. One test of the
    index starts the real pip."""

    def listed(argv: Sequence[str], timeout: float) -> Completed:
        names = [name for name in os.environ if name.startswith("PIP_")]
        lines = [f":env:.{name[4:].lower().replace('_', '-')}={os.environ[name]!r}\n" for name in names]
        return Completed(0, "".join(lines), "")

    monkeypatch.setattr(index_config, "run", listed)


# the command line


@dataclass(frozen=True)
class CommandResult:
    code: int
    stdout: str
    stderr: str
    arguments: tuple[str, ...] = ()

    @property
    def document(self) -> dict[str, Any]:
        """The document of --json, checked against its schema."""
        found: dict[str, Any] = json.loads(self.stdout)
        documents.require_valid(self.arguments, found)
        return found


def envbuild(*arguments: str) -> CommandResult:
    """Run a command line in this process. An error that the command does not catch, for which a user would see a
    traceback, is raised."""
    before, handler = sys.argv, signal.getsignal(signal.SIGTERM)
    out, err = io.StringIO(), io.StringIO()
    sys.argv = ["envbuild", *arguments]
    code: Any = None
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            entry.main()
    except SystemExit as done:
        code = done.code
    finally:
        sys.argv = before
        signal.signal(signal.SIGTERM, handler)
        _end_log()
    return CommandResult(int(code or 0), out.getvalue(), err.getvalue(), arguments)


def _end_log() -> None:
    """Remove the log handlers that -v or ENVBUILD_LOG added: these handlers would log later tests."""
    log = logging.getLogger("envbuild")
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.NOTSET)


def configure(text: str) -> None:
    """Write the site's settings."""
    file = user_folders.config_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    settings.settings_document.cache_clear()
