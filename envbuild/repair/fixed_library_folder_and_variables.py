"""Unpacks fixed libraries into a hash-checked folder, and finds the environment variable that makes a program load
them.

The Python environment is not changed. The folder is in the user's cache, and all Python environments share it.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import re
import shlex
import shutil
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from envbuild.audit.collected_environment import Holdings
from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.image.layers import wheel_installed_files
from envbuild.repair import dynamic_loader_search, repair_plan
from envbuild.repair.repair_plan import DiagnosisInput, RepairPlan
from envbuild.repair.repair_run import RepairRefused
from envbuild.repair.required_changes import LibraryPin
from envbuild.util import process_locks, temporary_files, user_folders
from envbuild.util.errors import CheckFailed, HashMismatch

_LIST = "libraries.json"


@dataclass(frozen=True)
class ProgramEnvironment:
    """The variables that a program needs (None: remove the variable), a sentence on what selects the libraries, and the
    libraries that the program should then load: soname -> path."""

    variables: Mapping[str, str | None]
    reason: str
    libraries: Mapping[str, str]


def program_environment(plan: RepairPlan, held: Holdings, say: Callable[[str], None]) -> ProgramEnvironment:
    """Return the variables that make a program load the fixed libraries.

    Raises RepairRefused if a package must be installed or removed to fix the fault, CheckFailed if no variable makes
    the loader take the fixed libraries.
    """
    changes = plan.diagnosis.changes
    removed = (*changes.uninstall, *changes.harmful_overwriting, *changes.harmful_leftovers)
    more = [
        what
        for what, needed in (
            (f"install torch {changes.torch}", changes.torch),
            (f"install {', '.join(changes.rebuilt)}", changes.rebuilt),
            (f"install {', '.join(changes.packages)}", changes.packages),
            (f"install {', '.join(changes.reinstall)} again", changes.reinstall),
            (f"remove {', '.join(removed)}", removed),
        )
        if needed
    ]
    if more:
        raise RepairRefused(
            f"the fix must {', '.join(more)}; other library files are not enough",
            hint=f"see: {shlex.join(plan.source.fix())}",
        )
    variables: dict[str, str | None] = dict(changes.variables)
    missing = [pin for pin in changes.pins if not pin.installed]
    if not missing:
        variables |= _shell_changes(plan, held)
        expected = {row.library: row.after for row in plan.libraries if row.after}
        return ProgramEnvironment(variables, "the environment already contains the fixed libraries", expected)
    version = ".".join(held.python.version.split(".")[:2])
    folders = [library_folder(pin, version, say) for pin in missing]
    found = effective_variables(held, missing, folders, plan.source, without_foreign=changes.library_path)
    return replace(found, variables={**variables, **found.variables})


def _shell_changes(plan: RepairPlan, held: Holdings) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for command in plan.commands:
        if command == repair_plan.unset_elsewhere(held):  # here the variable has other folders only
            continue
        if command.shell and command.argv[0] == "unset":
            found[command.argv[1]] = None
        elif command.shell:
            name, _, value = command.argv[1].partition("=")
            found[name] = value
    return found


def effective_variables(
    held: Holdings,
    pins: Sequence[LibraryPin],
    folders: Sequence[Path],
    source: DiagnosisInput,
    *,
    without_foreign: bool = False,
) -> ProgramEnvironment:
    """Return LD_LIBRARY_PATH if the loader takes the files of these folders with it, otherwise LD_PRELOAD.
    `without_foreign`: remove the folders with other CUDA libraries from LD_LIBRARY_PATH.

    Raises CheckFailed if neither works, for example because torch's library has a different name or is linked into
    torch.
    """
    given = repair_plan.loader_input(held)
    if given is None:
        raise CheckFailed("torch's libraries were not found", hint="envbuild audit lists the libraries that it finds")
    before = dynamic_loader_search.loaded_files(given)
    names = [name for pin in pins for name in repair_plan.group_sonames(held, pin.library, before)]
    if not names:
        raise CheckFailed(
            f"torch does not load {', '.join(pin.library for pin in pins)} from a separate file",
            hint=f"install a different build of torch, which this command shows: {shlex.join(source.fix())}",
        )
    own = {path.name: os.path.realpath(path) for folder in folders for path in folder.glob("*.so*")}
    wanted = {name: own[name] for name in names if name in own}
    if set(names) - set(wanted):
        raise CheckFailed(f"the fixed wheel lacks {', '.join(sorted(set(names) - set(wanted)))}")
    before_path = repair_plan.own_library_path(held, given.library_path) if without_foreign else given.library_path
    path = ":".join([*map(str, folders), *filter(None, [before_path])])
    after = dynamic_loader_search.loaded_files(replace(given, library_path=path))
    if all(after[name].path == wanted[name] for name in names):
        return ProgramEnvironment(
            {"LD_LIBRARY_PATH": path},
            "LD_LIBRARY_PATH selects the fixed libraries, because the loader searches it first",
            wanted,
        )
    why = next(before[name].way for name in names if after[name].path != wanted[name])
    # libcublasLt before libcublas, which needs it
    order = sorted(wanted.values(), key=lambda file: "Lt.so" not in file)
    preload = " ".join([*order, *filter(None, [given.preload])])
    after = dynamic_loader_search.loaded_files(replace(given, preload=preload))
    if all(after[name].path == wanted[name] for name in names):
        return ProgramEnvironment(
            {"LD_PRELOAD": preload},
            f"LD_PRELOAD selects the fixed libraries; LD_LIBRARY_PATH would have no effect: {why}",
            wanted,
        )
    raise CheckFailed(f"the loader does not take {', '.join(wanted.values())}", hint=f"it takes other files, by {why}")


def library_folder(pin: LibraryPin, python: str, say: Callable[[str], None]) -> Path:
    """Download the wheel of `pin`, unpack its libraries to a folder of the user's cache, and return this folder. If the
    folder exists and the checksums of its files are correct, nothing is downloaded. If several processes need it at the
    same time, one of them makes it, and the others wait."""
    folder = user_folders.cache_folder("libraries") / f"{pin.distribution}-{pin.version}"
    if _is_intact(folder):
        return folder
    with process_locks.exclusive(f"_libraries-{folder.name}", f"unpacks {folder.name}", say):
        if not _is_intact(folder):  # another process may have made it before this one got the lock
            shutil.rmtree(folder, ignore_errors=True)
            wheel = _fetched(pin, python, say)
            say(f"unpacking {wheel.name} to {folder}")
            with temporary_files.folder("libraries", folder.parent) as made:
                unpack_libraries(wheel, made / "new")
                (made / "new").replace(folder)
    return folder


def _fetched(pin: LibraryPin, python: str, say: Callable[[str], None]) -> Path:
    glibc = platform.libc_ver()[1] or "2.36"
    store = sha256_file_store.wheel_store()
    found = wheel_resolution_and_download.locate({pin.distribution: pin.version}, python, glibc)
    wheels = [LockedWheel(wheel, size, "") for wheel, size in wheel_resolution_and_download.sizes(found).items()]
    (locked,) = wheels
    say(f"{locked.wheel.file}: {locked.bytes / 1e6:.0f} MB, sha256 {locked.wheel.sha256}")
    wheel_resolution_and_download.fetch_wheels(wheels, python, glibc, store, lambda file, count: None)
    store.check(locked.wheel.sha256, locked.wheel.file)
    return store.path(locked.wheel.sha256, locked.wheel.file)


def unpack_libraries(wheel: Path, folder: Path) -> None:
    """Write the shared libraries of a wheel to a new folder, with a list of their checksums.

    Raises HashMismatch if a file differs from the wheel's RECORD.
    """
    folder.mkdir()
    listed: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        record = next(name for name in names if re.fullmatch(r"[^/]+\.dist-info/RECORD", name))
        rows = {row.path: row.digest for row in wheel_installed_files.parse_record(archive.read(record).decode())}
        for name in names:
            file = PurePosixPath(name).name
            if not re.fullmatch(r"lib[A-Za-z0-9_+.-]+\.so(\.[0-9]+)*", file) or file in listed:
                continue
            target = folder / file
            with archive.open(name) as source, target.open("xb") as written:
                shutil.copyfileobj(source, written, 1 << 20)
            listed[file] = sha256_file_store.file_digest(target)
            digest = base64.urlsafe_b64encode(bytes.fromhex(listed[file])).rstrip(b"=").decode()
            if rows.get(name) != f"sha256={digest}":
                raise HashMismatch(f"{name} in {wheel.name} does not match its checksum in RECORD")
    (folder / _LIST).write_text(json.dumps(listed), encoding="utf-8")


def _is_intact(folder: Path) -> bool:
    """Whether the folder has exactly the listed files with their checksums."""
    try:
        listed = json.loads((folder / _LIST).read_text(encoding="utf-8"))
        names = {path.name for path in folder.iterdir()} - {_LIST}
        return names == set(listed) and all(
            sha256_file_store.file_digest(folder / name) == sha256 for name, sha256 in listed.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return False
