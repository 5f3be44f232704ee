"""OCI layouts: a folder and a file with the same image, existing and damaged layouts, archives for engines."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from envbuild.image.engine_image_to_oci_layout import REF
from envbuild.image.oci.image_description import OciImage
from envbuild.image.oci.layer_blobs import learn_layers
from envbuild.image.oci.layout_export import archive, write_file, write_folder
from envbuild.registry import oci_types
from envbuild.util.errors import DiskError, EnvbuildError, FileError
from unit.image.oci.layered_samples import SampleRecipe, described, sample


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def unpacked(raw: bytes) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        for member in tar:
            stream = tar.extractfile(member)
            assert stream
            assert member.name not in found
            found[member.name] = stream.read()
    return found


def known() -> OciImage:
    return learn_layers(sample()[1], lambda line: None)


def written(folder: Path, reference: str = "one") -> OciImage:
    return write_folder(sample()[1], folder, reference, lambda line: None)


def test_a_folder_and_a_file_hold_the_same_image(tmp_path: Path) -> None:
    image = written(tmp_path / "folder")
    write_file(image, tmp_path / "file.tar", "one")
    write_file(known(), tmp_path / "again.tar", "one")
    raw = (tmp_path / "file.tar").read_bytes()
    assert (tmp_path / "again.tar").read_bytes() == raw
    assert unpacked(raw) == files(tmp_path / "folder")
    blobs = [name for name in files(tmp_path / "folder") if name.startswith("blobs/sha256/")]
    for name in blobs:
        assert oci_types.digest_of(files(tmp_path / "folder")[name]) == f"sha256:{Path(name).name}"
    assert len(blobs) == 4


def test_the_layout_names_its_parts_by_digest_and_size(tmp_path: Path) -> None:
    image = written(tmp_path)
    found = files(tmp_path)
    assert json.loads(found["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (entry,) = json.loads(found["index.json"])["manifests"]
    assert entry["annotations"] == {REF: "one"}

    def read(descriptor: dict[str, Any]) -> bytes:
        raw = found[f"blobs/sha256/{descriptor['digest'].removeprefix('sha256:')}"]
        assert descriptor["size"] == len(raw)
        return raw

    manifest = json.loads(read(entry))
    config = json.loads(read(manifest["config"]))
    assert manifest["config"]["digest"] == image.id
    for layer in manifest["layers"]:
        read(layer)
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in image.layers]
    assert [item["created_by"] for item in config["history"]] == ["sample base", "sample own"]
    assert (config["os"], config["architecture"]) == ("linux", "amd64")


def test_an_export_keeps_the_images_of_an_existing_layout(tmp_path: Path) -> None:
    first = written(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("blobs/sha256/*")}
    other = write_folder(described(*sample()[0], SampleRecipe("more", b"x")), tmp_path, "two", lambda line: None)
    again = write_folder(described(SampleRecipe("only", b"x")), tmp_path, "one", lambda line: None)
    entries = {
        item["annotations"][REF]: item["digest"]
        for item in json.loads((tmp_path / "index.json").read_text())["manifests"]
    }
    assert entries == {"one": again.manifest.digest, "two": other.manifest.digest}
    layers = [tmp_path / "blobs/sha256" / layer.digest.removeprefix("sha256:") for layer in first.layers]
    assert all(path.stat().st_mtime_ns == before[path] for path in layers)


def test_a_damaged_blob_of_a_layout_is_written_again(tmp_path: Path) -> None:
    image = written(tmp_path)
    before = files(tmp_path)
    for layer in image.layers:
        (tmp_path / "blobs/sha256" / layer.digest.removeprefix("sha256:")).write_bytes(b"x")
    written(tmp_path)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    "index",
    [b"", b"{", b"[]", b"{}", b'{"manifests": {}}', b'{"manifests": [1]}', b'{"manifests": [{"annotations": [1]}]}'],
)
def test_a_damaged_index_is_refused_and_stays(tmp_path: Path, index: bytes) -> None:
    written(tmp_path)
    (tmp_path / "index.json").write_bytes(index)
    before = files(tmp_path)
    with pytest.raises(EnvbuildError, match=r"index\.json") as caught:
        written(tmp_path, "two")
    assert caught.value.kind == "file"
    assert files(tmp_path) == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x", encoding="utf-8")
    with pytest.raises(FileError, match="is not an OCI image layout"):
        written(tmp_path)
    assert list(files(tmp_path)) == ["thesis.txt"]
    with pytest.raises(FileError, match="is not an OCI image layout"):
        written(tmp_path / "thesis.txt")


def test_a_file_that_cannot_be_completed_does_not_appear(tmp_path: Path) -> None:
    image = known()
    failing = SampleRecipe("own", b"", error=OSError(28, "No space left on device"))
    broken = described(sample()[0][0], failing).with_layers(image.layers)
    (tmp_path / "image.tar").write_bytes(b"before")
    with pytest.raises(DiskError):
        write_file(broken, tmp_path / "image.tar", "one")
    assert files(tmp_path) == {"image.tar": b"before"}


def test_an_archive_for_an_engine_leaves_layers_out() -> None:
    image = known()
    left_out = [image.layers[0].diff_id]
    found = unpacked(b"".join(archive(image, {"name": "x"}, docker_tag="e/x:1", left_out=left_out)))
    (item,) = json.loads(found["manifest.json"])
    assert item["RepoTags"] == ["e/x:1"]
    assert found[item["Config"]] == image.configuration
    first, second = item["Layers"]
    assert first not in found
    names = [layer.digest for layer in image.layers]
    assert [f"sha256:{Path(path).name}" for path in (first, second)] == names
    assert oci_types.digest_of(found[second]) == names[1]
    (entry,) = json.loads(found["index.json"])["manifests"]
    assert entry["digest"] == image.manifest.digest


def test_gnu_tar_reads_the_archive(tmp_path: Path) -> None:
    write_file(known(), tmp_path / "image.tar", "one")
    listed = subprocess.run(["tar", "-tf", tmp_path / "image.tar"], capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines()[:2] == ["oci-layout", "index.json"]
    assert listed.stderr == ""
