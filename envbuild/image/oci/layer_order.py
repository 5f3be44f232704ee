"""The order of the layers in the image of a lock, as far as the lock alone determines it. Pure.

Layers that most images share come first, those of one profile last.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.fetch.archive_spec import TOOLKIT, Archive
from envbuild.fetch.locked_wheel_types import LockedWheel
from envbuild.lock.lock_entry_types import LockedExtension
from envbuild.lock.lock_file import PACKAGES, Lock
from envbuild.resolve.plan_resolver import VENV


class SingleLayer(enum.Enum):
    """A layer of which an image has at most one. BASE stands for all layers of a base image. NVCC: the links for an
    nvcc from wheels; BASE_NVCC: the links for an nvcc of a base image. If the base image has all these links, there is
    no layer for BASE_NVCC."""

    BASE = enum.auto()
    APT = enum.auto()
    VENV = enum.auto()
    OVERRIDES = enum.auto()
    NVCC = enum.auto()
    BASE_NVCC = enum.auto()


@dataclass(frozen=True)
class WheelGroup:
    """The wheels of one layer."""

    name: str
    wheels: tuple[LockedWheel, ...]


LayerSource = SingleLayer | WheelGroup | Archive | LockedExtension


def layer_sources(lock: Lock) -> Iterator[LayerSource]:
    """Yield what each layer of the lock's image is made of, in the order of the layers."""
    groups = [WheelGroup(name, tuple(group)) for name, group in itertools.groupby(lock.wheels, lambda one: one.layer)]
    overridden = {override.name for override in lock.overrides}
    own = [group for group in groups if group.name in overridden]
    last = [group for group in groups if group.name == PACKAGES]
    yield SingleLayer.BASE
    if lock.apt:
        yield SingleLayer.APT
    yield SingleLayer.VENV
    yield from (group for group in groups if group not in own and group not in last)
    yield from lock.archives
    yield from own
    yield from lock.extensions
    yield from last
    if lock.overrides:
        yield SingleLayer.OVERRIDES
    # the layer of an archive with nvcc has the links too
    if lock.nvcc and lock.nvcc.home.startswith(f"{VENV}/"):
        yield SingleLayer.NVCC
    elif lock.nvcc and lock.image and not any(archive.name == TOOLKIT for archive in lock.archives):
        yield SingleLayer.BASE_NVCC
