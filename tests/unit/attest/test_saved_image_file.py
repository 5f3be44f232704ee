"""A saved image for an isolated site is trusted only through its evidence; nothing is loaded before the check."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import requests
import zstandard

from envbuild.attest import keys_and_signatures, saved_image_file
from envbuild.image import engine_image_to_oci_layout
from envbuild.image.docker_engine import Engine
from envbuild.image.engine_image_to_oci_layout import REF
from envbuild.image.layers.layer_writer import WrittenLayer
from envbuild.image.oci.image_description import DescribedLayer, OciImage
from envbuild.pipeline import layer_steps
from envbuild.pipeline.model import StepResult
from envbuild.registry import oci_types
from envbuild.registry.byte_block_streams import Blocks
from envbuild.registry.oci_types import Manifest
from envbuild.util import user_folders
from envbuild.util.errors import CheckFailed, EngineError, NotProved, UsageError
from unit.evidence.runs import passed_run, probe
from unit.saved import tar
from unit.site import LAYER, LAYER_TYPE, PlainDescription, PlainLayer, Site, config_of, new_key, proved
from unit.support import CommandResult, envbuild

Files = dict[str, bytes]


@pytest.fixture
def site(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    Path("team.pub").write_bytes(new_key(monkeypatch).pem)
    with proved(project, monkeypatch) as found:
        yield found


def exported() -> Files:
    result = envbuild("save", "sample", "-o", "a.tar", "--json")
    assert result.code == 0, result.stderr
    assert result.document["statements"] == 3
    with tarfile.open("a.tar") as tar:
        return {m.name: f.read() for m in tar.getmembers() for f in [tar.extractfile(m)] if f}


def brought(files: Files, *arguments: str) -> CommandResult:
    with tarfile.open("b.tar", "w") as tar:
        for name, raw in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(raw)
            tar.addfile(member, io.BytesIO(raw))
    return envbuild("load", "b.tar", *(arguments or ("--key", "team.pub")), "--json")


def reasons(result: CommandResult) -> list[str]:
    assert result.code == CheckFailed.code
    return [reason["id"] for reason in result.document["reasons"]]


def test_a_saved_image_is_an_oci_layout_with_all_that_is_needed(site: Site) -> None:
    files = exported()
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    assert all(oci_types.digest_of(raw)[7:] == name[13:] for name, raw in files.items() if name.startswith("blobs/"))
    assert files["envbuild/public-key.pem"] == Path("team.pub").read_bytes()
    assert files["envbuild/lock.yaml"] == site.loaded.lock_file.read_bytes()
    named = [item["annotations"][REF].partition("-")[0] for item in json.loads(files["index.json"])["manifests"]]
    assert named == ["sample", "sha256", "sha256"]
    left = {file.name for file in Path().iterdir()}
    assert left == {"a.tar", "profiles", "wheels", "team.pub"}


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress])
def test_layers_that_the_engine_keeps_compressed_are_decompressed(
    site: Site, tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    """The layers of a base image can be such: containerd's store keeps pulled layers compressed."""
    site.engine.layer = pack(b"layer")
    layout = engine_image_to_oci_layout.Folder(tmp_path / "layout")
    layout.take(cast(Engine, site.engine), site.engine.image)
    assert layout.blob(LAYER) == b"layer"


@pytest.mark.parametrize("ends", [100, 515, 1000])
def test_an_engine_that_stops_while_it_saves_is_reported(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: int
) -> None:
    def broken() -> Iterator[bytes]:
        yield whole[:ends]
        raise requests.exceptions.ChunkedEncodingError("the connection broke")

    whole = tar([("one/layer.tar", 900 * "x")])
    monkeypatch.setattr(site.engine, "without_room", lambda: None, raising=False)
    for number, (blocks, message) in enumerate(
        ((iter([whole[:ends]]), "archive of sha256:"), (broken(), "the Docker Engine failed"))
    ):
        saved = partial(tarfile.open, None, "r|", Blocks(blocks))
        monkeypatch.setattr(site.engine, "saved", lambda _, saved=saved: saved())
        layout = engine_image_to_oci_layout.Folder(tmp_path / str(number))
        with pytest.raises(EngineError, match=message):
            layout.take(cast(Engine, site.engine), site.engine.image)


