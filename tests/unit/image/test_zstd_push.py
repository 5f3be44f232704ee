"""`push --zstd`: our own upload of an image, into a registry in this process."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import zstandard

from envbuild.image import registry_push, zstd_push
from envbuild.image.docker_engine import Image
from envbuild.registry import oci_types, registry_http_and_auth
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import DiskError, EngineError, NetworkError
from unit.registries import Registry, docker_login, serving
from unit.site import Engine, Site, config_of, new_key, proved
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


@dataclasses.dataclass
class Saving(Engine):
    """Saves these files, whatever the image is."""

    files: tuple[bytes, ...] = ()
    ends: int | None = None  # where its archive ends, too early

    def saved(self, image: Image) -> tarfile.TarFile:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for number, raw in enumerate(self.files):
                member = tarfile.TarInfo(f"blobs/{number}")
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))
        return tarfile.open(fileobj=io.BytesIO(buffer.getvalue()[: self.ends]), mode="r|")


def saving(registry: Registry, *layers: bytes, files: tuple[bytes, ...] | None = None) -> Saving:
    """Return an engine with an image of these layers; `files`: what it saves instead of them, after the
    configuration."""
    digests = tuple(map(oci_types.digest_of, layers))
    config = config_of(list(digests), {})
    image = Image(oci_types.digest_of(config), "handle", digests, {}, {}, 1)
    kept = (*(layers if files is None else files), config, b"[]", b"")
    return Saving(registry, image, config, files=kept)


def place(registry: Registry) -> Repository:
    return Repository(Reference.parse(f"{registry.host}/team/sample"))


def push(engine: Saving) -> bool:
    """Push, and return whether the image was in the registry already."""
    return registry_push.push_from_engine(engine, place(engine.registry), engine.image, lambda line: None, zstd=True)[1]  # type: ignore[arg-type]


def manifest(registry: Registry) -> dict[str, Any]:
    (raw,) = {raw for target, (_, raw) in registry.manifests.items() if target.startswith("id-")}
    document: dict[str, Any] = json.loads(raw)
    return document


def unpacked(registry: Registry) -> list[bytes]:
    blobs = [registry.blobs[layer["digest"]] for layer in manifest(registry)["layers"]]
    return [zstandard.ZstdDecompressor().decompressobj().decompress(blob) for blob in blobs]


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
    layers = (LARGE, b"b" * 3000, LARGE, b"")
    assert push(saving(registry, *layers, files=(b"b" * 3000, b"of no use", LARGE))) is False
    assert unpacked(registry) == list(layers)
    assert {str(layer["size"]) for layer in manifest(registry)["layers"]} <= set(registry.lengths)


def test_only_layers_are_packed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = mock.Mock(wraps=zstd_push._packed)
    monkeypatch.setattr(zstd_push, "_packed", packed)
    push(saving(registry, b"a", b"b"))
    assert [call.args[0] for call in packed.mock_calls] == [b"a", b"b"]


def test_the_same_image_is_the_same_manifest_and_blobs_are_sent_once(registry: Registry) -> None:
    engine = saving(registry, LARGE, b"b")
    push(engine)
    before, sent = dict(registry.manifests), uploads(registry)
    assert sent == 3
    registry.manifests.clear()
    assert push(engine) is False
    assert (registry.manifests, uploads(registry)) == (before, sent)
    assert push(engine) is True


def test_layers_that_the_engine_keeps_packed_are_repacked(registry: Registry) -> None:
    """containerd's store keeps pulled layers compressed."""
    files = (gzip.compress(LARGE), zstandard.compress(b"b"))
    push(saving(registry, LARGE, b"b", files=files))
    assert unpacked(registry) == [LARGE, b"b"]


# failures


@pytest.mark.parametrize(
    "files", [(LARGE, b"x"), (LARGE[:-1], b"b"), (LARGE,), (gzip.compress(LARGE)[:-1], b"b"), ()],
    ids=["another", "shorter", "lacking", "damaged", "none"],
)  # fmt: skip
def test_a_layer_that_is_not_its_diff_id_is_refused(registry: Registry, files: tuple[bytes, ...]) -> None:
    with pytest.raises(EngineError, match=r"archive of sha256|different image"):
        push(saving(registry, LARGE, b"b", files=files))
    assert registry.manifests == {}


def test_another_configuration_is_refused(registry: Registry) -> None:
    """For example one that lists different layers than the engine reports, or none."""
    engine = saving(registry, b"a", b"b")
    turned = dataclasses.replace(engine.image, layers=engine.image.layers[::-1])
    for wrong in (dataclasses.replace(engine, image=turned), dataclasses.replace(engine, files=(b"a", b"b"))):
        with pytest.raises(EngineError, match="different image"):
            push(wrong)
    assert registry.manifests == {}


def test_an_archive_that_ends_too_soon_is_the_engines_failure(registry: Registry) -> None:
    for ends in (len(LARGE) // 2, 600, 100):
        with pytest.raises(EngineError, match="cannot be read"):
            push(dataclasses.replace(saving(registry, LARGE), ends=ends))
    assert registry.manifests == {}


def test_an_interrupted_upload_starts_again_and_is_whole(registry: Registry) -> None:
    registry.cut = 1
    push(saving(registry, LARGE))
    assert unpacked(registry) == [LARGE]


def test_uploads_that_are_always_cut_off_end(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    right = registry_http_and_auth.registry_session
    monkeypatch.setattr(
        registry_http_and_auth, "registry_session", lambda authority, tries=1: right(authority, tries=1)
    )
    registry.cut = 99
    engine = saving(registry, LARGE)
    with pytest.raises(NetworkError, match="does not answer"):
        push(engine)
    assert registry.manifests == {}
    registry.cut = 0
    push(engine)
    assert unpacked(registry) == [LARGE]


def test_a_blob_that_the_registry_refuses_is_reported(registry: Registry) -> None:
    registry.refuse = "PUT .*/uploads/.*"
    with pytest.raises(NetworkError, match=r"does not accept the blob sha256:.*500") as caught:
        push(saving(registry, LARGE))
    assert (caught.value.hint, registry.manifests) == ("NO: not now", {})


def test_an_upload_that_needs_a_new_token_sends_the_file_from_its_start(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token has expired when the upload starts, and the registry asks for a new one after it has read the file."""
    registry.bearer = f"http://{registry.host}/token"
    docker_login(tmp_path, monkeypatch, **{registry.host: "me:secret"})
    there = place(registry)
    file = tmp_path / "blob"
    file.write_bytes(LARGE)
    right = there._access._one

    def aged(method: str, url: str, scope: str, **options: Any) -> Any:
        if method == "PUT" and registry.token != "new":
            registry.token = "new"
        return right(method, url, scope, **options)

    monkeypatch.setattr(there._access, "_one", aged)
    there.put_file(oci_types.digest_of(LARGE), file)
    assert registry.blobs == {oci_types.digest_of(LARGE): LARGE}
    assert registry.lengths == [str(len(LARGE))] * 2


@pytest.mark.parametrize("sizes", [(1, 1 << 50), None])
def test_without_room_for_the_largest_layer_nothing_is_asked_for(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...] | None
) -> None:
    """If the engine does not report the size of its layers, the full disk is noticed while writing."""
    engine = dataclasses.replace(saving(registry, LARGE), bytes_of_layers=sizes)
    if sizes is None:
        push(engine)
        return
    with pytest.raises(DiskError, match="GB free") as caught:
        push(engine)
    assert "TMPDIR" in (caught.value.hint or "")
    assert registry.written() == []
