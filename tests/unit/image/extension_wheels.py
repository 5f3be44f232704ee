"""A lock with an extension, wheels as its compilation may leave them, and a stand-in for the compilation."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from selftest.device import library

from envbuild.image import build_context_folders, buildx, extension_wheel_build
from envbuild.image.buildx import BuildOrder
from envbuild.image.docker_engine import Engine
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.lock.lock_file import Lock
from unit.support import PROFILE, write_wheel

KERNELS: dict[str, Any] = {
    "name": "kernels", "git": "https://git.example/team/kernels", "commit": "c" * 40, "modules": ["kernels_cuda"],
    "build": {"env": {"KERNELS_CUDA": "1"}},
}  # fmt: skip
PROFILE_WITH_EXTENSION: dict[str, Any] = {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [KERNELS]}
FILE = "kernels-0.1-cp311-cp311-linux_x86_64.whl"
MODULE = "kernels_cuda.cpython-311-x86_64-linux-gnu.so"


def kernels_wheel(folder: Path, content: str = "", arch: str = "sm_90", module: str = MODULE, name: str = FILE) -> Path:
    """Write a wheel of the extension that passes its check unless `arch`, `module` or `name` is changed. `content`:
    anything that changes its sha256."""
    version, tag = name.removesuffix(".whl").split("-")[1], name.removesuffix(".whl").split("-", 2)[2]
    files = {module: library(arch)}
    return write_wheel(folder, name.partition("-")[0], version, tag=tag, content=content, files=files)


@dataclass
class FakeCompiler:
    """Stands in for buildx.build: leaves the wheel in `wheel`, and counts the compilations."""

    wheel: Path
    compiled: list[str] = field(default_factory=list)

    def __call__(self, order: BuildOrder, options: Sequence[str]) -> dict[str, Any]:
        out = Path(next(word for word in options if word.startswith("type=local")).partition("dest=")[2])
        out.mkdir(exist_ok=True)
        shutil.copy(self.wheel, out)
        self.compiled.append(self.wheel.name)
        return {}


class FakeEngine:
    cpus, memory_bytes = 8, 64 << 30


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    found = FakeCompiler(kernels_wheel(tmp_path / "built"))
    monkeypatch.setattr(buildx, "build", found)
    monkeypatch.setattr(build_context_folders, "fill_builder", lambda lock, name, extension: None)
    return found


def compile_kernels(lock: Lock) -> BuiltWheel:
    order = BuildOrder(cast(Engine, FakeEngine()), lock, "sample", "", lambda text: None, lambda line: None)
    return extension_wheel_build.compile_wheel(order, lock.extensions[0])


def use_machine(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continue on another machine: with another cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / name))
