"""Hashes the files that an environment's Python imports and loads.

The environment may be hostile. So its interpreter only reports the folders, and this module reads the files itself:
only regular files, and with limits on their number and size.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envbuild.audit.collected_environment import Text, Word
from envbuild.runners import host_runner
from envbuild.selftest.inventory import startup_files
from envbuild.selftest.inventory.elf_reader import HWCAPS, LEGACY_HWCAPS
from envbuild.testrun.output_judge import frame
from envbuild.testrun.selftest_job import BOOTSTRAP, Job, Limits, bootstrap_payload, started
from envbuild.util.errors import CheckFailed, printable

MOST_FILES = 1_000_000
LARGEST_FILE, LARGEST_TOTAL, LARGEST_TEXT, LARGEST_TEXTS = 8 << 30, 256 << 30, 64 << 20, 256 << 20
"""Maximum sizes in bytes: of one file, of all files, of one RECORD, and of all RECORDs. torch's largest library has 2
GB."""
PRELOADED = Path("/etc/ld.so.preload")
_ENTRY = "envbuild.selftest.inventory.interpreter_path_collector"
_MEMORY, _SECONDS, _LARGEST_REPORT = 1 << 30, 180.0, 4 << 20
_BLOCK, _SINGLE, _BATCH = 1 << 20, 256, 200
_CACHE = "__pycache__"
_RECORD = re.compile(r"[^/]+\.dist-info/RECORD")
_UNCHECKED = 1  # flags in a .pyc that Python never compares with its source (PEP 552: unchecked, hash-based)

Paths = Annotated[list[Text], Field(max_length=2000)]


class InterpreterReport(BaseModel):
    """What an interpreter reports about itself and its environment. All paths are real paths.

    `prefixes`: the environment, and the Python that it was created from. `path`: sys.path without the standard library,
    in order. `loader_folders`: the folders that the dynamic loader searches because of a search path. `library_path`:
    the folders in LD_LIBRARY_PATH, in order. `preloaded`: the files in LD_PRELOAD, in order. `cut`: whether a limit
    excluded some files.
    """

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True, defer_build=True)

    version: Word
    executable: Text
    prefixes: Annotated[list[Text], Field(min_length=1, max_length=2)]
    standard_library: Text
    path: Paths
    loader_folders: Paths
    library_path: Paths
    preloaded: Paths
    cuda_libraries: Paths
    libc: Text | None
    libstdcxx: Text | None
    libpython: Text | None
    driver: Word | None
    gpus: Annotated[list[Word], Field(max_length=100)]
    cut: bool


@dataclass(frozen=True)
class FolderFiles:
    """The files in one folder, such as an entry of sys.path. `sha256`: relative path -> sha256 of the file.

    The path of a link to a folder ends with a slash, and its sha256 is that of the target's name. If `folder` is itself
    a file, its relative path is "". `linked`: files that are symbolic links, or that are in a folder that is a symbolic
    link. `records`: the text of each RECORD.
    """

    folder: str
    sha256: Mapping[str, str]
    linked: frozenset[str] = frozenset()
    records: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EnvironmentFiles:
    """All files that were hashed. `folders`: the entries of sys.path, in order. `libraries`: path -> sha256 of single
    files, such as CUDA libraries. `loader`: the libraries in each folder that the dynamic loader searches."""

    report: InterpreterReport
    folders: tuple[FolderFiles, ...]
    standard_library: FolderFiles
    loader: tuple[FolderFiles, ...]
    libraries: Mapping[str, str]


def hash_environment(python: Path) -> EnvironmentFiles:
    """Hash the files of an interpreter's environment. Raises CheckFailed if a file cannot be hashed, or if the
    interpreter does not report its folders."""
    _refuse_unmeasured(os.environ)
    report = _interpreter_report(python)
    budget = _Budget()
    library = _Listing(report.standard_library, budget, skip=frozenset(("site-packages", "dist-packages")))
    folders = [_Listing(entry, budget) for entry in report.path]
    for one in folders:
        _refuse_editable(one)
    loader = [_Listing(entry, budget, libraries=True) for entry in dict.fromkeys(report.loader_folders)]
    single = [report.executable, *report.cuda_libraries, *report.preloaded]
    single += [path for path in (report.libc, report.libstdcxx, report.libpython) if path]
    wanted = {path for one in (library, *folders, *loader) for path in one.files.values()}
    sizes = {path: budget.add(path) for path in sorted(wanted | set(single))}
    hashes = _sha256_of(sorted(sizes, key=lambda path: sizes[path], reverse=True))
    return EnvironmentFiles(
        report,
        tuple(one.hashed(hashes, budget) for one in folders),
        library.hashed(hashes, budget),
        tuple(one.hashed(hashes, budget) for one in loader),
        {path: hashes[path] for path in single},
    )


def _refuse_unmeasured(variables: Mapping[str, str]) -> None:
    """Raise CheckFailed if environment variables or /etc/ld.so.preload make Python or the dynamic loader use files that
    cannot be hashed, or that depend on the current folder."""
    for name in ("LD_AUDIT", "PYTHONPYCACHEPREFIX"):
        if variables.get(name):
            raise CheckFailed(f"{name} is set: the files that it adds cannot be measured", hint=f"unset {name}")
    for name, separators in (("LD_LIBRARY_PATH", "[:;]"), ("PYTHONPATH", ":")):
        entries = re.split(separators, variables[name]) if variables.get(name) else []
        usable = [entry for entry in entries if entry.startswith("/") and ("$" not in entry or name == "PYTHONPATH")]
        if usable != entries:
            wrong = next(entry for entry in entries if entry not in usable)
            hint = f"export {name}={shlex.quote(':'.join(usable))}" if usable else f"unset {name}"
            what = "an empty entry, which means the current folder" if not wrong else f"not an absolute path: {wrong}"
            raise CheckFailed(f"{name} has an entry that cannot be measured: {printable(what)}", hint=hint)
    for entry in filter(None, re.split("[ :]", variables.get("LD_PRELOAD", ""))):
        if not entry.startswith("/") or "$" in entry:
            raise CheckFailed(f"LD_PRELOAD names {printable(entry)}", hint="give its full path, starting with /")
    if PRELOADED.exists() and PRELOADED.stat().st_size:
        raise CheckFailed(f"{PRELOADED} preloads libraries into every program, which cannot be measured")


def _refuse_editable(folder: _Listing) -> None:
    """Raise CheckFailed for an editable installation whose `.pth` file runs code. Such code imports sources from
    folders that are not on sys.path and therefore not hashed."""
    for name, path in folder.files.items():
        if "/" not in name and name.endswith(".pth"):
            lines = startup_files.pth_lines(next(_blocks(path), b""))
            if any(startup_files.runs(line) and "editable" in f"{name} {line}" for line in lines):
                hint = "install it without -e, or, with setuptools, with --config-settings editable_mode=compat"
                raise CheckFailed(f"{printable(path)} imports sources that are not on sys.path", hint=hint)


def _interpreter_report(python: Path) -> InterpreterReport:
    nonce = secrets.token_hex(16)
    document = json.dumps({"version": 1, "nonce": nonce}).encode()
    argv = ("python", *started(""), "-c", BOOTSTRAP, _ENTRY)
    job = Job("", argv, bootstrap_payload(document), nonce, Limits(_MEMORY, _SECONDS))
    output = host_runner.run_on_host(python, job)
    frames = [found for line in output.stdout.split(b"\n") for found in [frame(line, nonce)] if found]
    if len(output.stdout) > _LARGEST_REPORT or len(frames) != 1 or output.exit_code != 0:
        last = [printable(line)[:300] for line in output.stderr.splitlines() if line.strip()][-3:]
        raise CheckFailed(f"{python} did not report its folders", hint="\n".join(last) or None)
    try:
        report = InterpreterReport.model_validate(frames[0][1])
    except (ValidationError, RecursionError):
        hint = "its Python may have been tampered with"
        raise CheckFailed(f"{python} reported its folders in an invalid form", hint=hint) from None
    if report.cut:
        hint = "too many files, or a slow disk, in the system's library folders, sys.path or LD_LIBRARY_PATH"
        raise CheckFailed("the search for CUDA libraries exceeded its limit", hint=hint)
    return report


@dataclass
class _Budget:
    """The number of files and bytes that may still be hashed or read."""

    files: int = field(default_factory=lambda: MOST_FILES)
    size: int = field(default_factory=lambda: LARGEST_TOTAL)
    text: int = field(default_factory=lambda: LARGEST_TEXTS)

    def count(self, folder: str) -> None:
        self.files -= 1
        if self.files < 0:
            raise CheckFailed(f"more than {MOST_FILES} files to measure; the limit was reached at {printable(folder)}")

    def add(self, path: str) -> int:
        """Return the size of a file, and subtract the size from the budget. Raises CheckFailed if the path is missing
        or not a regular file, if the file is larger than LARGEST_FILE, or if all files together are larger than
        LARGEST_TOTAL. Whether the file can be read is tested only when it is hashed."""
        size = _regular(path).st_size
        self.size -= size
        if self.size < 0:
            text = f"more than {LARGEST_TOTAL >> 30} GiB to measure; the limit was reached at {printable(path)}"
            raise CheckFailed(text)
        return size

    def read(self, path: str) -> str:
        """Return the text of a RECORD. Raises CheckFailed if all RECORDs together are too large."""
        self.text -= _regular(path).st_size
        if self.text < 0:
            limit = f"{LARGEST_TEXTS >> 20} MiB"
            raise CheckFailed(f"the RECORD files have more than {limit}; the limit was reached at {printable(path)}")
        return read_text(path)


class _Listing:
    """The files below the folder `root`: relative path -> path; if `root` is a file, only that. Folders named .git,
    bytecode in __pycache__ and broken links are left out. Unchecked bytecode, which Python runs without comparing it
    with its source, raises CheckFailed.

    `skip`: folders directly below `root` to leave out. `libraries`: list only shared libraries, either directly in
    `root` or in its processor-specific subfolders that the dynamic loader prefers (glibc-hwcaps).
    """

    def __init__(
        self, root: str, budget: _Budget, *, skip: frozenset[str] = frozenset(), libraries: bool = False
    ) -> None:
        self.root = root
        self.files: dict[str, str] = {}
        self.linked: set[str] = set()
        self._links: dict[str, str] = {}  # links to folders; a target may also be a listed folder
        self._seen: set[str] = set()
        if os.path.isdir(root):  # noqa: PTH112 - returns False instead of raising if `root` is not accessible
            self._walk(budget, skip, libraries=libraries)
        elif not libraries:
            self.files[""] = root

    def _walk(self, budget: _Budget, skip: frozenset[str], *, libraries: bool) -> None:
        left, links = [(self.root, "", False)], list[tuple[str, str, bool]]()
        # Links to folders last, so that the files of a folder are listed under its own path, and not under that of a
        # link to it.
        while left or links:
            folder, below, linked = left.pop() if left else links.pop(0)
            real = os.path.realpath(folder)
            if real in self._seen:  # links may lead in a circle
                continue
            self._seen.add(real)
            in_cache = folder.endswith(f"/{_CACHE}")
            for entry in _entries(folder):
                budget.count(folder)
                name, is_link = f"{below}{entry.name}", linked or entry.is_symlink()
                if _is_folder(entry):
                    if _is_searched(name) if libraries else entry.name != ".git" and (below or entry.name not in skip):
                        if entry.is_symlink():
                            self._links[f"{name}/"] = os.readlink(entry.path)  # noqa: PTH115 - the unchanged text
                        (links if is_link else left).append((entry.path, f"{name}/", is_link))
                elif in_cache and entry.name.endswith(".pyc"):
                    _refuse_unchecked(entry.path)
                elif (libraries and ".so" not in entry.name) or (is_link and _is_dangling(entry.path)):
                    continue
                else:
                    self.files[name] = entry.path
                    self.linked |= {name} if is_link else set()

    def hashed(self, hashes: Mapping[str, str], budget: _Budget) -> FolderFiles:
        """Return the files with their hashes, and the text of each RECORD."""
        found = {name: hashes[path] for name, path in self.files.items()}
        found |= {name: hashlib.sha256(os.fsencode(target)).hexdigest() for name, target in self._links.items()}
        records = {name: budget.read(path) for name, path in self.files.items() if _RECORD.fullmatch(name)}
        return FolderFiles(self.root, found, frozenset(self.linked), records)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda entry: entry.name)
    except OSError as error:
        raise CheckFailed(f"{printable(folder)} cannot be read: {error.strerror}") from None


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_searched(below: str) -> bool:
    """Whether the dynamic loader, when it searches a folder, also searches this subfolder."""
    first, *others = below.split("/")
    return first == HWCAPS or {first, *others} <= LEGACY_HWCAPS


def _is_dangling(path: str) -> bool:
    return not os.path.exists(path)  # noqa: PTH110 - returns False instead of raising if it is not accessible


def _regular(path: str) -> os.stat_result:
    """Return the status of a regular file of at most LARGEST_FILE bytes. Raises CheckFailed for anything else."""
    try:
        found = os.stat(path)  # noqa: PTH116 - a name with a NUL must raise
    except (OSError, ValueError) as error:
        raise CheckFailed(f"{printable(path)} cannot be read: {_reason(error)}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CheckFailed(f"{printable(path)} is not a regular file", hint="remove it from the environment")
    if found.st_size > LARGEST_FILE:
        raise CheckFailed(f"{printable(path)} has {found.st_size} bytes, more than {LARGEST_FILE >> 30} GiB")
    return found


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or "invalid name"


def _blocks(path: str, at_once: int = _BLOCK) -> Iterator[bytes]:
    """Yield the content of a regular file. Opening does not block, since the path may be a FIFO. Raises CheckFailed if
    the file is not regular, cannot be read, or grows while it is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            found = os.fstat(descriptor)
            size = found.st_size if stat.S_ISREG(found.st_mode) else -1
            while size >= 0 and (block := file.read(at_once)):
                size -= len(block)
                yield block
    except OSError as error:
        raise CheckFailed(f"{printable(path)} cannot be read: {_reason(error)}") from None
    if size < 0:
        raise CheckFailed(f"{printable(path)} is not a regular file, or changed while it was read")


