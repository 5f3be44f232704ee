"""The bytes of layers while they are written: readers that stop, errors, and blobs that differ."""

from __future__ import annotations

import gzip
import hashlib
import threading
import time
from pathlib import Path

import pytest

from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci.layer_blobs import blob_blocks, learn_layers, write_blobs
from envbuild.util.errors import BuildError, HashMismatch
from unit.image.oci.layered_samples import SampleRecipe, described, sample


def digest(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


@pytest.mark.parametrize("number", [0, 1])
def test_a_blob_is_read_while_it_is_written(number: int) -> None:
    recipes, description = sample()
    layer = learn_layers(description, lambda line: None).layers[number]
    packed = b"".join(blob_blocks(recipes[number], layer.digest))
    plain = b"".join(blob_blocks(recipes[number], layer.diff_id, plain=True))
    assert (digest(packed), len(packed)) == (layer.digest, layer.size)
    assert (digest(plain), len(plain)) == (layer.diff_id, layer.diff_size)
    assert gzip.decompress(packed) == plain


def test_known_layers_are_not_written_again() -> None:
    recipes, description = sample()
    lines: list[str] = []
    image = learn_layers(description, lines.append)
    assert learn_layers(description, lines.append).layers == image.layers
    assert [recipe.written for recipe in recipes] == [1, 1]
    assert sorted(lines[:2]) == ["layer base: 3 MB, 3 MB unpacked", "layer own: 2 MB, 2 MB unpacked"]


def test_each_layer_is_written_once_into_a_folder(tmp_path: Path) -> None:
    recipes, description = sample()
    image = write_blobs(description, tmp_path, lambda line: None)
    assert [recipe.written for recipe in recipes] == [1, 1]
    assert {f"sha256:{path.name}" for path in tmp_path.iterdir()} == {layer.digest for layer in image.layers}


@pytest.mark.parametrize("plain", [False, True])
def test_an_abandoned_reader_leaves_no_thread(plain: bool) -> None:
    recipe = SampleRecipe("own", b"x" * 40_000_000)
    layer = learn_layers(described(recipe), lambda line: None).layers[0]
    before = threading.active_count()
    blocks = blob_blocks(recipe, layer.diff_id if plain else layer.digest, plain=plain)
    assert len(next(blocks)) >= 1 << 20
    assert threading.active_count() == before + 1
    blocks.close()
    assert threading.active_count() == before


def test_a_blob_that_differs_from_the_known_one_is_refused() -> None:
    recipe = SampleRecipe("own", b"one")
    layer = learn_layers(described(recipe), lambda line: None).layers[0]
    with pytest.raises(BuildError, match=f"before {layer.digest}"):
        list(blob_blocks(SampleRecipe("own", b"two"), layer.digest))


def test_an_error_of_the_writer_reaches_the_reader() -> None:
    with pytest.raises(HashMismatch, match="damaged"):
        list(blob_blocks(SampleRecipe("own", b"", error=HashMismatch("damaged")), "sha256:0"))


class Slow(SampleRecipe):
    """A recipe that writes until it is stopped."""

    def write(self, packed: object, plain: object) -> WrittenLayer:
        assert callable(packed)
        while True:
            packed(b"x" * 1000)
            time.sleep(0.001)


def test_the_first_error_stops_the_other_layers(tmp_path: Path) -> None:
    description = described(Slow("slow", b""), SampleRecipe("bad", b"", error=HashMismatch("damaged")))
    before = set(threading.enumerate())
    with pytest.raises(HashMismatch, match="damaged"):
        learn_layers(description, lambda line: None)
    with pytest.raises(HashMismatch, match="damaged"):
        write_blobs(description, tmp_path, lambda line: None)
    assert set(threading.enumerate()) <= before
    assert list(tmp_path.iterdir()) == []
