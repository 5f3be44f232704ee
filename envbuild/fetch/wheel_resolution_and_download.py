"""Resolves and locates wheels with uv, using the configuration of pip and uv; downloads and stores them by sha256."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
import tomllib
import urllib.parse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs
import uv
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from envbuild.facts import misleading_packages
from envbuild.fetch import (
    file_download_and_range_reads,
    index_config,
    index_pages,
    newest_release_lag,
    sha256_file_store,
    uv_config,
    uv_error_translator,
)
from envbuild.fetch.file_download_and_range_reads import Head, RemoteFile
from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.fetch.sha256_file_store import Store
from envbuild.util import disk_space, temporary_files
from envbuild.util.errors import EnvbuildError, Fault, HashMismatch, NetworkError, ProfileError
from envbuild.util.host_processes import Completed, ProcessTimeout, run
from envbuild.util.thread_safe_cache import thread_safe_cache

# uv 0.13 supports no platform beyond manylinux_2_40. Therefore `tags`, and not uv, decides which wheel fits.
_UV_NEWEST_GLIBC = 40
_MOST_NAMED = 5
_SAFE_FILE = re.compile(r"[A-Za-z0-9_.+!-]+\.whl")


@dataclass(frozen=True)
class Resolved:
    """Versions by name. `wanted_by`: for each name, the distributions that require it; "" stands for the profile."""

    versions: Mapping[str, str]
    wanted_by: Mapping[str, frozenset[str]]

    def closure(self, roots: Iterable[str]) -> frozenset[str]:
        """`roots` and all their direct and indirect dependencies."""
        reached = set(roots)
        while True:
            more = {name for name, parents in self.wanted_by.items() if parents & reached} - reached
            if not more:
                return frozenset(reached)
            reached |= more


def uv_binary() -> Path:
    return Path(uv.find_uv_bin())


# uv resolves a shipped profile in seconds. uv itself has no time limit for an index that sends byte by byte.
_SECONDS = 900.0


def _compile(lines: Iterable[str], python: str, glibc: str, *options: str) -> Completed:
    """Run uv's resolver and return its result. Raises DiskError if the disk of uv or its cache is full, NetworkError if
    uv takes too long."""
    try:
        return _resolved(lines, python, glibc, *options)
    except ProcessTimeout:
        raise NetworkError(
            f"no answer from the indexes after {_SECONDS:.0f} s of resolving", hint="envbuild doctor checks them"
        ) from None


def _resolved(lines: Iterable[str], python: str, glibc: str, *options: str) -> Completed:
    platform = f"x86_64-manylinux_2_{min(int(glibc.partition('.')[2]), _UV_NEWEST_GLIBC)}"
    lines = list(lines)
    with temporary_files.folder("uv") as folder:
        done = run(
            # wheels are only chosen and not built, so uv can use the Python that runs envbuild
            [uv_binary(), "pip", "compile", "--quiet", "--no-header", *uv_config.config_options(folder),
             "--only-binary", ":all:", "--python", sys.executable, "--no-python-downloads", "--python-version", python,
             "--python-platform", platform, *index_config.uv_options(), *options, "-"],
            stdin="".join(f"{line}\n" for line in lines),
            # uv leaves temporary folders if it is killed, and wraps the lines that we parse at COLUMNS
            env={**index_config.uv_variables(lines), "TMPDIR": str(folder), "COLUMNS": "100000"},
            cwd=folder,
            timeout=_SECONDS,
        )  # fmt: skip
    if done.code and disk_space.lacked(done.stderr):
        own = os.environ.get("UV_CACHE_DIR") or platformdirs.user_cache_dir("uv")
        raise disk_space.full([Path(own), *disk_space.written_folders()], "the disk is full while uv resolves")
    return done


def resolve_wheels(
    requirements: Sequence[str],
    python: str,
    glibc: str,
    keep: Mapping[str, str],
    constraints: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> Resolved:
    """Choose versions of all packages that `requirements` need; versions in `keep` are preferred if they fit.
    `overrides` replace what any package requires, `constraints` only narrow it.

    Raises ProfileError if no combination exists, if a required package is not the one that its name suggests
    (misleading_packages), or if a pre-release was chosen that nothing names. Raises NetworkError if an index does not
    answer or lacks a local build.
    """
    with temporary_files.folder("uv") as folder:
        output = folder / "requirements.txt"
        output.write_text("".join(f"{name}=={version}\n" for name, version in keep.items()), encoding="utf-8")
        options = ["--annotation-style", "line", "--output-file", str(output)]
        options += _lists(folder, constraints, overrides)
        done = _compile(requirements, python, glibc, *options)
        if done.code:
            raise _with_newest(uv_error_translator.resolution_error(requirements, done), python, glibc)
        resolved = _parse(output.read_text(encoding="utf-8"))
    _refuse_unrelated(resolved)
    _refuse_prereleases(resolved, [*requirements, *constraints, *overrides], python, glibc)
    return resolved


def _lists(folder: Path, constraints: Iterable[str], overrides: Iterable[str]) -> list[str]:
    """Write constraints and overrides to files, and return uv's options for these files."""
    options: list[str] = []
    for option, lines in (("--constraint", list(constraints)), ("--override", list(overrides))):
        file = folder / f"{option.lstrip('-')}.txt"
        file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        options += [option, str(file)] if lines else []
    return options


