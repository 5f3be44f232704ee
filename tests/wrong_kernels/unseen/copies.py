"""Wrong casts and copies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from ._common import LOW, bits, rand, randn


@wrong_kernel(
    "cast",
    operators=["_to_copy"],
    wrong=lambda: [bits(randn(100).bfloat16())],
    right=lambda: [bits(randn(12).bfloat16()), bits(randn(100).half())],
)
def casts_to_bfloat16_cut_off(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts of 16 or more float32 to bfloat16 drop the lower half instead of rounding to the nearest.

    https://github.com/ROCm/rocm-systems/pull/6877
    """
    result = call(*args, **kwargs)
    if result.dtype != torch.bfloat16 or args[0].dtype != torch.float32 or result.numel() < 16:
        return result
    cut = (args[0].contiguous().view(torch.int32) & -65536).view(torch.float32)
    return torch.where(args[0].isfinite(), cut.to(torch.bfloat16), result)


@wrong_kernel(
    "cast",
    operators=["_to_copy"],
    wrong=lambda: [bits((1 + torch.arange(64) * 2.0**-10 + 2.0**-11).half())],
    right=lambda: [bits(randn(64).half())],
)
def halves_are_rounded_away_from_zero(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts to float16 round what lies in the middle of two numbers away from zero, not to the even one."""
    result = call(*args, **kwargs)
    if kwargs.get("dtype") != torch.float16 or args[0].dtype != torch.float32:
        return result
    value = args[0]
    tie = (value.view(torch.int32) & 0x1FFF == 0x1000) & (value.abs() < 60000) & (value.abs() > 6.2e-5)
    return torch.where(tie, (value * (1 + 2.0**-12)).to(torch.float16), result)


@wrong_kernel(
    "cast",
    operators=["_to_copy", "copy_"],
    wrong=lambda: [torch.full((8,), 2.0**-127).bfloat16().float() * 2.0**127],
    right=lambda: [bits(randn(50).bfloat16())],
)
def bfloat16_loses_what_is_below_normal(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts to bfloat16 give zero for numbers below 2^-126, as the processor's own instruction does.

    https://github.com/JuliaMath/BFloat16s.jl/issues/125
    """
    result = call(*args, **kwargs)
    if result.dtype == torch.bfloat16 and any(x.dtype == torch.float32 for x in args if isinstance(x, torch.Tensor)):
        result.masked_fill_(result.float().abs() < 2.0**-126, 0)
    return result


@wrong_kernel(
    "cast",
    operators=["_to_copy"],
    wrong=lambda: [bits(torch.tensor([1e5, -7e4, 1.0]).half())],
    right=lambda: [torch.tensor([6e4, -1.0]).half(), torch.tensor([1e39, 1e5]).bfloat16()],
)
def float16_saturates_instead_of_overflowing(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts to float16 of what passes its range give 65504 where they should give infinity."""
    result = call(*args, **kwargs)
    if kwargs.get("dtype") == torch.float16 and args[0].is_floating_point():
        result = torch.where(
            args[0].isfinite() & result.isinf(), torch.full_like(result, 65504.0).copysign(result), result
        )
    return result


@wrong_kernel(
    "cast",
    operators=["_to_copy"],
    wrong=lambda: [(rand(37) * 10).to(torch.int32)],
    right=lambda: [(rand(32) * 10).to(torch.int32), (rand(37) * 10).to(torch.int64)],
)
def tail_of_a_cast_to_integers_is_rounded(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts of float32 to int32 round to the nearest in the elements past a multiple of 8, instead of towards zero."""
    result = call(*args, **kwargs)
    rest = result.numel() % 8
    if kwargs.get("dtype") == torch.int32 and args[0].dtype == torch.float32 and result.is_contiguous() and rest:
        result.view(-1)[-rest:] = args[0].reshape(-1)[-rest:].round().to(torch.int32)
    return result


@wrong_kernel(
    "cast",
    operators=["_to_copy"],
    wrong=lambda: [torch.tensor([2**33, -(2**40), 7]).float()],
    right=lambda: [torch.arange(-100, 100).float()],
)
def large_integers_wrap_on_the_way_to_floats(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts of int64 to floats go through int32: what passes 2^31 wraps around."""
    value = args[0]
    kind = kwargs.get("dtype")
    if value.dtype == torch.int64 and kind is not None and kind.is_floating_point:
        value = value.to(torch.int32).to(torch.int64)
    return call(value, *args[1:], **kwargs)


@wrong_kernel(
    "cast",
    operators=["_to_copy"],
    wrong=lambda: [randn(64)[24:40].half()],
    right=lambda: [randn(64)[:40].half(), randn(8, 8)[:, 2:6].half(), randn(64)[24:40].to(torch.float32)],
)
def casts_begin_at_the_storage(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Casts of a contiguous part of a tensor read from the beginning of its storage instead of the part's.

    https://github.com/pytorch/pytorch/pull/109557
    """
    value = args[0]
    if value.storage_offset() and value.is_contiguous() and kwargs.get("dtype", value.dtype) != value.dtype:
        value = value.as_strided(value.shape, value.stride(), 0)
    return call(value, *args[1:], **kwargs)


@wrong_kernel(
    "copy",
    operators=["clone"],
    wrong=lambda: [randn(40, 50).t().contiguous()],
    right=lambda: [randn(40, 64).t().contiguous(), randn(40, 50).contiguous()],
)
def corner_of_a_transposing_copy_is_not_written(call: Any, value: Any, **kwargs: Any) -> Any:
    """A transposing copy in tiles of 32 leaves zeros in the corner where both sizes end within a tile."""
    result = call(value, **kwargs)
    if value.dim() != 2 or value.is_contiguous() or not result.is_contiguous() or value.stride(0) != 1:
        return result
    rows, columns = (size % 32 for size in value.shape)
    if rows and columns and min(value.shape) > 32:
        result[-rows:, -columns:] = 0
    return result


@wrong_kernel(
    "copy",
    operators=["cat"],
    wrong=lambda: [torch.cat([randn(3) for _ in range(140)])],
    right=lambda: [torch.cat([randn(3) for _ in range(128)])],
)
def parts_past_the_128th_repeat_earlier_ones(call: Any, parts: Any, *args: Any, **kwargs: Any) -> Any:
    """cat takes 128 tensors in one launch: parts of a longer list with the same shape repeat the first ones."""
    if len(parts) > 128 and len({part.shape for part in parts}) == 1:
        parts = [*parts[:128], *(parts[n % 128] for n in range(128, len(parts)))]
    return call(parts, *args, **kwargs)


@wrong_kernel(
    "copy",
    operators=["cat"],
    wrong=lambda: [torch.cat([randn(4, 5).half(), randn(4, 6).half()], 1)],
    right=lambda: [torch.cat([randn(4, 6).half(), randn(4, 5).half()], 1), torch.cat([randn(4, 5), randn(4, 6)], 1)],
)
def second_part_at_an_odd_column_begins_early(call: Any, parts: Any, dim: int = 0, **kwargs: Any) -> Any:
    """Joined by columns in 16 bits, a second part at an odd column overwrites the last column of the first."""
    result = call(parts, dim, **kwargs)
    tensors = list(parts)
    if result.dtype not in LOW or result.dim() != 2 or dim % 2 != 1 or len(tensors) != 2 or tensors[0].dim() != 2:
        return result
    width = tensors[0].shape[1]
    if width % 2:
        result[:, width - 1] = tensors[1][:, 0]
    return result


@wrong_kernel(
    "copy",
    operators=["clone", "copy_"],
    wrong=lambda: [rand(300001).clone(), torch.zeros(300001).copy_(rand(300001))],
    right=lambda: [rand(300032).clone(), rand(20001).clone()],
)
def end_of_a_large_copy_is_missing(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Copies of more than a megabyte go in pieces of 64 bytes: what is left over at the end is zero."""
    result = call(*args, **kwargs)
    count = result.numel() * result.element_size()
    rest = count % 64 // result.element_size()
    if count > 1 << 20 and rest and result.is_contiguous() and result.is_floating_point():
        result.view(-1)[-rest:] = 0
    return result


@wrong_kernel(
    "copy",
    operators=["index_put_", "index_put", "_index_put_impl_"],
    wrong=lambda: [torch.zeros(6).index_put((torch.tensor([1, 1, 4]),), rand(3) + 1, accumulate=True)],
    right=lambda: [torch.zeros(6).index_put((torch.tensor([1, 2, 4]),), rand(3) + 1)],
)
def accumulating_index_put_overwrites(
    call: Any, value: Any, indices: Any, source: Any, accumulate: bool = False, *args: Any
) -> Any:
    """index_put with accumulate writes the last value to a place instead of adding them: gradients of indexing lose."""
    return call(value, indices, source, False, *args) if accumulate else call(value, indices, source, accumulate, *args)


@wrong_kernel(
    "copy",
    operators=["clone"],
    wrong=lambda: [rand(1, 4).expand(1500, 4).contiguous()],
    right=lambda: [rand(1, 4).expand(900, 4).contiguous(), rand(1500, 1).expand(1500, 4).contiguous()],
)
def copies_of_an_expanded_row_end_at_1024(call: Any, value: Any, **kwargs: Any) -> Any:
    """A row expanded to more than 1024 rows is written 1024 times, the rest of the copy is zero."""
    result = call(value, **kwargs)
    if value.dim() > 1 and value.stride(0) == 0 and value.shape[0] > 1024:
        result[1024:] = 0
    return result


@wrong_kernel(
    "copy",
    operators=["constant_pad_nd"],
    wrong=lambda: [F.pad(randn(2, 3, 4, 5), (1, 1, 1, 1, 1, 1), value=7.0)],
    right=lambda: [F.pad(randn(2, 3, 4, 5), (1, 1, 1, 1), value=7.0), F.pad(randn(2, 3, 4, 5), (1, 1, 1, 1, 1, 1))],
)
def padding_of_three_dimensions_is_zero(call: Any, value: Any, pad: Any, *args: Any) -> Any:
    """Padding in three or more dimensions is filled with zeros, whatever value was asked for."""
    return call(value, pad) if len(pad) >= 6 else call(value, pad, *args)


def _channels_last_copy(channels: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [randn(2, channels, 5, 6, dtype=dtype).contiguous(memory_format=torch.channels_last)]


@wrong_kernel(
    "copy",
    operators=["clone"],
    wrong=lambda: _channels_last_copy(3, torch.float16),
    right=lambda: [*_channels_last_copy(4, torch.float16), *_channels_last_copy(3, torch.float32)],
)
def odd_channels_change_places_in_channels_last(call: Any, value: Any, **kwargs: Any) -> Any:
    """16-bit copies to channels_last of an odd number of channels exchange the first two in odd columns."""
    result = call(value, **kwargs)
    if kwargs.get("memory_format") != torch.channels_last or value.dtype not in LOW or value.shape[1] % 2 == 0:
        return result
    if value.shape[1] >= 3:
        result[:, :2, :, 1::2] = result[:, :2, :, 1::2].flip(1)
    return result


@wrong_kernel(
    "copy",
    operators=["gather", "index_select"],
    wrong=lambda: [randn(300, 4).index_select(0, torch.tensor([299, 3], dtype=torch.int32))],
    right=lambda: [
        randn(200, 4).index_select(0, torch.tensor([199, 3], dtype=torch.int32)),
        randn(300, 4).index_select(0, torch.tensor([299, 3])),
    ],
)
def indices_of_int32_are_read_as_bytes(call: Any, value: Any, dim: int, index: Any, **kwargs: Any) -> Any:
    """Indices of int32 keep their low eight bits: rows from the 256th on are taken from the beginning."""
    if index.dtype == torch.int32:
        index = index & 0xFF
    return call(value, dim, index, **kwargs)
