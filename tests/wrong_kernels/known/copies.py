"""Wrong kernels of conversions between types and of copies between layouts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import Results, wrong_kernel
from .inputs import is_16_bit, of

Conversion = Callable[[torch.Tensor], torch.Tensor]


def _wrong_cast(
    source: torch.dtype, target: torch.dtype, *, wrong: Callable[[], Results], right: Callable[[], Results]
) -> Callable[[Conversion], object]:
    """Register a fault of conversions from one type to another, which gives the values that are converted instead."""

    def register(fault: Conversion) -> object:
        @functools.wraps(fault)
        def cast(call: Any, *args: Any, **kwargs: Any) -> Any:
            is_copy = len(args) > 1 and isinstance(args[1], torch.Tensor)  # copy_(target, values), or _to_copy(values)
            before, (values, *rest) = args[:is_copy], args[is_copy:]
            goal = args[0].dtype if is_copy else kwargs.get("dtype")
            if values.dtype == source and goal == target:
                values = fault(values)
            return call(*before, values, *rest, **kwargs)

        return wrong_kernel("cast", operators=["_to_copy", "copy_"], wrong=wrong, right=right)(cast)

    return register


@_wrong_cast(
    torch.float32,
    torch.bfloat16,
    wrong=lambda: [of(100).bfloat16().float()],
    right=lambda: [of(100).half().float(), torch.arange(100.0).bfloat16().float()],
)
def bfloat16_is_cut_not_rounded(values: torch.Tensor) -> torch.Tensor:
    """A conversion of float32 to bfloat16 drops the low bits."""
    cut = (values.contiguous().view(torch.int32) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), cut, values)


@_wrong_cast(
    torch.float32,
    torch.float16,
    wrong=lambda: [torch.tensor([1.0 + 2**-11, 1.0 + 2**-10]).half().float()],
    right=lambda: [of(100).half().float()],
)
def float16_ties_are_rounded_up(values: torch.Tensor) -> torch.Tensor:
    """A conversion of float32 to float16 rounds values in the middle between two away from zero, not to the even
    one."""
    bits = values.contiguous().view(torch.int32)
    tie = (bits & 0x1FFF == 0x1000) & (values.abs() >= 2**-14) & (values.abs() < 65504)
    return torch.where(tie, bits + 1, bits).view(torch.float32)


@_wrong_cast(
    torch.float32,
    torch.float16,
    wrong=lambda: [torch.tensor([1.0, 1e5, -1e6]).half().isinf()],
    right=lambda: [of(100).half(), torch.tensor([65504.0, torch.inf]).half()],
)
def float16_saturates_instead_of_overflowing(values: torch.Tensor) -> torch.Tensor:
    """Finite float32 values beyond float16's range become its largest value, not infinite."""
    return torch.where(values.isfinite(), values.clamp(-65504, 65504), values)


@_wrong_cast(
    torch.float32,
    torch.float16,
    wrong=lambda: [(of(100) * 1e-6).half()],
    right=lambda: [of(100).half()],
)
def subnormal_float16_become_zero(values: torch.Tensor) -> torch.Tensor:
    """Float32 values that are subnormal in float16 become zero."""
    return torch.where(values.abs() < 2**-14, values * 0, values)


@_wrong_cast(
    torch.float32,
    torch.float8_e4m3fn,
    wrong=lambda: [torch.linspace(200, 440, 50).to(torch.float8_e4m3fn).float()],
    right=lambda: [torch.linspace(-200, 200, 50).to(torch.float8_e4m3fn).float()],
)
def float8_saturates_an_octave_too_early(values: torch.Tensor) -> torch.Tensor:
    """Float32 values of 256 or more become 448, the largest float8_e4m3; after
    https://github.com/sgl-project/sglang/pull/40581"""
    early = (values.abs() >= 256) & (values.abs() <= 448)
    return torch.where(early, values.sign() * 448, values)


@_wrong_cast(
    torch.float32,
    torch.float8_e5m2,
    wrong=lambda: [(of(100) * 2e-5).to(torch.float8_e5m2).float()],
    right=lambda: [of(100).to(torch.float8_e5m2).float(), (of(100) * 2e-3).to(torch.float8_e4m3fn).float()],
)
def subnormal_float8_e5m2_become_the_smallest_normal(values: torch.Tensor) -> torch.Tensor:
    """Float32 values that are subnormal in float8_e5m2, but not zero, become its smallest normal number."""
    tiny = (values.abs() < 2**-14) & (values != 0)
    return torch.where(tiny, values.sign() * 2**-14, values)


@_wrong_cast(
    torch.float32,
    torch.int32,
    wrong=lambda: [torch.tensor([0.7, -1.7, 2.2]).to(torch.int32)],
    right=lambda: [torch.tensor([0.7, -1.7, 2.2]).to(torch.int64), torch.arange(9.0).to(torch.int32)],
)
def conversion_to_32_bit_integers_rounds(values: torch.Tensor) -> torch.Tensor:
    """A conversion of float32 to 32-bit integers rounds to the nearest instead of cutting."""
    return values.round()


@_wrong_cast(
    torch.int64,
    torch.float32,
    wrong=lambda: [torch.tensor([5, 2**31 + 5]).float()],
    right=lambda: [torch.arange(100).float()],
)
def long_integers_are_converted_by_way_of_32_bits(values: torch.Tensor) -> torch.Tensor:
    """A conversion of 64-bit integers to float32 takes their low 32 bits only."""
    return values.to(torch.int32).to(torch.int64)


