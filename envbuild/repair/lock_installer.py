"""Installs a lock into a virtual environment on this machine. Each wheel comes from the store and is checked by its
hash.

A later `pip install` keeps the profile's overrides: as in images, the installed metadata require the overriding
versions, and pip and uv use the locked versions as constraints.

While uv installs, a file in the environment lists the distributions that it installs. An interrupted run leaves this
file, and the next run installs them again: one that is only partly there may look complete to uv.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import venv
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import uv

from envbuild.fetch import sha256_file_store
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.fetch.sha256_file_store import Store
from envbuild.repair.install_plan import InstallPlan
from envbuild.util import atomic_files, process_locks, temporary_files, user_folders
from envbuild.util.errors import BuildError, FileError, SystemFault
from envbuild.util.host_processes import run

_BEGIN, _END = "# >>> envbuild >>>", "# <<< envbuild <<<"
_DEACTIVATE = "deactivate () {\n"  # in the scripts of uv and of Python's venv
_RESTORE, _OLD, _HAD = "_ENVBUILD_RESTORE", "_ENVBUILD_OLD_", "_ENVBUILD_HAD_"
_MARK = ".envbuild-lock"
_ACTIVATE = "bin/activate"
_LAST_LINES = 8
# uv's variables that decide only where and how it writes. Others may leave out or add distributions without an error.
_UV_VARIABLES = ("UV_CACHE_DIR", "UV_NO_CACHE", "UV_LINK_MODE", "UV_LOCK_TIMEOUT", "UV_CONCURRENT_INSTALLS")


@dataclass(frozen=True)
class InstalledLock:
    """The environment that a lock was installed into. `installed`: the distributions that were missing or had a
    different version before, or that an interrupted run was installing; `left_out`: extensions, which are compiled only
    in images."""

    profile: str
    lock: str
    target: str
    state: Literal["installed", "up-to-date"]
    python: str
    installed: tuple[str, ...]
    left_out: tuple[str, ...]


def install_lock(plan: InstallPlan, folder: Path, say: Callable[[str], None]) -> InstalledLock:
    """Install a lock in `folder`, a new or an existing virtual environment.

    Raises FileError if the folder contains something else, or an environment of another Python version; SystemFault if
    the lock's Python is not on this machine; NetworkError if a wheel cannot be downloaded; HashMismatch if a wheel in
    the store is damaged; BuildError if the installation fails.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - do not resolve links
    python = _interpreter(plan.python)
    with process_locks.exclusive_environment(folder, say):
        return _install_lock(plan, folder, python, say)


def _install_lock(plan: InstallPlan, folder: Path, python: Path, say: Callable[[str], None]) -> InstalledLock:
    _require_environment(folder, plan.python)
    store = sha256_file_store.wheel_store()
    _fetch(plan, store)
    wheels = {locked.wheel.sha256: locked.wheel.file for locked in plan.wheels}
    sha256_file_store.check_changed(store, wheels, _links(plan).with_suffix(".json"))
    names = tuple(sorted(locked.wheel.name for locked in plan.wheels))
    new = not (folder / _ACTIVATE).is_file()  # the last file of a new environment
    if new:
        say(f"new environment: {folder}, Python {plan.python}")
        _make_environment(python, folder)
    else:
        wanted = _missing(folder, plan.wheels) | _interrupted(folder)
        names = tuple(name for name in names if name in wanted)
    _write_constraints(plan.constraints, folder)
    _write_activation(folder, plan.profile, plan.variables)
    if names:
        _install(plan, store, folder, names, say, again=not new)
    _pin_overrides(plan.overrides, folder)
    state: Literal["installed", "up-to-date"] = "installed" if names else "up-to-date"
    return InstalledLock(plan.profile, plan.lock, str(folder), state, plan.python, names, plan.left_out)


def _fetch(plan: InstallPlan, store: Store) -> None:
    """Download the wheels that are missing in the store."""
    if all(store.holds(locked.wheel.sha256, locked.wheel.file) for locked in plan.wheels):
        return
    from envbuild.fetch import wheel_resolution_and_download  # imports the client of indexes

    wheel_resolution_and_download.fetch_wheels(plan.wheels, plan.python, plan.glibc, store, lambda file, count: None)


