"""Determines what a profile requires of a machine: GPUs, driver, disk space."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import Version

from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Gpu
from envbuild.image.oci import disk_space_needs
from envbuild.lock import lock_file
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.resolve import minimum_driver, profile_reader_and_overrides
from envbuild.util.errors import EnvbuildError


@dataclass(frozen=True)
class Need:
    """The requirements of a profile. `gpus`: ids of GPU models in the facts; empty for a CPU profile. `driver`: the
    oldest driver that works; None if unknown. `fetched`, `built`: the bytes that a build needs in envbuild's cache and
    in the engine; None without a lock. `pulls`: whether the base is an image from a registry. `cli_words`: the name of
    the profile on the command line."""

    profile: str
    gpus: tuple[str, ...]
    gpu_count: int = 1
    driver: str | None = None
    fetched: int | None = None
    built: int | None = None
    pulls: bool = False
    cli_words: str = ""

    @property
    def models(self) -> tuple[Gpu, ...]:
        known = database.gpus()
        return tuple(known[name] for name in self.gpus if name in known)

    def runs_on(self, driver: str) -> bool:
        """Whether a driver is new enough. `self.driver` takes the profile's compatibility libraries into account."""
        return self.driver is None or Version(driver) >= Version(self.driver)


def needs_of(loaded: LoadedProfile) -> Need:
    """The requirements of a profile. Raises LockError for an invalid lock."""
    profile = loaded.profile
    locked = lock_file.read(loaded.known_lock)
    fetched = None
    with contextlib.suppress(OSError):  # the check of the disk reports an unusable cache
        fetched = disk_space_needs.fetched_bytes(locked) if locked else None
    return Need(
        profile=loaded.name,
        gpus=tuple(profile.gpus),
        gpu_count=profile.gpu_count,
        driver=minimum_driver.oldest(profile),
        fetched=fetched,
        built=disk_space_needs.needed_bytes(locked) if locked else None,
        pulls=profile.base.image is not None,
        cli_words=loaded.known,
    )


def all_needs() -> Iterator[Need]:
    """Yields the requirements of all valid profiles. The errors in other profiles are reported by the commands that use
    these profiles."""
    for name in profile_and_lock_name_lookup.profile_names():
        try:
            yield needs_of(profile_reader_and_overrides.load(name))
        except EnvbuildError:
            continue