def contradiction(
    requirements: Sequence[str], python: str, glibc: str, constraints: Sequence[str] = (), overrides: Sequence[str] = ()
) -> str | None:
    """Why these requirements conflict, in uv's words; None if they do not. Raises NetworkError."""
    with temporary_files.folder("uv") as folder:
        done = _compile(requirements, python, glibc, "--no-annotate", *_lists(folder, constraints, overrides))
    error = uv_error_translator.resolution_error(requirements, done) if done.code else None
    if isinstance(error, NetworkError):
        raise error
    return error.hint if error else None


# Makes uv use only its cache, which has the responses of the indexes if uv has just resolved these packages.
_FROM_CACHE = ("--offline",)
_MOST_CHECKS = 4  # calls of uv at a time, to find out which pre-releases a requirement names

# uv's message if the requirement of a package names a pre-release explicitly, such as ==0.66b2.
_NAMED = re.compile(r"`([A-Za-z0-9._-]+)` was requested with a pre-release marker")


def _refuse_prereleases(resolved: Resolved, given: Iterable[str], python: str, glibc: str) -> None:
    """Refuse a pre-release that neither `given` nor a requirement of a locked package names. uv chooses a pre-release
    if no other release has a usable wheel."""
    named = {canonicalize_name(r.name) for r in map(Requirement, given) if r.specifier.prereleases}
    odd = {name for name, version in resolved.versions.items() if Version(version).is_prerelease} - named

    def is_named(name: str) -> bool:
        # all other packages are pinned, so uv fails only for this one
        pins = [f"{other}=={version}" for other, version in resolved.versions.items() if other != name]
        for where in (_FROM_CACHE, ()):
            with temporary_files.folder("uv") as folder:
                done = _compile(pins, python, glibc, *where, *_RELEASES, *_lists(folder, (), pins))
            if done.code == 0:
                return False
            if name in {str(canonicalize_name(word)) for word in _NAMED.findall(done.stderr)}:
                return True
        error = uv_error_translator.resolution_error(pins, done)
        if isinstance(error, NetworkError):
            raise error
        return False

    required = sorted(name for name in odd if resolved.wanted_by[name] - {""})
    with ThreadPoolExecutor(_MOST_CHECKS) as pool:
        odd -= {name for name, found in zip(required, pool.map(is_named, required), strict=True) if found}
    if odd:
        raise _prerelease(resolved, sorted(odd), python, glibc)


_RELEASES = ("--prerelease", "explicit")


class OnlyPreReleases(ProfileError):
    """No release of the packages `names` has a usable wheel, but a pre-release has one."""

    names: Sequence[str] = ()


