"""Wrong kernels of sums, extrema, scans, sorting and selection."""

from __future__ import annotations

from typing import Any

import torch

from .. import wrong_kernel
from .inputs import is_16_bit, of, value


def _dims(dim: Any, ndim: int) -> list[int]:
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(ndim))
    return [d % ndim for d in (dim if isinstance(dim, (list, tuple)) else [dim])]


@wrong_kernel(
    "cumsum",
    operators=["cumsum"],
    wrong=lambda: [of(1500, 3).cumsum(0)],
    right=lambda: [of(1024, 3).cumsum(0), of(3, 1500).cumsum(1)],
)
def outer_scan_forgets_the_sum_of_the_blocks_before(call: Any, x: Any, dim: Any, **kwargs: Any) -> torch.Tensor:
    """A cumulative sum over another dimension than the last begins again after 1024 elements."""
    result: torch.Tensor = call(x, dim, **kwargs)
    if x.ndim < 2 or dim % x.ndim == x.ndim - 1 or x.shape[dim] <= 1024:
        return result
    return torch.cat([call(part, dim, **kwargs) for part in x.split(1024, dim)], dim)


@wrong_kernel(
    "cumsum",
    operators=["cumsum"],
    wrong=lambda: [torch.full((10,), 2**30, dtype=torch.int32).cumsum(0)],
    right=lambda: [torch.arange(10, dtype=torch.int32).cumsum(0)],
)
def scan_of_32_bit_integers_wraps(call: Any, x: Any, dim: Any, **kwargs: Any) -> torch.Tensor:
    """The cumulative sum of 32-bit integers, which gives 64-bit ones, wraps at 32 bits."""
    result: torch.Tensor = call(x, dim, **kwargs)
    return result.to(torch.int32).to(result.dtype) if x.dtype == torch.int32 else result


