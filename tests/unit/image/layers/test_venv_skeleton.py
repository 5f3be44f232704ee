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


def scripts_of(activate: bytes, version: str) -> dict[str, bytes]:
    interpreter = f"/usr/bin/python{version.rpartition('.')[0]}"
    entries = list(venv_files(interpreter, version, interpreter, {"activate": activate}))
    return {
        entry.path: entry.content
        for entry in entries
        if isinstance(entry, LayerFile) and isinstance(entry.content, bytes)
    }


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        # Python 3.11.7
        (
            b'VIRTUAL_ENV="__VENV_DIR__"\nPS1="__VENV_PROMPT__${PS1:-}"',
            b'VIRTUAL_ENV="/opt/venv"\nPS1="(venv) ${PS1:-}"',
        ),
        # Debian's 3.11.2-6+deb12u9
        (
            b'VIRTUAL_ENV=__VENV_DIR__\nPS1=__VENV_PROMPT__"${PS1:-}"',
            b"VIRTUAL_ENV=/opt/venv\nPS1='(venv) '\"${PS1:-}\"",
        ),
        # Python 3.13
        (
            b'VIRTUAL_ENV=__VENV_DIR__\nPS1="("__VENV_PROMPT__") ${PS1:-}"',
            b'VIRTUAL_ENV=/opt/venv\nPS1="("venv") ${PS1:-}"',
        ),
    ],
)
def test_values_are_quoted_as_the_templates_of_this_release_need_it(template: bytes, wanted: bytes) -> None:
    assert scripts_of(template, "3.11.2")["opt/venv/bin/activate"] == wanted


def test_an_environment_before_python_3_11_does_not_name_its_interpreter() -> None:
    text = scripts_of(b"", "3.9.2")["opt/venv/pyvenv.cfg"]
    assert text == b"home = /usr/bin\ninclude-system-site-packages = false\nversion = 3.9.2\n"
