"""`verify --rebuild`: the layers that the lock gives, compared with those in the registry."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.attest.image_verifier import Verdict
from envbuild.cli.console import Console
from envbuild.image.oci import image_upload, layer_blobs
from envbuild.image.oci.image_description import OciImage
from envbuild.pipeline import rebuild_comparison
from envbuild.pipeline.model import StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.image_content_reader import Config, StoredImage
from envbuild.registry.oci_types import Manifest
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, CheckFailed, UsageError
from unit.image.oci.layered_samples import SampleRecipe, described
from unit.site import LAYER, LAYER_TYPE, PlainDescription, PlainLayer, Site, pushed
from unit.support import envbuild, is_locked


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with pushed(project, monkeypatch) as found:
        yield found


def test_properties_of_a_container_are_read_from_its_configuration() -> None:
    inner: dict[str, object] = {
        "User": "0",
        "Entrypoint": ["/x"],
        "Cmd": None,
        "Volumes": {},
        "ArgsEscaped": True,
        "Env": [],
        "Labels": None,
    }
    raw = json.dumps({"config": inner, "rootfs": {"diff_ids": []}, "history": []}).encode()
    assert image_content_reader.parse_config("sha256:0", raw).settings == {"User": "0", "Entrypoint": ["/x"]}


def stand_in(monkeypatch: pytest.MonkeyPatch, site: Site, write: Callable[[], OciImage]) -> None:
    """A lock whose layers are written by `write`."""

    def write_layers(*_: Any, again: bool) -> StepResult[OciImage]:
        assert again, "known layers would not be written"
        return StepResult(write())

    recipe = SimpleNamespace(name="sample-rebuild", lock=site.lock, plan=None)
    monkeypatch.setattr(rebuild_comparison, "_recipe", lambda *_: recipe)
    monkeypatch.setattr(rebuild_comparison, "write_layers", write_layers)
    monkeypatch.setattr(StepContext, "engine", None)


def image_of_site(configuration: bytes) -> OciImage:
    return PlainDescription(configuration).with_layers([PlainLayer().write(len, len)])


def test_verify_refuses_what_the_lock_does_not_give(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    other = json.loads(site.engine.config)
    other["config"]["Env"] = ["PATH=/sbin"]
    stand_in(monkeypatch, site, lambda: image_of_site(json.dumps(other).encode()))
    wanted = ("verify", f"{site.registry.host}/team/sample:verified", "--key", "team.pub", "--rebuild", "--json")
    site.registry.add_blob(b"layer")
    done = envbuild(*wanted)
    assert (done.code, done.document["state"]) == (CheckFailed.code, "unverified")
    both = envbuild(*wanted, "--gpu", "h20").document["reasons"]  # every reason, as without --rebuild
    assert [reason["id"] for reason in both] == ["gpu", *(reason["id"] for reason in done.document["reasons"])]
    stand_in(monkeypatch, site, lambda: image_of_site(site.engine.config))
    assert envbuild(*wanted).code == 0


def test_a_rebuild_of_a_child_rebuilds_its_base_and_reports_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.registry.add_blob(b"layer")
    child = json.loads(site.engine.config)
    child["config"]["Cmd"] = ["serve"]
    config = {"digest": site.registry.add_blob(json.dumps(child).encode())}
    document = {"mediaType": oci_types.MANIFEST, "config": config,
                "layers": [{"digest": LAYER, "mediaType": LAYER_TYPE}]}  # fmt: skip
    site.registry.put(oci_types.MANIFEST, document, "app")
    stand_in(monkeypatch, site, lambda: image_of_site(site.engine.config))
    base = f"{site.registry.host}/team/sample"
    done = envbuild("verify", f"{base}:app", "--key", "team.pub", "--base", base, "--rebuild")
    assert done.code == 0, done.stderr
    assert "nothing above it is built" in " ".join(done.stderr.split())


def test_a_rebuild_that_fails_leaves_nothing_and_one_runs_at_a_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = user_folders.cache_folder("contexts") / "sample-rebuild"
    context.mkdir()  # as of a compiled extension

    def failed() -> OciImage:
        assert is_locked(user_folders.cache_folder("locks") / "sample-rebuild.lock")
        raise BuildError("a layer cannot be written")

    stand_in(monkeypatch, site, failed)
    build: Any = dataclasses.make_dataclass("B", ["name", "lock"])("sample", site.lock)
    config = Config("sha256:0", (), {}, {})
    verdict = Verdict("ref", build=build, proved=StoredImage(site.place, Manifest(b"{}", oci_types.MANIFEST), config))
    with pytest.raises(BuildError, match="a layer cannot be written"):
        rebuild_comparison.rebuild_objections(verdict, Console())
    assert not context.exists()


def test_only_an_image_can_be_rebuilt(site: Site) -> None:
    assert envbuild("verify", "--evidence", "team.pub", "--rebuild").code == UsageError.code


# the comparison


def written_objections(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    there: OciImage,
    here: OciImage,
    stored: Callable[[bytes], bytes] | None = None,
    **other: Any,
) -> list[str]:
    """Return the messages if the registry has `there`, and the lock gives `here`. `stored`: what the registry has
    instead of a blob; `other`: fields of the configuration."""
    image_upload.upload_image(site.place, there, "proved", lambda line: None)
    manifest = site.place.manifest("proved")
    assert manifest
    if stored:
        blobs = [site.registry.add_blob(stored(site.registry.blobs[one.digest])) for one in there.layers]
        document = {**manifest.document, "layers": [{"mediaType": LAYER_TYPE, "digest": blob} for blob in blobs]}
        manifest = Manifest(oci_types.encoded(document), oci_types.MANIFEST)
    config = dataclasses.replace(image_content_reader.parse_config(there.id, there.configuration), **other)
    stand_in(monkeypatch, site, lambda: here)
    build: Any = dataclasses.make_dataclass("B", ["name", "lock"])("sample", site.lock)
    site.registry.requests.clear()
    verdict = Verdict("ref", build=build, proved=StoredImage(site.place, manifest, config))
    return [reason.detail for reason in rebuild_comparison.rebuild_objections(verdict, Console())]


def image(*recipes: SampleRecipe) -> OciImage:
    return layer_blobs.learn_layers(described(*recipes), lambda line: None)


BASE, OWN = SampleRecipe("base", b"b"), SampleRecipe("own", b"o")


def test_written_layers_that_are_the_same_are_not_downloaded(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert written_objections(site, monkeypatch, image(BASE, OWN), image(BASE, OWN)) == []
    assert "the lock gives the same image" in capsys.readouterr().err
    assert site.registry.requests == []


def test_layers_of_another_compression_are_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written_objections(site, monkeypatch, image(BASE, OWN), image(BASE, OWN), gzip.decompress) == []
    assert len(site.registry.requests) == 2


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (lambda raw: gzip.decompress(raw)[:-1] + b"x", "does not match the image's configuration"),
        (lambda raw: raw[:-1], "cannot be unpacked"),
    ],
)
def test_each_layer_is_read_where_it_was_proved(
    site: Site, monkeypatch: pytest.MonkeyPatch, stored: Callable[[bytes], bytes], message: str
) -> None:
    """The blob may not match the diff id in the configuration: an engine notices the difference, but not every program
    that runs images does."""
    (found,) = written_objections(site, monkeypatch, image(BASE, OWN), image(BASE, OWN), stored)
    assert message in found


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ([BASE, SampleRecipe("own", b"9", keeps_blob=True)], "layer 2 of 2, own, differs: /opt/own differs in content"),
        ([SampleRecipe("other", b"b"), OWN], "layer 1 of 2, other, differs: /opt/base is only in the registry's image"),
        ([BASE], "the image has 2 layers, the lock gives 1"),
    ],
)
def test_a_layer_that_the_lock_does_not_give_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, here: list[SampleRecipe], expected: str
) -> None:
    assert written_objections(site, monkeypatch, image(BASE, OWN), image(*here)) == [expected]


@pytest.mark.parametrize(
    "other", [{"labels": {"a": "b"}}, {"environment": {"LD_PRELOAD": "x"}}, {"settings": {"Entrypoint": ["/x"]}}]
)
def test_another_configuration_over_the_same_layers_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: dict[str, Any]
) -> None:
    (found,) = written_objections(site, monkeypatch, image(BASE), image(BASE), id="sha256:0", **other)
    assert found == f"the layers have the same content, the configuration differs: {next(iter(other))}"
    assert "the lock gives a different image" in capsys.readouterr().err
