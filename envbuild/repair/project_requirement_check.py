"""Finds lines of a project's files that still require the versions that a repair replaces: requirements and constraints
files, and pyproject.toml. Changes nothing."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from envbuild.facts import database
from envbuild.profile import requirements_reader
from envbuild.repair import environment_manager_detection
from envbuild.repair.required_changes import Changes, index_options
from envbuild.util import yaml_and_project_paths

_LARGEST = 1 << 20  # bytes: larger files are not read
_MOST_LINES = 10
_MOST_RELEASES = 10  # of torchvision or torchaudio in a series
_DEPENDENCIES = "project.dependencies"
_REQUIREMENT_LISTS = re.compile(
    r"project\.(dependencies|optional-dependencies\..+)|dependency-groups\..+"
    r"|tool\.uv\.(dev|constraint|override)-dependencies"
)
_PYTORCH_INDEX = re.compile(r"https://download\.pytorch\.org/whl/([a-z0-9]{2,20})\b")


def planned_versions(before: Mapping[str, str], changes: Changes) -> dict[str, str]:
    """Return the installed versions by name after the changes, as far as they are known before. If only the series of a
    companion of torch is known, it is the version, such as 0.25.*. `before`: the installed versions."""
    release = database.torch_release(changes.torch) if changes.torch else None
    bounds = {name: bound for name, bound in release.pins.items() if name in before} if release else {}
    texts = [f"{name}{bound}" for name, bound in bounds.items()]
    texts += [*([f"torch=={changes.torch}"] if changes.torch else []), *(pin.requirement for pin in changes.pins)]
    requirements = [Requirement(text) for text in (*texts, *changes.companions, *changes.rebuilt, *changes.packages)]
    removed = {*changes.uninstall, *changes.overwriting, *changes.old_cuda} - {
        canonicalize_name(item.name) for item in requirements
    }
    found = {name: version for name, version in before.items() if name not in removed}
    for requirement in requirements:
        exact = re.fullmatch(r"==([^,]+)", str(requirement.specifier))
        if exact:
            found[canonicalize_name(requirement.name)] = exact[1]
    return found


def outdated_requirements(folder: Path, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Describe each line in the files of a project folder that excludes a version which the repair installed, with the
    requirement to write instead, each line that names a package which the repair removed, and each line that names
    PyTorch's index for the build of the replaced torch; at most _MOST_LINES. `before`, `after`: the installed versions
    by name."""
    changed = _changed(before, after)
    removed = before.keys() - after.keys()
    found: list[str] = []
    for pattern in ("requirements*.txt", "constraints*.txt", "pyproject.toml"):
        for file in sorted(folder.glob(pattern)):
            text = _content(file)
            project = ((number, requirement, False) for number, requirement, _ in _project(text))
            requirements = project if file.suffix == ".toml" else _listed(text)
            for number, requirement, hashed in requirements:
                if requirement.marker and not requirement.marker.evaluate():
                    continue
                if canonicalize_name(requirement.name) in removed:
                    ending = " and its hashes" if hashed else ""
                    found.append(f"{file}:{number} still requires {requirement}: remove the line{ending}")
                version = changed.get(canonicalize_name(requirement.name))
                if version and _excludes(requirement.specifier, version):
                    found.append(_line(file, number, requirement, version, hashed))
            if file.suffix == ".txt" and "torch" in changed:
                found += _old_index(file, text, before.get("torch", ""), changed["torch"])
    return found[:_MOST_LINES]


