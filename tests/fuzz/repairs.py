"""Targets: what `fix` reads in an environment of another author: pyproject.toml, conda's files, backups, libraries; and
the document in which the Python of another author's image describes the contents of the image."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from selftest.device import library
from unit import oracle

from envbuild.audit import collected_environment, environment_audit
from envbuild.audit.environment_audit import Expected
from envbuild.facts import database
from envbuild.repair import (
    dynamic_loader_search,
    environment_manager_detection,
    file_backup,
    image_repair_plan,
    project_requirement_check,
    repair_plan,
    requirement_edits,
)
from envbuild.repair.dynamic_loader_search import LoaderInput
from fuzz.strategies import BYTES, files, trees
from fuzz.target import Target

PROJECTS = [
    b'[project]\nname = "a"\n[tool.uv]\noverride-dependencies = ["a[b]==1", # ]\n "nvidia-cublas-cu12==1"]\n',
    b'[tool.uv.sources]\nx = {path = "y"}\n[[tool.uv.index]]\nname = "z"\n',
    b'text = """\n[tool.uv]\noverride-dependencies = []\n"""\n',
]
REQUIREMENTS = [
    b"--extra-index-url https://download.pytorch.org/whl/cu121\ntorch==2.5.1+cu121 # x\nnumpy[a]<2; extra == 'b'\n",
    b'[project]\ndependencies = ["torch==2.5.1"]\n[dependency-groups]\na = ["numpy<2", {include-group = "b"}]\n',
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


def _requirements(raw: bytes) -> None:
    """Each line that is reported is in the file, and requires a different version."""
    for name in ("requirements.txt", "pyproject.toml"):
        Path(name).write_bytes(raw)
        before, after = {"torch": "2.5.1+cu121", "numpy": "1"}, {"torch": "2.8.0", "numpy": "2"}
        for line in project_requirement_check.outdated_requirements(Path(), before, after):
            number = int(line.removeprefix(f"{name}:").partition(" ")[0])
            assert 0 < number <= len(raw.decode(errors="replace").splitlines())
        Path(name).unlink()


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


def _copy(library: str, owner: str, sha256: str, **more: Any) -> dict[str, Any]:
    path = f"/opt/venv/lib/python3.11/site-packages/nvidia/{library}/lib/lib{library}.so.12"
    fixed = {"version": "12.1.3.1", "reported": None, "record": True, "loaded": True, "ways": ["environment"]}
    name = f"lib{library}.so.12"
    return {"library": library, "name": name, "path": path, "sha256": sha256 * 64, "owner": owner, **fixed, **more}


_SITE = "/opt/venv/lib/python3.11/site-packages"
_DISTRIBUTIONS = {
    "torch": ("2.3.1", ["nvidia-cublas-cu12==12.1.3.1", "nvidia-nccl-cu12==2.20.5"]),
    "nvidia-cublas-cu12": ("12.1.3.1", []), "nvidia-nccl-cu12": ("2.20.5", []), "nvidia-nccl-cu13": ("2.28.9", []),
    "nvidia-cudnn-cu12": ("8.9.2.26", []), "apex": ("0.9.10.dev0", []), "pip": ("24.0", []),
}  # fmt: skip
_NCCL = _copy("nccl", "nvidia-nccl-cu13==2.28.9", "b")
CONTENTS: dict[str, Any] = {
    "kind": "holdings",
    "python": {"version": "3.11.2", "executable": "/opt/venv/bin/python", "prefix": "/opt/venv", "markers": {}},
    "distributions": [
        {"name": name, "version": version, "folder": _SITE, "requires": requires}
        for name, (version, requires) in _DISTRIBUTIONS.items()
    ],
    "altered": [{"path": _NCCL["path"], "owner": "nvidia-nccl-cu12==2.20.5", "sha256": "b" * 64, "by": "RECORD"}],
    "torch": {"version": "2.3.1+cu121", "cuda": "12.1", "hip": None, "path": f"{_SITE}/torch/__init__.py",
              "imported": True, "architectures": ["sm_90"], "failure": None},
    "libraries": [
        _copy("cublas", "nvidia-cublas-cu12==12.1.3.1", "a"), _NCCL,
        _copy("cudnn", "nvidia-cudnn-cu12==8.9.2.26", "c", record=False),
        _copy("cublas", "unowned", "d", record=None, path=f"{_SITE}/nvidia/old/libcublas.so.12"),
    ],
    "order": None, "apex": {"path": f"{_SITE}/apex", "parts": [], "compiled": []}, "variables": {}, "compat": [],
    "machine": {"gpus": [], "driver": None}, "cut": False, "seconds": {},
}  # fmt: skip
# Paths that a shell would split or run without quotes.
SPACED: dict[str, Any] = json.loads(json.dumps(CONTENTS).replace("/opt/venv", "/opt/$(id) a'b; c"))
_PROGRAMS = ("uv", "rm", "sed")


def _image(given: Any) -> None:
    """Each line of the Dockerfile is one instruction, as an independent parser reads it, and each RUN starts one of the
    expected programs."""
    held = collected_environment._parsed(given, "it")
    wanted = Expected(gpus=(database.gpus()["h20"],))
    plan = image_repair_plan.plan_image_repair(environment_audit.assess("team/train:1", held, wanted), None, "1000")
    lines = [line for line in plan.dockerfile if "<<" not in line]  # a here-document for the parser, in quotes too
    found = oracle.parse("\n".join(lines))
    assert [one.keyword for one in found] == [line.partition(" ")[0] for line in lines]
    assert {one.keyword for one in found} <= {"FROM", "USER", "RUN", "ENV"}
    for line in lines:
        if line.startswith("RUN "):
            words = shlex.split(line.removeprefix("RUN "))
            assert words[0] in (*_PROGRAMS, held.python.executable)
            if words[0] == "sed":
                assert [word for word in words if word in ("&&", ";", "|")] == ["&&"]
            else:
                assert shlex.join(words) == line.removeprefix("RUN ")
                begin = ["uv", "pip", "install"] if words[0] == "uv" else [words[0], "-m", "pip", "install"]
                more = words[len(begin) :] if words[: len(begin)] == begin else []
                for word in (one for one in more if one != held.python.executable and not one.startswith("--")):
                    assert re.fullmatch(r"(torch|nvidia-[a-z0-9-]+)==[0-9A-Za-z.+!_-]+", word), word


TARGETS = (
    Target("image to fix", trees([CONTENTS, SPACED]), _image, 9),
    Target(
        "pyproject.toml",
        files(PROJECTS, (b"[tool.uv]\n", b"override-dependencies = [", b"]", b'"""', *BYTES)),
        _project,
        9,
    ),
    Target("requirements file", files(REQUIREMENTS, (b"==", b"[", b'"', b"#", b"--", *BYTES)), _requirements, 9),
    Target("package of conda", files(CONDA, (b"[", b"{", b">=", b"null", *BYTES)), _conda, 30),
    Target("backup of fix", files(BACKUPS, (b"..", b"/etc/passwd", b"\\u0000", b"PREFIX", *BYTES)), _backup, 30),
    Target("library to load", files([library("sm_90")], BYTES), _library, 9),
)
