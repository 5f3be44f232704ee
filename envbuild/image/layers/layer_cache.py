"""Writes layers from their recipes, and caches the digests and sizes of each layer under the key of its recipe.

The blob itself is cached only if the recipe requests it: writing a layer of wheels again takes about as long as copying
its blob, but compressing a base again takes longer. An entry is a JSON file that contains a hash of its other fields; a
damaged or missing entry is made again. Files are renamed into place when they are complete.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, cast

from isal import igzip

from envbuild.fetch import sha256_file_store
from envbuild.image.layers.layer_writer import WrittenLayer, drop, require_same_layer
from envbuild.util import atomic_files, strict_and_canonical_json, temporary_files, user_folders

_BLOCK = 1 << 20
_FOLDER, _BLOBS = "layers", "layers/blobs"


class LayerRecipe(Protocol):
    """The inputs of a layer. `key`: the sha256 of all of them, hex, or None for a layer that is not cached;
    `keeps_blob`: whether the blob is cached too."""

    @property
    def key(self) -> str | None: ...
    @property
    def keeps_blob(self) -> bool: ...
    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        """Write the layer. `packed` gets the bytes of its blob, `plain` those of the tar in it."""
        ...


@dataclass(frozen=True)
class _CacheEntry:
    """An entry of the cache. `key`: that of the recipe; `check`: the hash of all other fields."""

    key: str
    digest: str
    size: int
    diff_id: str
    diff_size: int
    check: str


def known_layer(recipe: LayerRecipe) -> WrittenLayer | None:
    """Return the cached layer of a recipe, without its files, or None if the layer is missing or its entry is
    damaged."""
    return _known(recipe.key) if recipe.key is not None else None


def files_of_layers(keys: Collection[str]) -> dict[str, set[str]]:
    """Return, for each folder of the cache, the names in it that belong to the layers with these keys."""
    layers = filter(None, map(_known, keys))
    return {
        _FOLDER: {_file(key).name for key in keys} | {_blobs().name},
        _BLOBS: {_blob(_blobs(), layer).name for layer in layers},
    }


def _known(key: str) -> WrittenLayer | None:
    entry = sha256_file_store.noted(_file(key), _CacheEntry)
    layer = WrittenLayer(entry.digest, entry.size, entry.diff_id, entry.diff_size) if entry else None
    return layer if layer and entry == _entry(key, layer) else None


def stream_layer(
    recipe: LayerRecipe, packed: Callable[[bytes], object] = drop, plain: Callable[[bytes], object] = drop
) -> WrittenLayer:
    """Write the layer of a recipe, and cache its digests. `packed` gets the bytes of the blob, `plain` those of the tar
    in it. Raises what the recipe's `write` raises."""
    if not recipe.keeps_blob:
        return _written(recipe, packed, plain)
    layer = write_blob(recipe, _blobs())
    blob = _blob(_blobs(), layer)
    if packed is not drop:
        with blob.open("rb") as stream:
            _copy(stream, packed)
    if plain is not drop:
        with cast(IO[bytes], igzip.open(blob, "rb")) as stream:  # type: ignore[no-untyped-call]
            _copy(stream, plain)
    return layer


def write_again(recipe: LayerRecipe, watch: Callable[[bytes], object]) -> WrittenLayer:
    """Write the layer of a recipe, even if it is cached, and cache its digests. `watch` gets the bytes of the blob, and
    may raise an error to stop. Raises BuildError if the layer differs from the cached one, and what the recipe's
    `write` raises."""

    def receive(block: bytes) -> None:
        """Ignore the tar. Unlike `drop`, this function makes the recipe compute the digest of the tar."""

    known = known_layer(recipe)
    layer = recipe.write(watch, receive)
    if known:
        require_same_layer(layer.digest, known.digest)
        require_same_layer(layer.diff_id, known.diff_id)
    _note(recipe, layer)
    return layer


def write_blob(recipe: LayerRecipe, folder: Path, watch: Callable[[bytes], object] = drop) -> WrittenLayer:
    """Write the layer of a recipe as a file in `folder`, named by the 64 digits of its digest, unless the cache knows
    the digest and the folder has that file undamaged. `watch` gets the bytes of the blob, and may raise an error to
    stop. Raises what the recipe's `write` raises."""
    known, in_cache = known_layer(recipe), folder == _blobs()
    if known:
        file = _blob(folder, known)
        for used in (file, _file(recipe.key)) if in_cache and recipe.key else ():
            with contextlib.suppress(OSError):
                os.utime(used)  # `envbuild prune` keeps it for another day
        if file.is_file() and sha256_file_store.file_digest(file) == file.name:
            return known
    folder.mkdir(parents=True, exist_ok=True)
    with temporary_files.file(folder) as (stream, made):

        def receive(block: bytes) -> None:
            watch(block)
            stream.write(block)

        layer = (_written if in_cache else stream_layer)(recipe, receive)
        stream.flush()
        made.chmod(0o644)
        made.replace(_blob(folder, layer))
    return layer


def _written(
    recipe: LayerRecipe, packed: Callable[[bytes], object], plain: Callable[[bytes], object] = drop
) -> WrittenLayer:
    layer = recipe.write(packed, plain)
    _note(recipe, layer)
    return layer


def _note(recipe: LayerRecipe, layer: WrittenLayer) -> None:
    if recipe.key is not None and known_layer(recipe) != layer:
        content = strict_and_canonical_json.encode(vars(_entry(recipe.key, layer)))
        atomic_files.write_atomically(_file(recipe.key), content)


def _copy(stream: IO[bytes], receiver: Callable[[bytes], object]) -> None:
    while block := stream.read(_BLOCK):
        receiver(block)


def _entry(key: str, layer: WrittenLayer) -> _CacheEntry:
    values = (key, layer.digest, layer.size, layer.diff_id, layer.diff_size)
    return _CacheEntry(*values, strict_and_canonical_json.canonical_digest(values))


def _file(key: str) -> Path:
    return user_folders.cache_folder(_FOLDER, make=False) / f"{key}.json"


def _blobs() -> Path:
    return user_folders.cache_folder(_BLOBS, make=False)


def _blob(folder: Path, layer: WrittenLayer) -> Path:
    return folder / layer.digest.removeprefix("sha256:")
