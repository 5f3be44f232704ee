"""The download of a base image from a registry in this process."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from envbuild.image.oci import base_image_download, lock_image_lookup_and_recipe
from envbuild.image.oci.base_image_download import BaseImage
from envbuild.image.oci.parallel_layer_tasks import Stopped, StopSignal
from envbuild.registry import oci_types, registry_client, registry_http_and_auth
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.registry.registry_http_and_auth import HostUnreachable
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, DiskError, HashMismatch, NetworkError
from envbuild.util.untrusted_input_errors import Refusal
from unit.conftest import forget
from unit.image.base_images import GZIP, PLATFORM, PushedBase, debian, gzipped, reference_of
from unit.registries import Registry, docker_login, serving
from unit.support import PROFILE, plan_of, whole_lock

DOCKER = "application/vnd.docker.distribution.manifest"
BASE = PushedBase([debian(), {"etc/motd": b"hello"}], {"Env": ["PATH=/usr/bin"], "Labels": {"a": "b"}})


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


def download(reference: str) -> BaseImage:
    return base_image_download.download_base_image(reference, PLATFORM, lambda name, count: None)


def files() -> set[str]:
    """Return the digests of the files in the cache. Their content is checked, and that nothing else is left."""
    folder = user_folders.cache_folder("images", make=False)
    found = {f"sha256:{file.name}": oci_types.digest_of(file.read_bytes()) for file in folder.glob("*")}
    assert list(found) == list(found.values())
    assert list(folder.glob(".*")) == []
    return set(found)


def gets(registry: Registry) -> list[str]:
    """Return the last part of each requested path, but for the registry's own."""
    return [line.rpartition("/")[2] for line, _ in registry.requests if "/team/base/" in line]


def index(
    registry: Registry, *platforms: dict[str, Any] | None, image: PushedBase = BASE, media: str = oci_types.INDEX
) -> str:
    """Put an index into the registry: `image` for the first platform, other images for the other platforms. Return the
    name of the index."""
    items = []
    for number, platform in enumerate(platforms):
        other = PushedBase([{"number": str(number).encode()}])
        digest = (other if number else image).push(registry)
        items.append(
            {
                "mediaType": oci_types.MANIFEST,
                "digest": digest,
                "size": 1,
                **({"platform": platform} if platform else {}),
            }
        )
    return reference_of(registry, registry.put(media, {"schemaVersion": 2, "mediaType": media, "manifests": items}))


AMD64, ARM64 = ({"os": "linux", "architecture": name} for name in ("amd64", "arm64"))
ATTESTATION = {"os": "unknown", "architecture": "unknown"}


def test_an_image_is_downloaded_once(registry: Registry) -> None:
    reference = BASE.reference(registry)
    shown: list[tuple[str, int]] = []
    image = base_image_download.download_base_image(reference, PLATFORM, lambda *given: shown.append(given))
    assert (image.reference, image.manifest) == (reference, reference.partition("@")[2])
    assert [layer.digest for layer in image.layers] == list(map(oci_types.digest_of, BASE.blobs))
    assert [layer.diff_id for layer in image.layers] == list(map(oci_types.digest_of, BASE.tars))
    assert [layer.size for layer in image.layers] == list(map(len, BASE.blobs))
    assert {layer.media_type for layer in image.layers} == {GZIP}
    assert (image.config.environment, image.config.labels) == ({"PATH": "/usr/bin"}, {"a": "b"})
    expected = [(f"layer {number} of 2 of the base image", len(blob)) for number, blob in enumerate(BASE.blobs, 1)]
    assert sorted(shown) == expected  # two threads
    assert files() == {image.manifest, image.config.id, *(layer.digest for layer in image.layers)}
    registry.requests.clear()
    assert download(reference) == base_image_download.read_base_image(reference, PLATFORM) == image
    assert gets(registry) == []


def test_of_an_index_the_image_of_the_platform_is_taken(registry: Registry) -> None:
    reference = index(registry, AMD64, ARM64, ATTESTATION, {**AMD64, "variant": "v3"}, None)
    image = download(reference)
    assert image.manifest == BASE.push(registry)
    assert files() == {reference.partition("@")[2], image.manifest, image.config.id} | set(
        map(oci_types.digest_of, BASE.blobs)
    )
    registry.requests.clear()
    assert download(reference) == image
    assert gets(registry) == []


