"""Reads a project's requirements file, each requirement with its line. Included files must be inside the project.

A file outside the project is read if the command line or a lock names it, but no message quotes its text: it may be
any file of the machine.
"""

from __future__ import annotations

import codecs
import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from envbuild.facts import misleading_packages
from envbuild.profile.value_types import PackageSpec, requirement_problem
from envbuild.util.errors import Fault, ProfileError
from envbuild.util.yaml_and_project_paths import Place, display, home, inside, regular

_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"\s--hash[= ]\S+")
_INCLUDE = re.compile(r"^(-r|--requirement)[= ]?\s*(\S+)$")
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
MAX_BYTES = 1_000_000
MAX_REQUIREMENTS = 2000
MAX_INCLUDES = 100
"""The most includes, direct and indirect, of one requirements file. Without a limit, a chain of thirty files that each
include the next one twice would be read a billion times."""


@dataclass(frozen=True)
class Requirements:
    """The requirements of a file, each with file and line. `faults`: lines that cannot be locked; `notes`: parts of the
    file that are ignored; `quotable`: whether messages may quote the file's text."""

    lines: list[tuple[str, Place]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quotable: bool = True


ACCEPTED = "accepted: a requirements.txt (pip's format) or a pyproject.toml, for example --requirements pyproject.toml"
_OTHER_FILES = (
    ({"poetry.lock"}, "To write a requirements.txt: poetry export --without-hashes -o requirements.txt"),
    ({"uv.lock"}, "To write a requirements.txt: uv export --no-hashes --no-emit-project -o requirements.txt"),
    ({"pdm.lock"}, "To write a requirements.txt: pdm export --without-hashes -o requirements.txt"),
    ({"Pipfile", "Pipfile.lock"}, "To write a requirements.txt: pipenv requirements > requirements.txt"),
    ({".yml", ".yaml"}, "For an existing conda environment: envbuild init NAME --from-env PATH"),
    ({".py", ".cfg", ".json", ".whl", ".zip", ".gz"},
     "To write a requirements.txt, in the project's environment: pip freeze > requirements.txt"),
)  # fmt: skip
"""Files of other tools, by name or suffix, each with a hint on how to get a requirements file."""


def read(file: Path) -> Requirements:
    """Read a requirements.txt, with the files that it includes by -r, or the dependencies of a pyproject.toml.

    Does not open included files outside the project. Raises ProfileError if `file` itself cannot be read, if its name
    is that of another tool's file, or if it has too many requirements.
    """
    other = next((hint for names, hint in _OTHER_FILES if file.name in names or file.suffix in names), None)
    if other:
        raise ProfileError(f"{display(file)} is not a requirements file", hint=f"{ACCEPTED}. {other}")
    try:
        text = _text(file)
    except ProfileError as error:
        raise ProfileError(error.message, hint=ACCEPTED) from error
    found = Requirements(quotable=file.resolve().is_relative_to(home(Path.cwd() / file.name).resolve()))
    if file.suffix == ".toml":
        lines = _pyproject(file, text, found)
    else:
        lines = _lines(file, text, _project(file), (), found, iter(range(MAX_INCLUDES)))
    for line, place in islice(lines, MAX_REQUIREMENTS + 1):
        problem = None if found.quotable else _problem(line)
        if problem:
            found.faults.append(Fault(problem, place.file, place.line))
        else:
            found.lines.append((line, place))
    if len(found.lines) > MAX_REQUIREMENTS:
        raise ProfileError(f"{display(file)} has more than {MAX_REQUIREMENTS} requirements")
    return found


_PACKAGE: TypeAdapter[str] = TypeAdapter(PackageSpec)


def _problem(line: str) -> str | None:
    """Why a requirement cannot be locked, in a message that does not quote it; None if it can be locked."""
    try:
        _PACKAGE.validate_python(line)
    except ValidationError:
        return requirement_problem(line, "this line") or "this line is too long, or has control characters"
    return None


def _project(file: Path) -> Path:
    """The folder that included files must be in: the working folder if it contains profiles/ and `file`, otherwise the
    folder of `file`, or the folder above if that is called profiles."""
    here, given = Path.cwd(), Path(os.path.abspath(file))  # noqa: PTH100 - removes "..", keeps links
    return here if (here / "profiles").is_dir() and given.is_relative_to(here) else home(file)


def _text(file: Path) -> str:
    """Read a file as UTF-8, or in the encoding of its byte order mark, as pip does: PowerShell writes UTF-16."""
    try:
        raw = regular(file, MAX_BYTES)
        if len(raw) > MAX_BYTES:
            raise ProfileError(f"{display(file)} is larger than {MAX_BYTES} bytes")
        return raw.decode("utf-16" if raw.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{display(file)} cannot be read: invalid {error.encoding.upper()}") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise ProfileError(f"{display(file)} cannot be read: {why}") from error


def _lines(
    file: Path, text: str, root: Path, seen: tuple[Path, ...], found: Requirements, left: Iterator[int]
) -> Iterator[tuple[str, Place]]:
    """The requirements of one file and its includes. `root`: the folder that includes must be inside; `left`: how many
    more files may be included."""
    name, faults = display(file), found.faults
    if _HASH.search(text):
        found.notes.append(
            f"{name}: the hashes in it are ignored, because the lock has the sha256 of every wheel on the index"
        )
    number, waiting = 0, ""
    for count, raw in enumerate(text.splitlines(), 1):
        number = number if waiting else count
        waiting += _COMMENT.sub("", raw)
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        line, waiting = _HASH.sub("", waiting).strip(), ""
        include = _INCLUDE.match(line)
        if include:
            if next(left, None) is None:
                faults.append(Fault(f"more than {MAX_INCLUDES} files are included", name, number))
                return
            try:
                target = inside(include[2], file.parent, root)
                included = _text(target)
            except (ProfileError, ValueError) as error:
                why = str(error) if found.quotable else "the included file cannot be read, or is outside the project"
                faults.append(Fault(why, name, number))
                continue
            if target in (*seen, file.resolve()):
                faults.append(Fault("includes itself", name, number))
                continue
            yield from _lines(target, included, root, (*seen, file.resolve()), found, left)
        elif line.startswith("-"):
            shown = f"option {line.split()[0].partition('=')[0]}" if found.quotable else "this option"
            option = f"{shown} is not supported in this file: {_ELSEWHERE}"
            meant = (
                misleading_packages.refusal_reason(line.partition(" ")[2])
                if line.startswith(("-e", "--editable"))
                else None
            )
            faults.append(Fault(meant or option, name, number))
        elif line:
            yield line, Place(name, number)


_ELSEWHERE = "set indexes and find-links in the configuration of pip or uv; install editable packages in a child image"


def _pyproject(file: Path, text: str, found: Requirements) -> Iterator[tuple[str, Place]]:
    """The dependencies in the table [project]. Adds a fault if the project lists its dependencies elsewhere."""
    name, faults = display(file), found.faults
    try:
        document = tomllib.loads(text)
        project = document.get("project", {})
        dependencies = project.get("dependencies", [])
        dynamic = "dependencies" in project.get("dynamic", [])
        poetry = "dependencies" in document.get("tool", {}).get("poetry", {})
    except (tomllib.TOMLDecodeError, AttributeError, TypeError, RecursionError) as error:
        where = re.search(r"at line [0-9]+, column [0-9]+", str(error))
        why = str(error) if found.quotable else f"invalid TOML {where[0] if where else ''}".rstrip()
        raise ProfileError(f"{name} is not a usable pyproject.toml: {why}") from None
    if not isinstance(dependencies, list) or not all(isinstance(item, str) for item in dependencies):
        faults.append(Fault("project.dependencies is not a list of texts", name, _line(text, "dependencies")))
        return
    if dynamic:
        faults.append(Fault("dependencies are dynamic: name the file that lists them", name, _line(text, "dynamic")))
    elif "project" not in document:
        hint = "write them to a requirements file (poetry export)" if poetry else "name a file that lists requirements"
        faults.append(Fault(f"no table [project] with dependencies: {hint}", name, 1))
    for item in islice(dependencies, MAX_REQUIREMENTS + 1):
        yield item, Place(name, _line(text, item))


def _line(text: str, part: str) -> int:
    """The number of the first line that contains `part`; 1 if none does."""
    return text.count("\n", 0, max(0, text.find(part))) + 1