def _prerelease(resolved: Resolved, names: Sequence[str], python: str, glibc: str) -> OnlyPreReleases:
    faults = []
    for name in names:
        parents = ", ".join(sorted(resolved.wanted_by[name] - {""}))
        known = newest_release_lag.matching_releases(index_pages.listed_files(name), python, tags(python, glibc))
        stable = [release for release in known if not release.version.is_prerelease]
        why = "it has no release"
        if stable:
            usable = any(release.usable for release in stable)
            lacking = "does not fit the requirements" if usable else f"has no wheel for {target(python, glibc)}"
            why = f"the newest release, {stable[-1].version}, {lacking}"
        faults.append(Fault(f"{name} {resolved.versions[name]}{f' (required by {parents})' if parents else ''}: {why}"))
    pins = ", ".join(f"{name}=={resolved.versions[name]}" for name in names)
    error = OnlyPreReleases(
        f"only a pre-release fits, and no requirement names one: {', '.join(names)}",
        hint=f"{newest_release_lag.COMPILE}; to take the pre-release, require it: {pins}",
        faults=faults,
    )
    error.names = names
    return error


def target(python: str, glibc: str) -> str:
    """The platform that a wheel must support, for messages."""
    return f"Python {python}, glibc {glibc}, x86_64"


def _refuse_unrelated(resolved: Resolved) -> None:
    """Refuse a required package whose name belongs to an unrelated package in the index."""
    for name in resolved.versions:
        meant = misleading_packages.refusal_reason(name)
        if meant:
            asking = ", ".join(sorted(resolved.wanted_by[name] - {""})) or "the profile"
            hint = f"use a different version of {asking}, or leave it out"
            raise ProfileError(f"{asking} needs {name}: {meant}", hint=hint)


# uv's message for a missing version. If all versions are too old for a range, uv itself names the newest.
_NOT_THERE = re.compile(r"no version of ([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")


def _with_newest(error: EnvbuildError, python: str, glibc: str) -> EnvbuildError:
    """The same error, with the newest available version of each package whose version is missing."""
    if isinstance(error, ProfileError):
        for name in dict.fromkeys(_NOT_THERE.findall(error.hint or "")):
            with contextlib.suppress(ProfileError, NetworkError):
                newest = offered([name], python, glibc)[canonicalize_name(name)]
                error.hint = f"{error.hint}\nthe newest {name} for Python {python} is {newest}"
    return error


def offered(requirements: Sequence[str], python: str, glibc: str, oldest: bool = False) -> dict[str, str]:
    """Distribution -> the newest (or oldest) version on the indexes that meets its requirement. Each requirement is
    considered separately.

    Raises ProfileError if no version meets a requirement, NetworkError if an index does not answer.
    """
    resolution = ["--resolution", "lowest"] if oldest else []
    done = _compile(requirements, python, glibc, "--no-deps", "--no-annotate", *_RELEASES, *resolution)
    if done.code:
        raise uv_error_translator.resolution_error(requirements, done)
    return dict(_parse(done.stdout).versions)


def _parse(text: str) -> Resolved:
    versions: dict[str, str] = {}
    wanted_by: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        pin, _, via = line.partition("# via ")
        if "==" not in pin:
            continue
        name, _, version = pin.strip().partition("==")
        versions[canonicalize_name(name)] = version
        parents = (parent.strip() for parent in via.split(","))
        wanted_by[canonicalize_name(name)] = frozenset("" if parent.startswith("-") else parent for parent in parents)
    return Resolved(versions, wanted_by)


