"""Looks up the driver versions and GPU properties that a profile expects, for the self-test's job document."""

from __future__ import annotations

from collections.abc import Iterable

from packaging.version import Version

from envbuild.facts import database
from envbuild.facts.gpu_fact_types import Datasheet, Gpu
from envbuild.profile.model import Profile
from envbuild.resolve import minimum_driver

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def expected_hardware(profile: Profile) -> dict[str, object]:
    """Return the part of the job document's `expect` about hardware: the minimum driver versions for torch's CUDA and
    for the profile, and the properties and datasheet of each GPU, by name. Values that the facts do not have are left
    out."""
    return devices_by_name(map(database.gpus().__getitem__, profile.gpus)) | {
        "driver": {
            who: ".".join(map(str, Version(text).release))
            for who, text in minimum_driver.minimum_drivers(profile).items() if who in ("cuda", "profile")
        },
    }  # fmt: skip


def devices_by_name(gpus: Iterable[Gpu]) -> dict[str, object]:
    """Return the expected properties and datasheet values of these GPUs, under each name that a driver prints for
    them."""
    named = {name: gpu for gpu in gpus for name in gpu.all_names}
    return {
        "cards": {
            name: {"compute_capability": gpu.compute_capability} | ({"sms": gpu.sms} if gpu.sms else {})
            for name, gpu in named.items()
        },
        "datasheets": {name: figures for name, gpu in named.items() if (figures := sheet(gpu.datasheet))},
    }


def sheet(datasheet: Datasheet) -> dict[str, float]:
    """Return the datasheet values under their names in the job document. Values without a source are left out."""
    figures = {name: getattr(datasheet, f"tflops_{name}") for name in _PRECISIONS} | {"copy": datasheet.gb_per_s}
    return {name: value for name, value in figures.items() if value is not None}
