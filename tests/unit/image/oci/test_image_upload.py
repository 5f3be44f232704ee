"""Uploads of described images: only missing blobs are sent, as a stream, and in parts, so that an interrupted upload
can continue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import pytest

from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci import layer_blobs, parallel_layer_tasks
from envbuild.image.oci.image_description import DescribedLayer, ImageDescription, OciImage
from envbuild.image.oci.image_upload import upload_image
from envbuild.image.oci.layer_blobs import blob_blocks, learn_layers
from envbuild.image.oci.parallel_layer_tasks import StopSignal
from envbuild.registry import blob_uploads
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import BuildError, HashMismatch, NetworkError
from unit.image.oci.layered_samples import SampleRecipe, described
from unit.registries import Registry, serving
from unit.support import sha

BASE, OWN = SampleRecipe("base", b"b" * 100), SampleRecipe("own", bytes(range(256)) * 200)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry; uploads are split into parts of 10,000 bytes."""
    monkeypatch.setattr(blob_uploads, "_PART", 10_000)
    with serving(Registry()) as found:
        yield found


def image(*recipes: SampleRecipe) -> OciImage:
    return learn_layers(described(*recipes), lambda line: None)


def upload(registry: Registry, one: OciImage, mount_from: str | None = None) -> list[str]:
    lines: list[str] = []
    upload_image(Repository(Reference.parse(f"{registry.host}/team/h20")), one, "v1", lines.append, mount_from)
    for described_layer, layer in zip(one.described, one.layers, strict=True):
        if layer.digest in registry.blobs:
            assert registry.blobs[layer.digest] == b"".join(blob_blocks(described_layer.recipe, layer.digest))
    assert registry.blobs[one.id] == one.configuration
    assert registry.manifests["v1"] == (one.manifest.media_type, one.manifest.raw)
    return sorted(lines)


def count_requests(registry: Registry, method: str) -> int:
    return sum(line.startswith(method) for line, _ in registry.requests)


def test_an_image_is_uploaded_and_its_manifest_last(registry: Registry) -> None:
    assert upload(registry, image(BASE, OWN)) == ["layer base: 0 MB", "layer own: 0 MB"]
    assert registry.requests[-1][0] == "PUT /v2/team/h20/manifests/v1"
    assert count_requests(registry, "PATCH") == 6  # the large layer has 51,200 bytes and its headers
    assert count_requests(registry, "PUT /v2/team/h20/blobs") == 3


def test_layers_in_the_registry_are_not_sent_again(registry: Registry) -> None:
    upload(registry, image(BASE, OWN))
    registry.requests.clear()
    lines = upload(registry, image(BASE, SampleRecipe("new", b"x"), OWN))
    assert lines == ["layer base: there already", "layer new: 0 MB", "layer own: there already"]
    assert count_requests(registry, "POST") == 2  # the new layer, and the configuration


def test_a_layer_that_occurs_twice_is_sent_once(registry: Registry) -> None:
    upload(registry, image(BASE, OWN, OWN))
    assert count_requests(registry, "POST") == 3


def test_blobs_are_mounted_from_another_repository(registry: Registry) -> None:
    one = image(BASE, OWN)
    blob = b"".join(blob_blocks(OWN, one.layers[1].digest))
    registry.mounts["team/h100"] = {one.layers[1].digest: blob}
    assert upload(registry, one, "team/h100") == ["layer base: 0 MB", "layer own: there already"]
    assert count_requests(registry, "PATCH") == 0


@pytest.mark.parametrize("arrived", [[0], [4000], [10_000], [10, 0, 9_990]])
def test_an_interrupted_part_goes_on(registry: Registry, arrived: list[int]) -> None:
    registry.cut_parts = list(arrived)
    upload(registry, image(OWN))
    assert count_requests(registry, "GET /v2/team/h20/blobs/uploads/") == len(arrived)


def test_an_upload_that_never_ends_is_an_error(registry: Registry) -> None:
    registry.cut_parts = [0] * 20
    with pytest.raises(NetworkError, match="does not answer"):
        upload(registry, image(OWN))
    assert "v1" not in registry.manifests