@pytest.mark.parametrize(
    ("platforms", "count"), [([ARM64, ATTESTATION], "0 images"), ([AMD64, AMD64], "2 images"), ([], "0")]
)
def test_an_index_without_exactly_one_image_of_the_platform_is_refused(
    registry: Registry, platforms: list[dict[str, Any]], count: str
) -> None:
    reference = index(registry, *platforms)
    with pytest.raises(BuildError, match=f"the base image {reference} has {count}.* for linux/amd64") as caught:
        download(reference)
    assert "name one image by its tag or digest" in str(caught.value.hint)
    with pytest.raises(BuildError):
        base_image_download.read_base_image(reference, PLATFORM)


def test_an_index_in_an_index_is_refused(registry: Registry) -> None:
    inner = index(registry, AMD64).partition("@")[2]
    items = [{"mediaType": oci_types.INDEX, "digest": inner, "size": 1, "platform": AMD64}]
    outer = registry.put(oci_types.INDEX, {"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": items})
    with pytest.raises(Refusal) as caught:
        download(reference_of(registry, outer))
    assert caught.value.reason.id == "malformed"


@pytest.mark.parametrize("changes", [{"architecture": "arm64"}, {"os": "windows"}, {"os": None}])
def test_an_image_of_another_platform_is_refused_before_its_layers(registry: Registry, changes: dict[str, Any]) -> None:
    base = PushedBase(BASE.layers, changes=changes)
    reference = base.reference(registry)
    with pytest.raises(BuildError, match=f"the base image {reference} is not for linux/amd64"):
        download(reference)
    assert not set(gets(registry)) & set(map(oci_types.digest_of, base.blobs))


@pytest.mark.parametrize(
    ("media_type", "pack", "expected"),
    [
        ("application/vnd.docker.image.rootfs.diff.tar.gzip", gzipped, GZIP),
        ("application/vnd.docker.image.rootfs.diff.tar", bytes, "application/vnd.oci.image.layer.v1.tar"),
        ("application/vnd.docker.image.rootfs.diff.tar.zstd", zstandard.compress, f"{GZIP[:-4]}zstd"),
        (f"{GZIP[:-4]}zstd", zstandard.compress, f"{GZIP[:-4]}zstd"),
        ("application/vnd.oci.image.layer.v1.tar", bytes, "application/vnd.oci.image.layer.v1.tar"),
    ],
)
def test_images_of_docker_and_other_compressions_are_taken(
    registry: Registry, media_type: str, pack: Callable[[bytes], bytes], expected: str
) -> None:
    base = PushedBase(BASE.layers, media_type=media_type, manifest_type=f"{DOCKER}.v2+json", pack=pack)
    image = download(base.reference(registry))
    assert {layer.media_type for layer in image.layers} == {expected}
    assert download(index(registry, AMD64, image=base, media=f"{DOCKER}.list.v2+json")).layers == image.layers


@pytest.mark.parametrize(
    "media_type",
    [None, 5, "", "text/plain", "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip", GZIP.upper(), [GZIP]],
)
def test_a_layer_of_an_unknown_type_is_refused_before_any_is_downloaded(registry: Registry, media_type: Any) -> None:
    base = PushedBase(BASE.layers, media_type=media_type)
    with pytest.raises(BuildError, match="which is not supported"):
        download(base.reference(registry))
    assert not files() & set(map(oci_types.digest_of, base.blobs))


# failures


