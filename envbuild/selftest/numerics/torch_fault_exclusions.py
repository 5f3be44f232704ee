"""Results that torch computes wrongly on a kind of device. The self-test leaves them out, so that a working machine
passes.

docs/cases.md contains the table. tests/selftest/numerics/test_torch_fault_exclusions.py reproduces each row in torch
alone, and is skipped where torch is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class KnownFault:
    """A known fault: torch computes these `results` of `operation` wrongly on devices of type `device`.

    It applies where each dimension of `where` has one of its values and none of `unless` has. `torch`: the release that
    shows the fault; earlier ones were not tested.
    """

    name: str
    operation: str
    results: Sequence[str]
    device: str
    torch: str
    reason: str
    where: Mapping[str, Sequence[Any]]
    unless: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def covers(self, at: Mapping[str, Any]) -> bool:
        """Whether `at`, a point and the values that the operation adds to it, is left out."""
        within = all(at[name] in values for name, values in self.where.items())
        return within and not any(at[name] in values for name, values in self.unless.items())


KNOWN_FAULTS = (
    KnownFault(
        name="grouped convolution of one image without a batch",
        operation="convolution",
        results=("gradient of the weights",),
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers: float16 on a processor with AVX-512 and without AMX, bfloat16 where oneDNN is limited "
        "to AVX2 or SSE41",
        where={
            "mode": ("one image without a batch",),
            "way": ("plain",),
            "rank": (2,),
            "groups": ("two", "three", "sixteen", "thirty-two"),
            "dtype": (torch.float16, torch.bfloat16),
            "input": ("channels last",),
            "weights": ("channels last",),
        },
        unless={"kernel": ((1, 1, 1),)},
    ),
    # oneDNN 3.12, jit_avx512_common_conv_bwd_weights_kernel_f32_t::compute_od_loop_partial: while the kernel still
    # overlaps the front padding, a count of taps above min(kernel depth, output depth) is taken for the end of that
    # padding. Kernel and pointer then move by stride - padding % stride too far, and the count passes the end of the
    # kernel. Affected shapes from conv_argument_space.py: kernel depth 7, stride 2, padding 3, output depth 5 to 7.
    # Plain convolutions have the same fault, but conv_argument_space.py makes deeper inputs for them.
    KnownFault(
        name="transposed convolution of a short volume with a deep kernel",
        operation="convolution",
        results=("gradient of the weights", "gradient of the bias"),  # oneDNN computes both in one call
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers, and the process may die of a corrupt heap: float32 and bfloat16 on a processor with "
        "AVX-512, where oneDNN writes past the end of the gradient (outputs of depth 5 to 7)",
        where={
            "way": ("transposed",),
            "rank": (3,),
            "kernel": ((7, 5, 1),),
            "stride": ((2, 2, 2), (2, 1, 1)),
            "dilation": ((1, 1, 1),),
            "padding": ("half", "same"),
            "dtype": (torch.float32, torch.bfloat16),
        },
    ),
    # A fault of torch, not of oneDNN: torch's own convolution is used where the output padding is not below the stride
    # (ConvParams::is_output_padding_big), and accumulates the images in a gradient of the dtype.
    KnownFault(
        name="transposed convolution of many images with an output padding of a stride or more",
        operation="convolution",
        results=("gradient of the weights",),
        device="cpu",
        torch="2.13.0",
        reason="imprecise: summed over the images in the dtype, float16 or bfloat16",
        where={
            "way": ("transposed",),
            "output padding of a stride": (True,),
            "dtype": (torch.float16, torch.bfloat16),
        },
    ),
    # https://github.com/uxlfoundation/oneDNN/issues/6035: for channels last the workspace is sized for the channels,
    # but addressed in blocks of 8 or 16. Only where strides divide the sizes of the input, or of a transposed
    # convolution's output.
    KnownFault(
        name="1x1 convolution with a stride, channels last",
        operation="convolution",
        results=("gradient of the weights", "gradient of the bias"),
        device="cpu",
        torch="2.13.0",
        reason="the process may die of a corrupt heap, or the numbers are wrong: float32 on a processor with AVX2 or "
        "AVX-512, where oneDNN writes past the end of a workspace (oneDNN issue 6035)",
        where={
            "rank": (2,),
            "kernel": ((1, 1, 1),),
            "stride": ((2, 2, 2), (3, 3, 2), (2, 1, 1), (1, 2, 3)),
            "groups": ("one", "depthwise", "depthwise twice"),  # depthwise: of one channel
            "input": ("channels last", "channels last apart"),
            "dtype": (torch.float32,),
        },
    ),
    # https://github.com/pytorch/pytorch/issues/191763. The steps of the loop are compared instead.
    KnownFault(
        name="fused SGD of half-precision parameters",
        operation="SGD of half precision",
        results=("parameters",),
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers: whole vectors of parameters are not updated (pytorch issue 191763)",
        where={"implementation": ("fused",), "dtype": (torch.float16, torch.bfloat16)},
    ),
    # The product of a single row in float32 is computed instead.
    KnownFault(
        name="product by index_reduce of a single row",
        operation="blocks by index",
        results=("prod", "prod of others"),
        device="cpu",
        torch="2.13.0",
        reason="refused with an internal assertion: float16 and bfloat16",
        where={
            "group": ("index_reduce",),
            "single row": (True,),
            "dtype": (torch.float16, torch.bfloat16),
        },
        unless={"count": (1,)},
    ),
    # Rows of the result have the values of the first one. The image with rows and columns exchanged is resized instead.
    KnownFault(
        name="antialiased resizing to a single column, except with channels last",
        operation="interpolation",
        results=("output",),
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers: all rows have the values of the first one",
        where={"mode": ("linear antialias", "bicubic antialias"), "to one column": (True,)},
        unless={"channels innermost": (True,)},
    ),
    # https://github.com/pytorch/pytorch/issues/188344. The gradient of a contiguous copy is computed instead.
    *(
        KnownFault(
            name="average of padded windows, channels last",
            operation=operation,
            results=("gradient",),
            device="cuda",
            torch="2.11.0",
            reason="wrong numbers: the kernel of the gradient takes places in the image for places in the padded image "
            "(pytorch issue 188344)",
            where={"layout": ("channels last",), **where},
        )
        for operation, where in (
            ("resized images", {"function": ("avg_pool2d",), "padding": (1,)}),
            (
                "pooling",
                {
                    "function": ("avg_pool", "avg_pool without padding", "avg_pool with a divisor"),
                    "rank": (2,),
                    "padded": (True,),
                },
            ),
        )
    ),
)


def uncomputed_results(operation: str, device: str, at: Mapping[str, Any]) -> frozenset[str]:
    """The names of the results of an operation that are not computed for one combination of parameter values (`at`)."""
    rows = (row for row in KNOWN_FAULTS if (row.operation, row.device) == (operation, device))
    return frozenset(result for row in rows if row.covers(at) for result in row.results)
