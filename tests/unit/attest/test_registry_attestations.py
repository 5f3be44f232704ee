"""Statements about environments and images in a registry: statements that several machines publish at the same time are
all kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from envbuild.attest import keys_and_signatures, registry_attestations
from envbuild.attest.keys_and_signatures import Envelope, Signer
from envbuild.registry import oci_types
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.util import strict_and_canonical_json
from unit.registries import Registry, serving

TAG = "environment-0123456789ab"
KIND = "https://example/kind"


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


@pytest.fixture
def signer() -> Signer:
    return new_signer()


def new_signer() -> Signer:
    hidden, _ = keys_and_signatures.generate("secret")
    return keys_and_signatures.private(hidden, "key", "secret")


def place(registry: Registry) -> Repository:
    return Repository(Reference.parse(f"{registry.host}/team/sample"))


def publish(registry: Registry, text: str, signer: Signer | None) -> tuple[str, int]:
    wanted = [(KIND, f'{{"text": "{text}"}}'.encode())]
    manifest, new = registry_attestations.publish_without_image(place(registry), TAG, wanted, signer)
    return manifest.digest, new


def texts(registry: Registry, target: str = TAG) -> list[str]:
    found, refused = registry_attestations.fetch_envelopes_without_image(place(registry), target)
    assert not refused
    return texts_in(found)


def texts_in(found: list[Envelope]) -> list[str]:
    return sorted(
        match[1].decode()
        for envelope in found
        if (match := re.search(rb'"text": "(\w+)"', keys_and_signatures.envelope_payload(envelope)))
    )


def listed(registry: Registry) -> int:
    manifest = place(registry).manifest(TAG)
    return len(manifest.layers) if manifest else 0


def publish_during(
    registry: Registry, line: str, *others: tuple[str, Signer | None], publish: Callable[..., object] = publish
) -> None:
    """Let other machines publish a statement each, while the registry has received a request and has not answered."""

    def interleave(request: str) -> None:
        if re.fullmatch(line, request):
            registry.on_request = None
            for text, signer in others:
                publish(registry, text, signer)

    registry.on_request = interleave


WRITES = [f"PUT /v2/team/sample/manifests/{TAG}", f"PUT /v2/team/sample/manifests/{TAG}-.*", ".*blobs/uploads/.*"]


@pytest.mark.slow
@pytest.mark.parametrize("line", [*WRITES, "GET /v2/team/sample/tags/list"])
@pytest.mark.parametrize("before", [0, 1])
def test_two_machines_that_publish_at_the_same_time_lose_nothing(registry: Registry, line: str, before: int) -> None:
    """One machine has read the list, and writes it after the other machine has written it."""
    if before:
        publish(registry, "earlier", new_signer())
    publish_during(registry, line, ("second", new_signer()))
    publish(registry, "first", new_signer())
    assert registry.on_request is None
    assert texts(registry) == ["earlier", "first", "second"][1 - before :]


def test_three_machines_with_one_key_lose_nothing(registry: Registry, signer: Signer) -> None:
    publish_during(registry, WRITES[0], ("second", signer), ("third", signer))
    publish(registry, "first", signer)
    assert listed(registry) == 1, "the list alone has lost the others"
    assert texts(registry) == ["first", "second", "third"]


def test_the_next_push_completes_the_list(registry: Registry, signer: Signer) -> None:
    publish_during(registry, WRITES[0], ("second", signer))
    publish(registry, "first", signer)
    digest, new = publish(registry, "second", signer)
    assert (new, listed(registry), texts(registry, digest)) == (0, 2, ["first", "second"])
    registry.requests.clear()
    assert publish(registry, "first", signer) == (digest, 0)
    assert registry.written() == []


def test_a_digest_names_exactly_its_list(registry: Registry, signer: Signer) -> None:
    digest, _ = publish(registry, "first", signer)
    publish(registry, "second", signer)
    assert texts(registry, digest) == ["first"]


def test_another_tag_of_the_list_finds_the_same(registry: Registry, signer: Signer) -> None:
    publish_during(registry, WRITES[0], ("second", signer))
    publish(registry, "first", signer)
    registry.manifests["environment"] = registry.manifests[TAG]
    assert texts(registry, "environment") == ["first", "second"]


def test_a_complete_list_needs_no_other_manifest(registry: Registry, signer: Signer) -> None:
    for text in ("first", "second"):
        publish(registry, text, signer)
    registry.requests.clear()
    texts(registry)
    assert [line for line, _ in registry.requests if "manifests" in line] == [f"GET /v2/team/sample/manifests/{TAG}"]


def test_statements_of_another_lock_do_not_belong_to_it(registry: Registry, signer: Signer) -> None:
    publish(registry, "first", signer)
    own = next(name for name in registry.manifests if name.startswith(f"{TAG}-"))
    for name in (own.replace("0123456789ab", "ba9876543210"), f"{TAG}-other", f"x{own}", f"{own}0"):
        registry.manifests[name] = registry.manifests[own]
    registry.manifests.pop(TAG), registry.manifests.pop(own)
    assert texts(registry) == []


def test_an_unsigned_statement_has_no_tag_and_gives_way(registry: Registry, signer: Signer) -> None:
    publish(registry, "first", None)
    assert [name for name in registry.manifests if ":" not in name] == [TAG]
    publish(registry, "second", signer)
    assert texts(registry) == ["second"]


@pytest.mark.parametrize("raw", [b"{", b'{"layers": 1}', b'{"annotations": [], "layers": [{}]}'])
def test_an_invalid_manifest_of_one_statement_hides_no_other(registry: Registry, signer: Signer, raw: bytes) -> None:
    publish(registry, "first", signer)
    registry.manifests[f"{TAG}-{'0' * 16}"] = (oci_types.MANIFEST, raw)
    publish(registry, "second", signer)
    assert listed(registry) == 2
    found, refused = registry_attestations.fetch_envelopes_without_image(place(registry), TAG)
    assert (len(found), len(refused)) == (2, 1)


def test_a_layer_without_a_digest_is_left_out_of_the_next_list(registry: Registry, signer: Signer) -> None:
    registry.manifests[TAG] = (oci_types.MANIFEST, b'{"layers": [{}]}')
    publish(registry, "first", signer)
    assert texts(registry) == ["first"]


def test_a_registry_that_lists_no_tags_works_as_before(registry: Registry, signer: Signer) -> None:
    registry.tag_page = None
    for text in ("first", "second"):
        publish(registry, text, signer)
    assert texts(registry) == ["first", "second"]


@pytest.mark.parametrize("code", [401, 403, 501])
def test_a_registry_that_refuses_the_list_of_tags_works_too(registry: Registry, signer: Signer, code: int) -> None:
    registry.lies["/v2/team/sample/tags/list"] = (code, {}, b"{}")
    for text in ("first", "second"):
        publish(registry, text, signer)
    assert texts(registry) == ["first", "second"]


def test_an_invalid_list_of_tags_hides_no_statement(registry: Registry, signer: Signer) -> None:
    publish(registry, "first", signer)
    registry.lies["/v2/team/sample/tags/list"] = (200, {}, b'{"tags": 1}')
    found, refused = registry_attestations.fetch_envelopes_without_image(place(registry), TAG)
    assert (len(found), len(refused)) == (1, 1)


@pytest.mark.parametrize("raw", [b"{", b'{"layers": 1}'])
def test_an_invalid_list_hides_no_statement_with_its_own_tag(registry: Registry, signer: Signer, raw: bytes) -> None:
    publish(registry, "first", signer)
    registry.manifests[TAG] = (oci_types.MANIFEST, raw)
    found, refused = registry_attestations.fetch_envelopes_without_image(place(registry), TAG)
    assert (len(found), len(refused)) == (1, 1)


def test_the_number_of_requests_for_statements_is_limited(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_attestations, "_MOST", 3)
    names = [f"{TAG}-{number:016x}" for number in range(5)]
    registry.lies["/v2/team/sample/tags/list"] = (200, {}, json.dumps({"tags": names[:2] * 4 + names}).encode())
    found, refused = registry_attestations.fetch_envelopes_without_image(place(registry), TAG)
    assert (found, [one.reason.id for one in refused]) == ([], ["too-large"])
    requested = [line for line, _ in registry.requests if f"{TAG}-" in line]
    assert requested == [f"GET /v2/team/sample/manifests/{name}" for name in names[:3]]


@pytest.mark.parametrize("kind", ["large", "wrong"])
def test_refused_statements_count_towards_the_total_size(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A registry could otherwise make clients download the largest size as often as the number of pieces allows."""
    monkeypatch.setattr(registry_attestations, "_TOTAL", 4500)
    monkeypatch.setattr(strict_and_canonical_json, "MAX_BYTES", 1000)
    monkeypatch.setattr(oci_types, "MAX_MANIFEST", 1000)
    layers = [oci_types.descriptor(registry_attestations.ENVELOPE, bytes([byte]) * 1001) for byte in range(9)]
    for byte, layer in enumerate(layers):
        registry.blobs[layer["digest"]] = bytes([byte]) * 1001 if kind == "large" else b"wrong" * 200
    manifest = Manifest(json.dumps({"mediaType": oci_types.MANIFEST, "layers": layers}).encode(), oci_types.MANIFEST)
    monkeypatch.setattr(oci_types, "MAX_MANIFEST", len(manifest.raw))
    registry.manifests[TAG] = (oci_types.MANIFEST, manifest.raw)
    found, refused = registry_attestations.fetch_envelopes_without_image(place(registry), TAG)
    assert (found, len(refused)) == ([], 9)
    assert "all evidence together is larger than" in refused[-1].message
    assert sum("/blobs/" in line for line, _ in registry.requests) <= 5


