"""What the facts say of a profile's driver and cards, as the self-test's job document takes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from packaging.version import Version

from envbuild.facts import database
from envbuild.facts.gpu_models import Datasheet, Gpu
from envbuild.profile.model import Profile
from envbuild.resolve import minimum_driver

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def expected_hardware(profile: Profile) -> dict[str, Any]:
    """Of the job document's `expect`, as far as the facts know: the oldest driver for torch's CUDA and for the profile,
    and by the cards' names what is known of each, and its datasheet.
    """
    return devices_by_name(map(database.gpus().__getitem__, profile.gpus)) | {
        "driver": {
            who: ".".join(map(str, Version(text).release))
            for who, text in minimum_driver.minimum_drivers(profile).items() if who in ("cuda", "profile")
        },
    }  # fmt: skip


def devices_by_name(gpus: Iterable[Gpu]) -> dict[str, Any]:
    """By each name that a driver prints for these GPUs: what the self-test compares with the device."""
    named = {name: gpu for gpu in gpus for name in gpu.all_names}
    return {
        "cards": {
            name: {"compute_capability": gpu.compute_capability} | ({"sms": gpu.sms} if gpu.sms else {})
            for name, gpu in named.items()
        },
        "datasheets": {name: figures for name, gpu in named.items() if (figures := sheet(gpu.datasheet))},
    }


def sheet(datasheet: Datasheet) -> dict[str, float]:
    """By the job document's names; what has no source is absent."""
    figures = {name: getattr(datasheet, f"tflops_{name}") for name in _PRECISIONS} | {"copy": datasheet.gb_per_s}
    return {name: value for name, value in figures.items() if value is not None}
