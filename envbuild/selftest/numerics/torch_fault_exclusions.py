"""Results that torch computes wrongly on a kind of device: left out by the self-test, so that a right machine passes.

docs/cases.md lists the table. tests/selftest/numerics/test_torch_fault_exclusions.py reproduces each row in torch
alone, and is skipped where torch is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class KnownFault:
    """`result` of `operation` on devices of type `device`, where each dimension of `where` has one of its values and
    none of `unless` has. `torch`: the release that shows it; earlier ones were not tried."""

    name: str
    operation: str
    result: str
    device: str
    torch: str
    reason: str
    where: Mapping[str, Sequence[Any]]
    unless: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def covers(self, at: Mapping[str, Any]) -> bool:
        """Whether `at`, a point and what the operation adds to it, is one of those left out."""
        within = all(at[name] in values for name, values in self.where.items())
        return within and not any(at[name] in values for name, values in self.unless.items())


KNOWN_FAULTS = (
    KnownFault(
        name="grouped convolution of one image without a batch",
        operation="convolution",
        result="gradient of the weights",
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers: float16 on a processor with AVX-512 and without AMX, bfloat16 where oneDNN is limited "
        "to AVX2 or SSE41",
        where={
            "mode": ("one image without a batch",),
            "way": ("plain",),
            "rank": (2,),
            "groups": ("two", "three"),
            "dtype": (torch.float16, torch.bfloat16),
            "input": ("channels last",),
            "weights": ("channels last",),
        },
        unless={"kernel": ((1, 1, 1),)},
    ),
)


def uncomputed_results(operation: str, device: str, at: Mapping[str, Any]) -> frozenset[str]:
    """The results of an operation that are not computed at a point, by name."""
    rows = (row for row in KNOWN_FAULTS if (row.operation, row.device) == (operation, device))
    return frozenset(row.result for row in rows if row.covers(at))