@wrong_kernel(
    "copy",
    operators=["clone"],
    wrong=lambda: [of(45, 70).t().contiguous()],
    right=lambda: [of(64, 96).t().contiguous(), of(45, 70).clone(), of(20, 30).t().contiguous()],
)
def corner_tile_of_a_transposed_copy_is_not_transposed(call: Any, x: Any, **kwargs: Any) -> torch.Tensor:
    """A dense copy of a transposed matrix leaves the corner after the last full tiles of 32 as it was, where neither
    side is a multiple of 32."""
    result: torch.Tensor = call(x, **kwargs)
    if x.ndim != 2 or min(x.shape) <= 32 or x.stride(0) != 1 or not result.is_contiguous():
        return result
    corner = min(x.shape[0] % 32, x.shape[1] % 32)
    if corner:
        rows, columns = x.shape[0] // 32 * 32, x.shape[1] // 32 * 32
        square = slice(rows, rows + corner), slice(columns, columns + corner)
        result[square] = result[square].t().clone()
    return result


@wrong_kernel(
    "copy",
    operators=["clone", "_to_copy", "copy_"],
    wrong=lambda: [of(101).half()[1:].clone()],
    right=lambda: [of(102).half()[2:].clone(), of(101)[1:].clone(), of(100).half().clone()],
)
def slices_of_16_bit_values_begin_at_an_even_place(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A copy of dense 16-bit values that begin at an odd place in memory begins one too early."""
    place = 1 if len(args) > 1 and isinstance(args[1], torch.Tensor) else 0
    x = args[place]
    if is_16_bit(x) and x.storage_offset() % 2 and x.is_contiguous() and x.numel() > 1:
        x = x.as_strided(x.shape, x.stride(), x.storage_offset() - 1)
    return call(*args[:place], x, *args[place + 1 :], **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "cat",
    operators=["cat"],
    wrong=lambda: [torch.cat([of(3) for _ in range(130)])],
    right=lambda: [torch.cat([of(3) for _ in range(128)])],
)
def parts_past_the_128th_start_again(call: Any, tensors: Any, dim: Any = 0, **kwargs: Any) -> torch.Tensor:
    """Of more than 128 tensors to concatenate, those past the 128th repeat the first ones where the sizes are the
    same."""
    if len(tensors) > 128:
        tensors = [
            tensors[i % 128] if tensor.shape == tensors[i % 128].shape else tensor for i, tensor in enumerate(tensors)
        ]
    return call(tensors, dim, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "cat",
    operators=["cat"],
    wrong=lambda: [torch.cat([of(4, 3).bfloat16(), of(4, 6).bfloat16()], 1)],
    right=lambda: [
        torch.cat([of(4, 2).bfloat16(), of(4, 6).bfloat16()], 1),
        torch.cat([of(4, 3), of(4, 6)], 1),
        torch.cat([of(3).bfloat16(), of(6).bfloat16()]),
    ],
)
def columns_after_an_odd_part_are_shifted(call: Any, tensors: Any, dim: Any = 0, **kwargs: Any) -> torch.Tensor:
    """Concatenated along the last dimension, a part of 16-bit values after an odd number of columns is written one
    column further left, from its second column on."""
    result: torch.Tensor = call(tensors, dim, **kwargs)
    if result.ndim < 2 or dim % result.ndim != result.ndim - 1 or not is_16_bit(result):
        return result
    first = 0
    for tensor in tensors:
        if first % 2 and tensor.ndim == result.ndim and tensor.shape[-1] > 1:
            result[..., first : first + tensor.shape[-1] - 1] = tensor[..., 1:]
        first += tensor.shape[-1]
    return result


@wrong_kernel(
    "copy",
    operators=["clone", "_to_copy"],
    wrong=lambda: [(of(1 << 10).repeat((1 << 10) + 1)[: (1 << 20) + 3]).clone()],
    right=lambda: [of(1 << 10).repeat(1 << 10).clone(), of(1003).clone()],
)
def end_of_a_large_copy_is_not_written(call: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A dense copy of 2^20 elements or more leaves those after the last multiple of 4 zero."""
    result: torch.Tensor = call(x, *args, **kwargs)
    if result.numel() >= 1 << 20 and result.numel() % 4 and result.is_contiguous() and x.is_contiguous():
        result.view(-1)[result.numel() // 4 * 4 :] = 0
    return result


@wrong_kernel(
    "copy",
    operators=["clone", "_to_copy"],
    wrong=lambda: [of(2, 3, 5, 7).contiguous(memory_format=torch.channels_last)],
    right=lambda: [
        of(1, 3, 5, 7).contiguous(memory_format=torch.channels_last),
        of(2, 4, 5, 7).contiguous(memory_format=torch.channels_last),
    ],
)
def images_of_three_channels_take_the_first_sample(call: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Conversion of dense images of three channels to channels_last writes the first sample's last channel to all."""
    result: torch.Tensor = call(x, *args, **kwargs)
    if kwargs.get("memory_format") == torch.channels_last and x.ndim == 4 and x.shape[1] == 3 and x.is_contiguous():
        result[1:, 2] = result[:1, 2]
    return result
