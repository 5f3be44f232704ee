"""Pushing to a registry in this process, with an engine that can only push."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.attest import in_toto_statements, keys_and_signatures, registry_attestations
from envbuild.evidence import evidence_statements_and_store
from envbuild.image import registry_push
from envbuild.image.docker_engine import Engine
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.image.oci.image_description import OciImage
from envbuild.pipeline import layer_steps, push_save_and_load
from envbuild.pipeline.model import StepResult
from envbuild.pipeline.push_save_and_load import _upload_layers as upload_layers
from envbuild.pipeline.step_context import StepContext
from envbuild.registry import oci_types
from envbuild.util.errors import BuildError, CheckFailed, NetworkError, NotProved, UsageError
from unit.evidence.runs import passed_run, probe
from unit.image.oci import layered_samples
from unit.site import SECRET, PlainDescription, PlainLayer, Site, new_key, proved
from unit.support import envbuild


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with proved(project, monkeypatch) as found:
        yield found


@pytest.fixture
def key(monkeypatch: pytest.MonkeyPatch) -> keys_and_signatures.PublicKey:
    return new_key(monkeypatch)


def test_the_image_then_its_evidence_then_the_tags(site: Site, key: keys_and_signatures.PublicKey) -> None:
    done = site.push("--json")
    assert done.code == 0, done.stderr
    document = done.document
    assert (document["statements"], document["key"]) == (3, key.fingerprint)
    assert document["tags"] == [f"{site.registry.host}/team/sample:{tag}" for tag in (site.lock.short, "verified")]
    written = [line.rpartition("/")[2] for line in site.registry.written() if "/manifests/" in line]
    assert written[-2:] == [site.lock.short, "verified"]
    assert f"{document['digest'].replace(':', '-')}.att" in written[:-2]
    found, _ = registry_attestations.fetch_envelopes(site.place, document["digest"])
    stated = [in_toto_statements.parse_statement(keys_and_signatures.signed_statement(one, [key])) for one in found]
    assert sorted(one.predicate_type for one in stated) == [
        in_toto_statements.CYCLONEDX, evidence_statements_and_store.TEST_RESULT, in_toto_statements.PROVENANCE
    ]  # fmt: skip
    for one in stated:
        digests = [digest for _, digest in one.subjects]
        assert digests == [site.engine.image.id[7:], document["digest"][7:]]
    assert site.engine.tags == []
    assert SECRET not in done.stdout + done.stderr


def test_pushed_again_nothing_is_written(site: Site, key: keys_and_signatures.PublicKey) -> None:
    site.push()
    site.registry.requests.clear()
    assert site.push().code == 0
    assert site.registry.written() == []


def test_the_tag_that_a_killed_push_left_in_the_engine_goes(site: Site, key: keys_and_signatures.PublicKey) -> None:
    """The engine pushes an image to the registry of a cluster, and needs a tag for the push."""
    left = f"{site.registry.host}/team/sample:id-{site.engine.image.id[7:]}"
    for there in (False, True):
        site.engine.tags = [left, "mine:1"]
        engine: Any = site.engine
        assert registry_push.push_from_engine(engine, site.place, site.engine.image, print)[1] is there
        assert site.engine.tags == ["mine:1"]


def test_without_a_key_nothing_is_sent(site: Site) -> None:
    done = site.push("--json")
    assert (done.code, site.registry.requests) == (UsageError.code, [])
    assert "signing_key" in done.document["error"]["hint"] and "--unsigned" in done.document["error"]["hint"]


def test_unsigned_is_asked_for_and_said(site: Site, key: keys_and_signatures.PublicKey) -> None:
    done = site.push("--unsigned", "--json")
    assert (done.code, done.document["key"]) == (0, None)
    assert "unsigned" in done.stderr


@pytest.mark.parametrize("what", ["manifests/.*att", "uploads/.*", "manifests/sha256:.*", "manifests/sha256-.*"])
def test_verified_is_never_there_without_evidence(site: Site, key: keys_and_signatures.PublicKey, what: str) -> None:
    site.registry.refuse = f"PUT .*/{what}"
    done = site.push()
    assert done.code == NetworkError.code
    assert "verified" not in site.registry.manifests
    assert site.lock.short not in site.registry.manifests
    site.registry.refuse = ""
    assert site.push().code == 0
    assert "verified" in site.registry.manifests


def test_a_push_that_fails_says_how_far_it_came(site: Site, key: keys_and_signatures.PublicKey) -> None:
    site.registry.refuse = f"PUT .*/manifests/{site.lock.short}"
    done = site.push("--json")
    assert (done.code, done.document["state"]) == (NetworkError.code, "incomplete")
    assert (done.document["statements"], done.document["key"], done.document["tags"]) == (3, key.fingerprint, [])
    assert done.document["digest"] == oci_types.digest_of(site.registry.manifests[f"id-{site.engine.image.id[7:]}"][1])


def test_an_unproved_image_is_not_pushed(site: Site, key: keys_and_signatures.PublicKey) -> None:
    site.prove(passed_run(probe("env.libs", "failed")), day=1)
    done = site.push()
    assert (done.code, site.registry.written()) == (NotProved.code, [])
    assert "the self-test failed" in done.stderr


def test_another_image_in_the_registry_is_not_taken_for_ours(site: Site, key: keys_and_signatures.PublicKey) -> None:
    site.engine.instead = b'{"rootfs": {}}'
    done = site.push()
    assert (done.code, "not the image that was just pushed" in done.stderr) == (CheckFailed.code, True)
    assert "verified" not in site.registry.manifests


def test_a_tag_moved_by_hand_is_moved_back(site: Site, key: keys_and_signatures.PublicKey) -> None:
    site.push()
    right = site.registry.manifests["verified"]
    site.registry.put(oci_types.MANIFEST, {"mediaType": oci_types.MANIFEST}, "verified")
    assert site.push().code == 0
    assert site.registry.manifests["verified"] == right


def written_image(image: OciImage) -> StepResult[Any]:
    """Return a stand-in for the description of the lock's image. Its layers give `image`."""
    return StepResult(SimpleNamespace(layers=image.described, with_layers=lambda layers: image))


