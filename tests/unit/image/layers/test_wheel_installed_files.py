"""The tree of a wheel equals the one that uv installs, for odd wheels and for those of the index."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild.image.layers.layer_writer import LayerFile
from envbuild.image.layers.wheel_installed_files import installed_files
from envbuild.image.layers.wheel_reader import WheelRefused, open_wheel
from unit.image.layers.odd_wheels import ODD, REFUSED_BY_BOTH, REFUSED_BY_US, odd_wheel
from unit.image.layers.uv_oracle import UvOracle, UvRefused, differences

# About 25 MB; what these packages install covers scripts, binaries, .data, gui and console scripts, odd modes.
PUBLISHED = (
    "certifi", "cffi", "click", "jinja2", "markupsafe", "numpy", "packaging", "pip", "protobuf",
    "pydantic-core", "pygments", "pyyaml", "setuptools", "typing-extensions", "wheel",
)  # fmt: skip
_PIP_SETTINGS = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}  # before any fixture
_HOME = os.environ.get("HOME", "/")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> UvOracle:
    return UvOracle(tmp_path_factory.mktemp("uv"))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Wheels from the index that pip is configured for."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest"]
    environment = {"PATH": os.defpath, "HOME": _HOME, **_PIP_SETTINGS}
    done = subprocess.run([*command, folder, *PUBLISHED], env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"pip cannot download wheels: {done.stderr.strip().splitlines()[-1]}")
    yield folder


@pytest.mark.slow
@pytest.mark.parametrize("package", PUBLISHED)
def test_a_published_wheel_gives_uvs_tree(published: Path, oracle: UvOracle, package: str) -> None:
    (wheel,) = published.glob(f"{package.replace('-', '_')}-*.whl")
    assert differences(oracle.written(wheel), oracle.install(wheel)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", ODD)
def test_an_odd_wheel_gives_uvs_tree(tmp_path: Path, oracle: UvOracle, case: str) -> None:
    wheel = odd_wheel(tmp_path, **_arguments(ODD[case]))
    found = oracle.written(wheel)
    assert len(found) > 3
    assert differences(found, oracle.install(wheel)) == []


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED_BY_BOTH)
def test_wheels_that_uv_refuses_are_refused(tmp_path: Path, oracle: UvOracle, case: str) -> None:
    wheel = odd_wheel(tmp_path, **_arguments(REFUSED_BY_BOTH[case]))
    with pytest.raises(UvRefused):
        oracle.install(wheel)
    with pytest.raises(Exception, match=r"odd-1\.0|is a file and a folder") as refusal:
        oracle.written(wheel)
    assert type(refusal.value).__name__ in ("WheelRefused", "LockError")


@pytest.mark.parametrize("case", REFUSED_BY_US)
def test_wheels_that_uv_installs_wrongly_are_refused(tmp_path: Path, oracle: UvOracle, case: str) -> None:
    arguments, words = REFUSED_BY_US[case]
    with pytest.raises(WheelRefused, match=r"^odd-1\.0-py3-none-any\.whl: ") as refusal:
        oracle.written(odd_wheel(tmp_path, **_arguments(arguments)))
    assert words in refusal.value.message


def test_the_oracle_sees_a_difference(tmp_path: Path, oracle: UvOracle) -> None:
    one = oracle.written(odd_wheel(tmp_path, {"odd/a.py": b"1"}))
    other = oracle.install(odd_wheel(tmp_path, {"odd/a.py": b"2", "odd/b.py": b""}))
    lines = differences(one, other)
    assert len(lines) == 3
    assert {line.partition(":")[0].rpartition("/")[2] for line in lines} == {"a.py", "b.py", "RECORD"}


def test_a_hash_in_hexadecimal_is_checked_too(tmp_path: Path, oracle: UvOracle) -> None:
    """The RECORD of gmsh 4.15.2 has such hashes."""
    for content, sound in ((b"", True), (b"x", False)):
        empty = "sha256=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
        wheel = odd_wheel(tmp_path, {"odd.py": content}, unlisted=["odd.py"], more_rows=[f"odd.py,{empty},0"])
        if sound:
            assert differences(oracle.written(wheel), oracle.install(wheel)) == []
        else:
            with pytest.raises(WheelRefused, match="in RECORD e3b0"):
                oracle.written(wheel)


def test_paths_begin_at_the_root_of_the_image(tmp_path: Path) -> None:
    wheel = odd_wheel(tmp_path, {"odd.py": b""}, entry_points="[console_scripts]\nodd = odd:main\n")
    with open_wheel(wheel) as reader:
        files = {entry.path: entry for entry in installed_files(reader, "3.12")}
    assert "opt/venv/lib/python3.12/site-packages/odd.py" in files
    script = files["opt/venv/bin/odd"]
    assert isinstance(script, LayerFile)
    assert isinstance(script.content, bytes)
    assert script.content.startswith(b"#!/opt/venv/bin/python\n")


def _arguments(case: dict[str, object]) -> dict[str, Any]:
    return dict(case)
