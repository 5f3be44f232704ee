"""Loading into engines that have some of the layers: graph drivers, and the containerd store."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from envbuild.fetch.sha256_file_store import file_digest
from envbuild.image.docker_engine import Image
from envbuild.image.layers import gzip_members, layer_cache
from envbuild.image.layers.base_image_layers import BaseBlobLayer
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.image.layers.wheel_reader import WheelMember, WheelReader, WheelRefused
from envbuild.image.oci.engine_load import known_layers, load_image
from envbuild.image.oci.image_description import DescribedLayer, ImageDescription, OciImage
from envbuild.image.oci.layer_blobs import find_tar_sizes, learn_layers, with_cached_layers, write_layers_again
from envbuild.registry import oci_types
from envbuild.util.errors import BuildError, DiskError, EngineError, HashMismatch
from unit.image.layers.odd_wheels import STORED, Item, digest, odd_wheel
from unit.image.oci.layered_samples import SampleRecipe, described
from unit.saved import layer

BASE, TORCH, OWN = (SampleRecipe(name, name.encode() * 1000) for name in ("base", "torch", "own"))


class LoadingEngine:
    """Loads archives as an engine does. `blobs`: its content: chains of diff ids, or on the containerd store the
    digests of blobs."""

    def __init__(self, containerd_store: bool = False) -> None:
        self.containerd_store = containerd_store
        self.held: dict[str, tuple[str, ...]] = {}  # handle -> diff ids
        self.ids: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.blobs: set[Any] = set()
        self.loads: list[list[str]] = []
        self.hidden: set[str] = set()
        self.error: Exception | None = None
        self.received = bytearray()

    def load(self, archive: Iterator[bytes]) -> None:
        files: dict[str, bytes] = {}
        self.received.clear()
        for block in archive:
            self.received += block
        with tarfile.open(fileobj=io.BytesIO(self.received)) as tar:
            for member in tar:
                stream = tar.extractfile(member)
                assert stream
                files[member.name] = stream.read()
        if self.error:
            raise self.error
        (item,) = json.loads(files["manifest.json"])
        (name,) = item["RepoTags"]
        raw = files[item["Config"]]
        diffs = tuple(json.loads(raw)["rootfs"]["diff_ids"])
        handle = oci_types.digest_of(raw)
        if self.containerd_store:
            (entry,) = json.loads(files["index.json"])["manifests"]
            assert entry["annotations"]["io.containerd.image.name"] == f"docker.io/{name}"
            handle = entry["digest"]
        self.loads.append([path for path in item["Layers"] if path in files])
        for index, path in enumerate(item["Layers"]):
            key = path if self.containerd_store else diffs[: index + 1]
            if path not in files and key not in self.blobs:
                self.hidden |= {name} if self.containerd_store else set()
                raise EngineError(f"no such file: {path}")
            if not self.containerd_store and path in files:
                assert oci_types.digest_of(files[path]) == diffs[index]
            self.blobs.add(key)
        self.held[handle], self.ids[handle], self.names[name] = diffs, oci_types.digest_of(raw), handle

    def images(self, prefix: str) -> list[tuple[str, str, int]]:
        return [(name, handle, 1) for name, handle in self.names.items() if name.startswith(prefix)]

    def layers_of(self, handle: str) -> tuple[str, ...]:
        return self.held.get(handle, ())

    def note_id(self, handle: str, image_id: str) -> None:
        assert not self.containerd_store or handle in self.held

    def get(self, reference: str) -> Image:
        handle = self.names[reference]
        return Image(self.ids[handle], handle, self.held[handle], {}, {}, 1)

    def tag(self, image: Image, repository: str, tag: str) -> None:
        self.names[f"{repository}:{tag}"] = image.handle

    def remove(self, reference: str) -> None:
        self.names.pop(reference, None)
        self.hidden.discard(reference)


def image(*recipes: SampleRecipe) -> OciImage:
    return learn_layers(described(*recipes), lambda line: None)


def load(engine: LoadingEngine, one: OciImage, tag: str = "1") -> tuple[Image, list[str]]:
    lines: list[str] = []
    found, sent = load_image(engine, one.to_load, "envbuild/sample", tag, lines.append)  # type: ignore[arg-type]
    assert sent == one
    return found, lines


@pytest.mark.parametrize("containerd_store", [False, True])
def test_only_missing_layers_are_sent(containerd_store: bool) -> None:
    engine = LoadingEngine(containerd_store)
    found, _ = load(engine, image(BASE, TORCH, OWN))
    assert found.id == image(BASE, TORCH, OWN).id
    assert len(engine.loads[0]) == 3
    found, lines = load(engine, image(BASE, TORCH, SampleRecipe("new", b"x")), "2")
    assert len(engine.loads[1]) == 1
    assert lines == ["loading 1 of 3 layers, 0 MB"]
    assert sorted(engine.names) == ["envbuild/sample:1", "envbuild/sample:2"]


@pytest.mark.parametrize(("containerd_store", "sent"), [(False, 2), (True, 1)])
def test_a_layer_on_other_layers_is_known_by_its_blob_alone(containerd_store: bool, sent: int) -> None:
    engine = LoadingEngine(containerd_store)
    load(engine, image(BASE, TORCH, OWN))
    load(engine, image(BASE, SampleRecipe("new", b"x"), OWN), "2")
    assert len(engine.loads[1]) == sent


def test_a_compressed_layer_of_a_base_image_is_always_sent_to_the_containerd_store(tmp_path: Path) -> None:
    """Another registry may have the same tar with another compression."""
    blob = tmp_path / "blob"
    blob.write_bytes(b"".join(gzip_members.compress([layer(a="1")])))
    blob_digest, diff_id = oci_types.digest_of(blob.read_bytes()), oci_types.digest_of(layer(a="1"))
    based = DescribedLayer("base image, layer 1", "base", BaseBlobLayer(blob, blob_digest, diff_id))
    whole = described(OWN)
    found = learn_layers(replace(whole, layers=(based, *whole.layers)), lambda line: None)
    engine = LoadingEngine(containerd_store=True)
    load(engine, found)
    assert known_layers(engine, found.to_load) == {found.layers[1].diff_id}  # type: ignore[arg-type]


@pytest.mark.parametrize("containerd_store", [False, True])
def test_all_layers_are_sent_after_a_refusal(containerd_store: bool) -> None:
    engine = LoadingEngine(containerd_store)
    load(engine, image(BASE, TORCH))
    engine.blobs.clear()  # it has the image's name, and no longer its layers
    found, lines = load(engine, image(BASE, TORCH, OWN), "2")
    assert [len(sent) for sent in engine.loads] == [2, 1, 3]
    assert lines[1].startswith("all layers are sent: no such file")
    assert found.id == image(BASE, TORCH, OWN).id
    assert engine.hidden == set()
    assert sorted(engine.names) == ["envbuild/sample:1", "envbuild/sample:2"]


@pytest.mark.parametrize("error", [DiskError("the disk is full"), EngineError("gone")])
def test_a_failed_load_leaves_no_tag_and_keeps_the_image_of_before(error: Exception) -> None:
    engine = LoadingEngine()
    load(engine, image(BASE))
    before = dict(engine.names)
    engine.error = error
    with pytest.raises(type(error)):
        load(engine, image(BASE, OWN))
    assert engine.names == before
    assert len(engine.loads) == 1


def test_another_image_than_the_one_that_was_sent_is_refused() -> None:
    engine = LoadingEngine()
    one = image(BASE)
    engine.get = lambda reference: Image("sha256:other", "h", (), {}, {}, 1)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="instead of the image that was loaded"):
        load(engine, one)
    assert engine.names == {}


def test_the_images_of_others_are_not_asked() -> None:
    engine = LoadingEngine()
    load(engine, image(BASE))
    engine.names = {"other/x:1": next(iter(engine.held))}
    assert known_layers(engine, image(BASE).to_load) == set()  # type: ignore[arg-type]


# layers that are written while they are sent


WHEEL = {f"torch/{number}": os.urandom(1_500_000) + bytes(1_500_000) for number in range(3)}


def with_wheel(wheel: Path) -> ImageDescription:
    """An image whose second layer is a wheel."""
    base, own = described(BASE, OWN).layers
    recipe = WheelLayer("3.11", (WheelOfLayer(wheel, file_digest(wheel)),))
    return replace(described(), layers=(base, DescribedLayer("torch", "torch", recipe), own))


def send(engine: LoadingEngine, one: ImageDescription) -> OciImage:
    to_load = find_tar_sizes(one, lambda line: None)
    _, sent = load_image(engine, to_load, "envbuild/sample", "1", lambda line: None)  # type: ignore[arg-type]
    return sent


def test_a_new_layer_of_wheels_is_written_once_while_it_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, engine = with_wheel(odd_wheel(tmp_path, WHEEL)), LoadingEngine()
    blocks, inflated = WheelReader.blocks, list[str]()

    def watched(reader: WheelReader, member: WheelMember) -> Iterator[tuple[bytes, bytes]]:
        inflated.append(member.name)
        return blocks(reader, member)

    monkeypatch.setattr(WheelReader, "blocks", watched)
    to_load = find_tar_sizes(one, lambda line: None)
    assert [bool(layer.written) for layer in to_load.layers] == [True, False, True]
    assert (to_load.complete, layer_cache.known_layer(one.layers[1].recipe)) == (None, None)
    sent = send(engine, one)
    assert [name for name in inflated if name in WHEEL] == sorted(WHEEL)
    assert layer_cache.known_layer(one.layers[1].recipe) == sent.layers[1]
    assert sent == write_layers_again(one, lambda line: None)
    assert engine.names["envbuild/sample:1"] == sent.id
    assert find_tar_sizes(one, lambda line: None).complete == sent


def with_changed_metadata(wheel: Path) -> ImageDescription:
    """An image whose second layer is a wheel, and whose third layer has this wheel's changed metadata."""
    base, torch, own = with_wheel(wheel).layers
    recipe = WheelLayer("3.11", (WheelOfLayer(wheel, file_digest(wheel)),), (("pinned", "2"),))
    return replace(described(), layers=(base, torch, DescribedLayer("overrides", "overrides", recipe), own))


