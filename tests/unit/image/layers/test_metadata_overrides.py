"""Rewritten metadata equals what dockerfiles/repin writes, and pip and uv keep the override."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.fetch import sha256_file_store
from envbuild.image.layers.layer_cache import known_layer, stream_layer
from envbuild.image.layers.layer_writer import LayerEntry
from envbuild.image.layers.metadata_overrides import overriding_files
from envbuild.image.layers.wheel_installed_files import installed_files
from envbuild.image.layers.wheel_layers import WheelLayer, WheelOfLayer
from envbuild.image.layers.wheel_reader import WheelRefused, open_wheel
from envbuild.util import package_data, user_folders
from envbuild.util.errors import HashMismatch
from unit.image.layers.odd_wheels import digest, odd_wheel
from unit.image.layers.uv_oracle import PYTHON, UvOracle
from unit.support import sha

METADATA = """Requires-Dist: nvidia-cublas-cu12==12.4.5.8; platform_system == "Linux" and platform_machine == "x86_64"
Requires-Dist: nvidia_cublas.cu12 (>=12,<13)
Requires-Dist: nvidia-cublas-cu12[extra]~=12.1 ; extra == "x"
Requires-Dist: nvidia-cublas-cu12
Requires-Dist: nvidia-cublas-cu12-more==1
Requires-Dist: pinned==1

Requires-Dist: nvidia-cublas-cu12==1 in the description
"""
PINS = {"nvidia-cublas-cu12": "12.5.3.2", "Pinned": "2"}


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    return [
        odd_wheel(tmp_path, {"odd.py": b""}, metadata=METADATA),
        odd_wheel(tmp_path, {"other.py": b""}, name="other", metadata="Requires-Dist: torch==2\n"),
    ]


def test_only_requirements_of_another_version_change(wheels: list[Path]) -> None:
    with open_wheel(wheels[0]) as one, open_wheel(wheels[1]) as two:
        everything: list[LayerEntry] = [*installed_files(one, "3.11"), *installed_files(two, "3.11")]
        changed = {entry.path.rpartition("/")[2]: entry.content for entry in overriding_files(everything, PINS)}
    assert set(changed) == {"METADATA", "RECORD"}
    assert isinstance(changed["METADATA"], bytes)
    assert changed["METADATA"].decode().splitlines()[3:] == [
        'Requires-Dist: nvidia-cublas-cu12==12.5.3.2; platform_system == "Linux" and platform_machine == "x86_64"',
        "Requires-Dist: nvidia_cublas.cu12==12.5.3.2",
        'Requires-Dist: nvidia-cublas-cu12[extra]==12.5.3.2; extra == "x"',
        "Requires-Dist: nvidia-cublas-cu12",
        "Requires-Dist: nvidia-cublas-cu12-more==1",
        "Requires-Dist: pinned==2",
        "",
        "Requires-Dist: nvidia-cublas-cu12==1 in the description",
    ]


def test_metadata_that_a_package_vendors_stays(tmp_path: Path) -> None:
    vendored = {"odd/_vendor/foo-1.0.dist-info/METADATA": b"Requires-Dist: pinned==1\n"}
    with open_wheel(odd_wheel(tmp_path, vendored)) as wheel:
        assert list(overriding_files(installed_files(wheel, "3.11"), PINS)) == []


def test_the_files_are_those_of_todays_installer(wheels: list[Path], tmp_path: Path) -> None:
    oracle = UvOracle(tmp_path)
    oracle.install(*wheels)
    tool, environment = package_data.DOCKERFILES / "repin", oracle.environment
    pins = [f"{name}=={version}" for name, version in PINS.items()]
    subprocess.run([sys.executable, "-I", "-S", tool, environment, *pins], check=True, stdout=subprocess.DEVNULL)
    with open_wheel(wheels[0]) as one, open_wheel(wheels[1]) as two:
        files = [*installed_files(one, PYTHON, str(environment)), *installed_files(two, PYTHON, str(environment))]
        for entry in overriding_files(files, PINS):
            assert Path("/", entry.path).read_bytes() == entry.content


def test_lines_that_end_in_carriage_returns_stay_so(tmp_path: Path) -> None:
    wheel = odd_wheel(tmp_path, {}, metadata="Requires-Dist: pinned==1\r\nX: y\r\n")
    with open_wheel(wheel) as reader:
        metadata, _ = overriding_files(installed_files(reader, "3.11"), PINS)
    assert metadata.content.endswith(b"Requires-Dist: pinned==2\r\nX: y\r\n")  # type: ignore[union-attr]


def test_the_layer_has_these_files_alone(wheels: list[Path]) -> None:
    from envbuild.fetch.sha256_file_store import file_digest

    recipe = WheelLayer("3.11", tuple(WheelOfLayer(w, file_digest(w)) for w in wheels), tuple(PINS.items()))
    site = "opt/venv/lib/python3.11/site-packages/odd-1.0.dist-info"
    assert [file.path for file in stream_layer(recipe).files] == [f"{site}/METADATA", f"{site}/RECORD"]
    shutil.rmtree(wheels[0].parent, ignore_errors=True)


def test_only_wheels_whose_metadata_changes_are_hashed_and_what_is_read_is_checked(
    wheels: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, *others = wheels

    def pinned() -> WheelLayer:
        listed = (WheelOfLayer(changed, sha256), *(WheelOfLayer(other, sha(other.name)) for other in others))
        return WheelLayer("3.11", listed, tuple(PINS.items()))

    sha256 = sha256_file_store.file_digest(changed)
    assert len(stream_layer(pinned()).files) == 2
    shutil.rmtree(user_folders.cache_folder("layers"))
    odd_wheel(changed.parent, {"more": b"1"}, metadata=METADATA)  # another valid wheel
    with pytest.raises(HashMismatch):
        stream_layer(pinned())
    assert known_layer(pinned()) is None
    metadata = "odd-1.0.dist-info/METADATA"
    odd_wheel(changed.parent, {}, metadata=METADATA, unlisted=[metadata], more_rows=[f"{metadata},{digest(b'x')},1"])
    monkeypatch.setattr(sha256_file_store, "file_digest", lambda file: sha256 if file == changed else sha(file.name))
    with pytest.raises(WheelRefused, match=r"METADATA': sha256 .*, in RECORD"):
        stream_layer(pinned())
