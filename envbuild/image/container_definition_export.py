"""Exports a lock as a Dockerfile, an Apptainer definition or a devcontainer.json that need no envbuild. Pure.

pip installs the locked wheels with their hashes, and the metadata of the packages is changed to require the overrides.
Debian packages get the versions that a mirror has on the day of the build; an image of `envbuild build` has the locked
versions.
"""

from __future__ import annotations

import json
import re
import shlex

from envbuild.facts import database
from envbuild.image.dockerfile_renderer import environment_pair
from envbuild.lock import requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.profile.model import Profile
from envbuild.resolve.plan_resolver import VENV

_LISTED = "/opt/requirements.txt"
_END = "REQUIREMENTS"


def standalone_dockerfile(lock: Lock, profile: Profile, name: str) -> str:
    """A Dockerfile that contains its requirements, so that its context can be empty. Needs BuildKit."""
    packages = _debian_packages(lock, profile)
    lines = [
        "# syntax=docker/dockerfile:1",
        *requirements_export.heading(lock, name, "dockerfile"),
        "# docker build -t NAME - < FILE",
        *_comments(lock),
        f"FROM {_base(lock)}",
        "USER root",
        "ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS",
        *([f"RUN {_apt(packages, ' && ')}"] if packages else []),
        f"COPY <<'{_END}' {_LISTED}",
        *requirements_export.hashed_pins(lock, " "),
        _END,
        *(f"RUN {command}" for command in install_commands(lock)),
        *(f"ENV {environment_pair(key, value)}" for key, value in sorted(lock.environment.items())),
        'CMD ["python"]',
    ]
    return "\n".join(lines) + "\n"


def apptainer_definition(lock: Lock, profile: Profile, name: str) -> str:
    """A definition file of Apptainer. HOME and USER are left to Apptainer, which sets them."""
    packages = _debian_packages(lock, profile)
    variables = {key: value for key, value in lock.environment.items() if key not in ("HOME", "USER")}
    lines = [
        "Bootstrap: docker",
        f"From: {_base(lock)}",
        "",
        *requirements_export.heading(lock, name, "apptainer"),
        "# apptainer build NAME.sif FILE" + ("; then: apptainer exec --nv NAME.sif python" if profile.gpus else ""),
        *_comments(lock),
        "",
        "%post",
        "    set -e",
        *([f"    {command}" for command in _apt(packages, "\n").split("\n")] if packages else []),
        f"    cat > {_LISTED} <<'{_END}'",
        *requirements_export.hashed_pins(lock, " "),
        _END,
        *(f"    {command}" for command in install_commands(lock)),
        "",
        "%environment",
        *(f"    export {key}={_quoted(value)}" for key, value in sorted(variables.items())),
        "",
        "%runscript",
        '    exec python "$@"',
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    """A word for the shell without `{{`: Apptainer 1.2 and newer replaces `{{ NAME }}` by a build argument.

    shlex.quote puts braces between single quotes; the quotes are closed and opened again between two braces.
    """
    return re.sub(r"\{(?=\{)", "{''", shlex.quote(value))


def devcontainer(lock: Lock, profile: Profile, name: str) -> str:
    """A devcontainer.json, which builds the exported Dockerfile in its folder."""
    file = f"Dockerfile-{name}"
    document: dict[str, object] = {"name": name, "build": {"dockerfile": file}}
    if profile.gpus:
        document |= {"runArgs": ["--gpus", "all"], "hostRequirements": {"gpu": True}}
    comments = [
        *requirements_export.heading(lock, name, "devcontainer"),
        "# Save this file as .devcontainer/devcontainer.json. It builds the Dockerfile in the same folder:",
        f"#   envbuild export dockerfile {name} -o .devcontainer/{file}",
        *_comments(lock),
    ]
    return "\n".join([*(f"//{line[1:]}" for line in comments), json.dumps(document, indent=2)]) + "\n"


def install_commands(lock: Lock) -> list[str]:
    """Shell commands that install the requirements in /opt/venv, and make the packages require the overrides."""
    site = f"{VENV}/lib/python{lock.python}/site-packages"
    python = f"{VENV}/bin/python"
    commands = [
        f"python{lock.python} -m venv {VENV}",
        f"{python} -m pip install --no-cache-dir --no-deps --require-hashes -r {_LISTED}",
    ]
    if lock.overrides:
        commands += [
            requirements_export.change_metadata(lock, site),
            requirements_export.refuse_conflicts(lock, python),
        ]
    return commands


def _base(lock: Lock) -> str:
    return lock.image or f"debian:{lock.suite}-slim"


def _debian_packages(lock: Lock, profile: Profile) -> list[str]:
    """The Debian packages to install. Empty for a profile with its own base image, which must have Python with venv."""
    if lock.image:
        return []
    return sorted({*database.base_packages(bool(profile.gpus)), "python3-venv", *profile.apt})


def _apt(packages: list[str], separator: str) -> str:
    return separator.join([
        "apt-get update",
        f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {' '.join(packages)}",
        "rm -rf /var/lib/apt/lists/*",
    ])  # fmt: skip


def _comments(lock: Lock) -> list[str]:
    """Comments on what the file pins, and what it does not."""
    lines = ["# Pinned: the version and sha256 of every wheel."]
    if lock.overrides:
        lines += [
            f"# Pinned by changed metadata of the packages: {requirements_export.override_list(lock)};",
            "# a later pip install keeps the override.",
        ]
    if lock.image:
        lines += [f"# Pinned: the base image by digest. It must have Python {lock.python} with venv."]
    else:
        lines += [
            "# Not pinned: the base image (a tag) and the Debian packages (their versions on the day of the build).",
            "# An image of `envbuild build` pins both.",
        ]
    lines += requirements_export.left_out(lock)
    return lines + (["# Left out: the setup of nvcc"] if lock.nvcc else [])