def locate(
    versions: Mapping[str, str], python: str, glibc: str, locked: Collection[str] = (), *, just_resolved: bool = False
) -> dict[Wheel, str]:
    """For each pinned version, the best wheel file for the image, and its current URL.

    A file whose sha256 is in `locked` is preferred to a better file, which an index may have received after locking.
    `just_resolved`: uv has just resolved these versions, so its cache is asked before the indexes.
    Raises ProfileError for a version without a fitting wheel, NetworkError if an index does not answer.
    """
    pins = [f"{name}=={version}" for name, version in versions.items()]
    options = ("--no-deps", "--format", "pylock.toml")
    done = _compile(pins, python, glibc, *_FROM_CACHE, *options) if just_resolved else None
    if done is None or done.code:
        done = _compile(pins, python, glibc, *options)
    if done.code:
        raise uv_error_translator.resolution_error(pins, done)
    supported = tags(python, glibc)
    found: dict[Wheel, str] = {}
    for package in tomllib.loads(done.stdout)["packages"]:
        offered = package.get("wheels", [])
        same = [wheel for wheel in offered if wheel.get("hashes", {}).get("sha256") in locked]
        best = _best(same or offered, supported)
        if best is None:
            raise ProfileError(
                f"{package['name']} {package['version']} has no wheel for {target(python, glibc)}",
                hint="choose a version that has such a wheel; envbuild does not build sdists",
            )
        address = best["url"] if "url" in best else Path(best["path"]).resolve().as_uri()
        file = _file_name(address)
        wheel = Wheel(canonicalize_name(package["name"]), package["version"], file, best["hashes"]["sha256"])
        found[wheel] = address
    return found


def tags(python: str, glibc: str) -> dict[Tag, int]:
    """Return rank by supported wheel tag; 0 is the best (PEP 425, PEP 600)."""
    major, minor = (int(part) for part in python.split("."))
    libc = int(glibc.split(".")[1])
    legacy = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}
    platforms: list[str] = []
    for number in range(libc, 4, -1):
        platforms += [f"manylinux_2_{number}_x86_64", *([legacy[number]] if number in legacy else [])]
    platforms.append("linux_x86_64")
    interpreter = f"cp{major}{minor}"
    ordered = [*cpython_tags((major, minor), platforms=platforms)]
    ordered += compatible_tags((major, minor), interpreter=interpreter, platforms=platforms)
    return {tag: rank for rank, tag in reversed(list(enumerate(ordered)))}


def _best(candidates: Sequence[dict[str, Any]], supported: Mapping[Tag, int]) -> dict[str, Any] | None:
    ranked = []
    for candidate in candidates:
        try:
            _, _, build, found = parse_wheel_filename(_file_name(str(candidate.get("url") or candidate.get("path"))))
        except InvalidWheelFilename:
            continue
        ranks = [supported[tag] for tag in found if tag in supported]
        if ranks:
            # of two builds of a version, the higher build number is newer; a build without a number is older (PEP 427)
            ranked.append((min(ranks), -build[0] if build else 1, candidate))
    return min(ranked, key=lambda item: item[:2])[2] if ranked else None


def _file_name(address: str) -> str:
    name = urllib.parse.unquote(urllib.parse.urlsplit(address).path).rpartition("/")[2]
    if not _SAFE_FILE.fullmatch(name):
        raise InvalidWheelFilename(f"{name!r} is not a wheel's file name")
    return name


def sizes(addresses: Mapping[Wheel, str]) -> dict[Wheel, int]:
    """Size of each file in bytes. Raises NetworkError."""
    files = [wheel.file for wheel in addresses]
    with ThreadPoolExecutor(index_config.PARALLEL) as pool:
        heads = pool.map(request_head, addresses.values(), files)
        return {wheel: head.bytes for wheel, head in zip(addresses, heads, strict=True)}


@thread_safe_cache
def request_head(address: str, file: str) -> Head:
    """Size and range support of a wheel file, by a HEAD request. Raises NetworkError."""
    return file_download_and_range_reads.head(index_config.shared_session(), RemoteFile(address, file))


def _located(missing: Sequence[Wheel], damaged: Mapping[str, HashMismatch], python: str, glibc: str) -> dict[str, str]:
    """The URL of each of these files on the configured indexes, by file name. `damaged`: the error of each file that a
    local folder has with a different content; it is raised if the search on the indexes fails."""
    if not missing:
        return {}
    try:
        found = locate({w.name: w.version for w in missing}, python, glibc, {w.sha256 for w in missing})
    except (ProfileError, NetworkError) as error:
        if named := next((damaged[wheel.file] for wheel in missing if wheel.file in damaged), None):
            raise named from error
        if folders := _local_folders():
            lacking = ", ".join(wheel.file for wheel in missing[:_MOST_NAMED])
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            text = f"the folder {', '.join(map(str, folders))} of find-links lacks {lacking}{more}"
            error.hint = (
                f"{text}: copy the files there; with PIP_NO_INDEX=1 no index is asked\n{error.hint or ''}".strip()
            )
        if isinstance(error, ProfileError):  # locked wheels were available once: not an error in the profile
            raise NetworkError("the configured indexes lack a locked file", hint=error.hint) from error
        raise
    return {wheel.file: address for wheel, address in found.items()}