def test_changed_metadata_is_written_while_the_layers_before_it_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = with_changed_metadata(odd_wheel(tmp_path, WHEEL, metadata="Requires-Dist: pinned==1\n"))
    written, stream_layer = threading.Event(), layer_cache.stream_layer

    def watched(recipe: LayerRecipe, *receivers: Any, **named: Any) -> WrittenLayer:
        changed = isinstance(recipe, WheelLayer) and recipe.pins
        if isinstance(recipe, WheelLayer) and not changed:
            assert written.wait(30), "the changed metadata is not written yet"
        layer = stream_layer(recipe, *receivers, **named)
        if changed:
            written.set()
        return layer

    monkeypatch.setattr(layer_cache, "stream_layer", watched)
    sent = send(LoadingEngine(), one)
    assert layer_cache.known_layer(one.layers[2].recipe) == sent.layers[2]
    assert sent == write_layers_again(one, lambda line: None)


def test_a_wheel_that_was_damaged_before_its_metadata_changed_is_never_part_of_an_image(tmp_path: Path) -> None:
    wheel = odd_wheel(tmp_path, WHEEL, metadata="Requires-Dist: pinned==1\n")
    one = with_changed_metadata(wheel)
    send(LoadingEngine(), with_wheel(wheel))  # the layer of the wheel is cached
    odd_wheel(tmp_path, WHEEL, metadata="Requires-Dist: pinned==1\nRequires-Dist: more\n")
    engine = LoadingEngine()
    with pytest.raises((HashMismatch, BuildError)):
        send(engine, one)
    assert b"manifest.json" not in engine.received