def requirements_kept_by_uv_add(folder: Path, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Describe each line in the pyproject.toml files of a uv project and its workspace that excludes a version which
    the repair installs, and that `uv add` does not change, with the requirement to write instead; at most _MOST_LINES.
    `uv add` only replaces requirements in the project's own `dependencies`, and only if they have no marker. uv also
    resolves for other systems, so that markers of other systems count. `before`, `after`: as for
    outdated_requirements."""
    changed = _changed(before, after)
    found: list[str] = []
    for file in (folder / "pyproject.toml", *environment_manager_detection.workspace_members(folder)):
        for number, requirement, key in _project(_content(file)):
            replaced = file.parent == folder and key == _DEPENDENCIES and requirement.marker is None
            version = changed.get(canonicalize_name(requirement.name))
            if version and not replaced and _excludes(requirement.specifier, version):
                found.append(_line(file, number, requirement, version, hashed=False))
    return found[:_MOST_LINES]


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    return {name: version for name, version in after.items() if before.get(name, version) != version}


def _excludes(specifier: SpecifierSet, version: str) -> bool:
    """Whether a requirement excludes a version, or each release of a series such as 0.25.*."""
    series = version.removesuffix(".*")
    versions = [version] if series == version else [f"{series}.{number}" for number in range(_MOST_RELEASES)]
    return not any(specifier.contains(one, prereleases=True) for one in versions)


def _content(file: Path) -> str:
    """The text of a regular file; empty if it cannot be read or is too large."""
    try:
        content = yaml_and_project_paths.regular(file, _LARGEST)
    except OSError:
        return ""
    return content.decode(errors="replace") if len(content) <= _LARGEST else ""


def _line(file: Path, number: int, requirement: Requirement, version: str, hashed: bool) -> str:
    wanted = Requirement(f"{requirement.name}=={version}")
    wanted.extras, wanted.marker = requirement.extras, requirement.marker
    from_torch = canonicalize_name(requirement.name) in database.torch_index().packages
    options = ("--no-deps", *(index_options(version) if from_torch else ()))
    download = shlex.join(("pip", "download", *options, f"{requirement.name}=={version}"))
    hashes = (
        " with the hashes of that version in place of the present ones: `uv pip compile --generate-hashes` or "
        "`pip-compile --generate-hashes` writes the whole file again; for this line alone, "
        f"`{download}`, then `pip hash` with the downloaded file"
    )
    return f"{file}:{number} still requires {requirement}: write {wanted}{hashes if hashed else ''}"


def _listed(text: str) -> Iterator[tuple[int, Requirement, bool]]:
    """Yield (line number, requirement, whether the line has hashes) for the requirements of a file in pip's format."""
    for number, line in requirements_reader.joined_lines(text):
        # pip also accepts other options after a requirement than --hash
        if parsed := _parsed(re.split(r"(?:^|\s)--", line, maxsplit=1)[0].strip()):
            yield number, parsed, bool(requirements_reader.HASH_OPTION.search(line))


def _project(text: str) -> Iterator[tuple[int, Requirement, str]]:
    """Yield (line number, requirement, key, such as project.dependencies) for the dependencies of a pyproject.toml, in
    the order of the file."""
    try:
        rows = [row for row in _texts(tomllib.loads(text), "") if _REQUIREMENT_LISTS.fullmatch(row[0])]
    except (ValueError, RecursionError):
        return
    lines = text.splitlines()
    last: dict[str, int] = {}  # the same text may be in several lists
    for key, value in rows:
        begin, written = last.get(value, 0), (json.dumps(value), f"'{value}'")
        found = (place for place, line in enumerate(lines[begin:], begin + 1) if any(text in line for text in written))
        number = next(found, None)
        parsed = _parsed(value)
        if parsed and number:
            last[value] = number
            yield number, parsed, key


def _texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each text that is in a list of a TOML document, in the order of the document."""
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _texts(child, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        yield from ((key, text) for text in value if isinstance(text, str))


def _parsed(text: str) -> Requirement | None:
    try:
        return Requirement(text) if text and not text.startswith("-") else None
    except (InvalidRequirement, RecursionError):
        return None


def _old_index(file: Path, text: str, before: str, after: str) -> Iterator[str]:
    """Describe each line that names PyTorch's index for the build of the replaced torch."""
    label = before.partition("+")[2]
    for number, line in enumerate(text.splitlines(), 1):
        named = _PYTORCH_INDEX.search(line.partition("#")[0])
        if named and label and named[1] == label and after.partition("+")[2] != label:
            text = f"names the index of the builds for {label}: torch {after} is not one of these; remove this line"
            yield f"{file}:{number} {text}"
