"""Exports a lock as a Dockerfile, an Apptainer definition or a devcontainer.json that need no envbuild. Pure.

The locked wheels are checked against their hashes, and the metadata of the packages is changed to require the
overrides. The Dockerfile is the one that `envbuild lock` writes. It names the locked versions of the Debian packages;
the Apptainer definition takes the versions that the mirror has on the day of the build.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence

from envbuild.facts import database
from envbuild.fetch.locked_wheel_types import Wheel
from envbuild.image.image_naming import LOCK_LABEL, VARIABLES
from envbuild.lock import requirements_export
from envbuild.lock.lock_file import Lock
from envbuild.profile.model import Profile
from envbuild.resolve.plan_resolver import VENV

UV_VERSION = "0.13.9"
"""The release of uv that installs the wheels in the Dockerfile, and whose rules image.layers.wheel_installed_files
follows."""
_LISTED = "/opt/requirements.txt"
_END = "REQUIREMENTS"
_PACKAGES, _PACKAGES_END = "/opt/packages.txt", "PACKAGES"
_WHEELS, _TOOLS = "/var/cache/envbuild", "/tmp/tools"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]")


def standalone_dockerfile(lock: Lock, name: str) -> str:
    """A Dockerfile that contains the lists of its packages, so that its context can be empty. Needs BuildKit and a
    network.

    uv installs the wheels, so that /opt/venv has the same files as in envbuild's image; pip downloads them, because
    indexes and mirrors are usually configured for pip. Nothing in a lock can add an instruction or reach a shell.
    """
    variables = {**VARIABLES, **lock.environment}
    lines = [
        *requirements_export.heading(lock, name, "dockerfile"),
        "# docker build -t NAME - < FILE",
        "# with the configuration of pip: docker build --secret id=pip,src=/etc/pip.conf -t NAME - < FILE",
        *_pinned_in_dockerfile(lock),
        f"ARG BASE={_base(lock)}",
        "FROM ${BASE}",
        "USER 0",
        "ENTRYPOINT []",
        *([] if lock.image else _debian_instructions(lock)),
        f"COPY <<'{_END}' {_LISTED}",
        *(wheel.hashed_pin() for wheel in _wheels(lock)),
        _END,
        f"RUN python{lock.python} -m venv --without-pip {VENV}",
        "ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS",
        f"RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target={_WHEELS} \\",
        *_joined(_uv_commands(lock)),
        *(f"RUN {command}" for command in _override_commands(lock)),
        *(f"ENV {environment_pair(key, value)}" for key, value in sorted(variables.items())),
        f"LABEL {environment_pair(LOCK_LABEL, lock.id)}",
        'CMD ["python"]',
    ]
    return "\n".join(lines) + "\n"


def _pinned_in_dockerfile(lock: Lock) -> list[str]:
    """Comments on what the Dockerfile pins, and what it does not."""
    on_debian = [
        "# Pinned: the version of every Debian package. Most mirrors keep only the newest version: if another one",
        "# is missing, use a snapshot of the mirror, or --build-arg DEBIAN_VERSIONS=newest. With",
        "# DEBIAN_VERSIONS=none the base image (BASE) must have the packages.",
        "# Not pinned: the base image, a tag.",
    ]
    return [
        *_wheel_and_base_comments(lock, on_debian),
        f"# Not pinned: the sha256 of uv {UV_VERSION}, which installs the wheels.",
        *_left_out_comments(lock),
    ]


def _wheel_and_base_comments(lock: Lock, on_debian: list[str]) -> list[str]:
    """Comments on how the wheels and the base are pinned. `on_debian`: the comments on the base if the lock has no base
    image."""
    wheels = ["# Pinned: the version and sha256 of every wheel.", *_pinned_overrides(lock)]
    return wheels + (_pinned_base_image(lock) if lock.image else on_debian)


def _pinned_base_image(lock: Lock) -> list[str]:
    lines = [f"# Pinned: the base image by digest. It must have Python {lock.python} with venv."]
    return lines + ([f"# The tag {lock.image_tag} pointed to it when the lock was made."] if lock.image_tag else [])


def _pinned_overrides(lock: Lock) -> list[str]:
    if not lock.overrides:
        return []
    return [
        f"# Pinned by changed metadata of the packages: {requirements_export.override_list(lock)};",
        "# a later pip install keeps the override.",
    ]


def _left_out_comments(lock: Lock) -> list[str]:
    """Comments on what only envbuild's image has."""
    return requirements_export.left_out(lock) + (["# Left out: the setup of nvcc"] if lock.nvcc else [])


