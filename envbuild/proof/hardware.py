"""What the facts say of a profile's driver and cards, as the self-test's job document takes it."""

from __future__ import annotations

from typing import Any

from packaging.version import Version

from envbuild.plan import drivers, facts
from envbuild.plan.advisories import Datasheet
from envbuild.plan.profile import Profile

_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")


def expected(profile: Profile) -> dict[str, Any]:
    """Of the job document's `expect`, as far as the facts know: the oldest driver for torch's CUDA and for the profile,
    and by the cards' names what is known of each, and its datasheet.
    """
    gpus = {name: gpu for gpu in map(facts.gpus().__getitem__, profile.gpus) for name in gpu.all_names}
    return {
        "cards": {
            name: {"compute_capability": gpu.compute_capability} | ({"sms": gpu.sms} if gpu.sms else {})
            for name, gpu in gpus.items()
        },
        "datasheets": {name: figures for name, gpu in gpus.items() if (figures := sheet(gpu.datasheet))},
        "driver": {
            who: ".".join(map(str, Version(text).release))
            for who, text in drivers.parts(profile).items() if who in ("cuda", "profile")
        },
    }  # fmt: skip


def sheet(datasheet: Datasheet) -> dict[str, float]:
    """By the job document's names; what has no source is absent."""
    figures = {name: getattr(datasheet, f"tflops_{name}") for name in _PRECISIONS} | {"copy": datasheet.gb_per_s}
    return {name: value for name, value in figures.items() if value is not None}
