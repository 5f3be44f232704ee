"""Build records: which lock produced which image.

An image can only be verified if it has a record. An image that controls its own Python can forge the self-test's
output, so only an image that this envbuild built from a lock can get the tag `verified`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild.util import user_folders
from envbuild.util.atomic_files import write_atomically
from envbuild.util.errors import some


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
    """A record that a lock produced an image. `recipe`: the hash of everything that determines the image. If an engine
    built the image, it does not cover the wheels compiled from source, which are in `extensions`. `digest`: that of the
    manifest, if envbuild wrote the layers. It is then the same in every registry, unless `push` uses zstd."""

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
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        return None  # a damaged record proves nothing: the image is built again


def difference_message(before: Sequence[Record], now: Record, titles: Sequence[str]) -> str | None:
    """Return a message if the same recipe produced a different image before, else None. If there are several earlier
    images, it compares the most similar one. `titles`: titles of the last layers; the layers below are the base."""
    others = [record for record in before if record.image != now.image]
    if not others:
        return None
    then = min(others, key=lambda record: len(_differing(record, now)))
    what = [_layers(then, now, titles)]
    wheels = {one.name: one.sha256 for one in then.extensions}
    recompiled = [one.name for one in now.extensions if wheels.get(one.name) != one.sha256]
    what += [f"recompiled, with a different wheel: {', '.join(recompiled)}"] if recompiled else []
    what += [f"built by {then.builder} before, by {now.builder} now"] if then.builder != now.builder else []
    return (
        f"not reproducible: this lock gave {then.image} before, and {now.image} now; {'; '.join(what)}. Each "
        "image needs its own proof. While the engine has both images, envbuild diff --files shows the difference"
    )


def _differing(a: Record, b: Record) -> list[int]:
    """Return the numbers, from 1, of the layers that differ between the two images."""
    most = max(len(a.layers), len(b.layers))
    return [index + 1 for index in range(most) if a.layers[index : index + 1] != b.layers[index : index + 1]]


def _layers(then: Record, now: Record, titles: Sequence[str]) -> str:
    count = len(now.layers)
    if len(then.layers) != count:
        return f"it had {some(len(then.layers), 'layer')}, and has {count}"
    differing = _differing(then, now)
    if not differing:
        return "its layers are the same, its labels or other settings are not"
    known = dict(enumerate(titles, 1 + count - len(titles)))
    named = ", ".join(f"{number} ({known.get(number, 'base')})" for number in differing)
    return f"layer{'s' if len(differing) > 1 else ''} {named} of {count} differ{'' if len(differing) > 1 else 's'}"
