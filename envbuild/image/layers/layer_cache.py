"""Writes the layers of wheels, and remembers each by its content: digest, size, diff id and list of files.

The blobs themselves are not kept: writing one again takes about as long as copying it. An entry is a JSON file that
contains a hash of itself; a damaged or missing one is made again. Files are renamed into place when they are complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild.fetch import sha256_file_store
from envbuild.image.layers.installed_tree import installed_files
from envbuild.image.layers.layer_writer import WRITER_VERSION, LayerEntry, WrittenLayer, write_layer
from envbuild.image.layers.metadata_overrides import overriding_files
from envbuild.image.layers.wheel_reader import WheelReader, open_wheel
from envbuild.resolve.plan_resolver import VENV
from envbuild.util import atomic_files, canonical_json, temporary_files, user_folders
from envbuild.util.errors import HashMismatch


@dataclass(frozen=True)
class WheelOfLayer:
    """A wheel's file, and the sha256 that it must have, hex."""

    file: Path
    sha256: str


@dataclass(frozen=True)
class LayerRecipe:
    """What determines a layer of wheels. `python`: such as "3.11". `pins`: name and version of each override; with
    them the layer has only the metadata of these wheels that changes.

    Where two wheels install one path, the file of the last one is written; wheel_conflicts.py refuses different ones.
    """

    python: str
    wheels: tuple[WheelOfLayer, ...]
    pins: tuple[tuple[str, str], ...] = ()

    @property
    def key(self) -> str:
        hashes = [wheel.sha256 for wheel in self.wheels]
        return canonical_json.canonical_digest([WRITER_VERSION, VENV, self.python, hashes, sorted(self.pins)])


@dataclass(frozen=True)
class _CacheEntry:
    layer: WrittenLayer
    check: str


def known_layer(recipe: LayerRecipe) -> WrittenLayer | None:
    """Return the remembered layer of a recipe, or None if there is none, or only a damaged entry."""
    entry = sha256_file_store.noted(_file(recipe), _CacheEntry)
    return entry.layer if entry and entry.check == _check(entry.layer) else None


def stream_wheels(
    recipe: LayerRecipe, packed: Callable[[bytes], object] = len, plain: Callable[[bytes], object] = len
) -> WrittenLayer:
    """Write the layer of a recipe as layer_writer.write_layer does, and remember it.

    Raises HashMismatch if a wheel is not the one of the recipe, WheelRefused if it cannot be installed, LockError if a
    file of one wheel is a folder of another.
    """
    with contextlib.ExitStack() as stack:
        files: dict[str, LayerEntry] = {}
        for wheel in recipe.wheels:
            reader = stack.enter_context(open_wheel(wheel.file))
            _require_sha256(reader, wheel)
            files |= {entry.path: entry for entry in installed_files(reader, recipe.python)}
        entries = overriding_files(files.values(), dict(recipe.pins)) if recipe.pins else files.values()
        layer = write_layer(entries, packed, plain)
    content = {"layer": asdict(layer), "check": _check(layer)}
    atomic_files.write_atomically(_file(recipe), canonical_json.encode(content))
    return layer


def write_blob(recipe: LayerRecipe, folder: Path) -> WrittenLayer:
    """Write the layer of a recipe as a file in `folder`, named by the 64 digits of its digest, unless it is there
    undamaged. Raises what stream_wheels raises."""
    known = known_layer(recipe)
    if known:
        file = folder / known.digest.removeprefix("sha256:")
        if file.is_file() and sha256_file_store.file_digest(file) == file.name:
            return known
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_files.file(folder) as (stream, made):
        layer = stream_wheels(recipe, stream.write)
        stream.flush()
        made.chmod(0o644)
        made.replace(folder / layer.digest.removeprefix("sha256:"))
    return layer


def _require_sha256(reader: WheelReader, wheel: WheelOfLayer) -> None:
    found = reader.sha256()
    if found != wheel.sha256:
        raise HashMismatch(
            f"{wheel.file} is not the locked wheel: sha256 {found}, locked {wheel.sha256}",
            hint="it was damaged on this disk: remove it, and run the same command again",
        )


def _check(layer: WrittenLayer) -> str:
    return canonical_json.canonical_digest(asdict(layer))


def _file(recipe: LayerRecipe) -> Path:
    return user_folders.cache_folder("layers", make=False) / f"{recipe.key}.json"
