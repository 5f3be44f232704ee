"""Downloads the source of an extension once, a git commit or an sdist, checks it, and writes it as a tar.

A commit is stored as a separate bare repository, so that git itself verifies every byte by the commit's hash. The
user's git configuration (certificates, proxies, credentials, insteadOf) applies.
"""

from __future__ import annotations

import lzma
import re
import shutil
import tarfile
import urllib.parse
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from envbuild.facts import extension_compilers
from envbuild.fetch import archive_fetcher, sha256_file_store
from envbuild.fetch.archive_spec import ArchiveRequest
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.resolve.extension_toolchain_and_contradictions import ExtensionRequest
from envbuild.util import disk_space, settings, temporary_files, url_redaction, user_folders
from envbuild.util.errors import EnvbuildError, NetworkError, ProfileError, printable
from envbuild.util.host_processes import Completed, run

Progress = Callable[[str, int], None]
# A repository may be large, and a server may stop sending.
_FETCH_SECONDS = 1800.0
# Variables that would redirect git to another repository, such as a hook's GIT_DIR: all of `git rev-parse
# --local-env-vars` except GIT_CONFIG_COUNT and GIT_CONFIG_PARAMETERS, which contain a user's configuration.
_ELSEWHERE = ("GIT_ALTERNATE_OBJECT_DIRECTORIES", "GIT_COMMON_DIR", "GIT_CONFIG", "GIT_DIR", "GIT_GRAFT_FILE",
              "GIT_IMPLICIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_INTERNAL_SUPER_PREFIX", "GIT_NO_REPLACE_OBJECTS",
              "GIT_OBJECT_DIRECTORY", "GIT_PREFIX", "GIT_REPLACE_REF_BASE", "GIT_SHALLOW_FILE",
              "GIT_WORK_TREE")  # fmt: skip
_ENVIRONMENT: Mapping[str, str | None] = {
    **dict.fromkeys(_ELSEWHERE),
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_ALLOW_PROTOCOL": "file:http:https:ssh",
    "LC_ALL": "C",
}
# Archive every byte as in the tree, and ignore the source's own attributes.
_ATTRIBUTES = "* -export-ignore -export-subst -text -ident -filter -working-tree-encoding\n"
# Files in which a build reads its flags. Docs and tests are excluded, because they may mention removed flags.
_BUILD_FILES = (".py", ".toml", ".cfg", ".cmake", "CMakeLists.txt")
_PAPERS = {"docs", "tests"}
_MOST_BYTES = 4 << 20  # per file
# Limits for a source archive: number of entries, unpacked bytes, and bytes of one extended tar header (pax, GNU).
_MOST_MEMBERS, _LARGEST_TOTAL, _LARGEST_HEADER = 500_000, 8 << 30, 1 << 20


def inspect_source(wanted: ExtensionRequest, progress: Progress) -> LockedExtension:
    """Download a source and inspect it for locking.

    Raises NetworkError if the source cannot be downloaded, and HashMismatch for an sdist with a different hash. Raises
    ProfileError with the profile's line for a commit that the repository lacks, for submodules, for a damaged source,
    and for a variable that no build file of the source mentions.
    """
    extension, build = wanted.extension, wanted.extension.build
    kind = "git" if extension.commit else "sdist"
    digest = extension.commit or (extension.sdist.sha256 if extension.sdist else "")
    locked = LockedExtension(
        extension.name, kind, digest, extension.modules, None, dict(build.env), tuple(build.settings)
    )
    fetch_source(wanted, progress)
    if extension.commit:
        repository = _repository(extension.commit)
        _refuse_submodules(wanted, repository)
        locked = replace(locked, tree=_git(repository, "rev-parse", f"{extension.commit}^{{tree}}").stdout.strip())
    with temporary_files.folder("source") as folder:
        file = folder / "source.tar"
        write_archive(locked, file)
        try:
            unknown = _unmentioned(file, set(build.env) - extension_compilers.variables())
        except _BROKEN as error:
            message = f"its source is not a tar archive (gzip, xz, bzip2 or plain), or is damaged: {error}"
            raise ProfileError(
                f"the source of {extension.name} cannot be locked", faults=[replace(wanted.at, message=message)]
            ) from None
    if unknown:
        faults = [replace(wanted.places[name], message=_SILENT.format(name=name)) for name in unknown]
        raise ProfileError(
            f"the build of {extension.name} does not use all of build.env", hint=_OTHERWISE, faults=faults
        )
    return locked