@pytest.mark.parametrize("damage", ["CRC", "RECORD", "another wheel"])
def test_a_wheel_that_fails_its_check_is_never_part_of_an_image(tmp_path: Path, damage: str) -> None:
    """The request ends before the engine receives manifest.json, and the digests are not cached."""
    wheel = odd_wheel(tmp_path, WHEEL)
    one = with_wheel(wheel)
    stored = {name: Item(content, method=STORED) for name, content in WHEEL.items()}
    if damage == "RECORD":
        rows = (f"{name},{digest(b'x')},3000000" for name in WHEEL)
        one = with_wheel(odd_wheel(tmp_path, stored, unlisted=list(WHEEL), more_rows=list(rows)))
    elif damage == "CRC":
        odd_wheel(tmp_path, stored)
        one = with_wheel(wheel)
        raw = bytearray(wheel.read_bytes())
        raw[-1_000_000] ^= 1
        wheel.write_bytes(raw)
    else:
        odd_wheel(tmp_path, {**WHEEL, "torch/more": b"x"})
    engine = LoadingEngine()
    with pytest.raises(WheelRefused if damage == "RECORD" else HashMismatch):
        send(engine, one)
    assert len(engine.received) > 1_000_000, "the layer was not sent while it was written"
    assert b"manifest.json" not in engine.received
    assert (engine.names, engine.held) == ({}, {})
    assert layer_cache.known_layer(one.layers[1].recipe) is None


