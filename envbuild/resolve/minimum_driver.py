"""The oldest driver that a profile's image runs on. Pure."""

from __future__ import annotations

from packaging.version import Version

from envbuild.facts import database
from envbuild.profile.model import Profile


def minimum_drivers(profile: Profile) -> dict[str, str]:
    """The oldest driver for torch's CUDA ("cuda"), for the profile ("profile") and for its cards ("cards"), as far as
    they are known."""
    release = database.torch_release(profile.torch)
    floors = [gpu.min_driver for name in profile.gpus if (gpu := database.gpus().get(name)) and gpu.min_driver]
    least = {
        "cuda": database.driver_minimum(release.cuda).compatible if release else None,
        "profile": profile.driver.minimum,
        "cards": max(floors, key=Version, default=None),
    }
    return {who: text for who, text in least.items() if text}


def oldest(profile: Profile) -> str | None:
    """The newest of its parts; None for the CPU, and where nothing is known.

    Forward-compatibility libraries stand in for CUDA's own part. What the profile declares speaks of the host all the
    same; where it declares nothing, the driver that CUDA's major version before needs is a lower bound, and no more:
    each package of NVIDIA's has its own list of drivers.
    """
    found = minimum_drivers(profile) if profile.gpus else {}
    if profile.driver.compat and "cuda" in found:
        release = database.torch_release(profile.torch)
        before = database.driver_minimum(str(Version(release.cuda).major - 1)).compatible if release else None
        del found["cuda"]
        if before and "profile" not in found:
            found["cuda"] = before
    return max(found.values(), key=Version, default=None)
