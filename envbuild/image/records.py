"""Build records: which lock gave which image.

A record is what allows an image to be proved: the self-test's output can be forged by an image that controls its own
Python, so only an image that this envbuild made from a lock may be called verified.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild import settings
from envbuild.plan.store import write_atomically


@dataclass(frozen=True)
class Compiled:
    """An extension's wheel as it went into an image: `key` is that of the cache, `roots` what it fills below
    site-packages."""

    name: str
    key: str
    file: str
    sha256: str
    roots: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """One build: this lock gave this image. `recipe` is the hash of all else that decides what is in it, but for what
    was compiled from source: `extensions`."""

    image: str
    handle: str
    lock: str
    recipe: str
    layers: tuple[str, ...]
    builder: str
    extensions: tuple[Compiled, ...] = ()


def write(record: Record) -> None:
    file = settings.state_folder("builds") / f"{record.recipe}-{record.image.removeprefix('sha256:')[:12]}.json"
    write_atomically(file, json.dumps(asdict(record), indent=1))


def every(image_id: str | None = None) -> Iterator[Record]:
    """All of them, or those of one image."""
    for file in sorted(settings.state_folder("builds", make=False).glob("*.json")):
        record = _read(file)
        if record and image_id in (None, record.image):
            yield record


def _read(file: Path) -> Record | None:
    try:
        data = {"extensions": (), **json.loads(file.read_text(encoding="utf-8"))}
        compiled = tuple(Compiled(**{**one, "roots": tuple(one["roots"])}) for one in data["extensions"])
        return Record(**{**data, "layers": tuple(data["layers"]), "extensions": compiled})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # a damaged record proves nothing: the image is built again