def _refuse_submodules(wanted: ExtensionRequest, repository: Path) -> None:
    """Refuse a commit with submodules, unless the profile omits them. Submodules are not downloaded, so a build that
    needs them would fail late, or omit parts."""
    if wanted.extension.submodules == "omit":
        return
    listed = _git(repository, "ls-tree", "-r", "-z", "--full-tree", f"{wanted.extension.commit}").stdout.split("\0")
    entries = (line.split("\t", 1) for line in listed if line.startswith("160000 "))
    found = [printable(path)[:200] for _, path in entries]
    if found:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        message = f"its commit has submodules, which are not downloaded: {', '.join(found[:_MOST_NAMED])}{more}"
        fault = replace(wanted.at, message=message)
        raise ProfileError(f"the source of {wanted.extension.name} is incomplete", hint=_WHOLE, faults=[fault])


_MOST_NAMED = 10
_WHOLE = (
    "if the build does not need the submodules, add submodules: omit after the commit; otherwise give the source with "
    "its submodules as an sdist: {sha256, url}"
)
# All errors that tarfile raises for a hostile tar, such as non-numeric sizes and endless nested headers.
_BROKEN = (OSError, EOFError, tarfile.TarError, zlib.error, lzma.LZMAError, ValueError, LookupError, OverflowError,
           RecursionError)  # fmt: skip
_SILENT = "the build files of the source do not mention {name}: setting it would have no effect"
_OTHERWISE = (
    "read the setup.py of the source; if it reads no variables, it may accept build.settings, such as "
    "--build-option=--cpp_ext"
)


def fetch_source(wanted: ExtensionRequest, progress: Progress) -> None:
    """Download a source unless it is cached. Raises NetworkError if that fails, HashMismatch for an sdist with a
    different hash, and ProfileError for a commit that the repository lacks."""
    extension = wanted.extension
    if extension.sdist:
        archive_fetcher.fetch_archives([_sdist(wanted)], progress)
    elif extension.commit and not _repository(extension.commit).is_dir():
        _clone(wanted, extension.commit)


def _sdist(wanted: ExtensionRequest) -> ArchiveRequest:
    sdist = wanted.extension.sdist
    assert sdist
    return ArchiveRequest(_SDIST, sdist.sha256, sdist.url, "", wanted.at)


_SDIST = "source"


def write_archive(locked: LockedExtension, file: Path) -> None:
    """Write the source of a commit as a tar with one top folder, or copy the sdist. If the cached source has changed,
    remove it and raise SourceDamaged for a commit, HashMismatch for an sdist. Also raise SourceDamaged if git cannot
    write the tar."""
    if locked.kind == "sdist":
        held = sha256_file_store.archive_store()
        held.check(locked.digest, _SDIST)
        shutil.copyfile(held.path(locked.digest, _SDIST), file)
        return
    repository = _repository(locked.digest)
    checked = _git(repository, "fsck", "--no-dangling", "--no-progress")
    tree = _git(repository, "rev-parse", f"{locked.digest}^{{tree}}")
    if checked.code or tree.code or locked.tree not in (None, tree.stdout.strip()):
        shutil.rmtree(repository, ignore_errors=True)
        raise SourceDamaged(
            f"the source of {locked.name} was damaged on this disk",
            hint="the damaged source was removed: run the same command again to download it",
        )
    done = _git(repository, "archive", "--format=tar", "--prefix=source/", f"--output={file}", locked.digest)
    if done.code:
        raise SourceDamaged(f"the source of {locked.name} cannot be read", hint=done.stderr.strip()[-600:])


class SourceDamaged(EnvbuildError):
    """A cached source no longer matches its hash, or cannot be read."""

    code, kind = 3, "hash"


def _repository(commit: str) -> Path:
    return user_folders.cache_folder("sources") / commit


