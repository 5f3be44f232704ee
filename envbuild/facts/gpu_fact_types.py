"""The types of facts about GPU models: names, compute capability, features, and values of the vendor's datasheet."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from envbuild.facts.fact_field_types import STRICT, Capability, FactRow, Name, Release, Text

UNLISTED = "unlisted"
"""The id of a GPU that is not in the facts: only its compute capability is known."""


@dataclass(frozen=True, config=STRICT)
class Datasheet:
    """The vendor's values: TFLOP/s by dtype without sparsity, and GB/s of the memory. None: no source is recorded."""

    tflops_fp32: float | None = None
    tflops_tf32: float | None = None
    tflops_fp16: float | None = None
    tflops_bf16: float | None = None
    gb_per_s: float | None = None
    source: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Gpu(FactRow):
    """A GPU model. `names`: complete names, as the driver prints them. `aliases`: further names that people type.
    `family`: models with the same family share evidence.

    `first_cuda`, `last_cuda`: the oldest and the newest toolkit whose compiler supports the GPU. Whether a torch wheel
    supports it depends on the wheel's arch list instead. `min_driver`: the oldest driver that supports the GPU.
    `datacentre`: whether forward-compatibility libraries work with it. `host`: the CPU architecture of the machine, as
    in the platform of an image. `unsupported`: why envbuild builds no image for the GPU.
    """

    id: Name
    names: Annotated[tuple[Text, ...], Field(min_length=1)]
    family: Name
    compute_capability: Capability
    features: frozenset[Literal["tf32", "bf16", "fp8"]]
    datacentre: bool
    memory_gb: tuple[int, ...] = ()
    first_cuda: Release | None = None
    host: Literal["amd64", "arm64"] = "amd64"
    unconfirmed_names: tuple[Text, ...] = ()
    aliases: tuple[Text, ...] = ()
    unsupported: Text | None = None
    sms: int | None = None
    last_cuda: Release | None = None
    min_driver: Release | None = None
    datasheet: Datasheet = Field(default_factory=Datasheet)
    note: Text | None = None

    @property
    def all_names(self) -> tuple[str, ...]:
        return (*self.names, *self.unconfirmed_names)
