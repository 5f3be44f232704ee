"""Describes a tested Python environment by the digest of its locked files, and by all other files that the environment
loads. Pure.

The digest is the sha256 over the lines `PATH NUL SHA256 LF`, sorted by path, of the files that the locked wheels
install below site-packages. Bytecode, RECORD, METADATA and other files that installers change are left out. RECORD is
used only to find the files: if its content is false, the digest differs.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from envbuild.audit.environment_file_hasher import EnvironmentFiles, FolderFiles, InterpreterReport
from envbuild.evidence.environment_record import FileGroup, MeasuredEnvironment, MeasuredFile, MeasuredInterpreter
from envbuild.fetch import wheel_file_lists_and_clashes
from envbuild.image.layers import wheel_installed_files
from envbuild.util.errors import CheckFailed, printable, some

_INFO = ".dist-info"
# Files in .dist-info that may differ from those in the wheel: an installer adds them, or an override changes them.
_INSTALLERS = frozenset(("INSTALLER", "REQUESTED", "RECORD", "METADATA", "direct_url.json", "uv_cache.json"))
# Of these, the files that name paths and times of an installation. They are left out for every distribution, locked or
# not. Python does not use them to import anything.
_NOTES = _INSTALLERS - {"METADATA"}
_MOST = 10  # maximum number of differences in a message


@dataclass(frozen=True)
class _Home:
    """The folder with the locked distributions. `locked`: path -> sha256 of their files. `own`: paths of files in their
    .dist-info folders that are not compared."""

    folder: FolderFiles
    locked: Mapping[str, str]
    own: frozenset[str]


def files_digest(files: Mapping[str, str]) -> str:
    """Return the digest (hex) of several files. `files`: path -> sha256 (hex)."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.encode("utf-8", "surrogateescape") + b"\0" + files[path].encode() + b"\n")
    return digest.hexdigest()


def is_compared(path: str) -> bool:
    """Whether a wheel's file is part of the digest. `path`: relative to site-packages. No RECORD is part of it, not
    even that of a distribution which a package bundles."""
    folder, _, name = path.rpartition("/")
    is_info = folder.endswith(_INFO)
    is_note = is_info and (name == "RECORD" or ("/" not in folder and name in _INSTALLERS))
    return not is_note and "__pycache__" not in folder.split("/")


def measure_environment(files: EnvironmentFiles, locked: Mapping[str, str]) -> MeasuredEnvironment:
    """Return the description of an environment. `locked`: the versions of the locked distributions.

    Raises CheckFailed if a locked distribution is not installed in its version, if its RECORD is invalid, or if a file
    of it is missing or a symbolic link.
    """
    home, report = _home(files, locked), files.report
    names = _names(report, home.folder.folder)
    rest = {path: sha for path, sha in home.folder.sha256.items() if path not in home.locked and path not in home.own}
    further = [*_groups("{site}", rest)]
    for folder in files.folders:
        if folder is not home.folder:
            further += _groups(_named(folder.folder, names), folder.sha256)
    measured = [folder.folder for folder in files.folders]
    single = [
        _group(_named(path, names), {"": files.libraries[path]})
        for path in sorted(set(report.cuda_libraries))
        if not any(path.startswith(f"{folder}/") for folder in measured)
    ]
    with_libraries = {one.folder for one in files.loader if one.sha256}
    return MeasuredEnvironment(
        sha256=files_digest(home.locked),
        files=len(home.locked),
        distributions=dict(sorted(locked.items())),
        path=[_escaped(_named(folder.folder, names)) for folder in files.folders],
        further=further,
        loaded=[*(_group(_named(one.folder, names), one.sha256) for one in files.loader if one.sha256), *single],
        library_path=[_escaped(_named(folder, names)) for folder in report.library_path if folder in with_libraries],
        preloaded=[one for path in report.preloaded if (one := _file(files, path, names))],
        interpreter=MeasuredInterpreter(
            version=report.version,
            executable=files.libraries[report.executable],
            libpython=files.libraries[report.libpython] if report.libpython else None,
            standard_library=_group("standard library", files.standard_library.sha256),
        ),
        libc=_file(files, report.libc, names),
        libstdcxx=_file(files, report.libstdcxx, names),
        driver=report.driver,
        gpus=sorted(set(report.gpus)),
    )


def require_locked_files(
    files: EnvironmentFiles, locked: Mapping[str, str], wheels: Iterable[Mapping[str, str]]
) -> None:
    """Raise CheckFailed unless the locked distributions have exactly the files of their wheels, and no other file hides
    one of these. `wheels`: for each wheel, path below site-packages -> sha256."""
    found = _home(files, locked).locked
    expected = {path: sha for wheel in wheels for path, sha in wheel.items() if is_compared(path)}
    wrong = [f"{path} is missing, or RECORD does not list it" for path in expected if path not in found]
    wrong += [f"{path} differs from its wheel" for path in expected if path in found and found[path] != expected[path]]
    wrong += [f"{path} is not in the wheel whose RECORD lists it" for path in found if path not in expected]
    wrong += _hiding_files(files, locked)
    _require(wrong)


def unlocked_names(measured: MeasuredEnvironment) -> list[str]:
    """Return the names of the files and folders in site-packages that belong to no locked distribution, without
    .dist-info folders."""
    names = [group.name.removeprefix("{site}/") for group in measured.further if group.name.startswith("{site}/")]
    return [name for name in names if not name.endswith(_INFO)]