def _git(repository: Path, *arguments: str | Path) -> Completed:
    """Run git in a repository. Raises DiskError if the disk is full."""
    done = run(["git", "--git-dir", repository, *arguments], env=_ENVIRONMENT, timeout=_FETCH_SECONDS)
    if done.code and disk_space.lacked(done.stderr):
        raise disk_space.full(
            [repository, *disk_space.written_folders()], "the disk is full while git fetches or writes a source"
        )
    return done


def _clone(wanted: ExtensionRequest, commit: str) -> None:
    """Fetch one commit without its history if the server allows it, otherwise the whole repository."""
    address = _address(wanted.extension.git or "")
    target = _repository(commit)
    with temporary_files.folder("incoming", target.parent) as folder:
        made = folder / "git"
        style = f"--object-format={'sha256' if len(commit) == 64 else 'sha1'}"
        begun = run(["git", "init", "--quiet", "--bare", "--template=", style, made], env=_ENVIRONMENT)
        if begun.code:
            raise EnvbuildError("git cannot create a repository", hint=printable(begun.stderr.strip()[-600:]))
        (made / "info").mkdir(exist_ok=True)
        (made / "info" / "attributes").write_text(_ATTRIBUTES, encoding="utf-8")
        done = _git(made, "fetch", "--quiet", "--no-tags", "--depth=1", address, commit)
        if done.code:
            every = _git(made, "fetch", "--quiet", address, "+refs/*:refs/kept/*")
            if every.code:
                shown = url_redaction.redact_url(address)
                raise NetworkError(
                    f"the source of {wanted.extension.name} cannot be fetched from {shown}",
                    hint=f"{every.stderr.replace(address, shown).strip()[-600:]}\n{_elsewhere()}",
                    faults=[replace(wanted.at, message="the source is named here")],
                )
        found = _git(made, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").stdout.strip()
        if found != commit or _git(made, "fsck", "--no-dangling", "--no-progress").code:
            message = f"{url_redaction.redact_url(address)} has no commit {commit}"
            raise ProfileError(
                f"the source of {wanted.extension.name} is not available", faults=[replace(wanted.at, message=message)]
            )
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # another process has fetched the same commit meanwhile
                raise


def _elsewhere() -> str:
    return f"to use a mirror, set git_mirror in {user_folders.config_file()}"


def _address(given: str) -> str:
    """The repository's URL in the profile, or its mirror by the setting git_mirror, in which {host} and {path} stand
    for parts of the profile's URL."""
    site = settings.setting("git_mirror")
    if site is None:
        return given
    parts = urllib.parse.urlsplit(given)
    path = parts.path.strip("/").removesuffix(".git")
    return site.replace("{host}", parts.hostname or "").replace("{path}", path)


class _Member(tarfile.TarInfo):
    """A tar entry. The size of its extended headers is limited, because tarfile reads them completely into memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        found = super().frombuf(buf, encoding, errors)
        if not found.isfile() and not 0 <= found.size <= _LARGEST_HEADER:
            raise tarfile.ReadError(f"a header of {found.size} bytes")
        return found


def _members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The entries of a tar. Raises TarError if it is too large, or endless because its offsets do not increase."""
    before = -1
    for count, member in enumerate(tar):
        if not before < tar.offset <= _LARGEST_TOTAL or count >= _MOST_MEMBERS:
            raise tarfile.ReadError(f"more than {_LARGEST_TOTAL >> 30} GiB, or {_MOST_MEMBERS} files, or without end")
        before = tar.offset
        yield member


def _unmentioned(file: Path, names: Iterable[str]) -> Sequence[str]:
    """The names that occur in no build file of a source. Reads the whole tar."""
    missing = {name: re.compile(rb"(?<![A-Za-z0-9_])%b(?![A-Za-z0-9_])" % name.encode()) for name in names}
    with tarfile.open(file, tarinfo=_Member) as tar:
        for member in _members(tar):
            if member.isreg() and _builds(member.name) and member.size <= _MOST_BYTES:
                content = tar.extractfile(member)
                text = content.read() if content else b""
                missing = {name: word for name, word in missing.items() if not word.search(text)}
    return sorted(missing)


def _builds(path: str) -> bool:
    return path.endswith(_BUILD_FILES) and not _PAPERS & set(path.split("/")[:-1])