@pytest.mark.parametrize("damaged", [False, True])
def test_compressed_layers_are_loaded_if_their_tars_are_the_right_ones(
    site: Site, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """The engine gets the tars. Signed statements are about the image, whose configuration names the tars only."""
    packed = gzip.compress(b"other" if damaged else b"layer", mtime=0)

    class GzipLayer(PlainLayer):
        def write(self, to: Callable[[bytes], object], plain: Callable[[bytes], object]) -> WrittenLayer:
            to(packed)
            return WrittenLayer(oci_types.digest_of(packed), len(packed), LAYER, 5)

    layers = (DescribedLayer("layer", "", GzipLayer(b"gzip"), LAYER_TYPE),)
    described = PlainDescription(site.engine.config, layers)
    monkeypatch.setattr(layer_steps, "describe_image", lambda *_: StepResult(described))
    result = brought(exported())
    if damaged:
        assert reasons(result) == ["layer"]
        assert site.engine.loaded == {}
    else:
        assert result.code == 0, result.stdout
        assert site.engine.loaded["1.tar"] == b"layer"


def test_it_is_verified_and_loaded(site: Site) -> None:
    result = brought(exported())
    assert result.code == 0, result.stdout
    tag = f"envbuild/sample:{site.lock.short}"
    assert (result.document["state"], result.document["gpus"], result.document["tag"]) == ("verified", ["cpu"], tag)
    archive = json.loads(site.engine.loaded["manifest.json"])[0]
    assert site.engine.tags == [tag]
    assert archive["RepoTags"] == [f"envbuild/sample:loading-{site.lock.short}"], "until it is complete"
    assert site.engine.loaded[archive["Config"]] == site.engine.config
    assert [site.engine.loaded[name] for name in archive["Layers"]] == [b"layer"]
    assert set(site.engine.loaded) == {archive["Config"], *archive["Layers"], "manifest.json"}, (
        "nothing else of the file"
    )


def change(name: str, raw: bytes) -> Callable[[Files], None]:
    def on(files: Files) -> None:
        files[name] = raw

    return on


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (change(f"blobs/sha256/{LAYER[7:]}", b"other"), "digest"),
        (change("index.json", b"{}"), "malformed"),
        (change("index.json", b'{"manifests": []}'), None),
        (change("envbuild/profile", b"../x"), "malformed"),
        (lambda files: files.pop("envbuild/profile"), "malformed"),
        (lambda files: files.pop(f"blobs/sha256/{LAYER[7:]}"), "malformed"),
    ],
)
def test_a_tampered_saved_image_is_not_loaded(site: Site, spoil: Callable[[Files], object], reason: str | None) -> None:
    files = exported()
    spoil(files)
    result = brought(files)
    if reason:
        assert reasons(result) == [reason]
    assert result.code != 0
    assert site.engine.loaded == {}


def other_image(files: Files, name: Callable[[dict[str, Any]], str]) -> None:
    """Add a second image, which nobody proved, under a name that is made from the entry of the proved one."""
    layer = b"hostile"
    config = config_of([oci_types.digest_of(layer)], {})
    manifest = oci_types.encoded(
        {
            "schemaVersion": 2,
            "mediaType": oci_types.MANIFEST,
            "config": oci_types.descriptor(oci_types.CONFIG, config),
            "layers": [{"mediaType": LAYER_TYPE, "digest": oci_types.digest_of(layer), "size": len(layer)}],
        }
    )
    files |= {f"blobs/sha256/{oci_types.digest_of(raw)[7:]}": raw for raw in (layer, config, manifest)}
    index = json.loads(files["index.json"])
    (proved,) = (item for item in index["manifests"] if item["annotations"][REF] == "sample")
    entry = {**oci_types.descriptor(oci_types.MANIFEST, manifest), "annotations": {REF: name(proved)}}
    index["manifests"].append(entry)
    files["index.json"] = json.dumps(index).encode()


@pytest.mark.attack(
    "writer of a saved image", "a second image under the digest of the proved one, or its name", "refused: malformed"
)
@pytest.mark.parametrize("name", [lambda proved: proved["digest"], lambda proved: "sample"])
def test_another_image_under_the_name_of_the_proved_one_is_not_loaded(
    site: Site, name: Callable[[dict[str, Any]], str]
) -> None:
    files = exported()
    other_image(files, name)
    assert reasons(brought(files)) == ["malformed"]
    assert site.engine.loaded == {}


