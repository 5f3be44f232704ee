"""`push --zstd`: our own upload of an image, into a registry in this process."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from envbuild.image import registry_push, zstd_push
from envbuild.image.layers.base_image_layers import BaseBlobLayer
from envbuild.image.oci import layer_blobs
from envbuild.image.oci.image_description import DescribedLayer, OciImage
from envbuild.registry import oci_types
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import BuildError, DiskError, HashMismatch, NetworkError
from unit.image.base_images import GZIP, gzipped, tar_of
from unit.image.oci.layered_samples import SampleRecipe, described
from unit.registries import Registry, docker_login, serving
from unit.site import Site, new_key, proved
from unit.support import envbuild

LARGE = bytes(range(251)) * 20_000


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    Path("team.pub").write_bytes(new_key(monkeypatch).pem)
    with proved(project, monkeypatch) as found:
        yield found


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Temporary files go to the test's own folder, which must be empty afterwards."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert list(folder.iterdir()) == []


def place(registry: Registry) -> Repository:
    return Repository(Reference.parse(f"{registry.host}/team/sample"))


def image(*contents: bytes) -> OciImage:
    """Return an image with a layer for each of these files."""
    recipes = (SampleRecipe(f"file-{number}", content) for number, content in enumerate(contents))
    return layer_blobs.learn_layers(described(*recipes), lambda line: None)


def push(registry: Registry, one: OciImage) -> bool:
    """Push, and return whether the image was in the registry already."""
    there = place(registry)

    def send(tag: str) -> None:
        zstd_push.push_layers(there, one, tag, lambda line: None)

    return registry_push.push_once(there, one.id, send)[1]


def manifest(registry: Registry) -> dict[str, Any]:
    (raw,) = {raw for target, (_, raw) in registry.manifests.items() if target.startswith("id-")}
    document: dict[str, Any] = json.loads(raw)
    return document


def unpacked(registry: Registry) -> list[bytes]:
    blobs = [registry.blobs[layer["digest"]] for layer in manifest(registry)["layers"]]
    return [zstandard.ZstdDecompressor().decompressobj().decompress(blob) for blob in blobs]


def tars(one: OciImage) -> list[bytes]:
    """Return the layers of an image, not compressed."""
    pairs = zip(one.described, one.layers, strict=True)
    return [b"".join(layer_blobs.blob_blocks(known.recipe, layer.diff_id, plain=True)) for known, layer in pairs]


def uploads(registry: Registry) -> int:
    return sum("/uploads/" in line for line in registry.written() if line.startswith("PUT"))


# the command


def test_the_layers_are_packed_and_the_evidence_stays_valid(site: Site) -> None:
    done = site.push("--zstd", "--json")
    assert done.code == 0, done.stderr
    media, raw = site.registry.manifests["verified"]
    assert (media, done.document["digest"]) == (oci_types.MANIFEST, oci_types.digest_of(raw))
    document = manifest(site.registry)
    assert (document["mediaType"], document["config"]) == (
        oci_types.MANIFEST, oci_types.descriptor(oci_types.CONFIG, site.engine.config)
    )  # fmt: skip
    (layer,) = document["layers"]
    blob = site.registry.blobs[layer["digest"]]
    assert (layer["mediaType"], layer["size"]) == ("application/vnd.oci.image.layer.v1.tar+zstd", len(blob))
    assert unpacked(site.registry) == [b"layer"]
    assert site.registry.blobs[site.engine.image.id] == site.engine.config
    verified = envbuild("verify", f"{site.registry.host}/team/sample:verified", "--key", "team.pub")
    assert verified.code == 0, verified.stderr


@pytest.mark.parametrize("first", [["--zstd"], []])
def test_existing_layers_are_not_uploaded_again_with_any_compression(site: Site, first: list[str]) -> None:
    assert site.push(*first).code == 0
    site.registry.requests.clear()
    for arguments in (["--zstd"], []):
        assert site.push(*arguments).code == 0
        assert site.registry.written() == []


# uploads


def test_large_layers_are_sent_with_their_length_in_the_order_of_the_configuration(registry: Registry) -> None:
    one = image(LARGE, b"b" * 3000, LARGE, b"")
    assert push(registry, one) is False
    assert unpacked(registry) == tars(one)
    assert json.loads(registry.blobs[one.id])["rootfs"]["diff_ids"] == list(map(oci_types.digest_of, tars(one)))
    assert {str(layer["size"]) for layer in manifest(registry)["layers"]} <= set(registry.lengths)


def test_the_same_image_is_the_same_manifest_and_blobs_are_sent_once(registry: Registry) -> None:
    one = image(LARGE, b"b")
    push(registry, one)
    before, sent = dict(registry.manifests), uploads(registry)
    assert sent == 3
    registry.manifests.clear()
    assert push(registry, one) is False
    assert (registry.manifests, uploads(registry)) == (before, sent)
    assert push(registry, one) is True


@pytest.mark.parametrize("media_type", [GZIP, "application/vnd.oci.image.layer.v1.tar"])
def test_layers_of_a_base_image_stay_as_they_are(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, media_type: str
) -> None:
    """A registry that has the base image does not get its layers again."""
    tar = tar_of({"etc/os-release": LARGE})
    blob = gzipped(tar) if media_type == GZIP else tar
    file = tmp_path / "base"
    file.write_bytes(blob)
    recipe = BaseBlobLayer(file, oci_types.digest_of(blob), oci_types.digest_of(tar))
    own = described(SampleRecipe("own", b"b" * 3000))
    layers = (DescribedLayer("base image, layer 1", "", recipe, media_type), *own.layers)
    one = layer_blobs.learn_layers(dataclasses.replace(own, layers=layers), lambda line: None)
    sizes: list[int] = []
    monkeypatch.setattr(zstd_push, "_require_space", lambda largest, folder: sizes.append(largest))
    assert push(registry, one) is False
    first, second = manifest(registry)["layers"]
    assert first == {"mediaType": media_type, "digest": oci_types.digest_of(blob), "size": len(blob)}
    assert registry.blobs[first["digest"]] == blob
    assert second["mediaType"] == oci_types.LAYER_ZSTD
    assert sizes == [one.layers[1].diff_size], "only the layer that is compressed needs space"
    registry.manifests.clear()
    registry.requests.clear()
    push(registry, one)
    assert uploads(registry) == 0


# failures


def test_a_layer_that_changed_is_refused(registry: Registry) -> None:
    """For example after a wheel was damaged on this disk."""
    one = image(LARGE, b"b")
    changed = dataclasses.replace(one, described=described(SampleRecipe("file-0", LARGE[:-1])).layers * 2)
    with pytest.raises(BuildError, match="not reproducible"):
        push(registry, changed)
    assert registry.manifests == {}


def test_a_layer_that_cannot_be_written_stops_the_push(registry: Registry) -> None:
    recipe = SampleRecipe("file", LARGE)
    one = layer_blobs.learn_layers(described(recipe), lambda line: None)
    recipe.error = HashMismatch("a wheel was damaged")
    with pytest.raises(HashMismatch):
        push(registry, one)
    assert registry.written() == []


def test_an_interrupted_upload_starts_again_and_is_whole(registry: Registry) -> None:
    registry.cut = 1
    push(registry, image(LARGE))
    assert unpacked(registry) == tars(image(LARGE))


def test_uploads_that_are_always_cut_off_end(registry: Registry) -> None:
    registry.cut = 99
    with pytest.raises(NetworkError, match="does not answer"):
        push(registry, image(LARGE))
    assert registry.manifests == {}
    registry.cut = 0
    push(registry, image(LARGE))
    assert unpacked(registry) == tars(image(LARGE))


def test_a_blob_that_the_registry_refuses_is_reported(registry: Registry) -> None:
    registry.refuse = "PUT .*/uploads/.*"
    with pytest.raises(NetworkError, match=r"does not accept the blob sha256:.*500") as caught:
        push(registry, image(LARGE))
    assert (caught.value.hint, registry.manifests) == ("NO: not now", {})


def test_an_upload_that_needs_a_new_token_sends_the_file_from_its_start(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token has expired when the upload starts, and the registry asks for a new token after it has read the
    file."""
    registry.bearer = f"http://{registry.host}/token"
    docker_login(tmp_path, monkeypatch, **{registry.host: "me:secret"})
    there = place(registry)
    file = tmp_path / "blob"
    file.write_bytes(LARGE)
    right = there._writer._one

    def aged(method: str, url: str, scope: str, **options: Any) -> Any:
        if method == "PUT" and registry.token != "new":
            registry.token = "new"
        return right(method, url, scope, **options)

    monkeypatch.setattr(there._writer, "_one", aged)
    there.put_file(oci_types.digest_of(LARGE), file)
    assert registry.blobs == {oci_types.digest_of(LARGE): LARGE}
    assert registry.lengths == [str(len(LARGE))] * 2


def test_without_space_for_the_largest_layer_nothing_is_sent(registry: Registry) -> None:
    one = image(LARGE, b"b")
    huge = dataclasses.replace(one, layers=(one.layers[0], dataclasses.replace(one.layers[1], diff_size=1 << 50)))
    with pytest.raises(DiskError, match="GB free") as caught:
        push(registry, huge)
    assert "TMPDIR" in (caught.value.hint or "")
    assert registry.written() == []
