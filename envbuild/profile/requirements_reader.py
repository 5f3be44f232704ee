"""Reads a project's requirements file, each requirement with its line. Included files must be inside the project.

Accepted are pip's requirements.txt, pyproject.toml, and the files of environment_and_lock_file_readers and
setup_and_shell_script_readers. URLs of indexes in a file are never used: packages come from the indexes that pip and uv
are configured with.

A file outside the project is read if the command line or a lock names it, but no message quotes its text: it may be
any file of the machine.
"""

from __future__ import annotations

import codecs
import os
import re
import tomllib
import urllib.parse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from packaging.utils import parse_wheel_filename
from pydantic import TypeAdapter, ValidationError

from envbuild.facts import database, misleading_packages
from envbuild.profile import environment_and_lock_file_readers, setup_and_shell_script_readers
from envbuild.profile.environment_and_lock_file_readers import Entry, marker_applies
from envbuild.profile.value_types import PackageSpec, requirement_problem
from envbuild.util.errors import Fault, ProfileError
from envbuild.util.yaml_and_project_paths import Place, display, home, inside, regular

_COMMENT = re.compile(r"(^|\s)#.*$")
HASH_OPTION = re.compile(r"\s--hash[= ]\S+")
_INCLUDE = re.compile(r"^(-r|--requirement)[= ]?\s*(\S+)$")
_CONSTRAINTS = re.compile(r"^(-c|--constraint)[= ]?\s*(\S+)$")
_INDEX = r"(--index-url|--extra-index-url|--pypi-url|--find-links|--trusted-host|-i|-f)"
_ON_A_LINE = re.compile(rf"\s{_INDEX}[= ]\s*\S+")
"""pip takes these options only on lines of their own; they are also ignored after a requirement, where people write
them."""
_IGNORED = (
    (re.compile(rf"^{_INDEX}([= ]|$)|^--no-index$"), "indexes are those that pip or uv is configured with"),
    (re.compile(r"^--(no-binary|only-binary|prefer-binary|no-build-isolation|use-pep517|require-hashes)\b"),
     "only wheels are locked, each with its sha256"),
    (re.compile(r"^--pre$"), "a pre-release is locked only if a requirement names one"),
    (re.compile(r"^--(use-feature|no-cache-dir|quiet|progress-bar|timeout|retries)\b"), "it changes no version"),
)  # fmt: skip
"""Options of pip without effect on a lock, each with the reason."""
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
MAX_BYTES = 1_000_000
MAX_LOCK_BYTES = 8_000_000
"""A uv.lock or pylock.toml has a line for each file of each package: with 200 packages it has 2 MB."""
MAX_REQUIREMENTS = 2000
MAX_ENTRIES = 20_000
MAX_INCLUDES = 100
"""The most includes, direct and indirect, of one requirements file. Without a limit, a chain of thirty files that each
include the next one twice would be read a billion times."""


