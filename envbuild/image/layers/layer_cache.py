"""Writes layers from their recipes, and remembers each by its content: digest, size, diff id and list of files.

The blob itself is kept only if a recipe asks for it: writing a layer of wheels again takes about as long as copying it,
compressing a base again does not. An entry is a JSON file that contains a hash of itself; a damaged or missing one is
made again. Files are renamed into place when they are complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from isal import igzip

from envbuild.fetch import sha256_file_store
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.util import atomic_files, canonical_json, temporary_files, user_folders

_BLOCK = 1 << 20


class LayerRecipe(Protocol):
    """What determines a layer. `key`: sha256 of all of that, hex; `keeps_blob`: the blob is kept in the cache."""

    @property
    def key(self) -> str: ...
    @property
    def keeps_blob(self) -> bool: ...
    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. `packed` gets the bytes of its gzip file, `plain` those of the tar in it."""
        ...


@dataclass(frozen=True)
class _CacheEntry:
    layer: WrittenLayer
    check: str


def known_layer(recipe: LayerRecipe) -> WrittenLayer | None:
    """Return the cached layer of a recipe, or None if it is missing or its entry is damaged."""
    entry = sha256_file_store.noted(_file(recipe), _CacheEntry)
    return entry.layer if entry and entry.check == _check(entry.layer) else None


def learn_layer(recipe: LayerRecipe) -> WrittenLayer:
    """Return the cached layer of a recipe; write it if it is missing. Passes on the errors of the recipe's `write`."""
    return known_layer(recipe) or stream_layer(recipe)


def stream_layer(
    recipe: LayerRecipe, packed: Callable[[bytes], object] = len, plain: Callable[[bytes], object] = len
) -> WrittenLayer:
    """Write the layer of a recipe, and remember it. Both receivers drop their bytes by default. Raises what the
    recipe's `write` raises."""
    if not recipe.keeps_blob:
        return _written(recipe, packed, plain)
    layer = write_blob(recipe, _blobs())
    blob = _blob(_blobs(), layer)
    with blob.open("rb") as stream:
        _copy(stream, packed)
    if plain is not len:
        with cast(IO[bytes], igzip.open(blob, "rb")) as stream:  # type: ignore[no-untyped-call]
            _copy(stream, plain)
    return layer


def write_blob(recipe: LayerRecipe, folder: Path) -> WrittenLayer:
    """Write the layer of a recipe as a file in `folder`, named by the 64 digits of its digest, unless it is there
    undamaged. Raises what the recipe's `write` raises."""
    known = known_layer(recipe)
    if known:
        file = _blob(folder, known)
        if file.is_file() and sha256_file_store.file_digest(file) == file.name:
            return known
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_files.file(folder) as (stream, made):
        in_cache = folder == _blobs()
        layer = (_written if in_cache else stream_layer)(recipe, stream.write, len)
        stream.flush()
        made.chmod(0o644)
        made.replace(_blob(folder, layer))
    return layer


def _written(recipe: LayerRecipe, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
    layer = recipe.write(packed, plain)
    content = {"layer": asdict(layer), "check": _check(layer)}
    atomic_files.write_atomically(_file(recipe), canonical_json.encode(content))
    return layer


def _copy(stream: IO[bytes], receiver: Callable[[bytes], object]) -> None:
    while block := stream.read(_BLOCK):
        receiver(block)


def _check(layer: WrittenLayer) -> str:
    return canonical_json.canonical_digest(asdict(layer))


def _file(recipe: LayerRecipe) -> Path:
    return user_folders.cache_folder("layers", make=False) / f"{recipe.key}.json"


def _blobs() -> Path:
    return user_folders.cache_folder("layers", make=False) / "blobs"


def _blob(folder: Path, layer: WrittenLayer) -> Path:
    return folder / layer.digest.removeprefix("sha256:")
