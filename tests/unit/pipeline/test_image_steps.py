"""What is checked before an extension is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from envbuild.image import extension_wheel_build
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.image.oci import base_image_download, disk_space_needs, image_description
from envbuild.lock.lock_entry_types import Nvcc
from envbuild.pipeline import build_downloads, image_steps
from envbuild.pipeline.model import Recipe
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.util import user_folders
from envbuild.util.errors import BuildError, LockError
from unit.image.base_images import PushedBase, debian
from unit.registries import Registry, serving
from unit.support import PROFILE, plan_of, sha, whole_lock

KERNELS = {"name": "kernels", "git": "https://git.example/k", "commit": "c" * 40, "modules": ["k"]}


@dataclass
class Compiling:
    """A registry for base images, and the steps that compile an extension, in their order."""

    registry: Registry
    folder: Path
    done: list[str]

    def recipe(self, base: PushedBase | None) -> Recipe:
        changes: dict[str, Any] = {"toolchain": {"sha256": "a" * 64}}
        if base:
            changes = {"base": {"image": base.reference(self.registry)}, "apt": []}
        plan = plan_of(
            self.folder, {**PROFILE, "torch": "2.11.0", "gpus": ["h200"], "extensions": [KERNELS], **changes}
        )
        return Recipe(cast(LoadedProfile, SimpleNamespace(name="sample")), plan, whole_lock(plan))


@pytest.fixture
def compiling(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiling]:
    done: list[str] = []

    def note(name: str, value: object = None) -> Callable[..., object]:
        def work(*_: object, **__: object) -> object:
            done.append(name)
            return value

        return work

    wheel = project / "kernels-1.0-py3-none-any.whl"
    wheel.touch()
    built = BuiltWheel("kernels", "key", wheel, sha("kernels"), 1.0, 1, "2026-11-21T00:00:00Z")
    fetch_base_image = build_downloads.fetch_base_image

    def fetch(*arguments: Any) -> None:
        done.append("base image")
        fetch_base_image(*arguments)

    monkeypatch.setattr(extension_wheel_build, "refuse_unlocked_requirements", lambda wheels, lock: None)
    monkeypatch.setattr(StepContext, "engine", MagicMock())
    monkeypatch.setattr(disk_space_needs, "require_disk_space", note("disk space"))
    monkeypatch.setattr(build_downloads, "fetch_base_image", fetch)
    monkeypatch.setattr(build_downloads, "fetch_image_parts", note("parts"))
    monkeypatch.setattr(build_downloads, "fetch_compiler_and_sources", note("compiler"))
    monkeypatch.setattr(extension_wheel_build, "compile_wheel", note("compile", built))
    with serving(Registry()) as registry:
        yield Compiling(registry, project, done)


def compile_extensions(recipe: Recipe) -> None:
    image_steps.compile_extensions(StepContext(cast(Any, MagicMock())), recipe)


def test_an_extension_is_compiled_after_the_check_of_the_base_image(compiling: Compiling) -> None:
    compile_extensions(compiling.recipe(PushedBase([debian()])))
    assert compiling.done == ["disk space", "base image", "parts", "compiler", "compile"]


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (PushedBase([debian()], config={"OnBuild": ["RUN x"]}), "has ONBUILD instructions"),
        (PushedBase([{**debian(), "opt/venv": None}]), "has /opt/venv already"),
        (PushedBase([{"usr/bin/python3.11": debian()["usr/bin/python3.11"]}]), "has no module venv"),
        (PushedBase([{"etc": None}]), r"has no python3\.11"),
    ],
)
def test_nothing_is_compiled_on_an_unsuitable_base_image(compiling: Compiling, base: PushedBase, message: str) -> None:
    with pytest.raises(BuildError, match=message):
        compile_extensions(compiling.recipe(base))
    assert compiling.done == ["disk space", "base image"]


def test_nothing_is_compiled_on_a_base_image_with_an_nvcc_of_another_release(compiling: Compiling) -> None:
    recipe = compiling.recipe(PushedBase([debian()]))
    needed = replace(recipe, lock=replace(recipe.lock, nvcc=Nvcc("/usr/local/cuda", "12.6")))
    with pytest.raises(BuildError, match="nvcc of the base image is missing"):
        compile_extensions(needed)
    assert "compile" not in compiling.done


def test_a_manifest_in_the_cache_is_not_waited_for(compiling: Compiling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may download something else for a long time."""
    lock, progress = compiling.recipe(PushedBase([debian()])).lock, MagicMock()
    build_downloads.fetch_base_manifest(lock, progress)
    with monkeypatch.context() as patched:
        patched.setattr(build_downloads, "one_fetch_at_a_time", lambda _: pytest.fail("waits"))
        build_downloads.fetch_base_manifest(lock, progress)
    (user_folders.cache_folder("images") / str(lock.image).rpartition(":")[2]).write_bytes(b"damaged")
    build_downloads.fetch_base_manifest(lock, progress)
    assert base_image_download.read_base_image(str(lock.image), lock.platform)


@pytest.mark.parametrize("base", [PushedBase([debian()]), None])
def test_nothing_is_compiled_for_an_image_with_too_many_layers(
    compiling: Compiling, base: PushedBase | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_description, "MAX_LAYERS", 3)
    with pytest.raises(LockError, match="an image can have at most 3"):
        compile_extensions(compiling.recipe(base))
    assert "compile" not in compiling.done