def _local_folders() -> list[Path]:
    """The folders of find-links on this machine."""
    found = []
    for place in index_config.links():
        parts = urllib.parse.urlsplit(place)
        if parts.scheme in ("", "file"):
            path = urllib.parse.unquote(parts.path) if parts.scheme else os.path.expanduser(place)  # noqa: PTH111
            found.append(Path(path).absolute())  # Path.expanduser raises an error for an unknown ~user
    return [folder for folder in found if folder.is_dir()]


def _local_files(sizes: Mapping[Wheel, int]) -> tuple[dict[str, str], dict[str, HashMismatch]]:
    """The URL of each wheel that a local folder of find-links has, by file name; and an error for each file there with
    the name of a wheel but a different content. `sizes`: the locked size of each wheel, in bytes."""
    good: dict[str, str] = {}
    damaged: dict[str, HashMismatch] = {}
    folders = _local_folders()
    for wheel, size in sizes.items():
        for path in (folder / wheel.file for folder in folders):
            if not path.is_file() or wheel.file in good:
                continue
            if (present := path.stat().st_size) != size:  # a file of gigabytes need not be read
                difference = f"{present} bytes, locked {size}"
            elif (found := sha256_file_store.file_digest(path)) != wheel.sha256:
                difference = f"sha256 {found}, locked {wheel.sha256}"
            else:
                good[wheel.file] = path.as_uri()
                continue
            damaged[wheel.file] = HashMismatch(
                f"{path} is not the file that was locked: {difference}",
                hint="the file is damaged, or a different build: copy it again from its origin",
            )
    return good, damaged


def fetch_wheels(
    locked: Iterable[LockedWheel], python: str, glibc: str, store: Store, progress: Callable[[str, int], None]
) -> int:
    """Download the wheels missing in the store; return how many. `progress` gets the file and the number of new bytes.
    A wheel that is in a local folder of find-links is copied from there; an index is asked only for the other wheels.

    Raises HashMismatch with the file's name, and with the path of a damaged local file; NetworkError if an index does
    not answer or no longer has a file.
    """
    limits = {item.wheel: item.bytes for item in locked if not store.holds(item.wheel.sha256, item.wheel.file)}
    missing = list(limits)
    if not missing:
        return 0
    local, damaged = _local_files(limits)
    elsewhere = [wheel for wheel in missing if wheel.file not in local]
    addresses = {**_located(elsewhere, damaged, python, glibc), **local}
    gone = [wheel.file for wheel in missing if wheel.file not in addresses]
    if gone:
        hint = "lock other versions: envbuild lock PROFILE --upgrade NAME"
        raise NetworkError(f"the configured indexes no longer have {', '.join(gone)}", hint=hint)
    for wheel in elsewhere:
        if wheel.file in damaged and urllib.parse.urlsplit(addresses[wheel.file]).scheme == "file":
            raise damaged[wheel.file]
    session = index_config.index_session()
    stop = threading.Event()  # one failure, or Ctrl-C, also ends the other downloads
    with store.incoming() as folder, ThreadPoolExecutor(index_config.PARALLEL) as pool:

        def bring(wheel: Wheel) -> None:
            file = folder / wheel.sha256
            address = addresses[wheel.file]
            report = functools.partial(progress, wheel.file)
            try:
                file_download_and_range_reads.fetch_file(
                    session, RemoteFile(address, wheel.file), file, report, limit=limits[wheel], stop=stop
                )
                if stop.is_set():
                    return
                store.put(file, wheel.sha256, wheel.file)
            except HashMismatch:  # the index may have stated a wrong size, too
                sha256_file_store.noted_listing(wheel.sha256).unlink(missing_ok=True)
                raise

        try:
            list(pool.map(bring, missing))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    return len(missing)
