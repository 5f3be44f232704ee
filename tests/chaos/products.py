"""The images of the campaigns: a small one for the CPU, which is proved, and one for a GPU, which is only built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.support import CHECKOUT, OTHER_CUBLAS

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
