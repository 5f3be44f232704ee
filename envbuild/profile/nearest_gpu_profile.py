"""Finds the shipped profile whose pins a GPU without its own profile uses."""

from __future__ import annotations

from packaging.version import Version

from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.profile.profile_folders import split_line
from envbuild.profile.value_types import PLATFORM
from envbuild.util import package_data


def nearest_gpu(gpu: Gpu) -> Gpu | None:
    """The most similar GPU that has a shipped profile whose code `gpu` can run: the major number of its compute
    capability is the same, and the capability is not higher. Prefers the highest capability. Among equals, prefers a
    GeForce for a GeForce, and a GPU that is not a GeForce for any other GPU, because GeForce drivers have their own
    limits."""
    own = _capability(gpu)
    shipped = [one for one in database.gpus().values() if (package_data.PROFILES / f"{one.id}.yaml").is_file()]
    fits = [one for one in shipped if _capability(one).major == own.major and _capability(one) <= own]
    return max(fits, key=lambda one: (_capability(one), _is_geforce(one) == _is_geforce(gpu)), default=None)


def lines_for_gpu(ident: str) -> list[str]:
    """The labels of the CUDA lines that can be written for a GPU without a shipped profile: those of the shipped
    profile for the most similar GPU, such as cu12. Empty for a GPU with a shipped profile, and if `ident` is not the id
    of a supported GPU."""
    gpu = database.gpus().get(ident)
    if gpu is None or database.unsupported(ident, PLATFORM) is not None:
        return []
    nearest = nearest_gpu(gpu)
    if nearest is None or nearest == gpu:
        return []
    names = (file.stem for file in package_data.PROFILES.glob(f"{nearest.id}-*.yaml"))
    found = (split_line(name) for name in names)
    return sorted((line[1] for line in found if line and line[0] == nearest.id), reverse=True)


def _capability(gpu: Gpu) -> Version:
    return Version(gpu.compute_capability)


def _is_geforce(gpu: Gpu) -> bool:
    return "GeForce" in gpu.names[0]
