"""The images of the campaigns: one for the CPU, which is verified, and one for a GPU, which is only built. In the
tests, the torch of the one for the CPU is a stand-in: its layers are written, pushed and tested in a second."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from e2e import standin_torch
from e2e.support import CHECKOUT, OTHER_CUBLAS, Project, machine_cache

from envbuild.lock import lock_file
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import build_downloads
from envbuild.pipeline.image_steps import load_profile, lock_profile, resolve_profile
from envbuild.pipeline.model import Options
from envbuild.pipeline.step_context import StepContext

VARIANTS = ("a", "b")


@dataclass(frozen=True)
class Product:
    """`extends`: the profile that the campaign's own profile extends; `lock_file`: the lock of `extends`. `keys`:
    variant -> the other keys of the campaign's profile, so that each variant has its own lock and image. `verb`: the
    command that makes the image; `status`: the state that the image then has.
    """

    extends: str
    lock_file: Path
    keys: Mapping[str, Mapping[str, Any]]
    verb: str
    status: str

    def pins(self, variant: str) -> dict[str, str]:
        return {name: pin["version"] for name, pin in self.keys[variant].get("pins", {}).items()}


_QUICK = {"level": "quick", "require": ["env.libs"]}
CPU = Product(
    "cpu", CHECKOUT / "profiles" / "cpu.lock.yaml",
    {variant: {"env": {"CHAOS": variant}, "selftest": _QUICK} for variant in VARIANTS}, "make", "verified",
)  # fmt: skip
GPU = Product(
    "step-video", CHECKOUT / "profiles" / "projects" / "step-video.lock.yaml",
    {"a": {}, "b": {"pins": {"cublas": {"version": OTHER_CUBLAS, "reason": "one layer differs"}}}}, "build", "built",
)  # fmt: skip


def stock(product: Product) -> list[Lock]:
    """Download to this machine's stores everything that the product's images need, while there is a network; return the
    locks of these images."""
    return [_stocked(product, pins) for pins in _each(product)]


def _each(product: Product) -> Iterator[dict[str, str]]:
    """Yield the changes to lock: none, then one for each set of pins."""
    yield {}
    yield from filter(None, map(product.pins, VARIANTS))


def _stocked(product: Product, pins: dict[str, str]) -> Lock:
    context, options = StepContext(lambda event: None), Options(locked=not pins, pins=pins)
    loaded = load_profile(product.extends, options=options).value
    plan = resolve_profile(loaded).value
    locked = lock_profile(context, loaded, plan, options).value
    build_downloads.fetch_image_parts(plan, locked, context.progress)
    return locked


def stock_with_stand_ins(folder: Path) -> tuple[Product, list[Lock]]:
    """Return CPU with stand-ins for torch and its requirements, and what `stock` returns. The base is that of CPU."""
    real = lock_file.read(CPU.lock_file)
    assert real
    wheels = folder / "wheels"
    project = Project.create(folder).with_env(**standin_torch.write_idle_index(wheels, real.versions))
    shutil.copy(CPU.lock_file, project.lock("stand-ins"))
    for packages in (["networkx"], ["numpy"]):  # `lock` makes a lock again if the profile's packages have changed
        project.write("stand-ins", extends="cpu", packages=packages, **CPU.keys["a"])
        done = project.run("lock", "stand-ins", "--json")
        assert done.code == 0, f"{done.stdout}\n{done.stderr}"
    locked = lock_file.read(project.lock("stand-ins"))
    assert locked
    for item in locked.wheels:
        kept = machine_cache("wheels") / item.wheel.sha256 / item.wheel.file
        kept.parent.mkdir(exist_ok=True)
        shutil.copy(wheels / item.wheel.file, kept)
    build_downloads.make_bases(locked, StepContext(lambda event: None).progress)
    return replace(CPU, lock_file=project.lock("stand-ins")), [locked]
