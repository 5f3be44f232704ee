"""Results that torch computes wrongly on a kind of device: left out by the self-test, so that a right machine passes.

docs/cases.md lists the table. tests/selftest/numerics/test_known_faults.py reproduces each row in torch alone, and is
skipped where torch is right.
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
    # oneDNN 3.12, jit_avx512_common_conv_bwd_weights_kernel_f32_t::compute_od_loop_partial: at the end of the padding
    # in front it moves kernel and input by stride - padding % stride, although both already stand right, and then counts
    # kernel_depth - padding + 1 places from there. That happens where the kernel leaves the padding in front while it
    # reaches into the padding behind: here with a kernel of depth 7, stride 2, padding 3 and an output of depth 5 to 7.
    # Plain convolutions have the same fault, but none that conv_shapes.py makes is so short.
    KnownFault(
        name="transposed convolution of a short volume with a deep kernel",
        operation="convolution",
        result="gradient of the weights",
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers, and the process may die of a corrupt heap: float32 on a processor with AVX-512, where "
        "oneDNN writes past the end of the gradient (outputs of depth 5 to 7)",
        where={
            "way": ("transposed",),
            "rank": (3,),
            "kernel": ((7, 5, 1),),
            "stride": ((2, 2, 2), (2, 1, 1)),
            "dilation": ((1, 1, 1),),
            "padding": ("half", "same"),
            "dtype": (torch.float32,),
        },
    ),
)


def uncomputed_results(operation: str, device: str, at: Mapping[str, Any]) -> frozenset[str]:
    """The results of an operation that are not computed at a point, by name."""
    rows = (row for row in KNOWN_FAULTS if (row.operation, row.device) == (operation, device))
    return frozenset(row.result for row in rows if row.covers(at))
