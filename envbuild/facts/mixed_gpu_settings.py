"""Determines the settings that different GPU models need to work together: a common dtype, and environment variables of
libraries. Pure.

The settings and their reasons are in facts/data/fleet.yaml.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from envbuild.facts import fact_file_reader
from envbuild.facts.fact_field_types import STRICT, FactRow, Spec, Text
from envbuild.facts.gpu_fact_types import Gpu

DTYPE = "ENVBUILD_DTYPE"
"""The environment variable with the name of the common 16-bit dtype, for `getattr(torch,
os.environ["ENVBUILD_DTYPE"])`."""

Feature = Literal["tf32", "bf16", "fp8"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """An environment variable of the image, and the reason for its value."""

    variable: str
    value: str
    reason: str


@dataclass(frozen=True, config=STRICT)
class _Some:
    """A property of a GPU: a feature, or a compute capability within a range."""

    feature: Feature | None = None
    compute_capability: Spec | None = None

    def has(self, gpu: Gpu) -> bool:
        return (self.feature is None or self.feature in gpu.features) and (
            self.compute_capability is None or gpu.compute_capability in self.compute_capability
        )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Rule(FactRow):
    variable: Annotated[str, Field(pattern=r"^[A-Z][A-Z0-9_]*$")]
    value: Text
    some: _Some
    reason: Text


@dataclass(frozen=True, kw_only=True, config=STRICT)
class _Dtype(FactRow):
    name: Literal["bfloat16", "float16"]
    feature: Feature | None = None


def mixed_gpu_settings(gpus: Sequence[Gpu]) -> Iterator[Setting]:
    """The settings for a mix of GPUs; none for GPUs of one model. Raises FactsError if the facts are malformed."""
    if len(gpus) < 2:
        return
    yield _common_dtype(gpus)
    for rule in fact_file_reader.rows("fleet", "settings", _Rule):
        if 0 < sum(map(rule.some.has, gpus)) < len(gpus):
            yield Setting(rule.variable, rule.value, rule.reason)


def _common_dtype(gpus: Sequence[Gpu]) -> Setting:
    better: list[str] = []
    for row in fact_file_reader.rows("fleet", "dtypes", _Dtype):
        lacking = [gpu.id for gpu in gpus if row.feature and row.feature not in gpu.features]
        if not lacking:
            why = "; ".join([f"all of {', '.join(gpu.id for gpu in gpus)} have it", *better])
            return Setting(DTYPE, row.name, f"the common half type: {why}")
        better.append(f"{row.name} is missing on {', '.join(lacking)}")
    raise AssertionError("the last of `dtypes` in facts/data/fleet.yaml must not require a feature")
