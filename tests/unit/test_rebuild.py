from __future__ import annotations

import dataclasses
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock, Timeout

from envbuild import rebuild, settings
from envbuild.attest import oci
from envbuild.attest.layers import Config
from envbuild.attest.oci import Manifest
from envbuild.attest.verify import Verdict
from envbuild.commands.console import Console
from envbuild.errors import CheckFailed, UsageError
from envbuild.image.build import layers_tag
from envbuild.image.engine import Image
from envbuild.steps import Session
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


def stand_in(monkeypatch: pytest.MonkeyPatch, engine: Engine, build: Callable[[], Image]) -> None:
    """`build` gives what the engine made."""
    monkeypatch.setattr(rebuild, "_made", lambda session, _: build())
    monkeypatch.setattr(Session, "connected", lambda session: engine)


def tags(site: Site) -> list[str]:
    """What a rebuild makes meanwhile."""
    tag = f"envbuild/sample-rebuild:{site.lock.short}"
    return [tag, layers_tag(site.lock, "sample-rebuild")]


def compared(
    site: Site, monkeypatch: pytest.MonkeyPatch, there: list[bytes], here: list[bytes], **other: Any
) -> list[str]:
    """What is said when the registry has the layers `there`, and the lock gives `here`."""
    digests = [site.registry.add_blob(one) for one in there]
    document = {"mediaType": oci.MANIFEST, "config": {"digest": oci.digest_of(b"")},
                "layers": [{"digest": digest, "mediaType": LAYER_TYPE} for digest in digests]}  # fmt: skip
    manifest = Manifest(json.dumps(document).encode(), oci.MANIFEST)
    engine = Engine(*here)
    stand_in(monkeypatch, engine, lambda: engine.image)
    config = Config(other.pop("id", "sha256:0"), tuple(digests), {}, {"PATH": "/bin"})
    build: Any = dataclasses.make_dataclass("B", ["name", "lock"])("sample", site.lock)
    verdict = Verdict("ref", build=build, proved=(site.place, manifest, dataclasses.replace(config, **other)))
    found = rebuild.objections(verdict, Console())
    assert engine.removed == tags(site)
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
    stand_in(monkeypatch, engine, lambda: engine.image)
    wanted = ("verify", f"{site.registry.host}/team/sample:verified", "--key", "team.pub", "--rebuild", "--json")
    site.registry.add_blob(b"layer")
    done = envbuild(*wanted)
    assert (done.code, done.document["verified"]) == (CheckFailed.code, False)
    both = envbuild(*wanted, "--gpu", "h20").document["reasons"]  # every reason, as without --rebuild
    assert [reason["id"] for reason in both] == ["gpu", *(reason["id"] for reason in done.document["reasons"])]
    right = dataclasses.replace(engine.image, id=site.engine.image.id)
    stand_in(monkeypatch, engine, lambda: right)
    assert envbuild(*wanted).code == 0


def test_a_rebuild_that_fails_leaves_nothing_and_one_runs_at_a_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the audit of the layers fails: they have a tag by then."""
    engine = Engine(A)

    def failed() -> Image:
        with pytest.raises(Timeout):
            FileLock(settings.cache_folder("locks") / "sample-rebuild.lock").acquire(timeout=0)
        raise CheckFailed("the audit says no")

    stand_in(monkeypatch, engine, failed)
    build: Any = dataclasses.make_dataclass("B", ["name", "lock"])("sample", site.lock)
    config = Config("sha256:0", (), {}, {})
    verdict = Verdict("ref", build=build, proved=(site.place, Manifest(b"{}", oci.MANIFEST), config))
    with pytest.raises(CheckFailed, match="the audit says no"):
        rebuild.objections(verdict, Console())
    assert engine.removed == tags(site)


def test_only_an_image_can_be_rebuilt(site: Site) -> None:
    assert envbuild("verify", "--evidence", "team.pub", "--rebuild").code == UsageError.code