class NoEngine:
    def __get__(self, context: StepContext, owner: object) -> Engine:
        raise AssertionError("no engine is needed")


@pytest.mark.parametrize("right", [True, False])
def test_layers_are_uploaded_without_an_engine(
    site: Site, key: keys_and_signatures.PublicKey, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    """The layers are uploaded only if they are those of the proved image."""
    image, proved = layered_samples.written(), site.engine.image
    monkeypatch.setattr(push_save_and_load, "_upload_layers", upload_layers)
    monkeypatch.setattr(layer_steps, "describe_image", lambda *_: written_image(image))
    monkeypatch.setattr(StepContext, "engine", NoEngine())
    if right:
        site.engine.image = dataclasses.replace(proved, id=image.id)
        records = [
            dataclasses.replace(one, image=image.id) for one in lock_image_lookup_and_recipe.matching_records(site.lock)
        ]
        monkeypatch.setattr(lock_image_lookup_and_recipe, "matching_records", lambda lock: records)
        site.prove()
    done = site.push("--json")
    if right:
        assert (done.code, done.document["digest"]) == (0, image.manifest.digest), done.stderr
        assert {layer.digest for layer in image.layers} <= site.registry.blobs.keys()
        assert site.registry.manifests["verified"][1] == image.manifest.raw
    else:
        assert (done.code, done.document["error"]["kind"]) == (BuildError.code, "build")
        assert (
            f"the lock now gives the image {image.id[:19]}, but {proved.id[:19]} is proved"
            in done.document["error"]["message"]
        )
        assert site.registry.written() == []


def test_an_image_is_saved_without_an_engine(
    site: Site, key: keys_and_signatures.PublicKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest is the one that `push` gives. Nothing is saved if the lock gives a different image than the proved
    one."""
    monkeypatch.setattr(StepContext, "engine", NoEngine())
    done = envbuild("save", "sample", "-o", "a.tar", "--json")
    assert done.code == 0, done.stderr
    assert (
        done.document["digest"]
        == PlainDescription(site.engine.config).with_layers([PlainLayer().write(len, len)]).manifest.digest
    )
    image = layered_samples.written()
    monkeypatch.setattr(layer_steps, "describe_image", lambda *_: written_image(image))
    refused = envbuild("save", "sample", "-o", "b.tar")
    assert (refused.code, "the lock now gives" in refused.stderr, Path("b.tar").exists()) == (
        BuildError.code,
        True,
        False,
    )


@pytest.mark.parametrize("target", ["r.example/a:tag", f"r.example/a@sha256:{'0' * 64}", "https://r.example/a"])
def test_only_a_repository_can_be_named(site: Site, target: str) -> None:
    assert envbuild("push", "sample", target).code == UsageError.code
