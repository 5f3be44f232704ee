"""Targets: what `fix` reads in an environment of another author: pyproject.toml, conda's files, backups, libraries."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

from selftest.device import library

from envbuild.repair import (
    dynamic_loader_search,
    environment_manager_detection,
    file_backup,
    repair_plan,
    requirement_edits,
)
from envbuild.repair.dynamic_loader_search import LoaderInput
from fuzz.strategies import BYTES, files
from fuzz.target import Target

PROJECTS = [
    b'[project]\nname = "a"\n[tool.uv]\noverride-dependencies = ["a[b]==1", # ]\n "nvidia-cublas-cu12==1"]\n',
    b'[tool.uv.sources]\nx = {path = "y"}\n[[tool.uv.index]]\nname = "z"\n',
    b'text = """\n[tool.uv]\noverride-dependencies = []\n"""\n',
]
CONDA = [
    json.dumps({"name": "libcublas", "version": "12.1", "depends": ["a >=1,<2", "b"], "files": ["lib/x.so"]}).encode()
]
BACKUPS = [
    b'{"version":1,"prefix":"PREFIX","sites":["PREFIX/lib"],"done":true,"files":{"torch-1.dist-info":[{"path":'
    b'"PREFIX/lib/torch.py","number":0,"size":1,"modified":1,"sha256":"a"}]},"added":["PREFIX/lib/b"],"project":{}}'
]


def _project(raw: bytes) -> None:
    """A changed file has the overrides; everything else is unchanged."""
    file = Path("pyproject.toml")
    file.write_bytes(raw)
    requirement_edits.override_project(file, ["nvidia-cublas-cu12==12.4.5.8"])
    before, after = tomllib.loads(raw.decode()), tomllib.loads(file.read_text(encoding="utf-8"))
    values = after["tool"]["uv"].pop("override-dependencies")
    assert values[-1] == "nvidia-cublas-cu12==12.4.5.8"
    before.setdefault("tool", {}).setdefault("uv", {}).pop("override-dependencies", None)
    assert after == before


def _conda(raw: bytes) -> None:
    folder = Path("conda-meta")
    folder.mkdir(exist_ok=True)
    (folder / "a.json").write_bytes(raw)
    for package in environment_manager_detection._conda_packages(Path()):
        for text in package.depends:
            assert repair_plan._conda_allows(text.partition(" ")[2], "12.4.5.8") in (True, False)


def _backup(raw: bytes) -> None:
    """Every path of an accepted backup is inside its environment."""
    prefix = Path("prefix").absolute()
    folder = prefix / file_backup.FOLDER / "0001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "backup.json").write_bytes(raw.replace(b"PREFIX", str(prefix).encode()))
    found = file_backup.latest_backup(prefix)
    assert found is not None
    allowed = [str(prefix.parent / name) for name in file_backup.PROJECT_FILES]
    for text in (*found.content.added, *(file.path for rows in found.content.files.values() for file in rows)):
        assert text in allowed or Path(text).resolve().is_relative_to(prefix.resolve())


def _library(raw: bytes) -> None:
    Path("lib.so").write_bytes(raw)
    path = str(Path("lib.so").absolute())
    dynamic_loader_search.loaded_files(LoaderInput(path, (path,), library_path=".:/nowhere", preload=path))


TARGETS = (
    Target(
        "pyproject.toml",
        files(PROJECTS, (b"[tool.uv]\n", b"override-dependencies = [", b"]", b'"""', *BYTES)),
        _project,
        9,
    ),
    Target("package of conda", files(CONDA, (b"[", b"{", b">=", b"null", *BYTES)), _conda, 30),
    Target("backup of fix", files(BACKUPS, (b"..", b"/etc/passwd", b"\\u0000", b"PREFIX", *BYTES)), _backup, 30),
    Target("library to load", files([library("sm_90")], BYTES), _library, 9),
)