def test_without_a_login_the_image_and_the_command_are_named(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = BASE.reference(registry)
    registry.user, registry.password = "me", "secret"
    with pytest.raises(NetworkError) as caught:
        download(reference)
    assert (caught.value.code, caught.value.kind) == (7, "network")
    assert caught.value.message == f"the base image {reference} cannot be fetched from its registry"
    assert "401" in str(caught.value.hint)
    assert f"docker login {registry.host}" in str(caught.value.hint)
    assert files() == set()
    docker_login(tmp_path, monkeypatch, **{registry.host: "me:secret"})
    forget()
    assert len(download(reference).layers) == 2


@pytest.mark.parametrize("what", ["manifest", "configuration", "layer"])
def test_a_part_that_the_registry_lacks_is_an_error_of_the_network(registry: Registry, what: str) -> None:
    reference = BASE.reference(registry)
    if what == "manifest":
        registry.manifests.clear()
    else:
        raw = BASE.configuration if what == "configuration" else BASE.blobs[1]
        del registry.blobs[oci_types.digest_of(raw)]
    with pytest.raises(NetworkError, match=reference) as caught:
        download(reference)
    assert f"has no {'manifest' if what == 'manifest' else 'blob'} sha256:" in str(caught.value.hint)
    assert ("docker login" in str(caught.value.hint)) == (what == "manifest")


@pytest.mark.parametrize("code", [403, 429])
def test_the_message_of_the_registry_is_shown(registry: Registry, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """For example, the message that a limit of downloads is reached, which a login does not change."""
    reference = BASE.reference(registry)
    body = b'{"errors": [{"code": "TOOMANYREQUESTS", "message": "You have reached your pull rate limit"}]}'
    registry.lies[f"/v2/team/base/manifests/{reference.partition('@')[2]}"] = (code, {}, body)
    whole = registry_http_and_auth.registry_session
    monkeypatch.setattr(registry_http_and_auth, "registry_session", lambda authority, tries=1: whole(authority, 1))
    with pytest.raises(NetworkError, match=reference) as caught:
        download(reference)
    assert f": {code}\nTOOMANYREQUESTS: You have reached your pull rate limit" in str(caught.value.hint)
    assert (f"docker login {registry.host}" in str(caught.value.hint)) == (code == 403)


@pytest.mark.parametrize("what", ["manifest", "configuration", "layer"])
def test_wrong_content_is_refused_and_not_kept(registry: Registry, what: str) -> None:
    reference = BASE.reference(registry)
    digest = reference.partition("@")[2]
    if what == "manifest":
        media, raw = registry.manifests[digest]
        registry.manifests[digest] = (media, raw + b" ")
    else:
        raw = BASE.configuration if what == "configuration" else BASE.blobs[1]
        digest = oci_types.digest_of(raw)
        registry.blobs[digest] = raw[:-1] + b"x"
    with pytest.raises(Refusal, match=f"the base image {reference} is refused: 127.* serves") as caught:
        download(reference)
    assert caught.value.reason.id == "digest"
    assert "run the same command again" in str(caught.value.hint)
    assert digest not in files()


@pytest.mark.parametrize("sizes", [lambda size: size - 1, lambda size: 0])
def test_a_layer_that_is_larger_than_in_the_manifest_is_refused(
    registry: Registry, sizes: Callable[[int], int]
) -> None:
    base = PushedBase(BASE.layers, sizes=sizes)
    with pytest.raises(Refusal) as caught:
        download(base.reference(registry))
    assert caught.value.reason.id == "digest"
    assert not files() & set(map(oci_types.digest_of, base.blobs))


def test_a_layer_that_does_not_end_is_not_read_on(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = BASE.reference(registry)
    count = 0

    def endless(self: object, digest: str, start: int) -> Iterator[bytes]:
        nonlocal count
        while True:
            count += 1
            yield b"x" * 100

    monkeypatch.setattr(Repository, "_blocks_from", endless)
    base_image_download._write(oci_types.digest_of(BASE.configuration), BASE.configuration)
    with pytest.raises(Refusal, match="more bytes"):
        base_image_download.download_base_image(reference, PLATFORM, lambda name, count: None)
    assert count < 1 << 20


@pytest.mark.parametrize(
    "sizes", [lambda size: -1, lambda size: None, lambda size: True, lambda size: str(size), lambda size: 1.5]
)
def test_a_layer_without_a_size_is_refused(registry: Registry, sizes: Callable[[int], Any]) -> None:
    with pytest.raises(Refusal, match="a layer without a size"):
        download(PushedBase(BASE.layers, sizes=sizes).reference(registry))


def test_the_disk_is_looked_at_before_the_layers(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a manifest states sizes that no disk has."""
    base = PushedBase(BASE.layers, sizes=lambda size: 10**18)
    with pytest.raises(DiskError, match=r"the base image needs about 2000000000\.0 GB"):
        download(base.reference(registry))
    reference = BASE.reference(registry)
    base_image_download.download_base_manifest(reference, PLATFORM)
    sizes = sum(map(len, BASE.blobs))
    assert base_image_download.missing_bytes(reference, PLATFORM) == sizes
    free = [sizes - 1]
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(0, 0, free[0]))
    with pytest.raises(DiskError):
        download(reference)
    assert not set(gets(registry)) & set(map(oci_types.digest_of, BASE.blobs))
    free = [sizes]
    assert len(download(reference).layers) == 2


def test_a_manifest_with_two_sizes_of_one_layer_is_refused(registry: Registry) -> None:
    sizes = iter((1, 2))
    base = PushedBase([debian(), debian()], sizes=lambda size: next(sizes))
    with pytest.raises(Refusal, match="one layer with two sizes"):
        download(base.reference(registry))
    base = PushedBase([debian(), debian()])
    registry.sent.clear()
    assert len(download(base.reference(registry)).layers) == 2
    assert [digest for digest, _ in registry.sent].count(oci_types.digest_of(base.blobs[0])) == 1


# several downloads at the same time, and downloads that are continued

LARGE = PushedBase([{"noise": random.Random(seed).randbytes(200_000)} for seed in range(6)])
FIRST = oci_types.digest_of(LARGE.blobs[0])


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_client, "_PAUSES", (0, 0, 0))
    monkeypatch.setattr(registry_client, "_BLOCK", 10_000)  # what is less than a block is lost


@pytest.fixture
def one_layer(registry: Registry) -> str:
    """Return the name of an image with the first layer of LARGE."""
    return PushedBase(LARGE.layers[:1]).reference(registry)


def part_of(digest: str) -> Path:
    return user_folders.cache_folder("images") / f".{digest[7:]}.part"


def sent(registry: Registry) -> list[int]:
    """Return how many bytes of the first layer each response had."""
    return [count for digest, count in registry.sent if digest == FIRST]


def test_four_layers_are_downloaded_at_once(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first four begin before one of them ends, and never more than four run."""
    reference, whole = LARGE.reference(registry), Repository.unchecked_blocks
    together, running, most = threading.Barrier(4, timeout=10), set[str](), list[int]()

    def counted(self: Repository, digest: str, start: int, size: int) -> Iterator[bytes]:
        running.add(digest)
        if digest in map(oci_types.digest_of, LARGE.blobs[:4]):
            together.wait()
        most.append(len(running))
        yield from whole(self, digest, start, size)
        running.remove(digest)

    monkeypatch.setattr(Repository, "unchecked_blocks", counted)
    download(reference)
    assert max(most) == 4
    assert set(map(oci_types.digest_of, LARGE.blobs)) <= files()


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_response_is_resumed(registry: Registry, one_layer: str, no_pauses: None, ranges: bool) -> None:
    """A registry without range requests sends the whole layer again."""
    registry.ranges = ranges
    size = len(LARGE.blobs[0])
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    registry.cut_blobs = [70_000, 90_000]
    shown: list[int] = []
    base_image_download.download_base_image(one_layer, PLATFORM, lambda title, count: shown.append(count))
    assert sum(shown) == size and FIRST in files()
    assert sent(registry) == ([70_000, 90_000, size - 160_000] if ranges else [70_000, 90_000, size])


def test_only_failures_in_a_row_end_a_download(
    registry: Registry, one_layer: str, no_pauses: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long download may be interrupted often. A complete block that arrives ends a row of failures; less than a block
    does not."""
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    waited: list[float] = []
    monkeypatch.setattr(registry_client, "_PAUSES", (0.001, 0.002, 0.003))
    monkeypatch.setattr(time, "sleep", waited.append)
    registry.cut_blobs = [0, 9_999, 0, 20_000, 0, 10_000, *[10_000] * 8]
    download(one_layer)
    assert FIRST in files()
    assert waited == [0.001, 0.002, 0.003, 0.001, 0.002, 0.001, *[0.001] * 8]
    waited.clear()
    (part_of(FIRST).parent / FIRST[7:]).unlink()
    registry.cut_blobs = [30_000, 0, 0, 0]
    with pytest.raises(NetworkError):
        download(one_layer)
    assert waited == [0.001, 0.002, 0.003]


@pytest.mark.parametrize("arrived", [True, False])
def test_a_registry_that_is_gone_for_a_while_is_waited_for_during_a_download(
    registry: Registry, one_layer: str, no_pauses: None, monkeypatch: pytest.MonkeyPatch, arrived: bool
) -> None:
    """envbuild waits only if the registry has sent something before: otherwise the address of the registry may be
    wrong."""
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    whole, answers = Repository._get, iter([True, False, False] if arrived else [False])

    def get(self: Repository, path: str, **options: Any) -> Any:
        if not next(answers, True):
            raise HostUnreachable("127.0.0.1 does not answer: ConnectionError")
        return whole(self, path, **options)

    monkeypatch.setattr(Repository, "_get", get)
    registry.cut_blobs = [20_000]
    if not arrived:
        with pytest.raises(NetworkError) as caught:
            download(one_layer)
        assert "does not answer" in str(caught.value.hint)
        assert registry.cut_blobs, "no other request was sent"
        return
    download(one_layer)
    assert sent(registry) == [20_000, len(LARGE.blobs[0]) - 20_000]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_registry_that_fails_for_a_while_is_waited_for_during_a_download(
    registry: Registry, one_layer: str, no_pauses: None, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    registry.cut_blobs = [20_000]
    failures = [("GET .*/blobs/.*", status, {"Retry-After": "7"})] * (4 if status != 500 else 1)
    registry.on_request = lambda request: setattr(registry, "failures", failures) if "blobs" in request else None
    download(one_layer)
    assert sent(registry) == [20_000, len(LARGE.blobs[0]) - 20_000]
    assert [seconds for seconds in waited if seconds > 2] == [7], "the others are urllib3's"


@pytest.mark.parametrize(("status", "headers"), [(403, {}), (501, {}), (500, {"Retry-After": "61"})])
def test_other_statuses_end_a_download(
    registry: Registry, one_layer: str, no_pauses: None, status: int, headers: dict[str, str]
) -> None:
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    failures = [("GET .*/blobs/.*", status, headers)]
    registry.cut_blobs = [20_000]
    registry.on_request = lambda request: setattr(registry, "failures", failures) if "blobs" in request else None
    with pytest.raises(NetworkError) as caught:
        download(one_layer)
    assert str(status) in str(caught.value.hint)
    assert len(sent(registry)) == 1


def test_an_interrupted_download_is_resumed_by_the_next_one(
    registry: Registry, one_layer: str, no_pauses: None
) -> None:
    size = len(LARGE.blobs[0])
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    registry.cut_blobs = [50_000, 10_000, 10_000, 10_000, 0, 0, 0]
    with pytest.raises(NetworkError, match=one_layer):
        download(one_layer)
    assert part_of(FIRST).read_bytes() == LARGE.blobs[0][:80_000]
    assert not part_of(FIRST).with_name(FIRST[7:]).exists()
    assert base_image_download.missing_bytes(one_layer, PLATFORM) == size - 80_000
    registry.sent.clear()
    download(one_layer)
    assert sent(registry) == [size - 80_000]
    assert FIRST in files()


@pytest.mark.parametrize("length", [1, 80_000, len(LARGE.blobs[0]), len(LARGE.blobs[0]) + 1])
def test_a_wrong_part_is_discarded(registry: Registry, one_layer: str, length: int) -> None:
    part_of(FIRST).write_bytes(b"x" * length)
    download(one_layer)
    assert FIRST in files()
    assert sent(registry)[-1] == len(LARGE.blobs[0])


def test_a_part_that_is_complete_needs_no_request(registry: Registry, one_layer: str) -> None:
    part_of(FIRST).write_bytes(LARGE.blobs[0])
    download(one_layer)
    assert (FIRST in files(), sent(registry)) == (True, [])


def test_wrong_content_leaves_no_part(registry: Registry, one_layer: str) -> None:
    registry.blobs[FIRST] = LARGE.blobs[0][:-1] + b"x"
    part_of(FIRST).write_bytes(LARGE.blobs[0][:1000])
    with pytest.raises(Refusal, match="serves wrong content"):
        download(one_layer)
    assert not files() & {FIRST}
    assert sent(registry) == [len(LARGE.blobs[0]) - 1000, len(LARGE.blobs[0])]


@pytest.mark.parametrize("content_range", ["bytes 999-1999/5000", ""])
def test_instead_of_a_different_part_the_whole_layer_is_requested(
    registry: Registry, one_layer: str, content_range: str
) -> None:
    part_of(FIRST).write_bytes(LARGE.blobs[0][:1000])
    registry.content_range = content_range
    shown: list[int] = []
    base_image_download.download_base_image(one_layer, PLATFORM, lambda title, count: shown.append(count))
    assert FIRST in files()
    assert (sum(shown), sent(registry)[-1]) == (len(LARGE.blobs[0]) - 1000, len(LARGE.blobs[0]))


@pytest.mark.parametrize("part", [b"", LARGE.blobs[0] + b"x" * 10])
def test_a_layer_that_is_smaller_than_in_the_manifest_is_an_error(
    registry: Registry, no_pauses: None, part: bytes
) -> None:
    """The registry refuses the range of bytes that it does not have."""
    reference = PushedBase(LARGE.layers[:1], sizes=lambda size: size + 1000).reference(registry)
    part_of(FIRST).write_bytes(part)
    with pytest.raises(NetworkError) as caught:
        download(reference)
    size = len(LARGE.blobs[0])
    assert f"only {max(size, len(part))} of the {size + 1000} bytes" in str(caught.value.hint)
    assert not part_of(FIRST).with_name(FIRST[7:]).exists()


@pytest.mark.parametrize("ranges", [True, False])
def test_a_response_that_is_only_too_short_is_resumed(
    registry: Registry, one_layer: str, no_pauses: None, ranges: bool
) -> None:
    """Nothing in the response shows that it is incomplete. If the registry has no range requests, the part is kept."""
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    registry.part_limit, registry.ranges = 90_000, ranges
    if ranges:
        download(one_layer)
        assert sent(registry) == [90_000, 90_000, len(LARGE.blobs[0]) - 180_000]
    else:
        with pytest.raises(NetworkError) as caught:
            download(one_layer)
        assert f"sends only 90000 of the {len(LARGE.blobs[0])} bytes" in str(caught.value.hint)
        assert part_of(FIRST).read_bytes() == LARGE.blobs[0][:90_000]
        registry.part_limit = None
        download(one_layer)
    assert FIRST in files()


def test_a_failure_ends_the_other_downloads(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of earlier layers."""
    reference, whole, count = LARGE.reference(registry), Repository.unchecked_blocks, [0]
    del registry.blobs[oci_types.digest_of(LARGE.blobs[3])]

    def slow(self: Repository, digest: str, start: int, size: int) -> Iterator[bytes]:
        while digest == FIRST and count[0] < 100:
            count[0] += 1
            time.sleep(0.05)
            yield b"x"
        yield from whole(self, digest, start, size)

    monkeypatch.setattr(Repository, "unchecked_blocks", slow)
    with pytest.raises(NetworkError) as caught:
        download(reference)
    assert "has no blob" in str(caught.value.hint)
    assert count[0] < 100


@pytest.mark.parametrize("blocks", [5, 15])
def test_a_download_also_stops_before_its_first_new_byte(
    registry: Registry, one_layer: str, no_pauses: None, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    """The download stops while ten blocks of the part are hashed, and while these blocks are skipped in the
    response."""
    base_image_download.download_base_manifest(one_layer, PLATFORM)
    image = base_image_download.read_base_image(one_layer, PLATFORM)
    assert image
    registry.ranges = False
    monkeypatch.setattr(base_image_download, "_BLOCK", 10_000)
    part_of(FIRST).write_bytes(LARGE.blobs[0][:100_000])
    stop, looks = StopSignal(), itertools.count()
    monkeypatch.setattr(stop, "is_set", lambda: next(looks) == blocks)
    place = Repository(Reference.parse(one_layer))
    with pytest.raises(Stopped):
        base_image_download._download_layer(place, image.layers[0], lambda count: None, stop)
    assert part_of(FIRST).stat().st_size == 100_000
    assert next(looks) == blocks + 1
    assert len(sent(registry)) == (blocks > 10)


def test_an_interruption_leaves_only_parts(registry: Registry) -> None:
    """An exception in one thread, for example after Ctrl-C in the main thread, ends the downloads of the other
    threads."""
    reference = LARGE.reference(registry)

    def stop(title: str, count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base_image_download.download_base_image(reference, PLATFORM, stop)
    assert not {file.name for file in part_of(FIRST).parent.iterdir()} & {
        oci_types.digest_of(blob)[7:] for blob in LARGE.blobs
    }
    download(reference)
    assert set(map(oci_types.digest_of, LARGE.blobs)) <= files()


@pytest.mark.parametrize(("number", "stays"), [(errno.ENOSPC, False), (errno.EIO, True), (errno.EACCES, True)])
def test_only_a_full_disk_leaves_no_part(
    registry: Registry, one_layer: str, monkeypatch: pytest.MonkeyPatch, number: int, stays: bool
) -> None:
    base_image_download.download_base_manifest(one_layer, PLATFORM)

    def fail(handle: int) -> None:
        raise OSError(number, "failed")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="failed"):
        patched.setattr(os, "fsync", fail)
        download(one_layer)
    assert part_of(FIRST).exists() == stays
    assert not part_of(FIRST).with_name(FIRST[7:]).exists()


@pytest.mark.parametrize(
    "raw",
    [
        b"{", b"[]", b"{}", b'{"os": "linux", "os": "linux"}',
        BASE.configuration.replace(b'"PATH=/usr/bin"', b'"PATH=/a", "PATH=/b"'),
        BASE.configuration.replace(b'"Env"', b'"env"'),
        BASE.configuration.replace(b"/usr/bin", b"\\ud800"),
        BASE.configuration.replace(b"sha256:", b"sha512:"),
        BASE.configuration.replace(b'"diff_ids": [', b'"diff_ids": ["sha256:' + b"0" * 64 + b'", '),
    ],
)  # fmt: skip
def test_an_invalid_configuration_is_refused(registry: Registry, raw: bytes) -> None:
    reference = reference_of(registry, BASE.push(registry, raw))
    for read in (download, lambda reference: base_image_download.read_base_image(reference, PLATFORM)):
        with pytest.raises(Refusal, match=f"the base image {reference} is refused: ") as caught:
            read(reference)
        assert caught.value.hint
    assert not files() & set(map(oci_types.digest_of, BASE.blobs))


@pytest.mark.parametrize("before", [b'"layers": ', b'"digest": '])
def test_a_manifest_with_a_duplicate_key_is_refused(registry: Registry, before: bytes) -> None:
    media, raw = registry.manifests[BASE.push(registry)]
    assert before in raw
    twice = raw.replace(before, before + b"[], " + before, 1)
    digest = oci_types.digest_of(twice)
    registry.manifests[digest] = (media, twice)
    with pytest.raises(Refusal, match="twice"):
        download(reference_of(registry, digest))


# the history


def history_of(registry: Registry, history: Any) -> list[dict[str, Any]]:
    base = PushedBase(BASE.layers, changes={"history": history})
    return [dict(entry) for entry in download(base.reference(registry)).history]


def test_an_image_with_triggers_is_refused(registry: Registry) -> None:
    base = PushedBase([debian()], {"OnBuild": ["RUN make"]})
    with pytest.raises(BuildError, match="has ONBUILD instructions"):
        download(base.reference(registry))


def test_a_layer_whose_file_is_cut_off_is_downloaded_again(registry: Registry) -> None:
    image = download(BASE.reference(registry))
    file = user_folders.cache_folder("images") / image.layers[0].digest.removeprefix("sha256:")
    file.write_bytes(file.read_bytes()[:-1])
    assert base_image_download.missing_bytes(image.reference, PLATFORM) == image.layers[0].size
    download(image.reference)
    assert files() >= {image.layers[0].digest}


@pytest.mark.parametrize("name", ["Team/Python", "a//b", "a:b:c"])
def test_a_reference_that_no_registry_accepts_has_no_other_files(name: str) -> None:
    assert base_image_download.cached_files(f"{name}@sha256:{'a' * 64}", PLATFORM) == {"a" * 64}


def test_the_history_is_kept_with_its_empty_entries(registry: Registry) -> None:
    full = {"created": "2026-01-01T00:00:00Z", "created_by": "RUN x", "author": "a", "comment": "c"}
    history = [full, {"created_by": "ENV A=b", "empty_layer": True}, {"created_by": "RUN y", "other": 5}]
    assert history_of(registry, history) == [full, history[1], {"created_by": "RUN y"}]


@pytest.mark.parametrize(
    "history",
    [
        None, [], {}, "x", [{}], [{}, {}, {}], [{}, {"empty_layer": True}], [{}, 5], [{}, {"created_by": 5}],
        [{}, {"empty_layer": 0}], [{}, {}, {"empty_layer": "yes"}],
    ],
)  # fmt: skip
def test_a_missing_or_invalid_history_has_one_entry_for_each_layer(registry: Registry, history: Any) -> None:
    found = history_of(registry, history)
    assert len(found) == 2
    assert all(entry["created_by"].startswith(f"{registry.host}/team/base@sha256:") for entry in found)


# the cache


def test_without_the_manifest_nothing_is_known(registry: Registry) -> None:
    reference = BASE.reference(registry)
    assert base_image_download.read_base_image(reference, PLATFORM) is None
    assert base_image_download.missing_bytes(reference, PLATFORM) is None
    assert base_image_download.cached_files(reference, PLATFORM) == {reference.rpartition(":")[2]}
    assert registry.requests == []


def test_what_the_cache_has_is_known(registry: Registry) -> None:
    reference = index(registry, AMD64)
    image = download(reference)
    assert base_image_download.missing_bytes(reference, PLATFORM) == 0
    assert base_image_download.cached_files(reference, PLATFORM) == {name.removeprefix("sha256:") for name in files()}
    (user_folders.cache_folder("images") / image.layers[0].digest[7:]).unlink()
    assert base_image_download.missing_bytes(reference, PLATFORM) == image.layers[0].size
    assert base_image_download.cached_files(reference, "linux/arm64") == {reference.rpartition(":")[2]}


@pytest.mark.parametrize("what", ["manifest", "config"])
def test_a_damaged_manifest_or_configuration_is_downloaded_again(registry: Registry, what: str) -> None:
    reference = BASE.reference(registry)
    image = download(reference)
    digest = image.manifest if what == "manifest" else image.config.id
    file = user_folders.cache_folder("images") / digest.removeprefix("sha256:")
    for content in (b"{}", None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        registry.requests.clear()
        assert download(reference) == image
        assert gets(registry) == [digest]
    file.write_bytes(b"{}")
    assert base_image_download.read_base_image(reference, PLATFORM) is None
    assert not file.exists()


def test_a_damaged_layer_is_removed_when_the_base_image_is_read(registry: Registry, project: Path) -> None:
    profile = {**PROFILE, "base": {"image": BASE.reference(registry)}, "apt": []}
    lock = whole_lock(plan_of(project, profile))
    assert lock.image
    image = download(lock.image)
    one, two = (user_folders.cache_folder("images") / layer.digest[7:] for layer in image.layers)
    for damaged in (gzipped(b"x" * 2000), b"", one.read_bytes()[:-1]):
        one.write_bytes(damaged)
        with pytest.raises(HashMismatch, match=image.layers[0].digest):
            lock_image_lookup_and_recipe.describe_lock(lock, {})
        assert not one.exists() and two.exists()
        download(lock.image)
    assert [layer.title for layer in lock_image_lookup_and_recipe.describe_lock(lock, {}).layers][:3] == [
        "base image, layer 1", "base image, layer 2", "virtual environment"
    ]  # fmt: skip


def test_a_layer_that_is_invalid_in_the_registry_stays_in_the_cache(registry: Registry, project: Path) -> None:
    base = PushedBase(BASE.layers, pack=lambda tar: gzipped(tar)[:-1])
    profile = {**PROFILE, "base": {"image": base.reference(registry)}, "apt": []}
    lock = whole_lock(plan_of(project, profile))
    assert lock.image
    download(lock.image)
    with pytest.raises(Refusal):
        lock_image_lookup_and_recipe.describe_lock(lock, {})
    assert set(map(oci_types.digest_of, base.blobs)) <= files()


def test_the_configuration_in_the_cache_is_the_one_of_the_registry(registry: Registry) -> None:
    image = download(BASE.reference(registry))
    raw = (user_folders.cache_folder("images") / image.config.id[7:]).read_bytes()
    assert json.loads(raw)["config"] == dict(BASE.config)