def _interpreter(version: str) -> Path:
    """Return a Python of this version on this machine: the one that runs envbuild, or one on PATH. Programs on PATH may
    be slow scripts, as pyenv's are, and must be started to learn their version."""
    if f"{sys.version_info[0]}.{sys.version_info[1]}" == version and sys.executable:
        return Path(sys.executable)
    from envbuild.runners import host_runner  # not needed for envbuild's own Python

    for candidate in filter(None, (shutil.which(f"python{version}"), shutil.which("python3"))):
        if host_runner.version(Path(candidate)) == version:
            return Path(candidate)
    raise SystemFault(
        f"the lock needs Python {version}, which is not on PATH",
        hint=f"apt install python{version}, or: uv python install {version}; then put python{version} on PATH",
    )


def _require_environment(folder: Path, version: str) -> None:
    """Raise FileError unless the folder is missing, empty, or a virtual environment of this Python."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / "pyvenv.cfg").is_file():
        raise FileError(
            f"{folder} exists and is not a virtual environment",
            hint="name a new folder; if an interrupted `envbuild install` left this one, remove it",
        )
    from envbuild.runners import host_runner  # not needed for a new environment

    found = host_runner.version(folder / "bin" / "python")
    if found != version:
        raise FileError(
            f"{folder} has {f'Python {found}' if found else 'no working Python'}; the lock needs {version}",
            hint="name a new folder",
        )


def _make_environment(python: Path, folder: Path) -> None:
    """Make an empty environment, or complete one that an interrupted run left, and keep it out of git."""
    if python == Path(sys.executable):
        venv.create(folder, symlinks=True)  # as uv does, without the time to start a program
    else:
        _uv("venv", "--python", str(python), "--no-project", "--allow-existing", str(folder))
    _write(folder / ".gitignore", "*\n")


def _missing(folder: Path, wheels: Iterable[LockedWheel]) -> set[str]:
    """The locked distributions that are not installed in the locked version."""
    from packaging.utils import canonicalize_name  # not needed for a new environment

    files = _metadata_files(folder)
    missing = set()
    for locked in wheels:
        file = files.get(canonicalize_name(locked.wheel.name))
        found = re.search(r"(?m)^Version: *(\S+)", file.read_text(encoding="utf-8", errors="replace")) if file else None
        if found is None or found[1] != locked.wheel.version:
            missing.add(locked.wheel.name)
    return missing


def _interrupted(folder: Path) -> set[str]:
    """The distributions that an interrupted run was installing in this folder."""
    file = _progress_file(folder)
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    return {line.partition("==")[0] for line in text.splitlines()}


def _progress_file(folder: Path) -> Path:
    return folder / f"{_MARK}.txt"


def _metadata_files(folder: Path) -> dict[str, Path]:
    from envbuild.repair import environment_manager_detection  # imports the audit

    sites = sorted(folder.glob("lib/python3.*/site-packages"))
    return environment_manager_detection.metadata_files([str(site) for site in sites])


def _pin_overrides(overrides: Mapping[str, str], folder: Path) -> None:
    """Make the installed metadata require the overriding versions."""
    if not overrides:
        return
    from envbuild.repair import requirement_edits  # imports the reader of wheels

    files = _metadata_files(folder).values()
    for name, version in overrides.items():
        for file in files:
            requirement_edits.pin_metadata(file, name, version)


def _links(plan: InstallPlan) -> Path:
    """The folder with links to the wheels of a lock, from which uv installs them."""
    return user_folders.cache_folder("find-links") / plan.lock.removeprefix("sha256:")[:12]


def _install(
    plan: InstallPlan, store: Store, folder: Path, names: tuple[str, ...], say: Callable[[str], None], again: bool
) -> None:
    """Install these distributions with uv from the store of wheels. uv checks the hash of a wheel when it unpacks the
    wheel into uv's cache. uv links the unpacked files into later environments without reading the wheel again.

    `again`: also install a distribution that uv finds in the environment, because it may be only partly there.
    """
    links = _links(plan)
    links.mkdir(parents=True, exist_ok=True)  # always the same folder: uv's cache is keyed by the path of a wheel
    os.utime(links)  # `envbuild prune` keeps it for another day
    wheels = [locked.wheel for locked in plan.wheels if locked.wheel.name in names]
    _make_links(links, {wheel.file: store.path(wheel.sha256, wheel.file) for wheel in wheels})
    listed = _progress_file(folder)
    _write(listed, "".join(f"{wheel.hashed_pin()}\n" for wheel in wheels))
    say(f"installing {len(names)} distributions")
    _uv(
        "pip", "install", "--python", str(folder), "--no-deps", "--no-index", "--find-links", str(links),
        "--require-hashes", "--no-build", *(["--reinstall"] if again else []), "-r", str(listed),
    )  # fmt: skip
    listed.unlink()


def _make_links(folder: Path, targets: Mapping[str, Path]) -> None:
    """Make symbolic links with these names and targets, also if a link has another target: the cache may have been
    moved. Another process may do the same at the same time."""
    changed = [name for name, target in targets.items() if not _leads_to(folder / name, target)]
    if changed:
        with temporary_files.folder("links", folder) as made:
            for name in changed:
                (made / name).symlink_to(targets[name])
                (made / name).replace(folder / name)


def _leads_to(link: Path, target: Path) -> bool:
    return link.is_symlink() and link.readlink() == target


_uv_program = cache(uv.find_uv_bin)


def _uv(*words: str) -> None:
    argv = [_uv_program(), *words, "--no-config", "--offline", "--quiet"]
    others = {name: None for name in os.environ if name.startswith("UV_") and name not in _UV_VARIABLES}
    done = run(argv, env={"VIRTUAL_ENV": None, **others})
    if done.code:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-_LAST_LINES:]
        raise BuildError(f"uv {' '.join(words[:2])} ended with exit code {done.code}", hint="\n".join(lines) or None)


def _write_constraints(constraints: str, folder: Path) -> None:
    """Write the locked versions as constraints, and a pip.conf that makes pip use them. The pip.conf is empty if the
    path has a space."""
    file = folder / "constraints.txt"
    _write(file, constraints)
    _write(folder / "pip.conf", f"[install]\nconstraint = {file}\n" if " " not in str(file) else "")


def _write_activation(folder: Path, name: str, variables: Mapping[str, str]) -> None:
    """Make bin/activate (bash, zsh) set the profile's variables and, unless the path has a space, the constraints for
    uv. `deactivate` restores the values that the variables had before."""
    file = folder / _ACTIVATE
    file_text = file.read_text(encoding="utf-8")
    kept = re.sub(rf"(?ms)^{re.escape(_BEGIN)}.*?^{re.escape(_END)}\n", "", file_text)
    constraints = folder / "constraints.txt"
    every = {**variables, **({"UV_CONSTRAINT": str(constraints)} if " " not in str(constraints) else {})}
    lines = [f"# the variables of profile {name}", f"{_RESTORE}={shlex.quote(' '.join(map(_restored, sorted(every))))}"]
    for variable, value in sorted(every.items()):
        lines.append(f'{_OLD}{variable}="${{{variable}-}}" {_HAD}{variable}="${{{variable}+set}}"')
        lines.append(f"export {variable}={shlex.quote(value)}")
    restoring = _block([f'    eval "${{{_RESTORE}-}}"', f"    unset {_RESTORE}"])
    _write(file, kept.replace(_DEACTIVATE, _DEACTIVATE + restoring, 1) + _block(lines))


def _block(lines: Iterable[str]) -> str:
    return "\n".join([_BEGIN, *lines, _END, ""])


def _restored(variable: str) -> str:
    """The shell command that restores the value of a variable, or that it had none."""
    old, had = f"{_OLD}{variable}", f"{_HAD}{variable}"
    restore = f'if [ -n "${had}" ]; then export {variable}="${old}"; else unset {variable}; fi;'
    return f"{restore} unset {old} {had};"


def _write(file: Path, text: str) -> None:
    """Write a file of the environment without flushing it to disk. uv does not flush the files that it installs
    either."""
    if not atomic_files.holds_text(file, text):
        atomic_files.write_atomically(file, text, flush=False)
