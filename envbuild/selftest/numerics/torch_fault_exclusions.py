"""Lists results that torch itself computes wrongly on a type of device. The self-test leaves these results out, so that
a working machine passes.

docs/cases.md contains the same list. tests/selftest/numerics/test_torch_fault_exclusions.py reproduces each
fault with torch alone. Such a test is skipped if torch's result is correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class KnownFault:
    """A known fault: torch computes these `results` of `operation` wrongly on devices of type `device`.

    `where` and `unless` list values of parameters. The fault affects a case if each parameter in `where` has a value
    listed there, and no parameter in `unless` has a value listed there. `torch`: the release in which the fault was
    observed; earlier releases were not tested.
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
        """Return whether the fault affects `at`, which maps each parameter of a test case to its value."""
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
    # The fault is in oneDNN 3.12, jit_avx512_common_conv_bwd_weights_kernel_f32_t::compute_od_loop_partial. While the
    # convolution kernel still overlaps the front padding, oneDNN counts its taps (elements in depth). If the count
    # exceeds min(kernel depth, output depth), oneDNN assumes that the padding has ended. It then moves the kernel and
    # the pointer too far, by stride - padding % stride, and the count passes the end of the kernel. Affected shapes of
    # conv_argument_space.py: kernel depth 7, stride 2, padding 3, output depth 5 to 7. Plain convolutions have the same
    # fault, but conv_argument_space.py gives them deeper inputs, which are not affected.
    KnownFault(
        name="transposed convolution of a short volume with a deep kernel",
        operation="convolution",
        results=("gradient of the weights", "gradient of the bias"),  # one call of oneDNN computes both
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
    # oneDNN 3.12 computes this gradient as that of a plain convolution whose input is the output of the transposed one.
    # The result is wrong if the kernel is deeper than this input, in any memory layout.
    KnownFault(
        name="transposed convolution to a volume that is shallower than the kernel",
        operation="convolution",
        results=("gradient of the weights",),
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers: bfloat16 on a processor with AVX512_BF16 and without AMX",
        where={
            "way": ("transposed",),
            "rank": (3,),
            "output shallower than the kernel": (True,),
            "dtype": (torch.bfloat16,),
        },
    ),
    # The compilation of oneDNN 3.12's kernel never ends (jit_brdgmm_kernel_base_t::brdgmm_microkernel). Observed for
    # 3 to 16 channels and kernels of 15 to 128 elements in the last dimension. 31 channels and more, kernels of 14
    # elements, bfloat16 and float32 are not affected.
    KnownFault(
        name="depthwise convolution of at most 16 channels with a long kernel",
        operation="convolution",
        results=("output", "gradient of the input", "gradient of the weights", "gradient of the bias"),
        device="cpu",
        torch="2.13.0",
        reason="never ends: float16 on a processor with AVX512_FP16",
        where={
            "at most 16 depthwise channels": (True,),
            "last dimension of the kernel 15 or more": (True,),
            "dtype": (torch.float16,),
        },
    ),
    # Observed with oneDNN 3.12 for all such shapes that were tried, in one and two dimensions and with any stride:
    # elements are 0 or have the value of another element. The gradient of a transposed convolution with respect to its
    # input is such a convolution.
    *(
        KnownFault(
            name=f"{way} convolution whose channels times kernel width are a multiple of 32",
            operation="convolution",
            results=(result,),
            device="cpu",
            torch="2.13.0",
            reason="wrong numbers: bfloat16 on a processor with AMX",
            where={
                "way": (way,),
                "channels (even, below 16) times kernel width a multiple of 32 above 32": (True,),
                "dtype": (torch.bfloat16,),
            },
        )
        for way, result in (("plain", "output"), ("transposed", "gradient of the input"))
    ),
    # This is a fault of torch, not of oneDNN. If the output padding is not below the stride
    # (ConvParams::is_output_padding_big), torch uses its own convolution. This convolution adds up the gradients of all
    # images in the dtype, without a wider accumulator.
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
    # https://github.com/uxlfoundation/oneDNN/issues/6035: for channels last, oneDNN allocates a workspace for the
    # actual number of channels, but addresses it in blocks of 8 or 16 channels. This happens only if the strides divide
    # the sizes of the input, or of the output of a transposed convolution.
    KnownFault(
        name="1x1 convolution with a stride, channels last",
        operation="convolution",
        results=("gradient of the weights", "gradient of the bias"),
        device="cpu",
        torch="2.13.0",
        reason="the process may die of a corrupt heap, or the numbers are wrong: float32 on a processor with AVX2 or "
        "AVX-512, bfloat16 with AVX512_BF16, where oneDNN writes past the end of a workspace (oneDNN issue 6035)",
        where={
            "rank": (2,),
            "kernel": ((1, 1, 1),),
            "stride": ((2, 2, 2), (3, 3, 2), (2, 1, 1), (1, 2, 3)),
            "groups": ("one", "depthwise", "depthwise twice"),  # depthwise: only with one channel in total
            "input": ("channels last", "channels last apart"),
            "dtype": (torch.float32, torch.bfloat16),
        },
    ),
    # https://github.com/pytorch/pytorch/issues/191763. Instead of the fused implementation, the self-test checks the
    # implementation that loops over the parameters.
    KnownFault(
        name="fused SGD of half-precision parameters",
        operation="SGD of half precision",
        results=("parameters",),
        device="cpu",
        torch="2.13.0",
        reason="wrong numbers: whole vectors of parameters are not updated (pytorch issue 191763)",
        where={"implementation": ("fused",), "dtype": (torch.float16, torch.bfloat16)},
    ),
    # Instead, the self-test checks the product of a single row in float32.
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
    # All rows of the result have the values of the first row. Instead, the self-test resizes the transposed image.
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
    # https://github.com/pytorch/pytorch/issues/188344. Instead, the self-test checks the gradient of a contiguous copy.
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
    """Return the names of the results of an operation that the self-test leaves out for the parameter values `at`."""
    rows = (row for row in KNOWN_FAULTS if (row.operation, row.device) == (operation, device))
    return frozenset(result for row in rows if row.covers(at) for result in row.results)