def _debian_instructions(lock: Lock) -> list[str]:
    versions = {deb.name: deb.version for deb in (*lock.base, *lock.apt)}
    python = f"python{lock.python}"
    if python in versions:
        versions[f"{python}-venv"] = versions[python]  # of the same source package
    return [
        f"COPY <<'{_PACKAGES_END}' {_PACKAGES}",
        *(f"{name}={version}" for name, version in sorted(versions.items())),
        _PACKAGES_END,
        "ARG DEBIAN_VERSIONS=locked",
        'RUN case "$DEBIAN_VERSIONS" in \\',
        f"    locked) packages=$(cat {_PACKAGES}) ;; \\",
        f"    newest) packages=$(sed 's/=.*//' {_PACKAGES}) ;; \\",
        "    none) exit 0 ;; \\",
        '    *) echo "DEBIAN_VERSIONS must be locked, newest or none" >&2; exit 2 ;; \\',
        "    esac && \\",
        *_joined(_apt(["--allow-downgrades", "$packages"])),
    ]


def _wheels(lock: Lock) -> list[Wheel]:
    return sorted((locked.wheel for locked in lock.wheels), key=lambda wheel: wheel.name)


def _joined(commands: list[str]) -> list[str]:
    """The lines of a RUN instruction after its first."""
    return [f"    {command} && \\" for command in commands[:-1]] + [f"    {commands[-1]}"]


def _uv_commands(lock: Lock) -> list[str]:
    """Shell commands that download the wheels with pip, and install them with uv. The folder of wheels is a mount."""
    pip = f"{_TOOLS}/bin/pip"
    return [
        f"python{lock.python} -m venv {_TOOLS}",
        f"{pip} install --quiet --no-cache-dir uv=={UV_VERSION}",
        f"{pip} download --quiet --no-cache-dir --no-deps --require-hashes --dest {_WHEELS} -r {_LISTED}",
        f'env -i PATH="$PATH" HOME={_TOOLS} UV_NO_INSTALLER_METADATA=1 '
        f"{_TOOLS}/bin/uv pip install --quiet --no-config --offline --no-cache --no-index "
        f"--no-deps --require-hashes --find-links {_WHEELS} --python {VENV}/bin/python -r {_LISTED}",
        f"rm -rf {_TOOLS} {VENV}/.lock",
    ]


def environment_pair(key: str, value: str) -> str:
    """Format NAME="value" for ENV and LABEL; quotes, backslashes and $ (which the builder would expand) are escaped.
    Raises ValueError for an invalid name, or a value with control characters."""
    if not _VARIABLE.fullmatch(key) or _CONTROL.search(value):
        raise ValueError(f"not a name and a one-line value: {key!r}, {value!r}")
    escaped = re.sub(r"([\\\"$])", r"\\\1", value)
    return f'{key}="{escaped}"'


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
        *_pinned_in_definition(lock),
        "",
        "%post",
        "    set -e",
        *([f"    {command}" for command in _apt(packages)] if packages else []),
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
    """A word for the shell without `{{`: Apptainer 1.2 and newer replace `{{ NAME }}` with a build argument.

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
        *_pinned_in_dockerfile(lock),
    ]
    return "\n".join([*(f"//{line[1:]}" for line in comments), json.dumps(document, indent=2)]) + "\n"


def install_commands(lock: Lock) -> list[str]:
    """Shell commands that install the requirements in /opt/venv, and make the packages require the overrides."""
    return [
        f"python{lock.python} -m venv {VENV}",
        f"{VENV}/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r {_LISTED}",
        *_override_commands(lock),
    ]


def _override_commands(lock: Lock) -> list[str]:
    if not lock.overrides:
        return []
    site = f"{VENV}/lib/python{lock.python}/site-packages"
    return [
        requirements_export.change_metadata(lock, site),
        requirements_export.refuse_conflicts(lock, f"{VENV}/bin/python"),
    ]


def _base(lock: Lock) -> str:
    return lock.image or f"debian:{lock.suite}-slim"


def _debian_packages(lock: Lock, profile: Profile) -> list[str]:
    """The Debian packages to install. Empty for a profile with its own base image, which must have Python with venv."""
    if lock.image:
        return []
    return sorted({*database.base_packages(bool(profile.gpus)), "python3-venv", *profile.apt})


def _apt(arguments: Sequence[str]) -> list[str]:
    """Shell commands that install Debian packages."""
    return [
        "apt-get update",
        f"DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends {' '.join(arguments)}",
        "rm -rf /var/lib/apt/lists/*",
    ]


def _pinned_in_definition(lock: Lock) -> list[str]:
    """Comments on what the Apptainer definition pins, and what it does not."""
    on_debian = [
        "# Not pinned: the base image (a tag) and the Debian packages (their versions on the day of the build).",
        "# An image of `envbuild build` pins both.",
    ]
    return [*_wheel_and_base_comments(lock, on_debian), *_left_out_comments(lock)]
