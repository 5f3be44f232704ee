"""The text of the new profile that `envbuild init` writes."""

from __future__ import annotations

import json

from packaging.version import Version

from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.util import package_data
from envbuild.util.errors import ProfileError


def starter_profile(name: str, parent: LoadedProfile) -> str:
    """Return the text of a profile that extends `parent`. It has the inherited values as comments that the user can
    change."""
    base = parent.profile
    kept = [
        f'# python: "{base.python}"',
        f"# torch: {base.torch}",
        *(["# pins:  # versions that differ from torch's own, each with its reason"] if base.gpus else []),
        *(['#   cublas: {version: 12.6.4.1, reason: "..."}'] if base.gpus else []),
        "# apt: [git]  # Debian packages, in one of the last layers",
        '# env: {OMP_NUM_THREADS: "4"}',
    ]
    packages = ", ".join(f'"{text}"' for text in base.packages)
    return "\n".join(
        [
            f"# `envbuild show {name}` explains every pin, `envbuild make {name}` builds and proves the image.",
            f'description: "{name}, on {parent.name}"',
            f"extends: {parent.name}  # mappings are merged, everything else replaces the parent's value",
            f"packages: [{packages}]  # as in requirements.txt; replaces those of {parent.name}",
            *kept,
            "# selftest:",
            f"#   level: {base.selftest.level}  # quick, standard or full",
            f"#   require: [{', '.join(base.selftest.require)}]",
            "",
        ]
    )


def for_gpu(name: str) -> str:
    """Return the text of a profile for the GPU with the id `name`. It extends the shipped profile of the most similar
    GPU.

    Raises ProfileError if the GPU cannot run the code of any shipped profile.
    """
    gpu = database.gpus()[name]
    parent = _nearest(gpu)
    if parent is None:
        raise ProfileError(
            f"no shipped profile supports GPUs like {name} (compute capability {gpu.compute_capability})",
            hint=f"envbuild init {name} --from PROFILE, then set gpus and torch",
        )
    return "\n".join(
        [
            f"# The pins are those of {parent.id}, the shipped profile for the most similar GPU (compute capability",
            f"# {parent.compute_capability}; {name} has {gpu.compute_capability}).",
            f"# `envbuild show {name}` explains every pin, `envbuild make {name}` builds and proves the image.",
            f"description: {json.dumps(gpu.names[0])}",
            f"extends: {parent.id}  # mappings are merged, everything else replaces the parent's value",
            f"gpus: [{name}]",
            "",
        ]
    )


def _nearest(gpu: Gpu) -> Gpu | None:
    """The most similar GPU that has a shipped profile whose code `gpu` can run: the major number of its compute
    capability is the same, and the capability is not higher. Prefers the highest capability. Among equals, prefers a
    GeForce for a GeForce, and a GPU that is not a GeForce for any other GPU, because GeForce drivers have their own
    limits."""
    own = _capability(gpu)
    shipped = [one for one in database.gpus().values() if (package_data.PROFILES / f"{one.id}.yaml").is_file()]
    fits = [one for one in shipped if _capability(one).major == own.major and _capability(one) <= own]
    return max(fits, key=lambda one: (_capability(one), _is_geforce(one) == _is_geforce(gpu)), default=None)


def _capability(gpu: Gpu) -> Version:
    return Version(gpu.compute_capability)


def _is_geforce(gpu: Gpu) -> bool:
    return "GeForce" in gpu.names[0]
