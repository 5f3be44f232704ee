from __future__ import annotations

import pytest

from envbuild.plan import facts, sources
from envbuild.proof import hardware


def test_the_cpu_expects_no_driver() -> None:
    assert hardware.expected(sources.load("cpu").profile) == {"driver": {}}


def test_the_oldest_driver_is_the_facts_and_the_profiles_own() -> None:
    found = hardware.expected(sources.load("h200").profile)["driver"]
    least = facts.driver_minimum("13.0").compatible
    assert found == {"cuda": least, "profile": "580.65.6"}


@pytest.mark.parametrize("name", sources.names())
def test_every_shipped_profile_gives_releases_of_numbers(name: str) -> None:
    for release in hardware.expected(sources.load(name).profile)["driver"].values():
        assert all(part.isdecimal() for part in release.split("."))
