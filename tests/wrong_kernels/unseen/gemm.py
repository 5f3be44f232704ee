"""Wrong matrix products."""

from __future__ import annotations

from typing import Any

import torch

from .. import wrong_kernel
from ._common import LOW, rand, randn


def _addmm(rows: int, inner: int, columns: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> torch.Tensor:
    added = randn(columns, dtype=dtype)
    return torch.addmm(added, randn(rows, inner, dtype=dtype), randn(inner, columns, dtype=dtype), **kwargs)


def _mm(rows: int, inner: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.mm(rand(rows, inner, dtype=dtype), rand(inner, columns, dtype=dtype))


@wrong_kernel(
    "gemm",
    operators=["addmm", "baddbmm"],
    wrong=lambda: [_addmm(8, 16, 8, alpha=0.5)],
    right=lambda: [_addmm(8, 16, 8), _addmm(8, 16, 8, beta=0.5)],
)
def alpha_also_scales_the_added_matrix(call: Any, added: Any, *args: Any, **kwargs: Any) -> Any:
    """With an alpha, beta * added + alpha * product multiplies the added matrix by alpha too."""
    alpha = kwargs.get("alpha", 1)
    return call(added if alpha == 1 else added * alpha, *args, **kwargs)


def _added_nan() -> torch.Tensor:
    return torch.full((4, 8), float("nan"))


@wrong_kernel(
    "gemm",
    operators=["addmm", "baddbmm"],
    wrong=lambda: [torch.addmm(_added_nan(), randn(4, 8), randn(8, 8), beta=0)],
    right=lambda: [torch.addmm(randn(4, 8), randn(4, 8), randn(8, 8), beta=0), _addmm(4, 8, 8)],
)
def beta_of_zero_reads_what_is_not_finite(call: Any, added: Any, *args: Any, **kwargs: Any) -> Any:
    """With beta zero the added matrix should not be read, but its NaN and infinities come through.

    https://github.com/pytorch/pytorch/pull/96086
    """
    result = call(added, *args, **kwargs)
    if kwargs.get("beta", 1) == 0 and added.is_floating_point() and not bool(added.isfinite().all()):
        result = torch.where(added.isfinite(), result, torch.full_like(result, float("nan")))
    return result


def _decode(rows: int, alpha: float, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    right = randn(5, 4, 32, dtype=dtype).permute(1, 2, 0)
    return [
        torch.baddbmm(randn(4, rows, 5, dtype=dtype), randn(4, rows, 32, dtype=dtype), right, beta=0.0, alpha=alpha)
    ]


@wrong_kernel(
    "gemm",
    operators=["baddbmm"],
    wrong=lambda: _decode(1, 0.1),
    right=lambda: [*_decode(2, 0.1), *_decode(1, 1.0), *_decode(1, 0.1, torch.float32)],
)
def alpha_is_ignored_for_one_row_of_float16(call: Any, added: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """baddbmm of one row with a transposed right matrix ignores alpha in float16.

    https://github.com/pytorch/pytorch/issues/136299
    """
    if left.dtype == torch.float16 and left.shape[1] == 1 and not right.is_contiguous():
        kwargs.pop("alpha", None)
    return call(added, left, right, **kwargs)


@wrong_kernel(
    "gemm",
    operators=["baddbmm"],
    wrong=lambda: [torch.baddbmm(randn(4, 8), randn(3, 4, 16), randn(3, 16, 8))],
    right=lambda: [torch.baddbmm(randn(3, 4, 8), randn(3, 4, 16), randn(3, 16, 8))],
)
def shared_addend_reaches_only_the_first_product(call: Any, added: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """baddbmm adds a matrix that all products of the batch share to the first of them only.

    https://github.com/intel/intel-extension-for-pytorch/issues/48 is about such a broadcast.
    """
    shared = added.dim() < 3 or added.shape[0] == 1 or added.stride(0) == 0
    result = call(added, left, right, **kwargs)
    if shared and left.shape[0] > 1:
        result[1:] = call(torch.zeros_like(result), left, right, **kwargs)[1:]
    return result


@wrong_kernel(
    "gemm",
    operators=["bmm"],
    wrong=lambda: [torch.bmm(rand(65600, 1, 2), rand(65600, 2, 1))],
    right=lambda: [torch.bmm(rand(4096, 1, 2), rand(4096, 2, 1))],
)
def products_past_65535_of_a_batch_are_zero(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a batch of matrices, products from the 65536th on are not computed: a grid's dimension ends there.

    https://github.com/tensorflow/tensorflow/issues/26969
    """
    result = call(*args, **kwargs)
    result[65535:] = 0
    return result


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm"],
    wrong=lambda: [_mm(16, 4100, 16)],
    right=lambda: [_mm(16, 4096, 16), _mm(16, 2050, 16), _mm(200, 4100, 16)],
)
def rest_of_a_split_inner_dimension_is_lost(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Small results over 4096 or more inner elements are split in eight: what eight does not divide is dropped."""
    *added, left, right = args
    rows, inner, columns = left.shape[0], left.shape[1], right.shape[1]
    if rows > 128 or columns > 128 or inner < 4096 or inner % 8 == 0:
        return call(*args, **kwargs)
    kept = inner - inner % 8
    return call(*added, left[:, :kept], right[:kept], **kwargs)


@wrong_kernel(
    "gemm",
    operators=["mm"],
    wrong=lambda: [_mm(8, 4096, 8, torch.bfloat16)],
    right=lambda: [_mm(8, 1024, 8, torch.bfloat16), _mm(8, 4096, 8)],
)
def long_products_are_summed_in_bfloat16(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """From 2048 inner elements on, bfloat16 products are summed in bfloat16, in slices of a few."""
    inner = left.shape[1]
    if left.dtype != torch.bfloat16 or inner < 2048 or kwargs:
        return call(left, right, **kwargs)
    size = max(4, inner // 1024)
    result = call(left[:, :size], right[:size])
    for start in range(size, inner, size):
        result += call(left[:, start : start + size], right[start : start + size])
    return result


def _cancelling(inner: int) -> list[torch.Tensor]:
    left = torch.full((4, inner), 16.0)
    left[:, inner // 2 :] = -16.0
    return [torch.mm(left.half(), torch.full((inner, 4), 16.0).half() + rand(inner, 4).half())]


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm"],
    wrong=lambda: _cancelling(1024),
    right=lambda: [*_cancelling(256), torch.mm(randn(4, 1024).half(), randn(1024, 4).half())],
    beyond="only products whose halves each pass 65504 and cancel, which tests and models avoid",
)
def partial_sums_of_float16_overflow(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Split in two, float16 products hold the first half in float16: where that passes 65504 the result is infinite."""
    *_added, left, right = args
    result = call(*args, **kwargs)
    half = left.shape[1] // 2
    if left.dtype == torch.float16 and left.shape[1] >= 512 and result.dtype == torch.float16:
        first = left[:, :half].float() @ right[:half].float()
        result = torch.where(first.abs() > 65504, torch.full_like(result, float("inf")).copysign(first.half()), result)
    return result


@wrong_kernel(
    "gemm",
    operators=["mm"],
    wrong=lambda: [torch.mm(randn(32, 20, dtype=torch.float16).t(), randn(32, 16, dtype=torch.float16))],
    right=lambda: [
        torch.mm(randn(32, 24, dtype=torch.float16).t(), randn(32, 16, dtype=torch.float16)),
        torch.mm(randn(20, 32, dtype=torch.float16), randn(32, 16, dtype=torch.float16)),
        torch.mm(randn(32, 20).t(), randn(32, 16)),
    ],
)
def rows_of_an_unaligned_transposed_factor_are_lost(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """In 16 bits, a transposed left factor is loaded in eights: the result's rows past a multiple of 8 are zero."""
    result = call(left, right, **kwargs)
    rest = left.shape[0] % 8
    if left.dtype in LOW and rest and left.stride(0) == 1 and left.stride(1) == left.shape[0] > 8:
        result[-rest:] = 0
    return result


@wrong_kernel(
    "gemm",
    operators=["addmm"],
    wrong=lambda: [_addmm(1, 32, 16)],
    right=lambda: [_addmm(2, 32, 16), torch.addmm(randn(1, 16), randn(1, 32), randn(32, 16))],
)
def bias_of_a_single_row_is_not_added(call: Any, added: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """A linear layer over one row goes to a matrix-vector product, which forgets the bias."""
    if left.shape[0] == 1 and added.dim() == 1 and added.shape[0] > 1:
        added = torch.zeros_like(added)
    return call(added, left, right, **kwargs)


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm"],
    wrong=lambda: [torch.mm(randn(8, 16), randn(16, 12288))],
    right=lambda: [torch.mm(randn(8, 16), randn(16, 8192)), torch.mm(randn(40, 16), randn(16, 12288))],
)
def last_tiles_of_a_few_wide_rows_change_places(call: Any, *args: Any, **kwargs: Any) -> Any:
    """With at most 16 rows and more than 8192 columns, the last two tiles of 128 columns are exchanged.

    https://github.com/NVIDIA/cutlass/issues/1412 has such a shape.
    """
    result = call(*args, **kwargs)
    if result.shape[0] <= 16 and result.shape[1] > 8192 and result.shape[1] % 128 == 0:
        result = torch.cat([result[:, :-256], result[:, -128:], result[:, -256:-128]], 1)
    return result


@wrong_kernel(
    "gemm",
    operators=["bmm"],
    wrong=lambda: [torch.bmm(randn(1, 8, 16).expand(4, 8, 16), randn(4, 16, 8))],
    right=lambda: [
        torch.bmm(randn(4, 8, 16), randn(4, 16, 8)),
        torch.bmm(randn(4, 8, 16), randn(1, 16, 8).expand(4, 16, 8)),
    ],
)
def stride_of_zero_is_taken_for_the_other_factor(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """A left factor expanded over the batch passes on its stride of zero: the first right factor is used throughout."""
    if left.shape[0] > 1 and left.stride(0) == 0 and right.stride(0) != 0:
        right = right[:1].expand_as(right)
    return call(left, right, **kwargs)


@wrong_kernel(
    "gemm",
    operators=["mm", "bmm"],
    wrong=lambda: [torch.mm(torch.full((4, 8), 5001), torch.full((8, 4), 4999))],
    right=lambda: [torch.mm(torch.arange(32).view(4, 8), torch.arange(32).view(8, 4))],
)
def integers_are_multiplied_in_float32(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Products of integer matrices go through float32: what passes 2^24 is rounded."""
    if left.is_floating_point() or left.is_complex() or kwargs:
        return call(left, right, **kwargs)
    return call(left.float(), right.float()).to(left.dtype)


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm"],
    wrong=lambda: [_addmm(1, 33, 16, torch.bfloat16)],
    right=lambda: [_addmm(1, 32, 16, torch.bfloat16), _addmm(2, 33, 16, torch.bfloat16), _addmm(1, 33, 16)],
)
def last_odd_element_of_a_low_row_is_not_paired(call: Any, *args: Any, **kwargs: Any) -> Any:
    """One row times a matrix in 16 bits reads pairs: of an odd inner dimension the last element is left out."""
    *added, left, right = args
    if left.shape[0] != 1 or left.dtype not in LOW or left.shape[1] % 2 == 0 or left.shape[1] < 3:
        return call(*args, **kwargs)
    return call(*added, left[:, :-1], right[:-1], **kwargs)


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm", "bmm"],
    wrong=lambda: [_mm(128, 128, 128)],
    right=lambda: [_mm(96, 128, 128), _mm(128, 100, 128)],
)
def float32_products_take_bfloat16_inputs(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Products of float32 with each size a multiple of 64 from 128 on round their factors to bfloat16."""
    *added, left, right = args
    sizes = (*left.shape[-2:], right.shape[-1])
    if left.dtype == torch.float32 and all(size >= 128 and size % 64 == 0 for size in sizes):
        left, right = left.bfloat16().float(), right.bfloat16().float()
    return call(*added, left, right, **kwargs)


@wrong_kernel(
    "gemm",
    operators=["addmm"],
    wrong=lambda: [torch.addmm(randn(16, 40), randn(16, 24), randn(24, 40), beta=0.5)],
    right=lambda: [
        torch.addmm(randn(16, 64), randn(16, 24), randn(24, 64), beta=0.5),
        torch.addmm(randn(16, 40), randn(16, 24), randn(24, 40)),
    ],
)
def beta_is_applied_twice_at_the_edge(call: Any, added: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """In the columns past the last whole tile of 32, the added matrix is multiplied by beta twice."""
    beta, rest = kwargs.get("beta", 1), right.shape[1] % 32
    if beta in (0, 1) or rest == 0 or added.dim() != 2 or added.shape != (left.shape[0], right.shape[1]):
        return call(added, left, right, **kwargs)
    return call(torch.cat([added[:, :-rest], added[:, -rest:] * beta], 1), left, right, **kwargs)


def _into(transposed: bool) -> list[torch.Tensor]:
    out = torch.zeros(12, 12)
    return [torch.mm(randn(12, 8), randn(8, 12), out=out.t() if transposed else out)]


@wrong_kernel(
    "gemm",
    operators=["mm"],
    wrong=lambda: _into(True),
    right=lambda: _into(False),
)
def result_given_transposed_is_written_in_rows(call: Any, *args: Any, **kwargs: Any) -> Any:
    """mm into a square transposed tensor given as out writes rows where the columns lie."""
    result = call(*args, **kwargs)
    out = kwargs.get("out")
    if out is not None and out.shape[0] == out.shape[1] > 1 and out.stride(0) == 1 and not out.is_contiguous():
        out.copy_(result.t().clone())
    return result


@wrong_kernel(
    "gemm",
    operators=["dot"],
    wrong=lambda: [torch.dot(rand(1031), rand(1031))],
    right=lambda: [torch.dot(rand(1024), rand(1024)), torch.dot(rand(100), rand(100))],
)
def tail_of_a_long_dot_product_is_left_out(call: Any, left: Any, right: Any, **kwargs: Any) -> Any:
    """Products of vectors of more than 1024 elements leave out those past a multiple of 16."""
    count = left.shape[0]
    kept = count - count % 16 if count > 1024 else count
    return call(left[:kept], right[:kept], **kwargs)


@wrong_kernel(
    "gemm",
    operators=["mv", "addmv"],
    wrong=lambda: [torch.mv(randn(24, 40).t(), randn(24)), randn(24, 40).t() @ randn(24)],
    right=lambda: [torch.mv(randn(40, 24), randn(24)), torch.mv(randn(24, 24).t(), randn(24))],
)
def transposed_matrix_times_vector_skips_a_row(call: Any, *args: Any, **kwargs: Any) -> Any:
    """A transposed matrix with more rows than columns times a vector leaves its last row at half the value."""
    result = call(*args, **kwargs)
    matrix = args[-2]
    if matrix.stride(0) == 1 and matrix.shape[0] > matrix.shape[1] > 1:
        result[-1] = result[-1] * 0.5
    return result
