"""The oldest driver that a profile's image runs on. Pure."""

from __future__ import annotations

from packaging.version import Version

from envbuild.facts import database
from envbuild.profile.model import Profile


def minimum_drivers(profile: Profile) -> dict[str, str]:
    """The known minimum drivers, by what requires them: torch's CUDA ("cuda"), the profile ("profile"), or the
    profile's GPUs ("cards")."""
    release = database.torch_release(profile.torch)
    floors = [gpu.min_driver for name in profile.gpus if (gpu := database.gpus().get(name)) and gpu.min_driver]
    least = {
        "cuda": database.driver_minimum(release.cuda).compatible if release else None,
        "profile": profile.driver.minimum,
        "cards": max(floors, key=Version, default=None),
    }
    return {who: text for who, text in least.items() if text}


def oldest(profile: Profile) -> str | None:
    """The oldest driver on which the image runs: the highest of `minimum_drivers`. None for a CPU profile, and if no
    minimum is known.

    With forward-compatibility libraries, the minimum of torch's CUDA does not count. If the profile sets no minimum,
    that of the previous CUDA major version is used instead. It is only a lower bound, because each of NVIDIA's
    compatibility packages has its own list of drivers.
    """
    found = minimum_drivers(profile) if profile.gpus else {}
    if profile.driver.compat and "cuda" in found:
        release = database.torch_release(profile.torch)
        before = database.driver_minimum(str(Version(release.cuda).major - 1)).compatible if release else None
        del found["cuda"]
        if before and "profile" not in found:
            found["cuda"] = before
    return max(found.values(), key=Version, default=None)