def test_only_the_verified_manifest_is_loaded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is loaded, even if the layers that are read from the file give a different image."""
    files = exported()
    right = saved_image_file.SavedImage.checked_image
    hostile = PlainDescription(config_of([LAYER], {"other": "image"})).with_layers([PlainLayer().write(len, len)])

    def other(saved: saved_image_file.SavedImage, manifest: Manifest) -> OciImage:
        right(saved, manifest)
        return hostile

    monkeypatch.setattr(saved_image_file.SavedImage, "checked_image", other)
    assert reasons(brought(files)) == ["digest"]
    assert site.engine.loaded == {}


def test_layers_beyond_the_limits_are_refused(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    files = exported()
    for limit, value in (("_LARGEST", 4), ("_MOST_LAYERS", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(saved_image_file, limit, value)
            assert reasons(brought(files)) == ["too-large"]
    assert site.engine.loaded == {}


def test_a_saved_image_leaves_nothing_in_the_cache_of_layers(site: Site) -> None:
    files = exported()
    before = sorted(user_folders.cache_folder("layers").rglob("*"))
    assert brought(files).code == 0
    assert sorted(user_folders.cache_folder("layers").rglob("*")) == before


def test_a_changed_manifest_or_configuration_is_not_loaded(site: Site) -> None:
    files = exported()
    (manifest,) = (
        item for item in json.loads(files["index.json"])["manifests"] if item["annotations"][REF] == "sample"
    )
    for digest in (manifest["digest"], site.engine.image.id):
        name = f"blobs/sha256/{digest[7:]}"
        assert reasons(brought({**files, name: files[name] + b" "})) == ["digest"]
    assert site.engine.loaded == {}


def test_only_a_key_that_is_trusted_here_counts(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    files = exported()
    Path("other.pub").write_bytes(new_key(monkeypatch).pem)
    assert reasons(brought(files, "--key", "other.pub")) == ["signature"]
    Path("none.yaml").write_text("level: quick\n", encoding="utf-8")
    assert reasons(brought(files, "--policy", "none.yaml")) == ["no-key"]
    assert site.engine.loaded == {}


def test_links_and_doubles_are_refused(site: Site) -> None:
    exported()
    with tarfile.open("a.tar", "a") as tar:
        member = tarfile.TarInfo("blobs/sha256/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    assert reasons(envbuild("load", "a.tar", "--key", "team.pub", "--json")) == ["malformed"]
    Path("c.tar").write_bytes(b"x" * 4096)
    assert reasons(envbuild("load", "c.tar", "--key", "team.pub", "--json")) == ["malformed"]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [({"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 60)}, "layer"), ({"size": "9" * 30}, "malformed")],
)
def test_a_file_of_exabytes_is_refused(site: Site, attributes: dict[str, str], reason: str) -> None:
    exported()
    with tarfile.open("a.tar", "a", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo(f"blobs/sha256/{'0' * 64}")
        member.size, member.pax_headers = 1, attributes
        tar.addfile(member, io.BytesIO(b"x"))
    assert reasons(envbuild("load", "a.tar", "--key", "team.pub", "--json")) == [reason]


def test_without_a_key_nothing_is_exported_unless_unsigned_is_asked_for(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(keys_and_signatures.KEY)
    refused = envbuild("save", "sample", "-o", "a.tar", "--json")
    assert (refused.code, Path("a.tar").exists()) == (UsageError.code, False)
    assert "--unsigned" in refused.document["error"]["hint"]
    done = envbuild("save", "sample", "-o", "a.tar", "--unsigned", "--json")
    assert (done.code, done.document["key"]) == (0, None)
    assert "unsigned" in done.stderr
    assert reasons(envbuild("load", "a.tar", "--key", "team.pub", "--json")) == ["unsigned"]


def test_an_unproved_image_is_not_exported(site: Site) -> None:
    site.prove(passed_run(probe("env.libs", "failed")), day=1)
    assert envbuild("save", "sample", "-o", "a.tar").code == NotProved.code
    assert not Path("a.tar").exists()


def test_no_file_is_written_over(site: Site) -> None:
    Path("a.tar").touch()
    assert envbuild("save", "sample", "-o", "a.tar").code == UsageError.code
