"""Exports a lock as files for pip and uv, to install into a separate environment. Pure."""

from __future__ import annotations

from envbuild.lock.lock_file import Lock
from envbuild.resolve.plan_resolver import computing

_SPLIT = " \\\n    "


def requirements(lock: Lock, name: str) -> str:
    """Every wheel by version and hash, except pip itself.

    The list is complete, so no resolver is needed; it would reject an override because of torch's own pins.
    """
    lines = [
        f"# {name}, lock {lock.short}, Python {lock.python}; made by: envbuild export requirements {name}",
        "# pip install --no-deps --require-hashes -r FILE    (uv pip install takes the same)",
        *_local(lock),
    ]
    wheels = {locked.wheel.name: locked.wheel for locked in lock.wheels}
    for package in sorted(computing(lock.versions)):
        wheel = wheels[package]
        lines.append(f"{package}=={wheel.version}{_SPLIT}--hash=sha256:{wheel.sha256}")
    return "\n".join(lines) + "\n"


def constraints(lock: Lock, name: str) -> str:
    """Every version, to be kept while other packages are installed."""
    lines = [
        f"# {name}, lock {lock.short}, Python {lock.python}; made by: envbuild export constraints {name}",
        "# pip install -c FILE PACKAGE",
        *_local(lock),
    ]
    if lock.overrides:
        names = ", ".join(f"{one.name} ({one.replaces})" for one in lock.overrides)
        lines += [
            f"# torch's metadata requires another {names}. With pip, use this file in an environment",
            f"# of `envbuild install {name} PATH`: its metadata require these versions. Elsewhere pip refuses it.",
            "# With uv: uv pip install --override FILE PACKAGE",
        ]
    lines += sorted(f"{name}=={version}" for name, version in computing(lock.versions).items())
    return "\n".join(lines) + "\n"


def _local(lock: Lock) -> list[str]:
    """Comments on packages that no public index has: versions with a local label, and extensions compiled from
    source."""
    names = sorted(f"{name}=={version}" for name, version in lock.versions.items() if "+" in version)
    lines = [f"# no public index has {', '.join(names)}: --find-links where it is"] if names else []
    return lines + [f"# left out: {one.name}, compiled from {one.kind} {one.digest}" for one in lock.extensions]
