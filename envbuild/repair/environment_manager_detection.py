"""Detects what manages a Python environment: pip or uv in a virtual environment, a uv or Poetry project, conda, or the
system.

Reads files of the environment and of the folder that contains it; runs no commands.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from packaging.markers import InvalidMarker, Marker, UndefinedComparison, UndefinedEnvironmentName
from packaging.utils import canonicalize_name

from envbuild.audit.collected_environment import Holdings

Kind = Literal["pip", "uv", "uv-project", "poetry", "conda", "system"]
_LARGEST = 64 << 20  # bytes: larger files in conda-meta are not read


@dataclass(frozen=True)
class CondaPackage:
    """An installed conda package. `depends`: its requirements in conda's syntax; `files`: the paths of its files,
    relative to the environment's folder."""

    name: str
    version: str
    depends: tuple[str, ...]
    files: frozenset[str]


@dataclass(frozen=True)
class EnvironmentManager:
    """What manages an environment. `reason`: the file or folder from which this was detected; `project`: the folder of
    a uv or Poetry project; `has_pip`: pip is installed in the environment; `locked_down`: the system forbids pip
    (EXTERNALLY-MANAGED, PEP 668)."""

    kind: Kind
    python: str
    prefix: Path
    reason: str
    project: Path | None = None
    has_pip: bool = False
    locked_down: bool = False
    conda: tuple[CondaPackage, ...] = field(default=(), repr=False)

    def conda_owner(self, path: str) -> CondaPackage | None:
        """The conda package that installed a file of the environment. `path`: without symbolic links, as the audit
        collects it."""
        try:
            relative = Path(path).relative_to(os.path.realpath(self.prefix)).as_posix()
        except ValueError:
            return None
        return self._conda_files.get(relative)

    def conda_distributions(self, metadata_files: Mapping[str, Path]) -> frozenset[str]:
        """The distributions whose METADATA a conda package installed. `metadata_files`: the METADATA file of each
        distribution."""
        return frozenset(name for name, file in metadata_files.items() if self.conda_owner(str(file)))

    @cached_property
    def _conda_files(self) -> Mapping[str, CondaPackage]:
        return {file: package for package in self.conda for file in package.files}

    @property
    def label(self) -> str:
        names = {
            "pip": "pip in a virtual environment", "uv": "uv in a virtual environment", "uv-project": "a uv project",
            "poetry": "Poetry", "conda": "conda", "system": "the system's Python",
        }  # fmt: skip
        return names[self.kind]

    def pip(self, command: Literal["install", "uninstall"]) -> tuple[str, ...]:
        """Return the first words of a pip command for this environment, or of `uv pip` if uv manages the environment or
        if the environment has no pip."""
        return _pip_words(self.python, command, self.has_pip and self.kind not in ("uv", "uv-project"))


def pip_words(held: Holdings, command: Literal["install", "uninstall"]) -> tuple[str, ...]:
    """Return the first words of a command of the environment's own pip, or of `uv pip` if the environment has no
    pip."""
    return _pip_words(held.python.executable, command, "pip" in held.installed)


def _pip_words(python: str, command: Literal["install", "uninstall"], has_pip: bool) -> tuple[str, ...]:
    if not has_pip:
        return ("uv", "pip", command, "--python", python)
    return (python, "-m", "pip", command, *(("--yes",) if command == "uninstall" else ()))


def detect(held: Holdings) -> EnvironmentManager:
    """Detect the manager of the environment whose contents the audit collected."""
    prefix, python = Path(held.python.prefix), held.python.executable
    has_pip = "pip" in held.installed
    settings = _pyvenv(prefix / "pyvenv.cfg")
    if settings is None:
        packages = _conda_packages(prefix)
        if (prefix / "conda-meta").is_dir():
            return EnvironmentManager(
                "conda", python, prefix, str(prefix / "conda-meta"), has_pip=has_pip, conda=packages
            )
        marker = _externally_managed(held)
        reason = str(marker) if marker else f"{prefix} has neither pyvenv.cfg nor conda-meta"
        return EnvironmentManager("system", python, prefix, reason, has_pip=has_pip, locked_down=marker is not None)
    project = prefix.parent
    if _locks_torch(project / "uv.lock"):
        return EnvironmentManager("uv-project", python, prefix, str(project / "uv.lock"), project, has_pip)
    poetry = _poetry_project(prefix)
    if poetry is not None:
        return EnvironmentManager("poetry", python, prefix, poetry[1], poetry[0], has_pip)
    kind: Kind = "uv" if "uv" in settings else "pip"
    return EnvironmentManager(kind, python, prefix, str(prefix / "pyvenv.cfg"), has_pip=has_pip)


def uv_sources_without_cuda(project: Path, cuda: str) -> frozenset[str]:
    """The packages for which the pyproject.toml of a uv project sets a source on this system, unless the source is
    PyTorch's package index for the same CUDA major version as `cuda`."""
    uv = _uv_table(project)
    sources, indexes = uv.get("sources"), uv.get("index")
    rows = [row for row in indexes if isinstance(row, dict)] if isinstance(indexes, list) else []
    builds = re.compile(rf"https://download\.pytorch\.org/whl/cu{cuda.partition('.')[0]}[0-9]+/?")
    fitting = {row.get("name") for row in rows if builds.fullmatch(str(row.get("url")))}
    return frozenset(
        canonicalize_name(name)
        for name, value in (sources.items() if isinstance(sources, dict) else ())
        for source in (value if isinstance(value, list) else [value])
        if isinstance(source, dict) and source.get("index") not in fitting and _applies(source.get("marker"))
    )


