"""Edits the requirements that would bring an old library version back: in installed METADATA files, and in a project's
pyproject.toml (override-dependencies).

Each file is replaced by a new one, never changed in place: as a hard link, it may share its content with a cache.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from envbuild.image.layers import wheel_installed_files
from envbuild.image.layers.metadata_overrides import override_requirements
from envbuild.image.layers.wheel_installed_files import RecordRow
from envbuild.util import atomic_files
from envbuild.util.errors import FileError

_KEY = "override-dependencies"


def pin_metadata(file: Path, name: str, version: str) -> None:
    """Change the requirement for `name` in an installed METADATA file to exactly `version`, and update the checksum of
    METADATA in RECORD."""
    before = file.read_bytes()
    after = override_requirements(before, {canonicalize_name(name): version})
    if after == before:
        return
    record = file.with_name("RECORD")
    row = f"{file.parent.name}/METADATA"
    atomic_files.write_atomically(file, after)
    if record.is_file():
        rows = [
            one for one in wheel_installed_files.parse_record(record.read_text(encoding="utf-8")) if one.path != row
        ]
        rows.append(RecordRow(row, wheel_installed_files.hash_in_record(after), str(len(after))))
        atomic_files.write_atomically(record, wheel_installed_files.write_record(rows))


def override_project(file: Path, requirements: Sequence[str]) -> None:
    """Add requirements to [tool.uv] override-dependencies in a pyproject.toml. Raises FileError, with the lines to add
    by hand, if the file cannot be read, is not TOML, or has a form that cannot be edited; OSError if the file cannot be
    written."""
    by_hand = f"add by hand, under [tool.uv]: {_KEY} = {json.dumps(list(requirements))}"
    try:
        text = file.read_text(encoding="utf-8")
        changed = with_overrides(text, requirements)
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{file} cannot be changed: {error}", hint=by_hand) from error
    if changed != text:
        atomic_files.write_atomically(file, changed)


def with_overrides(text: str, requirements: Sequence[str]) -> str:
    """Return the text of a pyproject.toml with these overrides. The new overrides replace present overrides of the same
    names; nothing else changes. Raises ValueError if the text is not TOML, or if no edit that _candidates tries has
    this result."""
    data = tomllib.loads(text)
    present = data.get("tool", {}).get("uv", {}).get(_KEY, [])
    names = {canonicalize_name(Requirement(one).name) for one in requirements}
    values = [*(one for one in present if _name(one) not in names), *requirements]
    wanted = deepcopy(data)
    wanted.setdefault("tool", {}).setdefault("uv", {})[_KEY] = values
    line = f"{_KEY} = {json.dumps(values)}"
    for candidate in _candidates(text, line):
        if _parsed(candidate) == wanted:
            return candidate
    raise ValueError(f"[tool.uv] {_KEY} is not in a form that can be changed")


def _candidates(text: str, line: str) -> list[str]:
    """Return possible edits of the text: the line replaces the present override-dependencies, follows the header
    [tool.uv], or is in a new table at the end."""
    found = []
    for start in re.finditer(rf"(?m)^{_KEY}\s*=\s*\[", text):
        for end in re.finditer(r"\]", text[start.end() :]):
            found.append(text[: start.start()] + line + text[start.end() + end.end() :])
    for header in re.finditer(r"(?m)^[ \t]*\[[ \t]*tool[ \t]*\.[ \t]*uv[ \t]*\][ \t]*(?:#.*)?$", text):
        found.append(f"{text[: header.end()]}\n{line}{text[header.end() :]}")
    separator = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
    return [*found, f"{text}{separator}[tool.uv]\n{line}\n"]


def _parsed(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError:
        return None


def _name(requirement: object) -> str | None:
    try:
        return canonicalize_name(Requirement(str(requirement)).name)
    except InvalidRequirement:
        return None