# an image

SUBJECT = Manifest(b'{"mediaType": "x"}', oci_types.MANIFEST)
ATT, INDEX = registry_attestations.att_tag(SUBJECT.digest), oci_types.fallback_tag(SUBJECT.digest)


def publish_about_image(registry: Registry, text: str, signer: Signer | None) -> int:
    wanted = [(KIND, f'{{"text": "{text}"}}'.encode())]
    return registry_attestations.publish(place(registry), SUBJECT, wanted, signer)


def texts_about_image(registry: Registry) -> list[str]:
    found, refused = registry_attestations.fetch_envelopes(place(registry), SUBJECT.digest)
    assert not refused
    return texts_in(found)


def texts_in_att(registry: Registry) -> list[str]:
    return texts_in([json.loads(registry.blobs[item["digest"]]) for item in document(registry, ATT)["layers"]])


def document(registry: Registry, tag: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(registry.manifests[tag][1])
    return found


IMAGE_REQUESTS = [
    f"GET /v2/team/sample/manifests/{re.escape(ATT)}",
    f"PUT /v2/team/sample/manifests/{re.escape(ATT)}",
    "PUT /v2/team/sample/manifests/sha256:.*",
    "PUT .*blobs/uploads/.*",
    "GET /v2/team/sample/referrers/.*",
]


@pytest.mark.parametrize("line", [*IMAGE_REQUESTS, f"PUT /v2/team/sample/manifests/{INDEX}(-.*)?"])
@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("same_key", [True, False])
def test_two_machines_that_publish_about_an_image_lose_nothing(
    registry: Registry, signer: Signer, line: str, before: int, same_key: bool
) -> None:
    """One machine has read the lists, and writes them after the other machine has written them. The next push completes
    both lists."""
    if before:
        publish_about_image(registry, "earlier", new_signer())
    publish_during(registry, line, ("second", signer if same_key else new_signer()), publish=publish_about_image)
    publish_about_image(registry, "first", signer)
    assert registry.on_request is None
    every = ["earlier", "first", "second"][1 - before :]
    assert texts_about_image(registry) == every

    assert publish_about_image(registry, "first", signer) == 0
    assert texts_in_att(registry) == texts_about_image(registry) == every
    assert len(document(registry, INDEX)["manifests"]) == len(every)
    registry.requests.clear()
    assert publish_about_image(registry, "first", signer) == 0
    assert registry.written() == []


@pytest.mark.parametrize("line", IMAGE_REQUESTS)
def test_a_registry_that_lists_referrers_needs_no_tags(registry: Registry, signer: Signer, line: str) -> None:
    registry.referrers = True
    publish_during(registry, line, ("second", new_signer()), publish=publish_about_image)
    publish_about_image(registry, "first", signer)
    assert texts_about_image(registry) == ["first", "second"]
    assert publish_about_image(registry, "first", signer) == 0
    assert texts_in_att(registry) == ["first", "second"]
    assert [name for name in registry.manifests if ":" not in name] == [ATT]
    assert registry.tag_pages == []


def test_an_unsigned_push_at_the_same_time_loses_nothing_signed(registry: Registry, signer: Signer) -> None:
    publish_during(registry, IMAGE_REQUESTS[1], ("second", signer), publish=publish_about_image)
    publish_about_image(registry, "first", None)
    assert texts_about_image(registry) == ["first", "second"]


def test_statements_of_other_kinds_stay_only_in_their_bundles(registry: Registry, signer: Signer) -> None:
    wanted = [("https://example/other", b'{"text": "other"}')]
    registry_attestations.publish(place(registry), SUBJECT, wanted, new_signer())
    del registry.manifests[ATT]
    publish_about_image(registry, "first", signer)
    assert (texts_in_att(registry), texts_about_image(registry)) == (["first"], ["first", "other"])


@pytest.mark.parametrize("raw", [b"{", b'{"layers": 1, "artifactType": "%s"}' % registry_attestations.BUNDLE.encode()])
def test_an_invalid_tag_of_one_bundle_hides_no_other(registry: Registry, signer: Signer, raw: bytes) -> None:
    publish_during(registry, f"PUT /v2/team/sample/manifests/{INDEX}", ("second", signer), publish=publish_about_image)
    publish_about_image(registry, "first", signer)
    registry.manifests[f"{INDEX}-{'0' * 16}"] = registry.manifests[oci_types.digest_of(raw)] = (oci_types.MANIFEST, raw)
    found, refused = registry_attestations.fetch_envelopes(place(registry), SUBJECT.digest)
    assert (texts_in(found), len(refused)) == (["first", "second"], 1)
    publish_about_image(registry, "first", signer)
    assert len(document(registry, INDEX)["manifests"]) == 2


def test_a_bundle_about_another_image_is_not_listed(registry: Registry, signer: Signer) -> None:
    other = Manifest(b'{"mediaType": "y"}', oci_types.MANIFEST)
    registry_attestations.publish(place(registry), other, [(KIND, b'{"text": "other"}')], signer)
    own = next(name for name in registry.manifests if "-" in name.removeprefix("sha256-"))
    publish_about_image(registry, "first", signer)
    registry.manifests[f"{INDEX}-{own.rpartition('-')[2]}"] = registry.manifests[own]
    found, refused = registry_attestations.fetch_envelopes(place(registry), SUBJECT.digest)
    assert (texts_in(found), [one.reason.id for one in refused]) == (["first"], ["subject"])
    publish_about_image(registry, "second", signer)
    assert len(document(registry, INDEX)["manifests"]) == 2


def test_a_registry_without_a_list_of_tags_keeps_statements_about_an_image(registry: Registry, signer: Signer) -> None:
    registry.tag_page = None
    for text in ("first", "second"):
        publish_about_image(registry, text, signer)
    assert texts_about_image(registry) == texts_in_att(registry) == ["first", "second"]
