"""Exports a lock as a project of uv or Poetry, or as an environment of conda. Pure.

Each file can be used without envbuild. Its comments say which versions the tool keeps, and which it cannot keep.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from envbuild.lock import requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.resolve.plan_resolver import computing

# linux/amd64 is the only platform of a lock
_PLATFORM = "sys_platform == 'linux' and platform_machine == 'x86_64'"


def uv_project(lock: Lock, name: str) -> str:
    """A pyproject.toml for uv. uv can override what torch requires, so it keeps all versions."""
    overrides = [f"override-dependencies = {_list(_pins(requirements_export.overriding_pins(lock)))}"]
    held = "# Pinned: every version, also for a later uv add"
    lines = [
        *requirements_export.heading(lock, name, "uv"),
        "# Save this file as pyproject.toml in a new folder, then run there: uv sync",
        f"{held}; the overrides by override-dependencies." if lock.overrides else f"{held}.",
        "# Not pinned: the sha256 of the files. uv.lock gets the sha256 values that your index reports.",
        *requirements_export.left_out(lock),
        *_project_table(lock, name, computing(lock.versions)),
        "[tool.uv]",
        "package = false",
        f"environments = {json.dumps([_PLATFORM])}",
        *(overrides if lock.overrides else []),
    ]
    return "\n".join(lines) + "\n"


def poetry_project(lock: Lock, name: str) -> str:
    """A pyproject.toml for Poetry, without the overrides, which Poetry cannot resolve."""
    overrides = requirements_export.overriding_pins(lock)
    kept = {package: version for package, version in computing(lock.versions).items() if package not in overrides}
    lines = [
        *requirements_export.heading(lock, name, "poetry"),
        "# Save this file as pyproject.toml in a new folder, then run there: poetry install",
        "# Pinned: the versions below.",
    ]
    if overrides:
        command = f"poetry run python -m pip install --no-deps {requirements_export.exact_pins(overrides)}"
        lines += [
            f"# Not pinned: {requirements_export.override_list(lock)}.",
            "# Poetry cannot override the versions that torch requires, so it installs those.",
            "# After each install, sync, add or update, run:",
            f"#   {command}",
        ]
    lines += [
        "# Not pinned: the sha256 of the files. poetry.lock gets the sha256 values that your index reports.",
        *requirements_export.left_out(lock),
        *_project_table(lock, name, kept),
        "[tool.poetry]",
        "package-mode = false",
    ]
    return "\n".join(lines) + "\n"


def conda_environment(lock: Lock, name: str) -> str:
    """An environment.yml: Python from conda, the locked wheels by pip."""
    create = "conda env create -f FILE"
    lines = [
        *requirements_export.heading(lock, name, "conda"),
        f"# PIP_NO_DEPS=1 {create}" if lock.overrides else f"# {create}",
        "# Pinned: the version and sha256 of every wheel, when the environment is created.",
        "# Not pinned: the builds of Python and pip, and packages that conda installs later: its solver ignores the",
        "# packages that pip installed.",
    ]
    if lock.overrides:
        lines += [
            f"# Overrides: {requirements_export.override_list(lock)}.",
            "# pip refuses them without PIP_NO_DEPS=1. So that a later pip install keeps them, run in the environment:",
            f"#   {requirements_export.metadata_command(lock)}",
        ]
    lines += [
        *requirements_export.left_out(lock),
        f"name: {json.dumps(name)}",
        "channels: [conda-forge, nodefaults]",
        "dependencies:",
        f"  - python={lock.python}",
        "  - pip",
        "  - pip:",
        *(f"      - {pin}" for pin in requirements_export.hashed_pins(lock, " ")),
    ]
    return "\n".join(lines) + "\n"


def _project_table(lock: Lock, name: str, versions: dict[str, str]) -> list[str]:
    return [
        "",
        "[project]",
        f'name = "{name}-environment"',
        'version = "0"',
        f'requires-python = "=={lock.python}.*"',
        f"dependencies = {_list(_pins(versions))}",
        "",
    ]


def _pins(versions: dict[str, str]) -> Iterable[str]:
    return (f"{package}=={version}" for package, version in sorted(versions.items()))


def _list(values: Iterable[str]) -> str:
    """A list in TOML, one value per line."""
    return "[\n" + "".join(f"    {json.dumps(value)},\n" for value in values) + "]"
