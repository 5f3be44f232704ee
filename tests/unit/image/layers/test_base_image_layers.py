"""The layers of an image on a base image: the base's blobs, the virtual environment, and the links of nvcc."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from envbuild.image import debian_base_tar
from envbuild.image.layers import base_image_contents, layer_cache, venv_skeleton
from envbuild.image.layers.base_and_empty_venv_layers import VenvLayer
from envbuild.image.layers.base_image_contents import BaseFolder, BaseLayerRef, base_contents
from envbuild.image.layers.base_image_layers import (
    BaseBlobLayer,
    BaseImageFoldersLayer,
    BaseImageNvccLinksLayer,
    BaseImageVenvLayer,
)
from envbuild.image.layers.file_tree_of_layers import FolderOwnership, TreeFolder
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.image.layers.layer_writer import WrittenLayer, write_layer
from envbuild.registry import oci_types
from envbuild.util.errors import BuildError, HashMismatch
from unit.image.base_images import ACTIVATE, CSH, Blobs, debian, layers_in, tar_of
from unit.support import sha

TAR = tar_of({"a": b"a" * 3_000_000, "b": b"b"})


def blob_layer(folder: Path, blob: bytes, tar: bytes = TAR) -> BaseBlobLayer:
    file = folder / "blob"
    file.write_bytes(blob)
    return BaseBlobLayer(file, oci_types.digest_of(blob), oci_types.digest_of(tar))


def written(recipe: LayerRecipe) -> tuple[bytes, bytes, WrittenLayer]:
    """Return the blob, the tar in it, and the layer."""
    packed, plain = bytearray(), bytearray()
    layer = recipe.write(packed.extend, plain.extend)
    assert (layer.digest, layer.size) == (oci_types.digest_of(bytes(packed)), len(packed))
    assert (layer.diff_id, layer.diff_size) == (oci_types.digest_of(bytes(plain)), len(plain))
    return bytes(packed), bytes(plain), layer


@pytest.mark.parametrize(
    "pack", [gzip.compress, zstandard.compress, bytes, lambda tar: gzip.compress(tar[:999]) + gzip.compress(tar[999:])]
)
def test_a_blob_of_a_base_image_stays_as_it_is(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    blob = pack(TAR)
    packed, plain, layer = written(blob_layer(tmp_path, blob))
    assert (packed, plain) == (blob, TAR)
    assert (layer.size, layer.diff_size) == (len(blob), len(TAR))


def test_a_known_blob_is_not_read_again(tmp_path: Path) -> None:
    recipe = blob_layer(tmp_path, gzip.compress(TAR))
    layer = layer_cache.stream_layer(recipe)
    recipe.file.unlink()
    assert layer_cache.known_layer(recipe) == layer


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, bytes])
@pytest.mark.parametrize("at", [0, 2, 40, -1])
def test_a_damaged_file_is_removed_and_named(tmp_path: Path, pack: Callable[[bytes], bytes], at: int) -> None:
    recipe = blob_layer(tmp_path, pack(TAR))
    raw = bytearray(recipe.file.read_bytes())
    raw[at % len(raw)] ^= 1
    recipe.file.write_bytes(raw)
    with pytest.raises(HashMismatch, match=f"damaged on this disk: {recipe.digest}") as caught:
        written(recipe)
    assert "downloads it again" in str(caught.value.hint)
    assert not recipe.file.exists()


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.compress, bytes])
def test_a_file_that_ends_too_early_is_removed(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    recipe = blob_layer(tmp_path, pack(TAR))
    recipe.file.write_bytes(recipe.file.read_bytes()[:-1])
    with pytest.raises(HashMismatch):
        written(recipe)
    assert not recipe.file.exists()


@pytest.mark.parametrize(
    "blob",
    [gzip.compress(TAR + b"x"), gzip.compress(TAR)[:-1], gzip.compress(TAR) + b"x", zstandard.compress(TAR)[:-1], b""],
)
def test_a_blob_that_is_not_the_tar_of_the_configuration_is_refused(tmp_path: Path, blob: bytes) -> None:
    """The file is the same as in the registry, so the file is kept."""
    recipe = blob_layer(tmp_path, blob)
    with pytest.raises(BuildError, match="does not match its configuration"):
        written(recipe)
    assert recipe.file.exists()


def test_layers_differ_in_their_keys() -> None:
    blob = BaseBlobLayer(Path("a"), "sha256:1", "sha256:2")
    venv = BaseImageVenvLayer("/usr/bin/python3.11", "/usr/bin/python3.11", "3.11.2", {"activate": "x"})
    links = BaseImageNvccLinksLayer("/usr/local/cuda/lib64", ("libcudart.so.12",), "")
    keys = [
        blob.key, replace(blob, digest="sha256:3").key, replace(blob, diff_id="sha256:3").key,
        venv.key, replace(venv, interpreter="/bin/python3.11").key, replace(venv, executable="/opt/python3.11").key,
        replace(venv, version="3.11.3").key, replace(venv, templates={"activate": "y"}).key,
        links.key, replace(links, folder="/x").key, replace(links, libraries=()).key, replace(links, lib64="/y").key,
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert replace(blob, file=Path("b")).key == blob.key


# the virtual environment


def test_the_virtual_environment_has_the_files_of_any_other() -> None:
    templates = {"activate": ACTIVATE, "activate.csh": CSH}
    python = "/opt/conda/bin/python3.11"
    recipe = BaseImageVenvLayer(
        python, "/opt/conda/bin/python3.11", "3.11.8", {k: v.decode() for k, v in templates.items()}
    )
    _, _, layer = written(recipe)
    assert layer == write_layer(venv_skeleton.venv_files(python, "3.11.8", python, templates))
    by_path = {file.path: file for file in layer.files}
    assert by_path["opt/venv/bin/python3.11"].target == python
    assert {"opt/venv/pyvenv.cfg", "opt/venv/bin/activate", "opt/venv/bin/activate.csh"} <= by_path.keys()


def test_a_base_image_like_our_own_base_gets_the_same_layer(tmp_path: Path) -> None:
    """The layer is the same as on a tar of Debian with the same Python."""
    tar = tmp_path / f"{sha('base')}.tar"
    tar.write_bytes(tar_of({path: entry for path, entry in debian().items() if entry is not None}))
    tar.with_suffix(".sha256").write_text(sha256_of(tar), encoding="utf-8")
    debian_base_tar.require_intact(tar, sha256_of(tar))
    templates = {"activate": ACTIVATE.decode(), "activate.csh": CSH.decode()}
    own = VenvLayer(tar, "3.11", "3.11.2")
    assert written(BaseImageVenvLayer("/usr/bin/python3.11", "/usr/bin/python3.11", "3.11.2", templates)) == written(
        own
    )


def sha256_of(file: Path) -> str:
    return oci_types.digest_of(file.read_bytes()).removeprefix("sha256:")


# the links of nvcc


def test_the_links_that_linkers_look_for_are_made_in_the_real_folder() -> None:
    names = ("libcudart.so.12", "libcudart.so.12.6.77", "libcublas.so", "libcublas.so.12", "libx.a")
    recipe = BaseImageNvccLinksLayer("/usr/local/cuda-12.6/lib", names, "/usr/local/cuda-12.6/lib64")
    _, plain, layer = written(recipe)
    assert {file.path: file.target for file in layer.files} == {
        "usr/local/cuda-12.6/lib/libcudart.so": "libcudart.so.12",
        "usr/local/cuda-12.6/lib64": "lib",
    }
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        assert {member.mtime for member in archive} == {debian_base_tar.SOURCE_DATE_EPOCH}


def test_without_missing_links_there_are_none() -> None:
    assert BaseImageNvccLinksLayer("/usr/local/cuda/lib64", ("libcudart.so", "libcudart.so.12"), "").links() == []


# folders of the base image


def test_folders_are_written_with_their_own_mode_and_owner() -> None:
    """Parents that are not named have mode 0755 and owner root, as in every other layer."""
    folders = {
        "/opt": FolderOwnership(0o1777, 8**7 - 1, 8**7),
        "/usr/local": FolderOwnership(0o2750, 2**32 - 2, 50),
        "/\u00e4": FolderOwnership(0o500),
    }
    recipe = BaseImageFoldersLayer(tuple(BaseFolder(path, one) for path, one in folders.items()))
    _, plain, layer = written(recipe)
    assert layer.files == ()
    with tarfile.open(fileobj=io.BytesIO(plain)) as archive:
        found = {f"/{one.name}": FolderOwnership(one.mode, one.uid, one.gid) for one in archive if one.isdir()}
    assert found == {**folders, "/usr": FolderOwnership()}
    other = BaseImageFoldersLayer((BaseFolder("/opt", FolderOwnership(0o1777)),))
    assert other.key != recipe.key != BaseImageFoldersLayer(recipe.folders[:2]).key


def test_above_all_layers_a_folder_is_as_in_the_base_image() -> None:
    """The layer of the virtual environment alone would change the folder."""
    own, blobs = FolderOwnership(0o1777, 7, 8), Blobs()
    refs = layers_in(blobs, {**debian(), "opt": own})
    held = base_contents(blobs, refs, "3.11", {})
    venv = BaseImageVenvLayer(held.interpreter, held.executable, held.version, held.templates)

    def found(*recipes: LayerRecipe) -> FolderOwnership:
        above = [layer for _, plain, layer in map(written, recipes) if blobs.add(plain)]
        plain = [BaseLayerRef(layer.diff_id, layer.diff_size, layer.diff_id, "") for layer in above]
        there = base_image_contents._read_tree(blobs, [*refs, *plain], "3.11").resolve("/opt")
        assert there and isinstance(there[1], TreeFolder)
        return there[1].ownership

    assert found(venv) == FolderOwnership()
    assert found(venv, BaseImageFoldersLayer(held.odd_folders)) == own
