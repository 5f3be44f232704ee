"""The crash of an H20 in cuBLAS, fixed in environments with the real torch 2.3.1 for CUDA, which needs no GPU.

Five gigabytes are downloaded, so only `make test-images` runs it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import uv
from packaging.version import Version

from .support import Project, command

pytestmark = pytest.mark.images

UV = uv.find_uv_bin()
FAULTY, FIXED = "12.1.3.1", "12.4.5.8"
LOG = """\
NVIDIA H20, driver 550.54.15
torch 2.3.1+cu121
Fatal Python error: Floating point exception
  File "train.py", line 12 in <module>
"""
# The version of the cuBLAS that a program with torch has loaded, which cuBLAS tells without a GPU.
LOADED = """
import ctypes, torch
library, number = ctypes.CDLL("libcublas.so.12"), ctypes.c_int()
parts = [(library.cublasGetProperty(part, ctypes.byref(number)), number.value)[1] for part in range(3)]
print("loaded", *parts)
"""


@pytest.fixture
def project(scratch: Path) -> Project:
    made = Project.create(scratch / "place")
    (made.folder / "train.log").write_text(LOG, encoding="utf-8")
    return made


def loaded(output: str) -> Version:
    line = next(line for line in output.splitlines() if line.startswith("loaded "))
    return Version(".".join(line.split()[1:]))


def loaded_in(prefix: Path) -> Version:
    return loaded(command(str(prefix / "bin" / "python"), "-c", LOADED))


def test_a_venv_is_fixed_and_stays_fixed(project: Project, scratch: Path) -> None:
    prefix = scratch / "venv"
    command(UV, "venv", "--quiet", "--seed", "--python", sys.executable, str(prefix))
    command(UV, "pip", "install", "--quiet", "--python", str(prefix), "torch==2.3.1")
    assert loaded_in(prefix) == Version("12.1.3")

    # without a change of the environment
    python = str(prefix / "bin" / "python")
    done = project.run("run", "--with-fix", "train.log", "--", python, "-c", LOADED)
    assert done.code == 0 and loaded(done.stdout) >= Version("12.4.5"), done.stderr
    assert loaded_in(prefix) == Version("12.1.3")

    fixed = project.run("fix", "train.log", "--python", str(prefix), "--apply", "--json")
    assert fixed.code == 0 and fixed.document["state"] == "fixed", fixed.stderr
    version = loaded_in(prefix)
    assert version >= Version("12.4.5")
    command(python, "-m", "pip", "install", "--quiet", "torchvision==0.18.1")
    assert loaded_in(prefix) == version
    assert command(python, "-c", "import torchvision; print(torchvision.__version__)").startswith("0.18.1")


def test_a_uv_project_is_fixed_and_stays_fixed_after_a_sync(project: Project, scratch: Path) -> None:
    folder = scratch / "uv-project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "training"\nversion = "0"\nrequires-python = "==3.11.*"\ndependencies = ["torch==2.3.1"]\n',
        encoding="utf-8",
    )
    command(UV, "sync", "--quiet", "--project", str(folder), "--python", sys.executable)
    prefix = folder / ".venv"
    assert loaded_in(prefix) == Version("12.1.3")
    fixed = project.run("fix", "train.log", "--python", str(prefix), "--apply", "--json")
    assert fixed.code == 0 and fixed.document["state"] == "fixed", fixed.stderr
    version = loaded_in(prefix)
    assert version >= Version("12.4.5")
    command(UV, "sync", "--quiet", "--project", str(folder))
    assert loaded_in(prefix) == version
