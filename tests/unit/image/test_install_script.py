"""How dockerfiles/install checks wheels before uv unpacks them: they must be exactly the wheels that the lock names, by
their hashes. uv checks whether a file contains the distribution that its name says."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from envbuild.util import package_data


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}-1.0-py3-none-any.whl").write_text(name, encoding="utf-8")
    return tmp_path


ASKED = [f"{name}==1.0 --hash=sha256:{sha(name)}" for name in ("a", "b")]


def looked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    tool = package_data.DOCKERFILES / "check"
    return subprocess.run([sys.executable, "-I", "-S", "-B", tool, folder, *arguments], capture_output=True, text=True)


def test_an_environment_as_locked_passes(folder: Path) -> None:
    done = looked(folder, *ASKED)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("change", ["content", "more", "less", "another's twice", "a folder"])
def test_anything_else_ends_the_step(folder: Path, change: str) -> None:
    file = folder / "a-1.0-py3-none-any.whl"
    if change == "content":
        file.write_text("spoiled", encoding="utf-8")
    elif change == "more":
        (folder / "a-2.0-py3-none-any.whl").write_text("newer", encoding="utf-8")
    elif change == "less":
        file.unlink()
    elif change == "a folder":
        (folder / "more").mkdir()
    else:
        file.write_text("b", encoding="utf-8")
    done = looked(folder, *ASKED)
    assert done.returncode == 1
    assert ("Is a directory" if change == "a folder" else "hash mismatch: a") in done.stderr


def test_a_file_of_several_blocks_is_read_whole(tmp_path: Path) -> None:
    text = "x" * (3 << 20) + "end"
    (tmp_path / "c-1-py3-none-any.whl").write_text(text, encoding="utf-8")
    assert looked(tmp_path, f"c==1 --hash=sha256:{sha(text)}").returncode == 0
    assert looked(tmp_path, f"c==1 --hash=sha256:{sha(text[:-1])}").returncode == 1