def test_a_tar_of_another_size_than_expected_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WheelLayer, "tar_size", lambda self: 512)
    engine = LoadingEngine()
    with pytest.raises(BuildError, match="layer torch has 9"):
        send(engine, with_wheel(odd_wheel(tmp_path, WHEEL)))
    assert b"manifest.json" not in engine.received


def test_after_a_refusal_a_layer_that_was_sent_once_is_sent_again(tmp_path: Path) -> None:
    engine, one = LoadingEngine(), with_wheel(odd_wheel(tmp_path, WHEEL))
    load(engine, image(BASE))
    engine.blobs.clear()
    sent = send(engine, one)
    assert engine.names["envbuild/sample:1"] == sent.id
    assert [len(sent) for sent in engine.loads] == [1, 2, 3]


def test_a_layer_that_another_build_has_sent_meanwhile_is_left_out(tmp_path: Path) -> None:
    engine = LoadingEngine()
    first = with_wheel(odd_wheel(tmp_path, WHEEL))
    second = replace(first, layers=(*first.layers, DescribedLayer("more", "more", SampleRecipe("more", b"more"))))
    both = [find_tar_sizes(one, lambda line: None) for one in (first, second)]
    for number, to_load in enumerate(both):
        now = with_cached_layers(to_load)
        load_image(engine, now, "envbuild/sample", str(number), lambda line: None)  # type: ignore[arg-type]
    assert engine.loads == [["1.tar", "2.tar", "3.tar"], ["4.tar"]]


def test_a_full_disk_of_the_cache_is_not_reported_as_the_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client library would report an OSError of the archive as a broken connection to the engine."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "note"))
    engine, one = LoadingEngine(), find_tar_sizes(with_wheel(odd_wheel(tmp_path, WHEEL)), lambda line: None)
    monkeypatch.setattr(layer_cache, "_note", MagicMock(side_effect=full))
    with pytest.raises(DiskError, match=re.escape(str(tmp_path))):
        load_image(engine, one, "envbuild/sample", "1", lambda line: None)  # type: ignore[arg-type]
    assert b"manifest.json" not in engine.received


def test_an_engine_that_answers_before_the_end_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LoadingEngine()
    monkeypatch.setattr(engine, "load", next)
    with pytest.raises(EngineError, match="before the whole image was sent"):
        send(engine, with_wheel(odd_wheel(tmp_path, WHEEL)))


def test_a_layer_that_occurs_twice_is_sent_once() -> None:
    engine = LoadingEngine()
    load(engine, image(BASE, OWN, BASE))
    assert engine.loads == [["1.tar", "2.tar", "1.tar"]]
    assert engine.received.count(BASE.content) == 1
