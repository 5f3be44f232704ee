"""A project's own requirement file, each requirement with the line it stands on."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from envbuild.document import Place, display
from envbuild.errors import Fault, ProfileError
from envbuild.plan import unrelated

_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(r"\s--hash[= ]\S+")
_INCLUDE = re.compile(r"^(-r|--requirement)[= ]?\s*(\S+)$")
MAX_BYTES = 1_000_000
MAX_INCLUDES = 100
"""Of one file and those that it includes: two lines in each of thirty would make a billion."""


def read(file: Path) -> tuple[list[tuple[str, Place]], list[Fault]]:
    """What a requirements.txt (with its -r includes) or the dependencies of a pyproject.toml ask for, and what of that
    cannot be locked.

    Hashes are dropped: the lock makes its own. Raises ProfileError where the file itself cannot be read.
    """
    faults: list[Fault] = []
    left = iter(range(MAX_INCLUDES))
    found = list(_pyproject(file) if file.suffix == ".toml" else _lines(file, _text(file), (), faults, left))
    return found, faults


def _text(file: Path) -> str:
    try:
        if file.exists() and not file.is_file():
            raise ProfileError(f"{display(file)} is no file")
        if file.stat().st_size > MAX_BYTES:
            raise ProfileError(f"{display(file)} is larger than {MAX_BYTES} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a path with a NUL
        why = getattr(error, "strerror", None) or error
        raise ProfileError(f"{display(file)} cannot be read: {why}") from error


def _lines(
    file: Path, text: str, seen: tuple[Path, ...], faults: list[Fault], left: Iterator[int]
) -> Iterator[tuple[str, Place]]:
    """`left`: as many more files may be included, by whichever of them."""
    name = display(file)
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
                target = (file.parent / include[2]).resolve()
                included = _text(target)
            except ProfileError as error:
                faults.append(Fault(error.message, name, number))
                continue
            except (ValueError, RuntimeError) as error:  # a NUL in it; links in a circle
                faults.append(Fault(f"{include[2]} cannot be read: {error}", name, number))
                continue
            if target in (*seen, file.resolve()):
                faults.append(Fault("includes itself", name, number))
                continue
            yield from _lines(target, included, (*seen, file.resolve()), faults, left)
        elif line.startswith("-"):
            option = f"option {line.split()[0]} is not taken from here: {_ELSEWHERE}"
            meant = unrelated.refused(line.partition(" ")[2]) if line.startswith(("-e", "--editable")) else None
            faults.append(Fault(meant or option, name, number))
        elif line:
            yield line, Place(name, number)


_ELSEWHERE = "indexes and find-links are pip's and uv's configuration, editable installs belong into a child image"


def _pyproject(file: Path) -> Iterator[tuple[str, Place]]:
    text = _text(file)
    try:
        dependencies = tomllib.loads(text).get("project", {}).get("dependencies", [])
    except (tomllib.TOMLDecodeError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{display(file)} is not a usable pyproject.toml: {error}") from error
    lines = text.splitlines()
    for item in dependencies if isinstance(dependencies, list) else []:
        number = next((count for count, line in enumerate(lines, 1) if str(item) in line), 1)
        yield str(item), Place(display(file), number)
