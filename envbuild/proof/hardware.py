"""What the facts say of a profile's driver and cards, as the self-test's job document takes it."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from envbuild.plan import facts
from envbuild.plan.profile import Profile


def expected(profile: Profile) -> dict[str, Any]:
    """Of the job document's `expect`: the oldest driver for torch's CUDA and for the profile, where they are known."""
    release = facts.torch_release(profile.torch)
    cuda = facts.driver_minimum(release.cuda).compatible if release else None
    minimum = {"cuda": cuda, "profile": profile.driver.minimum}
    return {
        "driver": {who: ".".join(map(str, Version(text).release)) for who, text in minimum.items() if text},
    }
