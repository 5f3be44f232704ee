from __future__ import annotations

import dataclasses
import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock, Timeout

from envbuild.attest.image_verifier import Verdict
from envbuild.attest.trusted_statements import SignedBuild
from envbuild.cli.console import Console
from envbuild.image.docker_engine import Image
from envbuild.image.oci import image_upload, layer_blobs
from envbuild.image.oci.image_description import OciImage
from envbuild.image.oci.lock_image_lookup_and_recipe import layers_tag
from envbuild.pipeline import rebuild_comparison
from envbuild.pipeline.model import BuiltImage, StepResult
from envbuild.pipeline.step_context import StepContext
from envbuild.registry import image_content_reader, oci_types
from envbuild.registry.image_content_reader import Config, StoredImage
from envbuild.registry.oci_types import Manifest
from envbuild.util import user_folders
from envbuild.util.errors import CheckFailed, EngineError, UsageError
from envbuild.util.untrusted_input_errors import Reason
from unit.image.oci.layered_samples import SampleRecipe, described
from unit.saved import Engine, layer, tar
from unit.site import LAYER, LAYER_TYPE, Site, pushed
from unit.support import envbuild


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with pushed(project, monkeypatch) as found:
        yield found


def stand_in(monkeypatch: pytest.MonkeyPatch, engine: Engine, build: Callable[[], Image]) -> None:
    """A lock on a base image, which the engine builds by `build`."""

    def recipe(context: StepContext, name: str, build: SignedBuild, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(name=name, lock=dataclasses.replace(build.lock, image="registry.example/base"))

    monkeypatch.setattr(rebuild_comparison, "_recipe", recipe)
    monkeypatch.setattr(rebuild_comparison, "find_or_build_image", lambda *_, **__: BuiltImage(build()))
    monkeypatch.setattr(StepContext, "engine", engine)


def tags(site: Site) -> list[str]:
    """Return the tags that a rebuild creates."""
    tag = f"envbuild/sample-rebuild:{site.lock.short}"
    return [tag, layers_tag(site.lock, "sample-rebuild")]


def compared(
    site: Site, monkeypatch: pytest.MonkeyPatch, there: list[bytes], here: list[bytes], **other: Any
) -> list[str]:
    """Return the message if the registry has the layers `there`, and the lock gives `here`. `other`: fields of the
    configuration."""
    found, reordered = rebuilt(site, monkeypatch, there, here, **other)
    if reordered:
        return [f"reordered: {reordered}"]
    assert {reason.id for reason in found} <= {"rebuild"}
    return [reason.detail for reason in found]


def rebuilt(
    site: Site, monkeypatch: pytest.MonkeyPatch, there: list[bytes], here: list[bytes], **other: Any
) -> tuple[list[Reason], list[int]]:
    digests = [site.registry.add_blob(one) for one in there]
    document = {"mediaType": oci_types.MANIFEST, "config": {"digest": oci_types.digest_of(b"")},
                "layers": [{"digest": digest, "mediaType": LAYER_TYPE} for digest in digests]}  # fmt: skip
    manifest = Manifest(json.dumps(document).encode(), oci_types.MANIFEST)
    engine = Engine(*here)
    stand_in(monkeypatch, engine, lambda: engine.image)
    config = Config(other.pop("id", "sha256:0"), tuple(digests), {}, {"PATH": "/bin"})
    build: Any = dataclasses.make_dataclass("B", ["name", "lock"])("sample", site.lock)
    verdict = Verdict(
        "ref", build=build, proved=StoredImage(site.place, manifest, dataclasses.replace(config, **other))
    )
    found = rebuild_comparison.rebuild_objections(verdict, Console())
    assert engine.removed == tags(site)
    assert not (found and verdict.reordered)
    assert list(verdict.document().reordered_layers) == verdict.reordered
    return found, verdict.reordered


A, B = layer(a="1"), layer(a="1", b="2", c="3")


def test_the_same_image_is_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compared(site, monkeypatch, [A, B], [A, B], id=Engine(A, B).image.id) == []
    assert "the lock gives the same image" in capsys.readouterr().err
    assert compared(site, monkeypatch, [A, B], [A, B]) == []  # another builder's configuration
    stderr = " ".join(capsys.readouterr().err.split())
    assert "the lock gives the same layers and configuration, with a different image id" in stderr


def test_each_layer_is_read_where_it_was_proved(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blob may differ from the one in the configuration: an engine notices this, but not every program that runs
    images does."""
    for known in ({}, {"id": Engine(A, B).image.id}):
        for wrong, reason in ((layer(a="2"), "digest"), (gzip.compress(A)[:-1], "malformed")):
            digests = [oci_types.digest_of(A), oci_types.digest_of(B)]
            found, _ = rebuilt(site, monkeypatch, [wrong, B], [A, B], layers=tuple(digests), **known)
            assert [one.id for one in found] == [reason]
        assert compared(site, monkeypatch, [gzip.compress(A), B], [A, B], layers=tuple(digests), **known) == []


def test_an_engine_that_stops_during_a_save_causes_no_traceback(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "ends", 700)
    with pytest.raises(EngineError, match=r"the engine's archive of sha256:\w+ cannot be read"):
        compared(site, monkeypatch, [A], [B])


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ([A, layer(a="1", b="9", c="3")], "layer 2 of 2 differs: /b differs in content"),
        ([A, layer(a="1", b="run", c="3")], "layer 2 of 2 differs: /b differs in mode, size, content"),
        ([A, layer(a="1", c="3")], "layer 2 of 2 differs: /b is only in the registry's image"),
        ([A, layer(a="1", b="2")], "layer 2 of 2 differs: /c is only in the registry's image"),
        ([layer(), B], "layer 1 of 2 differs: /a is only in the registry's image"),
        ([A], "the image has 2 layers, the lock gives 1"),
        ([A, B, A], "the image has 2 layers, the lock gives 3"),
    ],
)
def test_the_first_file_that_differs_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, here: list[bytes], expected: str
) -> None:
    assert compared(site, monkeypatch, [A, B], here) == [expected]


FOLDERS = [("torch/a", "1"), ("torch/" + 120 * "b", "2"), ("torch.dist-info/c", "3")]
BY_FOLDER, BY_PATH = tar(FOLDERS), tar(reversed(FOLDERS))


def test_another_order_of_the_same_is_the_same(
    site: Site, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a tar, a file with a long name has an extra header before its own; the two move together."""
    assert BY_FOLDER != BY_PATH
    assert compared(site, monkeypatch, [A, BY_FOLDER], [A, BY_PATH]) == ["reordered: [2]"]
    stderr = " ".join(capsys.readouterr().err.split())
    assert (
        "the lock gives the same files, with a different image id: the archive of layer 2 lists them in another"
        in stderr
    )
    assert compared(site, monkeypatch, [BY_FOLDER, A, BY_PATH], [BY_PATH, A, BY_FOLDER]) == ["reordered: [1, 3]"]


def test_every_layer_is_compared(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer that differs may differ only in its order."""
    message = compared(site, monkeypatch, [BY_FOLDER, B], [BY_PATH, layer(a="1", b="9", c="3")])
    assert message == ["layer 2 of 2 differs: /b differs in content"]
    for other in ({"labels": {"a": "b"}}, {"environment": {"LD_PRELOAD": "x"}}):
        assert "the configuration differs" in compared(site, monkeypatch, [BY_FOLDER], [BY_PATH], **other)[0]


@pytest.mark.parametrize(
    ("there", "here", "expected"),
    [
        ([("a", "1"), ("b", "2")], [("b", "9"), ("a", "1")], "/b differs in content"),
        ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1"), ("c", "3")], "/c is only in what the lock gives"),
        ([("a", "1"), ("a", "2")], [("a", "2"), ("a", "1")], "/a differs in content"),
        ([("a", "1"), ("a", "1")], [("a", "1")], "/a is only in the registry's image"),
        ([(".a", "1")], [("a", "1")], "/.a is only in the registry's image"),
        ([("./a", "1"), ("a", "1")], [("a", "1"), ("./a", "1")], "which matters: /a occurs more than once"),
        ([("d/x", "1"), ("d", "")], [("d", ""), ("d/x", "1")], "which matters: /d/x comes before its folder"),
        ([("a/b/c", "1"), ("a", "")], [("a", ""), ("a/b/c", "1")], "which matters: /a/b/c comes before its folder"),
        ([("a", ""), ("a/b/c", "1")], [("a/b/c", "1"), ("a", "")], "which matters: /a comes after the files in it"),
        ([("a", "1"), (".wh.a", "")], [(".wh.a", ""), ("a", "1")], "which matters: /.wh.a is a whiteout"),
        (
            [("d/.wh..wh..opq", ""), ("a", "")],
            [("a", ""), ("d/.wh..wh..opq", "")],
            "which matters: /d/.wh..wh..opq is a whiteout",
        ),
        ([("a", "1"), ("b", "-> a"), ("c", "")], [("c", ""), ("a", "1"), ("b", "-> a")], "matters: /b is a hard link"),
        ([("a", "1"), ("b", "-> a")], [("b", "1"), ("a", "-> b")], "/a differs in kind, link, size, content"),
        ([("./a", "1"), ("b", "")], [("b", ""), ("a", "1")], "the same files, but the archives differ"),
    ],
)
def test_an_order_that_may_count_is_a_difference(
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    there: list[tuple[str, str]],
    here: list[tuple[str, str]],
    expected: str,
) -> None:
    (found,) = compared(site, monkeypatch, [tar(there)], [tar(here)])
    assert found.startswith("layer 1 of 1 differs: ") and expected in found


def heads(raw: bytes, **fields: bytes) -> bytes:
    """Return the tar with some fields of its first header overwritten, and the header's checksum corrected."""
    at = {"prefix": 345, "magic": 257, "group_name": 297, "kind": 156}
    head = bytearray(raw[:512])
    for name, value in fields.items():
        head[at[name] : at[name] + len(value)] = value
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + raw[512:]


ORDERED, SWAPPED = tar([("a", "1"), ("b", "2")]), tar([("b", "2"), ("a", "1")])


@pytest.mark.parametrize(
    "there",
    [
        SWAPPED[:-1] + b"x",  # after the end
        SWAPPED + bytes(512),
        heads(SWAPPED, group_name=b"wheel"),
        heads(SWAPPED, magic=b"ustar  \0"),  # other readers than tarfile read different fields
        tar([("b", "2"), ("a", "1")], uname="root"),
    ],
)
def test_an_archive_that_another_reader_might_read_differently_is_refused(
    site: Site, monkeypatch: pytest.MonkeyPatch, there: bytes
) -> None:
    """tarfile does not expose every difference, so entries count as equal only if their bytes are."""
    (found,) = compared(site, monkeypatch, [there], [ORDERED])
    assert found == "layer 1 of 1 differs: the same files, but the archives differ"
    assert compared(site, monkeypatch, [SWAPPED], [ORDERED]) == ["reordered: [1]"]


def test_attributes_for_all_later_entries_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """With such attributes, the order of entries matters, also in our layers."""

    def packed(names: str, headers: dict[str, str]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name))
        return buffer.getvalue()

    there = packed("ba", {"comment": "x"})
    for here in (packed("ab", {"comment": "x"}), packed("ab", {})[:-1024]):  # equal at one end
        found = compared(site, monkeypatch, [there], [here])
        assert found == ["layer 1 of 1 differs: the same files, but the archives differ"]


def test_attributes_and_devices_are_compared(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    able = tar([("a", "1")], pax_headers={"SCHILY.xattr.security.capability": "all"})
    assert "/a differs in attributes" in compared(site, monkeypatch, [able], [tar([("a", "1")])])[0]
    devices = [tar([("a", "")], type=tarfile.CHRTYPE, devminor=minor) for minor in (1, 2)]
    assert "/a differs in device" in compared(site, monkeypatch, *([raw] for raw in devices))[0]


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


def test_only_configuration_that_affects_a_container_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in ({"labels": {"a": "b"}}, {"environment": {"LD_PRELOAD": "x"}}, {"settings": {"Entrypoint": ["/x"]}}):
        assert "the configuration differs" in compared(site, monkeypatch, [A], [A], **other)[0]


def test_verify_refuses_what_the_lock_does_not_give(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(A)
    stand_in(monkeypatch, engine, lambda: engine.image)
    wanted = ("verify", f"{site.registry.host}/team/sample:verified", "--key", "team.pub", "--rebuild", "--json")
    site.registry.add_blob(b"layer")
    done = envbuild(*wanted)
    assert (done.code, done.document["state"]) == (CheckFailed.code, "unverified")
    both = envbuild(*wanted, "--gpu", "h20").document["reasons"]  # every reason, as without --rebuild
    assert [reason["id"] for reason in both] == ["gpu", *(reason["id"] for reason in done.document["reasons"])]
    right = dataclasses.replace(engine.image, id=site.engine.image.id)
    stand_in(monkeypatch, engine, lambda: right)
    assert envbuild(*wanted).code == 0


def test_a_rebuild_of_a_child_rebuilds_its_base_and_reports_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.registry.add_blob(b"layer")
    child = json.loads(site.engine.config)
    child["config"]["Cmd"] = ["serve"]
    config = {"digest": site.registry.add_blob(json.dumps(child).encode())}
    document = {"mediaType": oci_types.MANIFEST, "config": config,
                "layers": [{"digest": LAYER, "mediaType": LAYER_TYPE}]}  # fmt: skip
    site.registry.put(oci_types.MANIFEST, document, "app")
    engine = Engine(A)
    right = dataclasses.replace(engine.image, id=site.engine.image.id, layers=(LAYER,))
    stand_in(monkeypatch, engine, lambda: right)
    base = f"{site.registry.host}/team/sample"
    done = envbuild("verify", f"{base}:app", "--key", "team.pub", "--base", base, "--rebuild")
    assert done.code == 0, done.stderr
    assert "nothing above it is built" in " ".join(done.stderr.split())


def test_a_rebuild_that_fails_leaves_nothing_and_one_runs_at_a_time(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example a rebuild whose audit fails: its image already has a tag by then."""
    engine = Engine(A)

    def failed() -> Image:
        with pytest.raises(Timeout):
            FileLock(user_folders.cache_folder("locks") / "sample-rebuild.lock").acquire(timeout=0)
        raise CheckFailed("the audit says no")

    stand_in(monkeypatch, engine, failed)
    build: Any = dataclasses.make_dataclass("B", ["name", "lock"])("sample", site.lock)
    config = Config("sha256:0", (), {}, {})
    verdict = Verdict("ref", build=build, proved=StoredImage(site.place, Manifest(b"{}", oci_types.MANIFEST), config))
    with pytest.raises(CheckFailed, match="the audit says no"):
        rebuild_comparison.rebuild_objections(verdict, Console())
    assert engine.removed == tags(site)


def test_only_an_image_can_be_rebuilt(site: Site) -> None:
    assert envbuild("verify", "--evidence", "team.pub", "--rebuild").code == UsageError.code


# layers written again, without an engine


def written_objections(
    site: Site, monkeypatch: pytest.MonkeyPatch, there: OciImage, here: OciImage, zstd: bool = False, **other: Any
) -> list[str]:
    """Return the messages if the registry has `there`, and the lock gives `here`. `zstd`: the registry's layers have
    another compression; `other`: fields of the configuration."""
    image_upload.upload_image(site.place, there, "proved", lambda line: None)
    manifest = site.place.manifest("proved")
    assert manifest
    if zstd:
        blobs = [site.registry.add_blob(gzip.decompress(site.registry.blobs[one.digest])) for one in there.layers]
        document = {**manifest.document, "layers": [{"mediaType": LAYER_TYPE, "digest": blob} for blob in blobs]}
        manifest = Manifest(oci_types.encoded(document), oci_types.MANIFEST)
    config = dataclasses.replace(image_content_reader.parse_config(there.id, there.configuration), **other)
    monkeypatch.setattr(
        rebuild_comparison, "_recipe", lambda *_: SimpleNamespace(name="again", lock=site.lock, plan=None)
    )
    monkeypatch.setattr(rebuild_comparison, "write_layers", lambda *_, again: StepResult(here) if again else None)
    monkeypatch.setattr(StepContext, "engine", None)
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
    assert written_objections(site, monkeypatch, image(BASE, OWN), image(BASE, OWN), zstd=True) == []
    assert len(site.registry.requests) == 2


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


def test_another_configuration_over_the_written_layers_is_named(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = written_objections(site, monkeypatch, image(BASE), image(BASE), id="sha256:0", environment={"A": "b"})
    assert found == "the layers have the same content, the configuration differs: environment"
