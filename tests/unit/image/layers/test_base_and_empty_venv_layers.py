"""The layers that are made from a base's tar."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from envbuild.image.layers import base_and_empty_venv_layers, layer_cache
from envbuild.image.layers.base_and_empty_venv_layers import BaseLayer, DifferenceLayer, VenvLayer
from envbuild.image.layers.layer_cache import LayerRecipe
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, HashMismatch
from unit.image.layers.uv_oracle import read_layer

SCRIPTS = "usr/lib/python3.11/venv/scripts"
BASE = {
    "usr/bin/python3.11": b"ELF",
    f"{SCRIPTS}/common/activate": b"VIRTUAL_ENV=__VENV_DIR__\n",
    f"{SCRIPTS}/posix/activate.csh": b"setenv VIRTUAL_ENV __VENV_DIR__\n",
    f"{SCRIPTS}/nt/activate.bat": b"not here",
}


def base(folder: Path, files: Mapping[str, bytes], name: str = "base") -> Path:
    """A base as built by debian_base_tar: a tar, and its sha256."""
    tar = folder / f"{name}.tar"
    with tarfile.open(tar, "w") as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(f"./{path}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    tar.with_suffix(".sha256").write_text(hashlib.sha256(tar.read_bytes()).hexdigest(), encoding="utf-8")
    return tar


def packed(recipe: LayerRecipe) -> bytes:
    blocks: list[bytes] = []
    layer = layer_cache.stream_layer(recipe, blocks.append)
    raw = b"".join(blocks)
    assert layer.digest == f"sha256:{hashlib.sha256(raw).hexdigest()}"
    assert layer.diff_id == f"sha256:{hashlib.sha256(gzip.decompress(raw)).hexdigest()}"
    assert (layer.size, layer.diff_size) == (len(raw), len(gzip.decompress(raw)))
    return raw


def test_the_base_is_its_tar(tmp_path: Path) -> None:
    tar = base(tmp_path, {**BASE, "large": bytes(range(256)) * 50_000})
    recipe = BaseLayer(tar)
    assert gzip.decompress(packed(recipe)) == tar.read_bytes()
    tar.unlink()
    assert packed(recipe)  # its blob is kept


def test_the_division_into_blocks_does_not_change_the_layer(tmp_path: Path) -> None:
    raw = bytes(range(256)) * 50_000
    layers = {
        base_and_empty_venv_layers.write_compressed((raw[i : i + step] for i in range(0, len(raw), step)), len, len)
        for step in (len(raw), 4 << 20, 1000, 65537)
    }
    assert len(layers) == 1


@pytest.mark.parametrize("which", ["base", "difference", "difference, second", "venv"])
def test_a_damaged_tar_is_found_and_removed(tmp_path: Path, which: str) -> None:
    tar, other = base(tmp_path, BASE), base(tmp_path, {**BASE, "more": b"x"}, "other")
    damaged = other if which == "difference, second" else tar
    raw = damaged.read_bytes()
    damaged.write_bytes(raw.replace(b"VIRTUAL_ENV", b"virtual_env", 1))
    recipe: LayerRecipe = BaseLayer(tar)
    if which == "venv":
        recipe = VenvLayer(tar, "3.11", "3.11.2")
    elif which != "base":
        recipe = DifferenceLayer(tar, other)
    with pytest.raises(HashMismatch, match="was damaged"):
        layer_cache.stream_layer(recipe)
    assert not damaged.exists()
    assert layer_cache.known_layer(recipe) is None
    blobs = user_folders.cache_folder("layers") / "blobs"
    assert not blobs.exists() or list(blobs.iterdir()) == []


def test_a_damaged_blob_in_the_cache_is_made_again(tmp_path: Path) -> None:
    recipe = BaseLayer(base(tmp_path, BASE))
    raw = packed(recipe)
    (blob,) = (user_folders.cache_folder("layers") / "blobs").iterdir()
    blob.write_bytes(raw[:-1])
    assert packed(recipe) == raw
    blob.unlink()
    assert packed(recipe) == raw


def test_the_difference_has_the_packages_of_apt(tmp_path: Path) -> None:
    first = base(tmp_path, {"a": b"1", "removed": b""})
    second = base(tmp_path, {"a": b"2", "b": b"3"}, "second")
    recipe = DifferenceLayer(first, second)
    with tarfile.open(fileobj=io.BytesIO(packed(recipe)), mode="r:gz") as archive:
        assert archive.getnames() == [".wh.removed", "./a", "./b"]
    keys = {recipe.key, DifferenceLayer(second, first).key, DifferenceLayer(first, second, "another zlib").key}
    assert len(keys | {BaseLayer(first).key, BaseLayer(first, "another zlib").key}) == 5


def test_the_environment_is_that_of_the_bases_python(tmp_path: Path) -> None:
    tree = read_layer(packed(VenvLayer(base(tmp_path, BASE), "3.11", "3.11.2")))
    assert tree["opt/venv/bin/activate"] == (0o644, b"VIRTUAL_ENV=/opt/venv\n")
    assert tree["opt/venv/bin/activate.csh"] == (0o644, b"setenv VIRTUAL_ENV /opt/venv\n")
    assert tree["opt/venv/bin/python3.11"] == (0o777, b"-> /usr/bin/python3.11")
    assert b"version = 3.11.2\n" in (tree["opt/venv/pyvenv.cfg"][1] or b"")
    assert "opt/venv/bin/activate.bat" not in tree
    assert all(not path.startswith("usr") for path in tree)


@pytest.mark.parametrize("lacking", ["usr/bin/python3.11", "scripts"])
def test_a_base_without_python_or_its_module_venv_is_refused(tmp_path: Path, lacking: str) -> None:
    tar = base(tmp_path, {path: content for path, content in BASE.items() if lacking not in path})
    with pytest.raises(BuildError, match=r"no /usr/bin/python3\.11 with the module venv"):
        layer_cache.stream_layer(VenvLayer(tar, "3.11", "3.11.2"))
