"""Exports a lock as files for pip and uv, to install into a separate environment. Pure.

Comments in each file say which versions the tool keeps, and which it cannot keep. pip cannot override what an installed
package requires, so it keeps an override only if torch's metadata requires the overriding version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from envbuild.lock.lock_file import Lock
from envbuild.resolve.plan_resolver import computing

_SPLIT = " \\\n    "
SITE_PACKAGES = '"$(python -c \'import sysconfig; print(sysconfig.get_path("purelib"))\')"'
"""A word for the shell that expands to the site-packages folder of the active environment."""


def requirements(lock: Lock, name: str) -> str:
    """A requirements.txt with every wheel by version and hash, except pip itself.

    The list is complete, so pip can skip its resolver, which would reject an override because of torch's own pins.
    """
    lines = [
        *heading(lock, name, "requirements"),
        "# pip install --no-deps --require-hashes -r FILE    (uv pip install takes the same options)",
        "# Pinned: every version and every file's sha256.",
        *_kept_by_metadata(lock),
        *left_out(lock),
        *hashed_pins(lock, _SPLIT),
    ]
    return "\n".join(lines) + "\n"


def constraints(lock: Lock, name: str, *, metadata_changed: bool = False) -> str:
    """A constraints file with every version, which pip then keeps while it installs other packages.

    Overrides are left out, because pip refuses a constraint that contradicts torch's metadata. `metadata_changed`: the
    metadata in the environment requires the overrides, so they are included.
    """
    kept = {} if metadata_changed else {one.name: one.version for one in lock.overrides}
    lines = [*heading(lock, name, "constraints"), "# pip install -c FILE PACKAGE", "# Pinned: the versions below."]
    if kept:
        lines += [
            f"# Not pinned: {override_list(lock)}. pip cannot override what torch requires: it refuses",
            "# such a constraint. Without it, pip may install the version that torch requires. After each pip install:",
            f"#   pip install --no-deps {exact_pins(kept)}",
            *_kept_by_metadata(lock),
            "# uv can keep the override: see `envbuild export uv`, or use a file with overrides:",
            "#   uv pip install -c FILE --override OVERRIDES PACKAGE",
        ]
    lines += left_out(lock)
    lines += sorted(f"{name}=={version}" for name, version in computing(lock.versions).items() if name not in kept)
    return "\n".join(lines) + "\n"


def heading(lock: Lock, name: str, kind: str) -> list[str]:
    """The first line of an exported file."""
    return [f"# {name}, lock {lock.short}, Python {lock.python}; made by: envbuild export {kind} {name}"]


def hashed_pins(lock: Lock, separator: str) -> list[str]:
    """A requirement with its hash for each wheel, except pip itself."""
    wheels = {locked.wheel.name: locked.wheel for locked in lock.wheels}
    return [wheels[package].hashed_pin(separator) for package in sorted(computing(lock.versions))]


def override_list(lock: Lock) -> str:
    """The overrides, each with what torch requires instead."""
    return ", ".join(f"{one.name}=={one.version} (torch requires {one.replaces})" for one in lock.overrides)


def exact_pins(versions: dict[str, str]) -> str:
    return " ".join(f"{name}=={version}" for name, version in versions.items())


def overriding_pins(lock: Lock) -> dict[str, str]:
    """The versions that replace what torch requires, by name."""
    return {one.name: one.version for one in lock.overrides}


def metadata_command(lock: Lock) -> str:
    """A shell command that changes the metadata in the active environment, and fails if pip then finds a conflict."""
    return f"{change_metadata(lock, SITE_PACKAGES)} && python -m pip check"


def change_metadata(lock: Lock, site: str) -> str:
    """A shell command that makes the metadata of all installed packages require the overrides. `site`: as for
    metadata_edit."""
    return metadata_edit(overriding_pins(lock), site)


def metadata_edit(versions: Mapping[str, str], site: str, owner: str | None = None) -> str:
    """A shell command that makes the metadata of all installed packages require these versions; with `owner`, only the
    metadata of this package.

    `site`: the folder of the packages, as a word for the shell. sed replaces the files, so other hard links to them
    keep the old content.
    """
    lines = rf"/^Name: *{any_spelling(owner)} *\r\?$/I,$" if owner else ""
    changes = " ".join(
        rf"-e '{lines}s/^\(Requires-Dist: *{any_spelling(name)} *\(\[[^]]*\]\)\?\) *(\?[<>=!~][^;]*/\1=={version} /I'"
        for name, version in versions.items()
    )
    return f"sed -i {changes} {site}/*.dist-info/METADATA"


def refuse_conflicts(lock: Lock, python: str) -> str:
    """A shell command that exits with 1 if an installed package still requires other versions than the overrides. It
    ignores missing packages, because the export leaves out compiled extensions."""
    conflicts = " ".join(f"-e ' has requirement {any_spelling(one.name)}[^-_.a-z0-9]'" for one in lock.overrides)
    return f"if {python} -m pip check | grep -i {conflicts}; then exit 1; fi"


def any_spelling(name: str) -> str:
    """A pattern for sed and grep that matches all spellings of a package's name if case is ignored."""
    return re.sub(r"[-_.]+", r"[-_.]\\+", name)


def left_out(lock: Lock) -> list[str]:
    """Comments on packages that PyPI does not have (versions with a local label), and on the parts of the lock that
    are not wheels."""
    names = sorted(f"{name}=={version}" for name, version in lock.versions.items() if "+" in version)
    lines = [f"# Not on PyPI: {', '.join(names)}; add --extra-index-url or --find-links for them"] if names else []
    lines += [f"# Left out: {one.name}, compiled from {one.kind} {one.digest}" for one in lock.extensions]
    return lines + [f"# Left out: {archive.name} {archive.version}" for archive in lock.archives]


def _kept_by_metadata(lock: Lock) -> list[str]:
    """Return comment lines that say how to keep the overrides in later installations; empty without overrides."""
    if not lock.overrides:
        return []
    return [
        f"# torch's metadata does not require {exact_pins(overriding_pins(lock))}. So that a later pip install",
        "# keeps this version, change the metadata once, in the active environment:",
        f"#   {metadata_command(lock)}",
    ]