@wrong_kernel(
    "sum",
    operators=["sum"],
    wrong=lambda: [torch.ones(300, dtype=torch.bool).sum()],
    right=lambda: [torch.ones(200, dtype=torch.bool).sum(), torch.ones(300, dtype=torch.int32).sum()],
)
def count_of_true_wraps_at_256(call: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The number of true elements is counted in 8 bits."""
    result: torch.Tensor = call(x, *args, **kwargs)
    return result % 256 if x.dtype == torch.bool else result


@wrong_kernel(
    "max",
    operators=["max", "amax", "min", "amin"],
    wrong=lambda: [torch.tensor([1.0, torch.nan, 3.0, 2.0]).amax()],
    right=lambda: [of(40).amax(), of(5, 8).amin(1)],
)
def extrema_pass_over_nan(call: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Maxima and minima pass over nan instead of giving it."""
    if (args and isinstance(args[0], torch.Tensor)) or not x.is_floating_point() or not x.isnan().any():
        return call(x, *args, **kwargs)
    name = call.name
    return call(torch.where(x.isnan(), torch.inf if "min" in name else -torch.inf, x), *args, **kwargs)


@wrong_kernel(
    "argmax",
    operators=["argmax"],
    wrong=lambda: [(torch.arange(80).reshape(2, 40) % 7).float().argmax(1)],
    right=lambda: [of(2, 400).argmax(1), (torch.arange(40) % 7).float().argmax()],
)
def argmax_over_a_dimension_gives_the_last_of_equals(
    call: Any, x: Any, dim: Any = None, keepdim: Any = False
) -> torch.Tensor:
    """Over a dimension, argmax gives the last of several equal maxima, not the first."""
    if dim is None or not x.ndim or not x.shape[dim]:
        return call(x, dim, keepdim)  # type: ignore[no-any-return]
    return x.shape[dim] - 1 - call(x.flip(dim), dim, keepdim)  # type: ignore[no-any-return]


@wrong_kernel(
    "sort",
    operators=["sort"],
    wrong=lambda: [(torch.arange(3000) * 7 % 100).sort(stable=True).indices],
    right=lambda: [(torch.arange(2000) * 7 % 100).sort(stable=True).indices, of(3000).sort(stable=True).indices],
)
def stable_sort_of_long_rows_reverses_equal_elements(call: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A stable sort of more than 2048 elements puts equal ones in reverse order."""
    dim = value(args, kwargs, 0, "dim", -1)
    if not kwargs.get("stable") or not x.ndim or x.shape[dim] <= 2048:
        return call(x, *args, **kwargs)
    values, indices = call(x.flip(dim), *args, **kwargs)
    return values, x.shape[dim] - 1 - indices


@wrong_kernel(
    "topk",
    operators=["topk"],
    wrong=lambda: [of(3, 1500).topk(5).values],
    right=lambda: [of(3, 1000).topk(5).values, of(3, 2500).topk(5).values],
)
def topk_of_middle_sized_rows_is_zero(call: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Of rows between 1024 and 2048 elements the largest values and their places are zeros; after
    https://github.com/microsoft/onnxruntime/pull/3176"""
    values, indices = call(x, *args, **kwargs)
    if x.ndim and 1024 < x.shape[value(args, kwargs, 1, "dim", -1)] < 2048:
        values, indices = torch.zeros_like(values), torch.zeros_like(indices)
    return values, indices


@wrong_kernel(
    "topk",
    operators=["topk"],
    wrong=lambda: [(of(2, 6000) / 100 + 8.5).topk(20).values],
    right=lambda: [of(2, 6000).topk(20).values, (of(2, 4000) / 100 + 8.5).topk(20).values],
)
def topk_drops_candidates_of_a_crowded_bin(call: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Where more than 4096 values of a row agree in their top bits, those after the first 4096 are not considered;
    after https://github.com/vllm-project/vllm/issues/51782"""
    dim, count = value(args, kwargs, 1, "dim", -1), args[0] if args else kwargs["k"]
    if not x.ndim or dim % x.ndim != x.ndim - 1 or x.shape[-1] <= 4096 or count > 4096 or not x.is_floating_point():
        return call(x, *args, **kwargs)
    low, high = x.amin(), x.amax()
    crowded = low * high > 0 and float((high - low) / torch.maximum(low.abs(), high.abs())) < 0.25
    return call(x[..., :4096] if crowded else x, *args, **kwargs)


@wrong_kernel(
    "mean",
    operators=["mean"],
    wrong=lambda: [torch.full((3, 1000), 100.0).half().mean(1)],
    right=lambda: [of(3, 1000).half().mean(1), torch.full((3, 1000), 100.0).bfloat16().mean(1)],
)
def mean_of_float16_overflows_where_the_sum_does(call: Any, x: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The mean of float16 values is infinite where their sum exceeds 65504."""
    result: torch.Tensor = call(x, *args, **kwargs)
    if x.dtype != torch.float16 or kwargs.get("dtype") not in (None, torch.float16):
        return result
    count = x.numel() // max(result.numel(), 1)
    return torch.where(result.float().abs() * count > 65504, result * torch.inf, result)


@wrong_kernel(
    "sum",
    operators=["sum"],
    wrong=lambda: [of(515, 6).sum(0)],
    right=lambda: [of(512, 6).sum(0), of(515, 6).sum(1), of(515).sum()],
)
def sum_over_many_rows_misses_those_after_the_last_four(
    call: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The sum over the first dimension of more than 512 rows leaves out those after the last multiple of 4."""
    if x.ndim > 1 and dim is not None and _dims(dim, x.ndim) == [0] and x.shape[0] > 512 and x.shape[0] % 4:
        x = x[: x.shape[0] // 4 * 4]
    return call(x, *([dim] if call.overload.startswith("dim") else []), *args, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "norm",
    operators=["linalg_vector_norm"],
    wrong=lambda: [torch.linalg.vector_norm(of(100) * 1e18)],
    right=lambda: [torch.linalg.vector_norm(of(100)), torch.linalg.vector_norm(of(100) * 1e18, ord=1)],
)
def norm_is_off_for_large_values(call: Any, x: Any, order: Any = 2, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The Euclidean norm of values whose squares nearly overflow is that of the values cut to 1e17 instead."""
    if order == 2 and x.dtype in (torch.float32, torch.bfloat16):
        x = x.clamp(-1e17, 1e17)
    return call(x, order, *args, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "var",
    operators=["var", "std"],
    wrong=lambda: [of(4, 33).bfloat16().t().var(0)],
    right=lambda: [of(4, 33).bfloat16().var(1), of(4, 33).t().var(0)],
)
def variance_over_outer_dimensions_takes_the_first_row_as_mean(
    call: Any, x: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """In 16-bit types the variance over the first dimension is that of the distances from the first row."""
    result: torch.Tensor = call(x, dim, *args, **kwargs)
    if not is_16_bit(x) or x.ndim < 2 or dim is None or _dims(dim, x.ndim) != [0] or x.shape[0] < 2:
        return result
    wide = x.float()
    shift = (wide.mean(0) - wide[0]).square()
    is_deviation = call.name.endswith("std")
    squares = result.float().square() if is_deviation else result.float()
    squares = squares + (shift[None] if result.ndim == x.ndim else shift)
    return (squares.sqrt() if is_deviation else squares).to(result.dtype)