def test_a_part_that_the_registry_lost_is_an_error(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    one, place = image(OWN), Repository(Reference.parse(f"{registry.host}/team/h20"))

    def blocks() -> Generator[bytes, None, None]:
        yield b"x" * 10_000
        for session in registry.sessions.values():
            session.clear()
        registry.cut_parts = [0]
        yield b"x" * 10_000

    with pytest.raises(NetworkError, match="lost a part"):
        place.put_blocks(one.layers[0].digest, one.layers[0].size, blocks)


def test_a_registry_that_takes_no_parts_gets_the_whole_blob(registry: Registry) -> None:
    registry.parts = False
    one = image(OWN)
    upload(registry, one)
    assert count_requests(registry, "PATCH") == 1
    assert str(one.layers[0].size) in registry.lengths


def test_a_layer_that_changed_stops_the_upload(registry: Registry) -> None:
    one = image(OWN)
    changed = described(SampleRecipe("own", bytes(range(256)) * 201))
    with pytest.raises(BuildError, match="not reproducible"):
        upload(registry, changed.with_layers(one.layers))
    assert registry.manifests == {}
    assert registry.blobs == {}


@dataclass
class LongRecipe:
    """A layer of 300 blocks, each 10 ms after the other. `begun`: set after the first block; `written`: the number of
    written blocks."""

    begun: threading.Event
    written: int = 0
    keeps_blob = False
    key = None

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        while self.written < 300:
            packed(b"x" * 1000)
            self.written += 1
            self.begun.set()
            time.sleep(0.01)
        return WrittenLayer("", 0, "", 0)


@dataclass
class FailingRecipe(LongRecipe):
    """A layer whose writing fails after the other layer has begun."""

    def write(self, packed: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
        assert self.begun.wait(30)
        raise HashMismatch("a wheel was damaged")


def test_an_interruption_ends_a_pause_between_two_attempts(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_uploads, "PAUSES", (50,))
    registry.failures = [("POST .*", 503, {})]
    one, begun, wait = image(BASE), threading.Event(), StopSignal.wait

    def pause(self: StopSignal, seconds: float | None = None) -> bool:
        begun.set()
        return wait(self, seconds)

    def interrupt(*_: object, **__: object) -> object:
        assert begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(StopSignal, "wait", pause)
    monkeypatch.setattr(parallel_layer_tasks, "wait", interrupt)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        upload(registry, one)
    assert time.monotonic() - begin < 25


@pytest.mark.parametrize("pattern", ["HEAD", "PATCH"])
def test_an_interruption_ends_the_wait_for_a_registry_that_does_not_answer(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    one, begun, ended = image(OWN), threading.Event(), threading.Event()

    def stall(request: str) -> None:
        if request.startswith(pattern):
            begun.set()
            ended.wait(60)

    def interrupt(*_: object, **__: object) -> object:
        assert begun.wait(30)
        raise KeyboardInterrupt

    registry.on_request = stall
    monkeypatch.setattr(parallel_layer_tasks, "wait", interrupt)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        upload(registry, one)
    ended.set()
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("error", [HashMismatch, KeyboardInterrupt])
def test_the_other_uploads_stop_if_one_fails_or_the_user_interrupts(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(blob_uploads, "_PART", 1000)
    monkeypatch.setattr(layer_blobs, "_BLOCK", 1000)
    long = LongRecipe(threading.Event())
    recipes: list[LongRecipe] = [long] if error is KeyboardInterrupt else [long, FailingRecipe(long.begun)]
    layers = tuple(DescribedLayer(str(number), "", recipe) for number, recipe in enumerate(recipes))
    digests = [WrittenLayer(f"sha256:{sha(str(n))}", 300_000, f"sha256:{sha(f'plain {n}')}", 1) for n in range(2)]
    one = ImageDescription("linux/amd64", layers, {}).with_layers(digests[: len(layers)])

    def interrupt(*_: object, **__: object) -> object:
        assert long.begun.wait(30)
        raise KeyboardInterrupt

    if error is KeyboardInterrupt:
        monkeypatch.setattr(parallel_layer_tasks, "wait", interrupt)
    with pytest.raises(error):
        upload(registry, one)
    assert long.written < 300 and registry.manifests == {}


def test_a_blob_that_the_registry_refuses_is_an_error(registry: Registry) -> None:
    registry.refuse = "PUT .*/blobs/.*"
    with pytest.raises(NetworkError, match="does not accept the blob"):
        upload(registry, image(BASE, OWN))
    assert registry.manifests == {}
