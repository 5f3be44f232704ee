"""Build records: which lock produced which image.

An image can only be verified if it has a record. An image that controls its own Python can forge the self-test's
output, so only an image that this envbuild built from a lock can get the tag `verified`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild.util import user_folders
from envbuild.util.atomic_files import write_atomically


@dataclass(frozen=True)
class CompiledRecord:
    """The wheel of an extension in an image. `key`: its key in the cache; `roots`: the paths it fills below
    site-packages."""

    name: str
    key: str
    file: str
    sha256: str
    roots: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """This lock produced this image. `image`: the image id; `handle`: the image's id in the engine that has it;
    `recipe`: the hash of everything that determines the image; `digest`: the digest of its manifest as envbuild writes
    it, None in the record of an older envbuild."""

    image: str
    handle: str
    lock: str
    recipe: str
    layers: tuple[str, ...]
    builder: str
    extensions: tuple[CompiledRecord, ...] = ()
    digest: str | None = None


def write(record: Record) -> None:
    write_atomically(_file(record), json.dumps(asdict(record), indent=1))


def remove_record(record: Record) -> None:
    _file(record).unlink(missing_ok=True)


def all_records(image_id: str | None = None) -> Iterator[Record]:
    """Return all records, or those of one image."""
    for file in sorted(user_folders.state_folder("builds", make=False).glob("*.json")):
        record = _read(file)
        if record and image_id in (None, record.image):
            yield record


def _file(record: Record) -> Path:
    return user_folders.state_folder("builds") / f"{record.recipe}-{record.image.removeprefix('sha256:')[:12]}.json"


def _read(file: Path) -> Record | None:
    try:
        data = {"extensions": (), **json.loads(file.read_text(encoding="utf-8"))}
        compiled = tuple(CompiledRecord(**{**one, "roots": tuple(one["roots"])}) for one in data["extensions"])
        return Record(**{**data, "layers": tuple(data["layers"]), "extensions": compiled})
    except (OSError, ValueError, TypeError, KeyError):
        return None  # a missing or damaged record proves nothing: the image is built again
