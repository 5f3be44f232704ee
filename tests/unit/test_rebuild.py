from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild import rebuild
from envbuild.errors import CheckFailed, UsageError
from envbuild.image.engine import Image
from envbuild.proof import oci
from envbuild.proof.child import Config
from envbuild.proof.oci import Manifest
from envbuild.proof.verify import Verdict
from unit.site import LAYER_TYPE, Site, config_of, new_key, proved
from unit.support import envbuild


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    Path("team.pub").write_bytes(new_key(monkeypatch).pem)
    with proved(project, monkeypatch) as found:
        assert found.push().code == 0
        yield found


def layer(**files: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if content == "run" else 0o644
            archive.addfile(member, io.BytesIO(content.encode()))
    return buffer.getvalue()


class Engine:
    """Has what a rebuild gave."""

    def __init__(self, *layers: bytes) -> None:
        self.layers = layers
        self.config = config_of([oci.digest_of(one) for one in layers], {})
        self.removed: list[str] = []

    @property
    def image(self) -> Image:
        ids = tuple(oci.digest_of(one) for one in self.layers)
        return Image(oci.digest_of(self.config), "handle", ids, {}, {"PATH": "/bin"}, 1)

    def saved(self, image: Image) -> tarfile.TarFile:
        names = [f"{index}/layer.tar" for index, _ in enumerate(self.layers)]
        listed = json.dumps([{"Config": "c.json", "Layers": names}]).encode()
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            rest = (("c.json", self.config), ("manifest.json", listed))
            for name, raw in (*zip(names, self.layers, strict=True), *rest):
                member = tarfile.TarInfo(name)
                member.size = len(raw)
                archive.addfile(member, io.BytesIO(raw))
        return tarfile.open(fileobj=io.BytesIO(buffer.getvalue()), mode="r|")

    def remove(self, reference: str) -> None:
        self.removed.append(reference)


def compared(
    site: Site, monkeypatch: pytest.MonkeyPatch, there: list[bytes], here: list[bytes], **other: Any
) -> list[str]:
    """What is said when the registry has the layers `there`, and the lock gives `here`."""
    digests = [site.registry.add_blob(one) for one in there]
    document = {"mediaType": oci.MANIFEST, "config": {"digest": oci.digest_of(b"")},
                "layers": [{"digest": digest, "mediaType": LAYER_TYPE} for digest in digests]}  # fmt: skip
    manifest = Manifest(json.dumps(document).encode(), oci.MANIFEST)
    engine = Engine(*here)
    monkeypatch.setattr(rebuild, "_made", lambda build, progress: (engine.image, engine))
    config = Config(other.pop("id", "sha256:0"), tuple(digests), {}, {"PATH": "/bin"})
    build: Any = dataclasses.make_dataclass("B", ["name", "lock"])("sample", site.lock)
    verdict = Verdict("ref", build=build, proved=(site.place, manifest, dataclasses.replace(config, **other)))
    progress: Any = None
    found = rebuild.objections(verdict, progress)
    assert engine.removed == [f"envbuild/sample-rebuild:{site.lock.short}"]
    assert {reason.id for reason in found} <= {"rebuild"}
    return [reason.detail for reason in found]


A, B = layer(a="1"), layer(a="1", b="2", c="3")


def test_the_same_image_is_the_same(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(site, monkeypatch, [A, B], [A, B], id=Engine(A, B).image.id) == []
    assert compared(site, monkeypatch, [A, B], [A, B]) == []  # another builder's configuration


@pytest.mark.parametrize(
    ("here", "said"),
    [
        ([A, layer(a="1", b="9", c="3")], "layer 2 of 2 is another: /b has another content"),
        ([A, layer(a="1", b="run", c="3")], "layer 2 of 2 is another: /b has another mode, size, content"),
        ([A, layer(a="1", c="3")], "layer 2 of 2 is another: /b is in one of the two"),
        ([A, layer(a="1", b="2")], "layer 2 of 2 is another: /c is in one of the two"),
        ([layer(), B], "layer 1 of 2 is another: /a is in one of the two"),
        ([A], "it has 2 layers, the lock gives 1"),
        ([A, B, A], "it has 2 layers, the lock gives 3"),
    ],
)
def test_the_first_file_that_differs_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, here: list[bytes], said: str
) -> None:
    assert compared(site, monkeypatch, [A, B], here) == [said]


def test_labels_and_environment_count(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ({"labels": {"a": "b"}}, {"environment": {"LD_PRELOAD": "x"}}):
        assert "labels or environment" in compared(site, monkeypatch, [A], [A], **other)[0]


def test_verify_refuses_what_the_lock_does_not_give(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(A)
    monkeypatch.setattr(rebuild, "_made", lambda build, progress: (engine.image, engine))
    wanted = ("verify", f"{site.registry.host}/team/sample:verified", "--key", "team.pub", "--rebuild", "--json")
    site.registry.add_blob(b"layer")
    done = envbuild(*wanted)
    assert (done.code, done.document["verified"]) == (CheckFailed.code, False)
    right = dataclasses.replace(engine.image, id=site.engine.image.id)
    monkeypatch.setattr(rebuild, "_made", lambda build, progress: (right, engine))
    assert envbuild(*wanted).code == 0


def test_only_an_image_can_be_rebuilt(site: Site) -> None:
    assert envbuild("verify", "--evidence", "team.pub", "--rebuild").code == UsageError.code