def _sha256_of(paths: list[str]) -> dict[str, str]:
    """Return the sha256 of each file. `paths`: the largest file first. Threads hash the largest files one by one, and
    the others in batches."""
    large, small = paths[:_SINGLE], paths[_SINGLE:]
    batches = [[path] for path in large] + [small[at : at + _BATCH] for at in range(0, len(small), _BATCH)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda batch: [(path, _sha256(path)) for path in batch], batches))
    return {path: digest for batch in found for path, digest in batch}


def _sha256(path: str) -> str:
    """Return the sha256 of a regular file, hex. Raises CheckFailed."""
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def read_text(path: str) -> str:
    """Return the text of a small regular file. Raises CheckFailed."""
    if _regular(path).st_size > LARGEST_TEXT:
        raise CheckFailed(f"{printable(path)} is larger than {LARGEST_TEXT >> 20} MiB, the limit for a RECORD")
    return b"".join(_blocks(path)).decode("utf-8", "replace")


def _refuse_unchecked(path: str) -> None:
    for block in _blocks(path, 16):
        if int.from_bytes(block[4:8], "little") & 3 == _UNCHECKED:
            hint = "remove it: Python compiles the source again"
            raise CheckFailed(f"Python runs {printable(path)} without comparing it with its source", hint=hint)
        return
