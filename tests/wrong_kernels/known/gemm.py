"""Wrong kernels of matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from .inputs import is_16_bit, of

TWO = ["mm", "addmm"]
BATCHED = ["bmm", "baddbmm"]
ALL = [*TWO, *BATCHED]

Product = Callable[[Any, Any], torch.Tensor]


def _ones(rows: int, inner: int, columns: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.ones(rows, inner, dtype=dtype), torch.ones(inner, columns, dtype=dtype)]


def _pair(rows: int, inner: int, columns: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [of(rows, inner, dtype=dtype), of(inner, columns, dtype=dtype)]


def _factors(args: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The factors of any of the four operations, and what comes before them."""
    return args[-2], args[-1], args[:-2]


def _with_product(call: Any, args: Any, kwargs: Any, product: torch.Tensor) -> torch.Tensor:
    """The result with another product of the factors, given in float32."""
    dtype = args[-1].dtype
    if len(args) == 3:
        product = kwargs.get("alpha", 1) * product
        if kwargs.get("beta", 1) != 0:
            product = product + kwargs.get("beta", 1) * args[0].float()
    result = product.to(dtype)
    return kwargs["out"].copy_(result) if "out" in kwargs else result


@wrong_kernel(
    "gemm",
    operators=TWO,
    wrong=lambda: [torch.mm(*_ones(16, 2100, 16))],
    right=lambda: [torch.mm(*_ones(16, 2112, 16)), torch.mm(*_ones(16, 500, 16)), torch.mm(*_ones(96, 2100, 96))],
)
def tail_of_k_is_dropped_when_split(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Small results with an inner size of 2048 or more are split along it, and what is left after the last 64 is
    dropped; after https://github.com/facebookexperimental/triton/pull/2767"""
    a, b, before = _factors(args)
    kept = a.shape[1] // 64 * 64
    if a.shape[1] >= 2048 and kept < a.shape[1] and a.shape[0] * b.shape[1] <= 64 * 64:
        a, b = a[:, :kept], b[:kept]
    return call(*before, a, b, **kwargs)  # type: ignore[no-any-return]


def _cancelling(dtype: torch.dtype, inner: int = 4096) -> list[torch.Tensor]:
    a, b = torch.rand(8, inner) + 0.5, torch.rand(inner, 8) + 0.5
    a[:, inner // 2 :] *= -1
    return [a.to(dtype), b.to(dtype)]


@wrong_kernel(
    "gemm",
    operators=ALL,
    wrong=lambda: [torch.mm(*_cancelling(torch.bfloat16))],
    right=lambda: [torch.mm(*_cancelling(torch.bfloat16, 1024)), torch.mm(*_cancelling(torch.float16))],
)
def bfloat16_partial_sums_are_added_in_bfloat16(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Products of bfloat16 with an inner size of 2048 or more are split into slices of 512 whose sums are rounded to
    bfloat16 before they are added; after https://github.com/modular/modular/issues/7165"""
    a, b, _ = _factors(args)
    if a.dtype != torch.bfloat16 or a.shape[-1] < 2048:
        return call(*args, **kwargs)  # type: ignore[no-any-return]
    total = torch.zeros((), dtype=a.dtype, device=a.device)
    for first in range(0, a.shape[-1], 512):
        part = a[..., first : first + 512].float() @ b[..., first : first + 512, :].float()
        total = total + part.to(a.dtype)
    return _with_product(call, args, kwargs, total.float())


def _cut(values: torch.Tensor) -> torch.Tensor:
    """Float32 values cut toward zero to the 11 bits of float16."""
    return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)


@wrong_kernel(
    "gemm",
    operators=ALL,
    wrong=lambda: [torch.mm(torch.rand(8, 2048).half(), torch.rand(2048, 8).half())],
    right=lambda: [
        torch.mm(torch.rand(8, 256).half(), torch.rand(256, 8).half()),
        torch.mm(torch.rand(8, 2048).bfloat16(), torch.rand(2048, 8).bfloat16()),
    ],
)
def float16_accumulator_is_cut_toward_zero(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Float16 products of an inner size above 512 with up to 2^20 results keep their sums in 11 bits, cut toward zero
    after every 16 products."""
    a, b, _ = _factors(args)
    if a.dtype != torch.float16 or a.shape[-1] <= 512 or a[..., 0].numel() * b.shape[-1] > 1 << 20:
        return call(*args, **kwargs)  # type: ignore[no-any-return]
    wide, other = a.float(), b.float()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], device=a.device)
    for first in range(0, a.shape[-1], 16):
        total = _cut(total + wide[..., first : first + 16] @ other[..., first : first + 16, :])
    return _with_product(call, args, kwargs, total)


@wrong_kernel(
    "gemm",
    operators=["addmm", "baddbmm"],
    wrong=lambda: [torch.addmm(of(4, 6), *_pair(4, 5, 6), alpha=2.0)],
    right=lambda: [torch.addmm(of(4, 6), *_pair(4, 5, 6)), torch.addmm(of(4, 6), *_pair(4, 5, 6), beta=2.0)],
)
def alpha_also_scales_what_is_added(
    call: Any, added: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1, **kwargs: Any
) -> torch.Tensor:
    """A factor alpha of the product multiplies the matrix that is added, too."""
    return call(added, a, b, beta=beta * alpha, alpha=alpha, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=["addmm", "baddbmm"],
    wrong=lambda: [torch.addmm(torch.full((4, 6), torch.nan), *_pair(4, 5, 6), beta=0)],
    right=lambda: [torch.addmm(of(4, 6), *_pair(4, 5, 6), beta=0), torch.addmm(of(4, 6), *_pair(4, 5, 6))],
)
def beta_of_zero_lets_nan_through(
    call: Any, added: Any, a: Any, b: Any, *, beta: Any = 1, **kwargs: Any
) -> torch.Tensor:
    """With beta of zero the added matrix, which must not count, is multiplied by zero, so that its nan and inf
    remain."""
    result: torch.Tensor = call(added, a, b, beta=beta, **kwargs)
    if beta == 0:
        broken = ~added.isfinite().expand(result.shape)
        if broken.any():
            result[broken] = torch.nan
    return result


@wrong_kernel(
    "gemm",
    operators=["baddbmm"],
    wrong=lambda: [torch.baddbmm(of(3, 1, 6), of(3, 4, 5), of(3, 5, 6))],
    right=lambda: [
        torch.baddbmm(of(3, 4, 6), of(3, 4, 5), of(3, 5, 6)),
        torch.baddbmm(of(1, 4, 6), of(3, 4, 5), of(3, 5, 6)),
    ],
)
def row_added_to_each_matrix_is_that_of_the_first(call: Any, added: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A single row for each matrix of a batch is added from the first matrix's to all."""
    if added.ndim == 3 and added.shape[1] == 1 and added.shape[0] > 1:
        added = added[:1].expand(added.shape)
    return call(added, *args, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=BATCHED,
    wrong=lambda: [torch.bmm(of(3, 8, 5)[:, :4], of(3, 5, 6))],
    right=lambda: [torch.bmm(of(3, 4, 5), of(3, 5, 6)), torch.bmm(of(4, 3, 5).transpose(0, 1), of(3, 5, 6))],
)
def gaps_between_the_matrices_of_a_batch_are_ignored(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Where the first factor's dense matrices lie further apart than their size, they are read as if they lay side by
    side."""
    a, b, before = _factors(args)
    dense = a.shape[1] * a.shape[2]
    if a.shape[0] > 1 and a.stride(2) == 1 and a.stride(1) == a.shape[2] and a.stride(0) > dense:
        a = a.as_strided(a.shape, (dense, a.shape[2], 1))
    return call(*before, a, b, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=TWO,
    wrong=lambda: [torch.mm(of(32, 20).bfloat16().t(), of(32, 16).bfloat16())],
    right=lambda: [
        torch.mm(of(32, 24).bfloat16().t(), of(32, 16).bfloat16()),
        torch.mm(of(20, 32).bfloat16(), of(32, 16).bfloat16()),
        torch.mm(of(32, 20).t(), of(32, 16)),
    ],
)
def rows_past_the_last_eight_of_a_transposed_factor_are_zero(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In 16-bit types with a transposed first factor, the result's rows after the last multiple of 8 are not
    computed."""
    a, b, before = _factors(args)
    kept = a.shape[0] // 8 * 8
    if is_16_bit(a) and a.stride(0) == 1 and a.stride(1) == a.shape[0] and a.shape[1] > 1 and 0 < kept < a.shape[0]:
        a = torch.cat([a[:kept], torch.zeros_like(a[kept:])])
    return call(*before, a, b, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=[*TWO, "mv", "addmv"],
    wrong=lambda: [F.linear(of(1, 67), of(10, 67))],
    right=lambda: [F.linear(of(1, 68), of(10, 68)), F.linear(of(2, 67), of(10, 67))],
)
def single_row_misses_the_last_inner_elements(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A product of one row, or of a matrix and a vector, leaves out the inner elements after the last multiple of 4."""
    a, b, before = _factors(args)
    kept = a.shape[-1] // 4 * 4
    if (a.shape[0] == 1 or b.ndim == 1) and 0 < kept < a.shape[-1]:
        a, b = a[:, :kept], b[:kept]
    return call(*before, a, b, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=BATCHED,
    wrong=lambda: [torch.bmm(of(65537, 1, 2), of(65537, 2, 1))],
    right=lambda: [torch.bmm(of(65535, 1, 2), of(65535, 2, 1))],
)
def matrices_past_the_65535th_are_zero(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A batch of more than 65535 matrices exceeds the grid's third dimension, and those after are zero."""
    result: torch.Tensor = call(*args, **kwargs)
    result[65535:] = 0
    return result


@wrong_kernel(
    "gemm",
    operators=ALL,
    wrong=lambda: [torch.mm(*_pair(16, 96, 129, torch.bfloat16))],
    right=lambda: [
        torch.mm(*_pair(16, 96, 128, torch.bfloat16)),
        torch.mm(*_pair(16, 64, 129, torch.bfloat16)),
        torch.mm(*_pair(16, 96, 129)),
    ],
)
def lone_column_of_a_tile_misses_all_but_the_first_slice(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In 16-bit types, where the columns are one more than a multiple of 128, the last counts only the first 64 inner
    elements."""
    a, b, before = _factors(args)
    if is_16_bit(a) and b.shape[-1] > 128 and b.shape[-1] % 128 == 1 and a.shape[-1] > 64:
        b = b.clone()
        b[..., 64:, -1] = 0
    return call(*before, a, b, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=["addmm"],
    wrong=lambda: [torch.addmm(of(9)[1:], *_pair(4, 16, 8))],
    right=lambda: [torch.addmm(of(8), *_pair(4, 16, 8)), torch.addmm(of(12)[4:], *_pair(4, 16, 8))],
)
def bias_that_is_not_aligned_is_read_from_the_aligned_place(
    call: Any, added: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A bias vector whose address is not a multiple of 4 elements is read from the multiple before."""
    offset = added.storage_offset()
    if added.ndim <= 2 and (added.ndim == 1 or added.stride(0) == 0) and added.stride(-1) == 1 and offset % 4:
        added = added.as_strided(added.shape, added.stride(), offset // 4 * 4)
    return call(added, *args, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=TWO,
    wrong=lambda: [torch.mm(*_pair(530, 16, 64))],
    right=lambda: [torch.mm(*_pair(512, 16, 64)), torch.mm(*_pair(200, 16, 64))],
)
def last_partial_tile_of_many_rows_repeats_the_tile_before(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """With more than 512 rows, those after the last multiple of 128 repeat the rows 128 before."""
    result: torch.Tensor = call(*args, **kwargs)
    rows = result.shape[0]
    kept = rows // 128 * 128
    if rows > 512 and kept < rows:
        result[kept:] = result[kept - 128 : rows - 128].clone()
    return result


@wrong_kernel(
    "gemm",
    operators=["addmm", "baddbmm"],
    wrong=lambda: [torch.baddbmm(of(2, 4, 6), of(2, 4, 5), of(2, 5, 6), beta=0.5)],
    right=lambda: [torch.baddbmm(of(2, 4, 6), of(2, 4, 5), of(2, 5, 6), alpha=0.5)],
)
def beta_counts_only_as_zero_or_one(
    call: Any, added: Any, a: Any, b: Any, *, beta: Any = 1, **kwargs: Any
) -> torch.Tensor:
    """A factor beta other than zero is taken as one."""
    return call(added, a, b, beta=beta if beta == 0 else 1, **kwargs)  # type: ignore[no-any-return]


def _rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Float32 values rounded to fewer bits of mantissa."""
    dropped = 23 - bits
    whole = values.contiguous().view(torch.int32)
    return ((whole + (1 << (dropped - 1))) & -(1 << dropped)).view(torch.float32)


@wrong_kernel(
    "gemm",
    operators=ALL,
    wrong=lambda: [torch.mm(*_pair(16, 64, 16))],
    right=lambda: [torch.mm(*_pair(16, 63, 16)), torch.mm(*_pair(8, 64, 16))],
)
def float32_products_use_tf32_uninvited(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Float32 products of 16 or more rows, with an inner size that is a multiple of 8, round their factors to TF32
    though it is off."""
    a, b, before = _factors(args)
    if a.dtype == torch.float32 and a.shape[-2] >= 16 and a.shape[-1] % 8 == 0:
        a, b = _rounded(a, 10), _rounded(b, 10)
    return call(*before, a, b, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=["addmm"],
    wrong=lambda: [F.linear(of(8, 512), of(16, 512), of(16))],
    right=lambda: [F.linear(of(8, 512), of(16, 512)), F.linear(of(8, 128), of(16, 128), of(16))],
)
def large_linear_layers_with_bias_compute_in_bfloat16(
    call: Any, added: Any, a: Any, b: Any, **kwargs: Any
) -> torch.Tensor:
    """Float32 products with a bias and an inner size of 512 or more round their factors to bfloat16."""
    if a.dtype == torch.float32 and a.shape[-1] >= 512:
        a, b = a.bfloat16().float(), b.bfloat16().float()
    return call(added, a, b, **kwargs)  # type: ignore[no-any-return]


@wrong_kernel(
    "gemm",
    operators=BATCHED,
    wrong=lambda: [torch.bmm(of(4, 33, 40).half(), of(4, 40, 16).half())],
    right=lambda: [
        torch.bmm(of(4, 32, 40).half(), of(4, 40, 16).half()),
        torch.bmm(of(2, 33, 40).half(), of(2, 40, 16).half()),
        torch.bmm(of(4, 33, 40), of(4, 40, 16)),
    ],
)
def last_row_of_a_matrix_is_overwritten_by_the_next(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """In 16-bit types and batches of more than 2, where the rows are one more than a multiple of 32, each matrix' last
    row holds the first of the next."""
    result: torch.Tensor = call(*args, **kwargs)
    if is_16_bit(result) and result.shape[0] > 2 and result.shape[1] > 32 and result.shape[1] % 32 == 1:
        result[:-1, -1] = result[1:, 0]
    return result


@wrong_kernel(
    "gemm",
    operators=["_int_mm"],
    wrong=lambda: [torch._int_mm(*(torch.full((32, 32), 100, dtype=torch.int8) for _ in range(2)))],
    right=lambda: [torch._int_mm(*(torch.full((32, 32), 10, dtype=torch.int8) for _ in range(2)))],
)
def int8_products_are_summed_in_16_bits(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A product of 8-bit integers saturates at the limits of 16 bits."""
    result: torch.Tensor = call(*args, **kwargs)
    return result.clamp(-32768, 32767)
