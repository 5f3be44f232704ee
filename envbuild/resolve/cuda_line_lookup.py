"""Finds the profiles that are lines of one GPU, such as h20 and h20-cu12, and the drivers that they support."""

from __future__ import annotations

from envbuild.facts import database
from envbuild.profile import nearest_gpu_profile, profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.profile.model import Profile
from envbuild.resolve import minimum_driver, profile_reader_and_overrides
from envbuild.resolve.cuda_line_choice import CURRENT, GpuLine

_COMPAT = "cuda/compat"  # part of the path of forward-compatibility libraries, in NVIDIA's packages and in our images
_LOADER = ("LD_LIBRARY_PATH", "LD_PRELOAD")


def gpu_lines(name: str) -> list[GpuLine]:
    """The lines of the GPU profile `name`, the current one first; empty if the profile lists no GPUs. For a GPU without
    a shipped profile, they include those that `envbuild init` would write."""
    current = _read(name)
    if not current.gpus:
        return []
    labels = nearest_gpu_profile.lines_for_gpu(name) if list(current.gpus) == [name] else []
    others = {label: f"{name}-{label}" for label in labels} | profile_and_lock_name_lookup.lines_of(name)
    return [
        as_line(name, CURRENT, current),
        *(as_line(other, label, _read(other)) for label, other in sorted(others.items(), reverse=True)),
    ]


def _read(name: str) -> Profile:
    """Read a profile by name; for a GPU without a profile, return the one that `envbuild init` would write."""
    try:
        return profile_reader_and_overrides.load(name).profile
    except profile_and_lock_name_lookup.UnwrittenProfile as missing:
        return profile_reader_and_overrides.unwritten(missing.name).profile


def lines_for(loaded: LoadedProfile) -> list[GpuLine]:
    """The lines of a profile's GPU: h20 and h20-cu12, both for h20 and for h20-cu12. Empty for a profile that is given
    by path or combined with a requirements file."""
    if loaded.meant is None or loaded.meant.requirements or profile_and_lock_name_lookup.is_path(loaded.meant.profile):
        return []
    found = profile_and_lock_name_lookup.named_line(loaded.name)
    return gpu_lines(found[0] if found else loaded.meant.profile)


def as_line(name: str, label: str, profile: Profile) -> GpuLine:
    release = database.torch_release(profile.torch)
    forced = any(_COMPAT in profile.env.get(variable, "") for variable in _LOADER)
    own = database.driver_minimum(release.cuda).compatible if release else None
    cuda = release.cuda.partition(".")[0] if release else None
    return GpuLine(name, label, minimum_driver.oldest(profile), forced, own, cuda, tuple(profile.gpus))
