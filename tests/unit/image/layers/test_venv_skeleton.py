"""The skeleton equals the environment that Python's own module venv makes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from envbuild.image.layers.layer_writer import LayerFile, LayerFolder, LayerLink
from envbuild.image.layers.venv_skeleton import venv_files


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="compared with Python 3.11's own")
@pytest.mark.parametrize("name", ["python3.11", "python3"])
def test_the_skeleton_is_that_of_the_module_venv(tmp_path: Path, name: str) -> None:
    environment, interpreter = tmp_path / "venv", Path(sys.base_prefix, "bin", name)
    subprocess.run([interpreter, "-m", "venv", "--without-pip", environment], check=True, env={"PATH": os.defpath})
    scripts = Path(venv.__file__).parent / "scripts"
    templates = {file.name: file.read_bytes() for part in ("common", "posix") for file in (scripts / part).iterdir()}
    executable = str(interpreter.resolve())
    found = list(venv_files(str(interpreter), platform.python_version(), executable, templates, str(environment)))
    for entry in found:
        path = Path("/", entry.path)
        if isinstance(entry, LayerLink):
            assert str(path.readlink()) == entry.target
        elif isinstance(entry, LayerFile):
            assert not path.is_symlink()
            assert path.read_bytes() == entry.content
            assert (path.stat().st_mode & 0o777, entry.executable) == (0o644, False)
        else:
            assert isinstance(entry, LayerFolder)
            assert path.is_dir()
            assert list(path.iterdir()) == []
    files = {
        path for path in environment.rglob("*") if path.is_symlink() or not path.is_dir() or not any(path.iterdir())
    }
    assert files == {Path("/", entry.path) for entry in found}