@dataclass(frozen=True)
class Requirements:
    """The requirements of a file, each with file and line. `constraints`: bounds of packages that are installed for
    another reason (-c); `faults`: lines that cannot be locked; `notes`: parts of the file that are ignored; `quotable`:
    whether messages may quote the file's text."""

    lines: list[tuple[str, Place]] = field(default_factory=list)
    constraints: list[tuple[str, Place]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quotable: bool = True


ACCEPTED = (
    "accepted: a requirements.txt (pip's format), pyproject.toml, uv.lock, pylock.toml, conda's environment.yml, a "
    "setup.py that lists them literally, or a .sh file with `pip install`, for example --requirements pyproject.toml"
)
_OTHER_FILES = (
    ({"poetry.lock"}, "To write a requirements.txt: poetry export --without-hashes -o requirements.txt"),
    ({"pdm.lock"}, "To write a requirements.txt: pdm export --without-hashes -o requirements.txt"),
    ({"Pipfile", "Pipfile.lock"}, "To write a requirements.txt: pipenv requirements > requirements.txt"),
    ({".py", ".cfg", ".json", ".whl", ".zip", ".gz"},
     "To write a requirements.txt, in the project's environment: pip freeze > requirements.txt"),
)  # fmt: skip
"""Files of other tools, by name or suffix, each with a hint on how to get a requirements file."""


def read(file: Path, python: str) -> Requirements:
    """Read a requirements.txt, with the files that it includes by -r and -c, or the dependencies of a pyproject.toml, a
    uv.lock, a pylock.toml, an environment.yml, a setup.py or a shell script. `python`: the release of Python for which
    a lock is read.

    Does not open included files outside the project. Raises ProfileError if `file` itself cannot be read, if its name
    is that of another tool's file, or if it has too many requirements.
    """
    entries = _reader_of(file.name)
    other = next((hint for names, hint in _OTHER_FILES if file.name in names or file.suffix in names), None)
    if other and not entries:
        raise ProfileError(f"{display(file)} is not a requirements file", hint=f"{ACCEPTED}. {other}")
    try:
        text = _text(file)
    except ProfileError as error:
        raise ProfileError(error.message, hint=ACCEPTED) from error
    found = Requirements(quotable=file.resolve().is_relative_to(home(Path.cwd() / file.name).resolve()))
    if entries:
        try:
            lines = iter(list(_entries(file, entries(text, display(file), python), found, python)))
        except ProfileError as error:
            own = error.message if found.quotable else f"{display(file)} cannot be read as a file of its kind"
            raise ProfileError(own, hint=ACCEPTED, faults=error.faults if found.quotable else ()) from None
    elif file.suffix == ".toml":
        lines = _pyproject(file, text, found, python)
    else:
        lines = _lines(file, text, _project(file), (), found, iter(range(MAX_INCLUDES)), python)
    for line, place in islice(lines, MAX_REQUIREMENTS + 1):
        problem = None if found.quotable else _problem(line)
        if problem:
            found.faults.append(Fault(problem, place.file, place.line))
        else:
            found.lines.append((line, place))
    constraints = list(found.constraints)
    found.constraints.clear()
    for line, place in constraints:
        problem = _problem(line)
        if problem:
            found.faults.append(Fault(problem, place.file, place.line))
        else:
            found.constraints.append((line, place))
    if max(len(found.lines), len(constraints)) > MAX_REQUIREMENTS:
        raise ProfileError(f"{display(file)} has more than {MAX_REQUIREMENTS} requirements")
    return found


def _reader_of(file_name: str) -> Callable[[str, str, str], Iterator[Entry]] | None:
    """The function that reads a file of this name. None for a requirements.txt and a pyproject.toml."""
    if file_name == "setup.py":
        return lambda text, name, python: setup_and_shell_script_readers.setup_entries(text, name)
    if file_name.endswith((".sh", ".bash")):
        return lambda text, name, python: setup_and_shell_script_readers.shell_entries(text, name)
    return environment_and_lock_file_readers.reader_of(file_name)


def _entries(file: Path, entries: Iterator[Entry], found: Requirements, python: str) -> Iterator[tuple[str, Place]]:
    """The requirements among the entries of a file. The lines of a section for pip are read as those of a
    requirements.txt."""
    name, root, left = display(file), _project(file), iter(range(MAX_INCLUDES))
    for count, entry in enumerate(entries, 1):
        if count > MAX_ENTRIES:
            raise ProfileError(f"{name} has more than {MAX_ENTRIES} entries")
        place = Place(name, entry.line)
        shown = entry.name if found.quotable else "this entry"
        if entry.option:
            yield from _lines(file, entry.option, root, (), found, left, python, entry.line)
        elif entry.note:
            found.notes.append(f"{name}:{entry.line}: {shown} is left out: {entry.note}")
        elif entry.fault:
            found.faults.append(Fault(f"{shown}: {entry.fault}", place.file, place.line))
        else:
            yield entry.requirement, place


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
        most = MAX_LOCK_BYTES if file.name == "uv.lock" or file.name.startswith("pylock.") else MAX_BYTES
        raw = regular(file, most)
        if len(raw) > most:
            raise ProfileError(f"{display(file)} is larger than {most} bytes")
        return raw.decode("utf-16" if raw.startswith(_UTF16) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"{display(file)} cannot be read: invalid {error.encoding.upper()}") from None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise ProfileError(f"{display(file)} cannot be read: {why}") from error


def joined_lines(text: str, first: int = 1) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file in pip's format without comments, each with its number. A line that ends with a
    backslash is joined with the next one. `first`: the number of the first line."""
    number, waiting = first, ""
    for count, raw in enumerate(text.splitlines(), first):
        number = number if waiting else count
        waiting += _COMMENT.sub("", raw)
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        yield number, waiting
        waiting = ""
    if waiting:
        yield number, waiting


def _lines(
    file: Path, text: str, root: Path, seen: tuple[Path, ...], found: Requirements, left: Iterator[int], python: str,
    first: int = 1,
) -> Iterator[tuple[str, Place]]:  # fmt: skip
    """The requirements of one file and its includes. `root`: the folder that includes must be inside; `left`: how many
    more files may be included; `python`: the release of Python; `first`: the number of the first line of `text`."""
    name, faults = display(file), found.faults
    if HASH_OPTION.search(text):
        found.notes.append(
            f"{name}: the hashes in it are ignored, because the lock has the sha256 of every wheel on the index"
        )
    for number, joined in joined_lines(text, first):
        line = HASH_OPTION.sub("", joined).strip()
        if not line.startswith("-") and _ON_A_LINE.search(line):
            line = _ON_A_LINE.sub("", line).strip()
            found.notes.append(f"{name}:{number}: the index option is ignored: {_IGNORED[0][1]}")
        ignored = next((reason for pattern, reason in _IGNORED if pattern.match(line)), None)
        if ignored:
            shown = f"option {line.split()[0].partition('=')[0]}" if found.quotable else "an option"
            found.notes.append(f"{name}:{number}: {shown} is ignored: {ignored}")
            continue
        bounds = _CONSTRAINTS.match(line)
        include = bounds or _INCLUDE.match(line)
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
            inner = _lines(target, included, root, (*seen, file.resolve()), found, left, python)
            if bounds:
                found.constraints.extend(islice(inner, MAX_REQUIREMENTS + 1))
            else:
                yield from inner
        elif folder := _FOLDER.match(line):
            meant = misleading_packages.refusal_reason(folder[1])
            if meant:
                faults.append(Fault(meant, name, number))
            elif not folder[1].endswith(_ARCHIVES):
                shown = folder[1] if found.quotable else "a folder"
                found.notes.append(f"{name}:{number}: {shown} is left out: {_OWN_FOLDER}")
            elif not _is_for_another_platform(line, python):
                faults.append(Fault(f"{folder[1] if found.quotable else 'this'} {_LOCAL_FILE}", name, number))
        elif line.startswith("-"):
            shown = f"option {line.split()[0].partition('=')[0]}" if found.quotable else "this option"
            option = f"{shown} is not supported in this file: {_ELSEWHERE}"
            meant = (
                misleading_packages.refusal_reason(line.partition(" ")[2])
                if line.startswith(("-e", "--editable"))
                else None
            )
            faults.append(Fault(meant or option, name, number))
        elif line and not _is_for_another_platform(line, python):
            yield _torch_of_address(line), Place(name, number)


_ELSEWHERE = "remove it, or install an editable package in a child image or under extensions"
_OWN_FOLDER = "it is a folder of the project; install it in a child image. Its own dependencies are not read"
_ARCHIVES = (".whl", ".zip", ".tar.gz", ".tgz", ".tar.bz2")
_LOCAL_FILE = "is a local file: put it into a folder of find-links, and name its release here, as in numpy==2.4.6"
_FOLDER = re.compile(r"^(?:(?:-e|--editable)[= ]?\s*)?(\.{1,2}(?:/[^\s\[;]*)?)(?:\[[^]]*\])?\s*(?:;.*)?$")


def _is_for_another_platform(line: str, python: str) -> bool:
    """Whether the marker of an address or a path excludes linux/amd64 or the profile's Python. A requirement of an
    index keeps its marker, which the resolver evaluates."""
    address, _, marker = line.partition(";")
    if not ("://" in address or address.startswith(".")) or not marker.strip():
        return False
    try:
        return not marker_applies(marker.strip(), python)
    except ProfileError:
        return False


def _torch_of_address(line: str) -> str:
    """The requirement torch==2.6.0 for the address of a wheel of torch, torchvision or torchaudio, because the profile
    has its own torch; any other line unchanged."""
    address = line.partition(";")[0].strip().rpartition(" ")[2].partition("#")[0]
    if "://" not in address or not address.endswith(".whl"):
        return line
    try:
        name, version, _, _ = parse_wheel_filename(urllib.parse.unquote(address.rpartition("/")[2]))
    except ValueError:  # also InvalidWheelFilename, and Python's error for a number of more than 4300 digits
        return line
    return f"{name}=={version}" if name in database.torch_index().packages else line


def _pyproject(file: Path, text: str, found: Requirements, python: str) -> Iterator[tuple[str, Place]]:
    """The dependencies in the table [project]. Adds a fault if the project lists its dependencies elsewhere, and a note
    if the project is for other releases of Python than the profile's."""
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
    if not environment_and_lock_file_readers.is_for_python(project.get("requires-python"), python):
        line = _line(text, "requires-python")
        found.notes.append(f"{name}:{line}: requires-python is ignored: the profile has Python {python}")
    for item in islice(dependencies, MAX_REQUIREMENTS + 1):
        yield item, Place(name, _line(text, item))


def _line(text: str, part: str) -> int:
    """The number of the first line that contains `part`; 1 if none does."""
    return text.count("\n", 0, max(0, text.find(part))) + 1
