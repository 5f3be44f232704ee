from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Datasheet
from envbuild.profile import profile_and_lock_name_lookup
from envbuild.resolve import profile_reader_and_overrides
from envbuild.testrun import expected_hardware


def test_the_cpu_expects_no_driver() -> None:
    assert expected_hardware.expected_hardware(profile_reader_and_overrides.load("cpu").profile) == {
        "driver": {},
        "cards": {},
        "datasheets": {},
    }


def test_the_oldest_driver_is_the_facts_and_the_profiles_own() -> None:
    found = expected_hardware.expected_hardware(profile_reader_and_overrides.load("h200").profile)["driver"]
    least = database.driver_minimum("13.0").compatible
    assert found == {"cuda": least, "profile": "580.65.6"}


def test_a_datasheet_goes_by_the_gpus_names_and_what_has_no_source_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    card = database.gpus()["h20"]
    sheet = Datasheet(tflops_fp16=2.0, tflops_bf16=3.0, gb_per_s=4.0)
    monkeypatch.setattr(database, "gpus", lambda: {"h20": dataclasses.replace(card, datasheet=sheet)})
    found = expected_hardware.expected_hardware(profile_reader_and_overrides.load("h20").profile)["datasheets"]
    assert found == {name: {"fp16": 2.0, "bf16": 3.0, "copy": 4.0} for name in card.all_names}


@pytest.mark.parametrize("name", profile_and_lock_name_lookup.profile_names())
def test_every_shipped_profile_gives_releases_of_numbers(name: str) -> None:
    found: Any = expected_hardware.expected_hardware(profile_reader_and_overrides.load(name).profile)
    for release in found["driver"].values():
        assert all(part.isdecimal() for part in release.split("."))


def test_each_gpu_comes_with_what_the_facts_know_of_it() -> None:
    names = database.gpus()["h20"].all_names
    cards: Any = expected_hardware.expected_hardware(profile_reader_and_overrides.load("h20").profile)["cards"]
    assert cards == {name: {"compute_capability": "9.0", "sms": 78} for name in names}
    unknown = [gpu.id for gpu in database.gpus().values() if gpu.sms is None]
    assert "a100" in unknown  # the facts have no figure, so none is expected
    cards = expected_hardware.expected_hardware(profile_reader_and_overrides.load("a100").profile)["cards"]
    assert all(card == {"compute_capability": "8.0"} for card in cards.values())
