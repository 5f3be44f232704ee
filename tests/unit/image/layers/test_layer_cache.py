"""The cache of layers: damaged entries, several writers, and a process that is killed at any moment."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envbuild.fetch.sha256_file_store import file_digest
from envbuild.image.layers import layer_cache, layer_writer, wheel_layers
from envbuild.image.layers.layer_cache import known_layer, stream_layer, write_blob
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.image.layers.wheel_reader import WheelMember, WheelReader
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, HashMismatch, LockError
from unit.image.layers.odd_wheels import odd_wheel
from unit.image.layers.uv_oracle import read_layer


def of_layer(wheel: Path) -> WheelOfLayer:
    return WheelOfLayer(wheel, file_digest(wheel))


@pytest.fixture
def recipe(tmp_path: Path) -> WheelLayer:
    wheels = [
        odd_wheel(tmp_path, {f"{name}/a.py": b"1" * 1000, "shared.py": b""}, name=name) for name in ("one", "two")
    ]
    return WheelLayer("3.11", tuple(map(of_layer, wheels)))


def entries() -> list[Path]:
    return sorted(user_folders.cache_folder("layers").iterdir())


def test_a_written_layer_is_remembered(recipe: WheelLayer) -> None:
    assert known_layer(recipe) is None
    layer = stream_layer(recipe)
    assert known_layer(recipe) == layer
    assert stream_layer(recipe) == layer
    assert len(entries()) == 1


def test_a_file_that_two_wheels_share_is_written_once(recipe: WheelLayer) -> None:
    paths = [file.path for file in stream_layer(recipe).files]
    assert paths.count("opt/venv/lib/python3.11/site-packages/shared.py") == 1


def test_a_file_of_one_wheel_cannot_be_a_folder_of_another(tmp_path: Path) -> None:
    one, two = odd_wheel(tmp_path, {"x": b""}, name="one"), odd_wheel(tmp_path, {"x/y": b""}, name="two")
    with pytest.raises(LockError, match="site-packages/x is a file and a folder"):
        stream_layer(WheelLayer("3.11", (of_layer(one), of_layer(two))))
    assert not user_folders.cache_folder("layers", make=False).exists()


@pytest.mark.parametrize("damage", ["cut", "another size", "of another recipe", "not JSON", "empty"])
def test_a_damaged_entry_is_found_and_made_again(recipe: WheelLayer, damage: str) -> None:
    stream_layer(WheelLayer("3.11", recipe.wheels[:1]))
    (other,) = entries()
    layer = stream_layer(recipe)
    (entry,) = set(entries()) - {other}
    text = entry.read_text()
    changed = {
        "cut": text[: len(text) // 2],
        "another size": text.replace(f'"size":{layer.size}', f'"size":{layer.size + 1}'),
        "of another recipe": other.read_text(),
        "not JSON": "x",
        "empty": "",
    }[damage]
    assert changed != text
    entry.write_text(changed)
    assert known_layer(recipe) is None
    assert stream_layer(recipe) == layer
    assert json.loads(entry.read_text()) == json.loads(text)


def test_everything_that_determines_a_layer_is_in_its_key(recipe: WheelLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = recipe.wheels
    keys = {
        recipe.key,
        WheelLayer("3.12", recipe.wheels).key,
        WheelLayer("3.11", (one,)).key,
        WheelLayer("3.11", (two, one)).key,
        WheelLayer("3.11", recipe.wheels, (("a", "1"),)).key,
    }
    monkeypatch.setattr(wheel_layers, "WRITER_VERSION", layer_writer.WRITER_VERSION + 1)
    keys.add(recipe.key)
    assert len(keys) == 6


def test_a_wheel_that_is_not_the_locked_one_is_refused(recipe: WheelLayer) -> None:
    wheel = recipe.wheels[0].file
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    with pytest.raises((HashMismatch, LockError), match=r"one-1\.0"):
        stream_layer(recipe)
    another = odd_wheel(wheel.parent, {"other": b""}, name="one")
    assert another == wheel
    with pytest.raises(HashMismatch, match="not the locked wheel"):
        stream_layer(recipe)
    assert known_layer(recipe) is None


@pytest.mark.parametrize("wanted", ["packed", "plain"])
def test_a_known_layer_is_written_again_with_the_same_bytes(
    recipe: WheelLayer, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, again = io.BytesIO(), io.BytesIO()
    layer = stream_layer(recipe, **{wanted: first.write})
    if wanted == "packed":  # nothing but METADATA, RECORD and the like is inflated
        monkeypatch.setattr(WheelReader, "blocks", _only_texts(WheelReader.blocks))
    assert stream_layer(recipe, **{wanted: again.write}) == layer
    assert again.getvalue() == first.getvalue() != b""


def _only_texts(blocks: Callable[..., object]) -> Callable[..., object]:
    def reading(reader: WheelReader, member: WheelMember) -> object:
        assert ".dist-info/" in member.name
        return blocks(reader, member)

    return reading


@pytest.mark.parametrize("wanted", ["packed", "plain"])
def test_a_wheel_that_was_damaged_since_is_found(recipe: WheelLayer, wanted: str) -> None:
    layer = stream_layer(recipe)
    wheel = recipe.wheels[1].file
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo("two/a.py")
    raw = bytearray(wheel.read_bytes())
    raw[member.header_offset + 30 + len(member.filename) + 2] ^= 1
    wheel.write_bytes(raw)
    with pytest.raises(HashMismatch, match=r"two-1\.0.*is not the locked wheel"):
        stream_layer(recipe, **{wanted: len})
    assert known_layer(recipe) == layer


@pytest.mark.parametrize("wanted", ["packed", "plain"])
def test_a_layer_that_is_not_the_known_one_is_an_error(recipe: WheelLayer, wanted: str) -> None:
    other = layer_writer.WrittenLayer("sha256:" + "0" * 64, 1, "sha256:" + "1" * 64, 1)
    layer_cache._note(recipe, other)
    with pytest.raises(BuildError, match="not reproducible: a layer has the digest sha256:"):
        stream_layer(recipe, **{wanted: len})
    with pytest.raises(BuildError, match="not reproducible"):
        layer_cache.write_again(recipe, len)


# blobs


def test_a_blob_is_named_by_its_digest(recipe: WheelLayer, tmp_path: Path) -> None:
    layer = write_blob(recipe, tmp_path / "blobs")
    (blob,) = (tmp_path / "blobs").iterdir()
    assert f"sha256:{blob.name}" == f"sha256:{file_digest(blob)}" == layer.digest
    assert len(read_layer(blob.read_bytes())) > 8
    before = blob.stat().st_mtime_ns
    assert write_blob(recipe, tmp_path / "blobs") == layer
    assert blob.stat().st_mtime_ns == before


def test_a_damaged_blob_is_written_again(recipe: WheelLayer, tmp_path: Path) -> None:
    layer = write_blob(recipe, tmp_path)
    blob = tmp_path / layer.digest.removeprefix("sha256:")
    for damage in (blob.read_bytes()[:-1], b""):
        blob.write_bytes(damage)
        assert write_blob(recipe, tmp_path) == layer
        assert file_digest(blob) == blob.name


def test_two_writers_at_once_leave_one_sound_blob(recipe: WheelLayer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        layers = set(pool.map(lambda _: write_blob(recipe, tmp_path / "blobs"), range(12)))
    (blob,) = (tmp_path / "blobs").iterdir()
    (layer,) = layers
    assert file_digest(blob) == blob.name == layer.digest.removeprefix("sha256:")
    assert known_layer(recipe) == layer


_WRITER = """
import sys
from pathlib import Path
from envbuild.image.layers.layer_cache import write_blob
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
wheel, sha256, folder = sys.argv[1:]
recipe = WheelLayer("3.11", (WheelOfLayer(Path(wheel), sha256),))
print("begins", flush=True)
write_blob(recipe, Path(folder))
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    """The writer is killed at 12 moments of a run. Remaining files are complete, and the next run removes temporary
    files."""
    wheel = of_layer(odd_wheel(tmp_path, {f"odd/{number}": os.urandom(200_000) for number in range(40)}))
    recipe, blobs = WheelLayer("3.11", (wheel,)), tmp_path / "blobs"
    command = [sys.executable, "-c", _WRITER, str(wheel.file), wheel.sha256, str(blobs)]
    environment = {**os.environ, "PYTHONPATH": str(Path(layer_cache.__file__).parents[3])}
    for moment in range(12):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout
        process.stdout.readline()
        time.sleep(moment * 0.01)
        process.kill()
        process.communicate()
        complete = [path for path in blobs.glob("*") if not path.name.startswith(".")] if blobs.exists() else []
        assert all(file_digest(path) == path.name for path in complete)
        known = known_layer(recipe)
        assert known is None or known == stream_layer(recipe)
        for path in complete:
            path.unlink()
        for path in entries():
            path.unlink()
    layer = write_blob(recipe, blobs)
    assert [path.name for path in blobs.iterdir()] == [layer.digest.removeprefix("sha256:")]


def test_a_full_disk_leaves_nothing(recipe: WheelLayer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wheel_layers, "write_layer", full)
    with pytest.raises(OSError, match="No space"):
        write_blob(recipe, tmp_path / "blobs")
    assert list((tmp_path / "blobs").iterdir()) == []
    assert known_layer(recipe) is None
