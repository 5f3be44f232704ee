"""The text of the new profile that `envbuild init` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from envbuild.facts import database
from envbuild.profile import nearest_gpu_profile
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.profile_folders import split_line
from envbuild.util.errors import ProfileError


def starter_profile(name: str, parent: LoadedProfile) -> str:
    """Return the text of a profile that extends `parent`. It has the inherited values as comments that the user can
    change."""
    base, extended = parent.profile, parent.file.stem
    release = database.torch_release(base.torch)
    cublas = database.libraries_of(release).get("cublas") if release else None
    kept = [
        f'# python: "{base.python}"',
        f"# torch: {base.torch}",
        *(["# pins:  # versions that differ from torch's own, each with its reason"] if cublas else []),
        *([f'#   cublas: {{version: {cublas}, reason: "..."}}'] if cublas else []),
        "# apt: [git]  # Debian packages, in one of the last layers",
        '# env: {OMP_NUM_THREADS: "4"}',
    ]
    packages = ", ".join(f'"{text}"' for text in base.packages)
    return "\n".join(
        [
            f"# `envbuild show {name}` explains every pin, `envbuild make {name}` builds and proves the image.",
            f'description: "{name}, on {parent.name}"',
            f"extends: {extended}  # mappings are merged, everything else replaces the parent's value",
            *_own_gpu(name, base.gpus),
            *(["variant: devel"] if base.variant == "devel" else []),
            f"packages: [{packages}]  # as in requirements.txt; replaces those of {extended}",
            *kept,
            "# selftest:",
            f"#   level: {base.selftest.level}  # quick, standard or full",
            f"#   require: [{', '.join(base.selftest.require)}]",
            "",
        ]
    )


def _own_gpu(name: str, inherited: Sequence[str]) -> list[str]:
    """The line `gpus` of a profile whose name is that of a GPU, or of one of its CUDA lines, which the parent's GPUs do
    not include. Empty for other names."""
    ident, _ = split_line(name) or (name, None)
    return [f"gpus: [{ident}]"] if ident in database.gpus() and ident not in inherited else []


def for_gpu(name: str) -> str:
    """Return the text of a profile for a GPU. `name`: the GPU's id, or the name of one of its CUDA lines, such as
    rtx3090-cu12. The profile extends the shipped profile of the most similar GPU, or that profile's line of the same
    label.

    Raises ProfileError if the GPU cannot run the code of any shipped profile.
    """
    ident, label = split_line(name) or (name, None)
    gpu = database.gpus()[ident]
    nearest = nearest_gpu_profile.nearest_gpu(gpu)
    if nearest is None:
        raise ProfileError(
            f"no shipped profile supports GPUs like {ident} (compute capability {gpu.compute_capability})",
            hint=f"envbuild init {ident} --from PROFILE, then set gpus and torch",
        )
    parent = f"{nearest.id}-{label}" if label else nearest.id
    text = f"{gpu.names[0]}, CUDA {label.removeprefix('cu')}" if label else gpu.names[0]
    return "\n".join(
        [
            f"# The pins are those of {parent}, a shipped profile for the most similar GPU (compute capability",
            f"# {nearest.compute_capability}; {ident} has {gpu.compute_capability}).",
            f"# `envbuild show {name}` explains every pin, `envbuild make {name}` builds and proves the image.",
            f"description: {json.dumps(text)}",
            f"extends: {parent}  # mappings are merged, everything else replaces the parent's value",
            f"gpus: [{ident}]",
            "",
        ]
    )