def _hiding_files(files: EnvironmentFiles, locked: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each file that Python imports, or that torch loads, instead of a locked file.

    The file is in site-packages, in an earlier folder of sys.path, or in the standard library. Because of such a file,
    the self-test would not test the locked file.
    """
    home = _home(files, locked)
    modules = {name for path in home.locked if (name := _module(path))}
    before = list(takewhile(lambda one: one is not home.folder, files.folders))
    for folder in (*before, files.standard_library, home.folder):
        if "" in folder.sha256:
            yield f"{folder.folder} comes before site-packages, and is not a folder"
        for path in sorted(folder.sha256):
            if folder is home.folder and (path in home.locked or path in home.own):
                continue
            below = path.removeprefix("lib-dynload/") if folder is files.standard_library else path
            module = _module(below)
            if below in home.locked or (module and module in modules):
                where = path if folder is home.folder else f"{folder.folder}/{path}"
                yield f"{where} is not locked, and hides a locked module"


def _module(path: str) -> str | None:
    return wheel_file_lists_and_clashes.module(f"{wheel_file_lists_and_clashes.SITE}/{path}")


def _home(files: EnvironmentFiles, locked: Mapping[str, str]) -> _Home:
    wanted = {canonicalize_name(name) for name in locked}
    folder = next((one for one in files.folders if wanted & {name for _, name, _ in _infos(one)}), None)
    if folder is None:
        raise CheckFailed("none of the locked distributions is installed", hint="envbuild install NAME PATH")
    infos: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for info, name, version in _infos(folder):
        infos[name].append((info, version))
    wrong, paths, own = [], set[str](), set[str]()
    for name, version in sorted(locked.items()):
        found = infos[canonicalize_name(name)]
        if len(found) != 1 or not _same_version(found[0][1], version):
            installed = " and ".join(held for _, held in found) or "not installed"
            wrong.append(f"{name} is {installed}, but {version} is locked")
            continue
        ((info, _),) = found
        own |= {f"{info}/{note}" for note in _INSTALLERS}
        paths |= set(_recorded(folder, info))
    wrong += [f"{path} is missing" for path in sorted(paths) if path not in folder.sha256]
    wrong += [f"{path} is a symbolic link, or below one" for path in sorted(paths & folder.linked)]
    _require(wrong)
    return _Home(folder, {path: folder.sha256[path] for path in paths}, frozenset(own))


def _require(wrong: list[str]) -> None:
    if wrong:
        more = [f"and {len(wrong) - _MOST} more"] if len(wrong) > _MOST else []
        hint = "\n".join([*map(printable, wrong[:_MOST]), *more])
        raise CheckFailed(f"the environment is not as locked: {some(len(wrong), 'difference')}", hint=hint)


def _infos(folder: FolderFiles) -> Iterator[tuple[str, str, str]]:
    """Yield (.dist-info folder, normalised name, version) of each distribution in a folder."""
    for path in folder.records:
        info = path.partition("/")[0]
        name, _, version = info.removesuffix(_INFO).partition("-")
        yield info, canonicalize_name(name), version


def _same_version(first: str, second: str) -> bool:
    try:
        return Version(first) == Version(second)
    except InvalidVersion:
        return first == second


def _recorded(folder: FolderFiles, info: str) -> Iterator[str]:
    """Yield the paths in the RECORD of the .dist-info folder `info` that are part of the digest. Raises CheckFailed if
    the RECORD is invalid."""
    try:
        rows = wheel_installed_files.parse_record(folder.records[f"{info}/RECORD"])
    except ValueError as error:
        raise CheckFailed(f"invalid RECORD of {printable(info)}: {printable(str(error))[:200]}") from None
    for row in rows:
        if not row.path.startswith("../") and is_compared(row.path):
            yield row.path


def _groups(label: str, files: Mapping[str, str]) -> Iterator[FileGroup]:
    """Yield one group for all files whose paths have the same first part. The _NOTES in .dist-info folders are left
    out, but a folder with nothing else has a group too. `label`: the folder's name in the result."""
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for path, sha in files.items():
        first, _, below = path.partition("/")
        group = parts[first]
        if not (first.endswith(_INFO) and below in _NOTES):
            group[path] = sha
    for part in sorted(parts):
        yield _group(f"{label}/{part}".rstrip("/"), parts[part])


def _group(name: str, files: Mapping[str, str]) -> FileGroup:
    return FileGroup(name=_escaped(name), files=len(files), sha256=files_digest(files))


def _file(files: EnvironmentFiles, path: str | None, names: Mapping[str, str]) -> MeasuredFile | None:
    return MeasuredFile(path=_escaped(_named(path, names)), sha256=files.libraries[path]) if path else None


def _names(report: InterpreterReport, home: str) -> dict[str, str]:
    """Return folder -> placeholder, the innermost folder first. `home`: the folder with the locked distributions."""
    words = dict(zip(report.prefixes, ("{prefix}", "{base}"), strict=False))
    return {home: "{site}", **dict(sorted(words.items(), key=lambda item: -len(item[0])))}


def _named(path: str, names: Mapping[str, str]) -> str:
    for folder, word in names.items():
        if path == folder or path.startswith(f"{folder}/"):
            return word + path.removeprefix(folder)
    return path


def _escaped(name: str) -> str:
    """Return a name as printable text. Different names give different texts."""
    return name if name.isprintable() and "\\" not in name else ascii(name)
