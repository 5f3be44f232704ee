"""Pushing against a registry in this process, with an engine that only knows how to push."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild import publish
from envbuild.errors import CheckFailed, NetworkError, NotProved, UsageError
from envbuild.image import build
from envbuild.image.engine import Image
from envbuild.plan import lock, store
from envbuild.plan.lock import Lock
from envbuild.plan.sources import Source
from envbuild.proof import attestations, evidence, oci, signing, statements, status
from envbuild.proof.oci import Reference
from envbuild.proof.registry import Repository
from envbuild.steps import Session
from unit.proof.runs import passed_run, probe
from unit.proof.test_evidence import DAY
from unit.registries import Registry, serving
from unit.support import PROFILE, Said, envbuild, lock_for, plan_of, sha, source_of, write_wheel

SECRET = "correct horse battery staple"


@dataclasses.dataclass
class Engine:
    """Pushes what it is said to hold into a registry; `instead` is what arrives there."""

    registry: Registry
    image: Image
    instead: bytes | None = None
    tags: list[str] = dataclasses.field(default_factory=list)

    def tag(self, image: Image, repository: str, tag: str) -> None:
        self.tags.append(f"{repository}:{tag}")

    def remove(self, reference: str) -> None:
        self.tags.remove(reference)

    def push(self, repository: str, tag: str, on_line: Callable[[str], None]) -> None:
        config = self.registry.add_blob(self.instead or CONFIG)
        layers = [{"mediaType": "application/vnd.oci.image.layer.v1.tar", "digest": f"sha256:{sha('layer')}"}]
        document = {"mediaType": oci.MANIFEST, "config": {"digest": config}, "layers": layers}
        self.registry.put(oci.MANIFEST, document, tag)


CONFIG = json.dumps({"rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha('layer')}"]}}).encode()
IMAGE = Image(oci.digest_of(CONFIG), "handle", (f"sha256:{sha('layer')}",), {}, {}, 1)


@dataclasses.dataclass
class Site:
    """A profile that was made and proved, and a registry to push it to."""

    registry: Registry
    engine: Engine
    source: Source
    lock: Lock

    def push(self, *arguments: str) -> Said:
        return envbuild("push", "sample", f"{self.registry.host}/team/sample", *arguments)

    @property
    def place(self) -> Repository:
        return Repository(Reference.parse(f"{self.registry.host}/team/sample"))

    def prove(self, run: Any = None, day: int = 0) -> None:
        wanted = status.wanted("sample", self.source.profile, self.lock)
        finished = DAY.replace(day=DAY.day + day)
        evidence.save(evidence.run_record(IMAGE, wanted, run or passed_run(), "docker 26", finished))


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    source, plan = source_of(project, PROFILE), plan_of(project, PROFILE)
    wheels = []
    for item in lock_for(plan).wheels:  # real ones, so that what they fill can be read
        file = write_wheel(project / "wheels", item.wheel.name, item.wheel.version)
        real = dataclasses.replace(item.wheel, file=file.name, sha256=store.digest(file))
        store.wheels().put(file, real.sha256, real.file)
        wheels.append(dataclasses.replace(item, wheel=real))
    made = dataclasses.replace(lock_for(plan), wheels=tuple(wheels))
    lock.write(made, source.lock_file, "sample")
    record = build.Record(IMAGE.id, "handle", made.id, sha("recipe"), IMAGE.layers, "docker 26")
    monkeypatch.setattr(build, "records", lambda image_id=None: iter([record]))
    with serving(Registry()) as registry:
        engine = Engine(registry, IMAGE)
        monkeypatch.setattr(publish, "existing", lambda session, reference: (source, made, IMAGE))
        monkeypatch.setattr(Session, "connected", lambda self: engine)
        found = Site(registry, engine, source, made)
        found.prove()
        yield found


@pytest.fixture
def key(project: Path, monkeypatch: pytest.MonkeyPatch) -> signing.PublicKey:
    monkeypatch.setenv("ENVBUILD_KEY_PASSPHRASE", SECRET)
    monkeypatch.setenv("ENVBUILD_SIGNING_KEY", signing.generate(SECRET)[0].decode())
    signer = signing.configured()
    assert signer is not None
    return signer.public


def test_the_image_then_its_evidence_then_the_tags(site: Site, key: signing.PublicKey) -> None:
    done = site.push("--json")
    assert done.code == 0, done.stderr
    document = done.document
    assert (document["statements"], document["signed"]) == (3, key.fingerprint)
    assert document["tags"] == [f"{site.registry.host}/team/sample:{tag}" for tag in (site.lock.short, "verified")]
    written = [line.rpartition("/")[2] for line in site.registry.written() if "/manifests/" in line]
    assert written[-2:] == [site.lock.short, "verified"]
    assert f"{document['digest'].replace(':', '-')}.att" in written[:-2]
    found, _ = attestations.fetch(site.place, document["digest"])
    stated = [signing.opened(one, [key]) for one in found]
    assert sorted(one["predicateType"] for one in stated) == [
        statements.CYCLONEDX, evidence.TEST_RESULT, statements.PROVENANCE
    ]  # fmt: skip
    for one in stated:
        digests = [item["digest"]["sha256"] for item in one["subject"]]
        assert digests == [IMAGE.id[7:], document["digest"][7:]]
    assert site.engine.tags == []
    assert SECRET not in done.stdout + done.stderr


def test_pushed_again_nothing_is_written(site: Site, key: signing.PublicKey) -> None:
    site.push()
    site.registry.asked.clear()
    assert site.push().code == 0
    assert site.registry.written() == []


def test_without_a_key_it_is_unsigned_and_said(site: Site) -> None:
    done = site.push("--json")
    assert (done.code, done.document["signed"]) == (0, None)
    assert "unsigned" in done.stderr


@pytest.mark.parametrize("what", ["manifests/.*att", "uploads/.*", "manifests/sha256:.*", "manifests/sha256-.*"])
def test_verified_is_never_there_without_evidence(site: Site, key: signing.PublicKey, what: str) -> None:
    site.registry.refuse = f"PUT .*/{what}"
    done = site.push()
    assert done.code == NetworkError.code
    assert "verified" not in site.registry.manifests
    assert site.lock.short not in site.registry.manifests
    site.registry.refuse = ""
    assert site.push().code == 0
    assert "verified" in site.registry.manifests


def test_what_is_not_proved_is_not_pushed(site: Site, key: signing.PublicKey) -> None:
    site.prove(passed_run(probe("env.libs", "failed")), day=1)
    done = site.push()
    assert (done.code, site.registry.written()) == (NotProved.code, [])
    assert "the self-test failed" in done.stderr


def test_another_image_in_the_registry_is_not_taken_for_ours(site: Site, key: signing.PublicKey) -> None:
    site.engine.instead = b'{"rootfs": {}}'
    done = site.push()
    assert (done.code, "not the image that was just pushed" in done.stderr) == (CheckFailed.code, True)
    assert "verified" not in site.registry.manifests


def test_a_tag_moved_by_hand_is_moved_back(site: Site, key: signing.PublicKey) -> None:
    site.push()
    right = site.registry.manifests["verified"]
    site.registry.put(oci.MANIFEST, {"mediaType": oci.MANIFEST}, "verified")
    assert site.push().code == 0
    assert site.registry.manifests["verified"] == right


@pytest.mark.parametrize("target", ["r.example/a:tag", f"r.example/a@sha256:{'0' * 64}", "https://r.example/a"])
def test_only_a_repository_can_be_named(site: Site, target: str) -> None:
    assert envbuild("push", "sample", target).code == UsageError.code
