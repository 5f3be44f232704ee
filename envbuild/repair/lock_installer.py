"""Installs a lock into a virtual environment on this machine. Each wheel comes from the store and is checked by its
hash.

A later `pip install` keeps the profile's overrides: as in images, the installed metadata require the overriding
versions, and pip and uv use the locked versions as constraints.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.utils import canonicalize_name

from envbuild.fetch import sha256_file_store, wheel_resolution_and_download
from envbuild.fetch.sha256_file_store import Store
from envbuild.lock import requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.repair import environment_manager_detection, requirement_edits
from envbuild.resolve import plan_resolver
from envbuild.runners import host_runner
from envbuild.util import atomic_files, user_folders
from envbuild.util.errors import BuildError, FileError, SystemFault
from envbuild.util.host_processes import run

_BEGIN, _END = "# >>> envbuild >>>", "# <<< envbuild <<<"
_MARK = ".envbuild-lock"
_LAST_LINES = 8


@dataclass(frozen=True)
class InstalledLock:
    """The environment that a lock was installed into. `installed`: the distributions that were missing or had a
    different version before; `left_out`: extensions, which are compiled only in images."""

    profile: str
    lock: str
    target: str
    state: Literal["installed", "up-to-date"]
    python: str
    installed: tuple[str, ...]
    left_out: tuple[str, ...]


def install_lock(
    name: str, lock: Lock, variables: Mapping[str, str], folder: Path, say: Callable[[str], None]
) -> InstalledLock:
    """Install the lock of profile `name` in `folder`, a new or an existing virtual environment. `variables`: the
    profile's environment variables, which bin/activate sets.

    Raises FileError if the folder contains something else, or an environment of another Python version; SystemFault if
    the lock's Python is not on this machine; NetworkError if a wheel cannot be downloaded; BuildError if the
    installation fails.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - do not resolve links
    python = _interpreter(lock.python)
    _require_environment(folder, lock.python)
    store = sha256_file_store.wheel_store()
    glibc = plan_resolver.glibc_of_base(lock.suite)
    wheel_resolution_and_download.fetch_wheels(lock.wheels, lock.python, glibc, store, lambda file, count: None)
    if not (folder / "pyvenv.cfg").is_file():
        say(f"new environment: {folder}, Python {lock.python}")
        _uv("venv", "--python", str(python), "--no-project", str(folder))
    missing = tuple(sorted(_missing(folder, lock)))
    if missing:
        _install(lock, store, folder, missing, say)
    for override in lock.overrides:
        for file in environment_manager_detection.metadata_files([str(site) for site in _sites(folder)]).values():
            requirement_edits.pin_metadata(file, override.name, override.version)
    _write_constraints(lock, name, folder)
    _write_activation(folder, name, variables)
    left_out = tuple(extension.name for extension in lock.extensions)
    state: Literal["installed", "up-to-date"] = "installed" if missing else "up-to-date"
    return InstalledLock(name, lock.id, str(folder), state, lock.python, missing, left_out)


def _interpreter(version: str) -> Path:
    """Return a Python of this version on this machine."""
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    candidates = [shutil.which(f"python{version}"), sys.executable if own == version else None, shutil.which("python3")]
    for candidate in filter(None, candidates):
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
        raise FileError(f"{folder} exists and is not a virtual environment", hint="name a new folder")
    found = host_runner.version(folder / "bin" / "python")
    if found != version:
        raise FileError(
            f"{folder} has {f'Python {found}' if found else 'no working Python'}; the lock needs {version}",
            hint="name a new folder",
        )


def _sites(folder: Path) -> list[Path]:
    return sorted(folder.glob("lib/python3.*/site-packages"))


def _missing(folder: Path, lock: Lock) -> set[str]:
    """The locked distributions that are not installed in the locked version."""
    files = environment_manager_detection.metadata_files([str(site) for site in _sites(folder)])
    missing = set()
    for name, version in lock.versions.items():
        file = files.get(canonicalize_name(name))
        found = re.search(r"(?m)^Version: *(\S+)", file.read_text(encoding="utf-8", errors="replace")) if file else None
        if found is None or found[1] != version:
            missing.add(name)
    return missing


def _install(lock: Lock, store: Store, folder: Path, names: tuple[str, ...], say: Callable[[str], None]) -> None:
    """Install these distributions with uv from the store of wheels. uv checks the hash of each file."""
    links = user_folders.cache_folder("find-links") / lock.short
    links.mkdir(parents=True, exist_ok=True)  # always the same folder: uv's cache is keyed by the path of a wheel
    lines = []
    for locked in lock.wheels:
        wheel = locked.wheel
        if wheel.name in names:
            link = links / wheel.file
            if not link.is_symlink():
                link.symlink_to(store.path(wheel.sha256, wheel.file))
            lines.append(f"{wheel.hashed_pin()}\n")
    listed = folder / f"{_MARK}.txt"
    atomic_files.write_atomically(listed, "".join(lines))
    say(f"installing {len(names)} distributions")
    _uv(
        "pip", "install", "--python", str(folder), "--no-deps", "--no-index", "--find-links", str(links),
        "--require-hashes", "--no-build", "-r", str(listed),
    )  # fmt: skip
    listed.unlink()


def _uv(*words: str) -> None:
    argv = [str(wheel_resolution_and_download.uv_binary()), *words, "--no-config", "--offline", "--quiet"]
    done = run(argv, env={"VIRTUAL_ENV": None, "UV_CONSTRAINT": None, "UV_OVERRIDE": None})
    if done.code:
        lines = [line for line in done.stderr.splitlines() if line.strip()][-_LAST_LINES:]
        raise BuildError(f"uv {' '.join(words[:2])} ended with exit code {done.code}", hint="\n".join(lines) or None)


def _write_constraints(lock: Lock, name: str, folder: Path) -> None:
    """Write the locked versions as constraints, and a pip.conf that makes pip use them. No pip.conf if the path has a
    space."""
    file = folder / "constraints.txt"
    _write(file, requirements_export.constraints(lock, name, metadata_changed=True))
    _write(folder / "pip.conf", f"[install]\nconstraint = {file}\n" if " " not in str(file) else "")


def _write_activation(folder: Path, name: str, variables: Mapping[str, str]) -> None:
    """Make bin/activate (bash, zsh) set the profile's variables and the constraints for uv."""
    file = folder / "bin" / "activate"
    file_text = file.read_text(encoding="utf-8")
    kept = re.sub(rf"(?ms)^{re.escape(_BEGIN)}.*?^{re.escape(_END)}\n", "", file_text)
    constraints = folder / "constraints.txt"
    every = {**variables, **({"UV_CONSTRAINT": str(constraints)} if " " not in str(constraints) else {})}
    lines = [f"export {variable}={shlex.quote(value)}" for variable, value in sorted(every.items())]
    block = "\n".join([_BEGIN, f"# the variables of profile {name}", *lines, _END, ""])
    _write(file, kept + block)


def _write(file: Path, text: str) -> None:
    if not atomic_files.holds_text(file, text):
        atomic_files.write_atomically(file, text)