def _applies(marker: object) -> bool:
    """Whether a marker is true on this system, or cannot be evaluated."""
    try:
        return not isinstance(marker, str) or Marker(marker).evaluate()
    except (InvalidMarker, UndefinedEnvironmentName, UndefinedComparison):
        return True


def workspace_members(project: Path) -> list[Path]:
    """The pyproject.toml files of the members of a uv workspace, without that of its root."""
    workspace = _uv_table(project).get("workspace")
    found = {key: set[Path]() for key in ("members", "exclude")}
    for key, files in found.items():
        patterns = workspace.get(key) if isinstance(workspace, dict) else None
        for pattern in patterns if isinstance(patterns, list) else ():
            with contextlib.suppress(ValueError, NotImplementedError):  # empty or absolute
                files.update(project.glob(f"{pattern}/pyproject.toml"))
    return sorted(found["members"] - found["exclude"] - {project / "pyproject.toml"})


def _uv_table(project: Path) -> Mapping[str, Any]:
    table = _table(project, "tool").get("uv")
    return table if isinstance(table, dict) else {}


def always_installs_torch(project: Path) -> bool:
    """Whether `dependencies` in the pyproject.toml of a uv project names torch: then each `uv sync` installs it."""
    texts = _table(project, "project").get("dependencies")
    names = (re.match(r"[\w.-]+", text) for text in texts if isinstance(text, str)) if isinstance(texts, list) else ()
    return any(name is not None and canonicalize_name(name[0]) == "torch" for name in names)


def conda_program() -> str:
    """The name of the installed tool for conda environments; conda if none is installed."""
    return next((name for name in ("mamba", "conda", "micromamba") if shutil.which(name)), "conda")


def metadata_files(folders: Sequence[str]) -> dict[str, Path]:
    """The METADATA file of each distribution in these package folders. If two folders contain a distribution, the file
    in the first folder counts, as for an import."""
    found: dict[str, Path] = {}
    for folder in folders:
        for file in sorted(Path(folder).glob("*.dist-info/METADATA")):
            name = _name_in(file)
            if name:
                found.setdefault(canonicalize_name(name), file)
    return found


def _name_in(file: Path) -> str | None:
    try:
        head = file.read_bytes()[:4096].decode(errors="replace")
    except OSError:
        return None
    match = re.search(r"(?mi)^Name: *([A-Za-z0-9][A-Za-z0-9._-]{0,200})\r?$", head)
    return match[1] if match else None


def _pyvenv(file: Path) -> Mapping[str, str] | None:
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return {key.strip().lower(): value.strip() for key, _, value in (line.partition("=") for line in lines)}


def _table(folder: Path, name: str) -> Mapping[str, Any]:
    """A table of a project's pyproject.toml; empty if the file has none of that name or cannot be read."""
    try:
        table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8")).get(name, {})
    except (OSError, ValueError, RecursionError):
        return {}
    return table if isinstance(table, dict) else {}


def _locks_torch(file: Path) -> bool:
    """Whether a uv.lock contains torch. If not, uv did not install torch from this project."""
    try:
        return bool(re.search(r'(?m)^name = "torch"$', file.read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return False


def _poetry_project(prefix: Path) -> tuple[Path | None, str] | None:
    """Return (the project's folder if known, the reason); None if Poetry does not manage the environment."""
    project = prefix.parent
    if (project / "poetry.lock").is_file() or "poetry" in _table(project, "tool"):
        file = "poetry.lock" if (project / "poetry.lock").is_file() else "pyproject.toml"
        return project, str(project / file)
    if "pypoetry" in prefix.parts:
        return None, f"{prefix} is in the folder where Poetry keeps environments"
    return None


def _externally_managed(held: Holdings) -> Path | None:
    """The marker of PEP 668, next to Python's standard library. On some systems that is in lib64."""
    version = ".".join(held.python.version.split(".")[:2])
    folders = (Path(held.python.prefix) / name / f"python{version}" for name in ("lib", "lib64"))
    return next((file for folder in folders if (file := folder / "EXTERNALLY-MANAGED").is_file()), None)


def _conda_packages(prefix: Path) -> tuple[CondaPackage, ...]:
    found = (_conda_package(file) for file in sorted((prefix / "conda-meta").glob("*.json")))
    return tuple(package for package in found if package)


def _conda_package(file: Path) -> CondaPackage | None:
    """The package that a file of conda-meta describes; None if the file cannot be read, is too large or is invalid."""
    try:
        if file.stat().st_size > _LARGEST:
            return None
        data = json.loads(file.read_bytes())
        return CondaPackage(
            str(data["name"]),
            str(data["version"]),
            tuple(map(str, data.get("depends", ()))),
            frozenset(map(str, data.get("files", ()))),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
