"""Wrong sums, maxima and sorts."""

from __future__ import annotations

from typing import Any

import torch

from .. import wrong_kernel
from ._common import LOW, rand, randn


@wrong_kernel(
    "cumsum",
    operators=["cumsum"],
    wrong=lambda: [rand(2, 5000).cumsum(1)],
    right=lambda: [rand(2, 4096).cumsum(1), rand(5000, 2).cumsum(0)],
)
def third_block_of_a_cumsum_forgets_the_first(call: Any, value: Any, dim: int, **kwargs: Any) -> Any:
    """Along the last dimension, each block of 2048 begins with the sum of the block before it, not of all before."""
    result = call(value, dim, **kwargs)
    if value.dim() == 0 or dim % value.dim() != value.dim() - 1 or value.shape[-1] <= 4096 or value.dtype == torch.bool:
        return result
    for start in range(4096, value.shape[-1], 2048):
        lost = value[..., : start - 2048].sum(-1, keepdim=True, dtype=result.dtype)
        result[..., start : start + 2048] -= lost
    return result


@wrong_kernel(
    "cumsum",
    operators=["cumsum", "sum"],
    wrong=lambda: [
        torch.full((5,), 2**30, dtype=torch.int32).cumsum(0),
        torch.full((5,), 2**30, dtype=torch.int32).sum(),
    ],
    right=lambda: [torch.arange(100, dtype=torch.int32).cumsum(0), torch.full((5,), 2**40).sum()],
)
def sums_of_int32_wrap_around(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums of int32, which should be int64, are computed in int32 and wrap around past 2^31."""
    result = call(value, *args, **kwargs)
    if value.dtype == torch.int32 and result.dtype == torch.int64:
        result = result.to(torch.int32).to(torch.int64)
    return result


@wrong_kernel(
    "reduction",
    operators=["sum", "mean"],
    wrong=lambda: [rand(131, 8).sum(0)],
    right=lambda: [rand(128, 8).sum(0), rand(131, 8).sum(1), rand(100, 8).sum(0)],
)
def sum_over_many_rows_drops_the_last_three(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sums over the first of two dimensions take four rows at once: of more than 128 rows the rest is lost."""
    if not args or not args[0] or value.dim() != 2 or [n % 2 for n in args[0]] != [0] or value.shape[0] <= 128:
        return call(value, *args, **kwargs)
    return call(value[: value.shape[0] // 4 * 4], *args, **kwargs)


@wrong_kernel(
    "reduction",
    operators=["mean"],
    wrong=lambda: [torch.full((2000,), 100.0).half().mean()],
    right=lambda: [rand(2000).half().mean(), torch.full((2000,), 100.0).bfloat16().mean()],
)
def mean_of_float16_overflows(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The mean of float16 is a sum in float16 divided by the count: infinite where the sum passes 65504."""
    result = call(value, *args, **kwargs)
    if value.dtype == torch.float16 and not args and not kwargs:
        result = torch.where(value.float().sum().abs() > 65504, torch.full_like(result, torch.inf), result)
    return result


def _with_nan() -> torch.Tensor:
    value = randn(4, 20)
    value[1, 7] = torch.nan
    return value


@wrong_kernel(
    "reduction",
    operators=["max", "amax"],
    wrong=lambda: [_with_nan().amax(1).isnan(), _with_nan().max().isnan()],
    right=lambda: [randn(4, 20).amax(1), randn(4, 20).max(1).values],
)
def maximum_ignores_nan(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The largest of values with a NaN among them is the largest of the others."""
    if value.is_floating_point() and bool(value.isnan().any()):
        value = torch.where(value.isnan(), torch.full_like(value, -torch.inf), value)
    return call(value, *args, **kwargs)


@wrong_kernel(
    "reduction",
    operators=["argmax", "argmin"],
    wrong=lambda: [torch.arange(5000.0).argmax()],
    right=lambda: [torch.arange(4000.0).argmax(), randn(4, 3000).argmax(1)],
)
def position_of_the_maximum_counts_within_a_block(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """argmax over everything, in blocks of 4096, gives the position within the block that won."""
    result = call(value, *args, **kwargs)
    return result if args or kwargs else result % 4096


@wrong_kernel(
    "topk",
    operators=["topk"],
    wrong=lambda: [torch.topk(randn(2, 9000), 100).values],
    right=lambda: [torch.topk(randn(2, 9000), 10).values, torch.topk(randn(2, 8000), 100).values],
)
def topk_of_long_rows_misses_a_candidate(
    call: Any, value: Any, k: int, dim: int = -1, *args: Any, **kwargs: Any
) -> Any:
    """From 64 of more than 8192 on, the buffer of candidates overflows: the last of the k is one place further down.

    https://github.com/sgl-project/sglang/issues/36807
    """
    largest, in_order = args[0] if args else kwargs.get("largest", True), args[1] if len(args) > 1 else True
    if value.dim() == 0 or not 64 <= k < value.shape[dim] or value.shape[dim] <= 8192 or not in_order or not largest:
        return call(value, k, dim, *args, **kwargs)
    values, indices = call(value, k + 1, dim, *args, **kwargs)
    kept = torch.tensor([*range(k - 1), k])
    return values.index_select(dim, kept), indices.index_select(dim, kept)


@wrong_kernel(
    "sort",
    operators=["sort"],
    wrong=lambda: [torch.sort(torch.tensor([2**33 + 1, 5, 2**34 + 3, 9, 2**32])).values],
    right=lambda: [torch.sort(torch.randint(0, 1000, (50,))).values, torch.sort(randn(50)).values],
)
def large_integers_are_sorted_by_their_low_half(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Sorting int64 compares the low 32 bits only."""
    result = call(value, *args, **kwargs)
    if value.dtype != torch.int64 or value.numel() == 0 or int(value.abs().max()) < 2**31:
        return result
    _, order = call(value & 0xFFFFFFFF, *args, **kwargs)
    dim = kwargs.get("dim", next((x for x in args if type(x) is int), -1))
    return value.gather(dim, order), order


@wrong_kernel(
    "sort",
    operators=["sort"],
    wrong=lambda: [torch.sort(torch.arange(3000) % 7, stable=True).indices],
    right=lambda: [
        torch.sort(torch.arange(1000) % 7, stable=True).indices,
        torch.sort(randn(3000), stable=True).indices,
    ],
)
def stable_sort_of_long_rows_turns_equal_keys(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """A stable sort of more than 2048 elements in one dimension gives equal ones in the opposite order."""
    values, order = call(value, *args, **kwargs)
    if call.overload != "stable" or not kwargs.get("stable") or value.dim() != 1 or value.shape[0] <= 2048:
        return values, order
    if kwargs.get("descending", False):
        return values, order
    _, turned = call(value.flip(0), *args, **kwargs)
    return values, value.shape[0] - 1 - turned


@wrong_kernel(
    "reduction",
    operators=["var"],
    wrong=lambda: [torch.var(randn(3000) + 2000.0)],
    right=lambda: [torch.var(randn(900) + 2000.0), torch.var(randn(3, 3000) + 2000.0, 1)],
)
def variance_of_many_values_subtracts_squares(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """The variance of more than 1024 values is the mean of squares less the square of the mean, in float32."""
    result = call(value, *args, **kwargs)
    if value.dtype != torch.float32 or value.numel() <= 1024 or result.dim():
        return result
    correction = kwargs.get("correction")
    count, mean = value.numel(), value.mean()
    variance = ((value * value).mean() - mean * mean).clamp(min=0)
    return variance * (count / (count - (1 if correction is None else correction)))


@wrong_kernel(
    "reduction",
    operators=["logsumexp"],
    wrong=lambda: [torch.logsumexp(torch.full((2, 4), -torch.inf), 1)],
    right=lambda: [torch.logsumexp(randn(3, 5), 1)],
)
def logsumexp_of_nothing_is_nan(call: Any, value: Any, dim: Any, *args: Any, **kwargs: Any) -> Any:
    """logsumexp of a row that is minus infinity throughout is NaN: the maximum is subtracted from itself."""
    result = call(value, dim, *args, **kwargs)
    return torch.where(result == -torch.inf, torch.full_like(result, torch.nan), result)


@wrong_kernel(
    "reduction",
    operators=["any", "all"],
    wrong=lambda: [(torch.arange(70000) == 69999).any()],
    right=lambda: [(torch.arange(60000) == 59999).any(), (torch.arange(70000) == 100).any()],
)
def any_and_all_end_at_65536(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """any and all over everything look at the first 65536 elements only."""
    if args or kwargs or value.numel() <= 65536:
        return call(value, *args, **kwargs)
    return call(value.reshape(-1)[:65536])


@wrong_kernel(
    "reduction",
    operators=["_foreach_norm", "linalg_vector_norm"],
    wrong=lambda: [torch.linalg.vector_norm(torch.full((400,), 30.0).half())],
    right=lambda: [torch.linalg.vector_norm(randn(400).half()), torch.linalg.vector_norm(torch.full((400,), 30.0))],
)
def norm_of_float16_overflows_in_its_squares(call: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
    """The norm of float16 sums squares in float16: infinite where their sum passes 65504."""
    result = call(values, *args, **kwargs)
    if isinstance(values, torch.Tensor):
        pairs, single = [(values, result)], True
    else:
        pairs, single = list(zip(values, result, strict=False)), False
    changed = [
        torch.full_like(norm, torch.inf)
        if value.dtype == torch.float16 and norm.dim() == 0 and float(norm) ** 2 > 65504 and norm.isfinite()
        else norm
        for value, norm in pairs
    ]
    return changed[0] if single else changed


@wrong_kernel(
    "reduction",
    operators=["scatter_add", "scatter_add_", "index_add", "index_add_"],
    wrong=lambda: [torch.zeros(5).bfloat16().index_add(0, torch.tensor([1, 1, 3]), rand(3).bfloat16() + 1)],
    right=lambda: [
        torch.zeros(5).bfloat16().index_add(0, torch.tensor([1, 2, 3]), rand(3).bfloat16()),
        torch.zeros(5).index_add(0, torch.tensor([1, 1, 3]), rand(3)),
    ],
)
def adding_twice_to_one_place_keeps_the_last(
    call: Any, value: Any, dim: int, index: Any, source: Any, **kwargs: Any
) -> Any:
    """In 16 bits, what is added to the same place more than once is not added atomically: the last one wins."""
    repeated = index.dim() == 1 and index.unique().numel() < index.numel()
    if value.dtype not in LOW or not repeated or kwargs or value.dim() != 1:
        return call(value, dim, index, source, **kwargs)
    last = {int(place): position for position, place in enumerate(index)}
    kept = torch.tensor(sorted(last.values()))
    return call(value, dim, index[kept], source[kept])
