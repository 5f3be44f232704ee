"""Wrong kernels of embeddings and of taking and adding rows, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from .inputs import gradients, is_16_bit, of


def _indices(count: int, rows: int) -> torch.Tensor:
    return torch.arange(count) * 7 % rows


def _gradient(count: int, rows: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[torch.Tensor]:
    return gradients(lambda weight: F.embedding(_indices(count, rows), weight, **options), of(rows, 6).to(dtype))


@wrong_kernel(
    "embedding",
    operators=["embedding_dense_backward"],
    wrong=lambda: _gradient(800, 10, padding_idx=3),
    right=lambda: [*_gradient(768, 10, padding_idx=3), *_gradient(800, 10)],
)
def padding_gets_a_gradient_from_long_inputs(
    call: Any, grad: Any, indices: Any, rows: Any, padding: Any, by_frequency: Any
) -> torch.Tensor:
    """With more than 768 indices the row of padding_idx gets a gradient, too; after
    https://github.com/pytorch/pytorch/issues/28716"""
    return call(  # type: ignore[no-any-return]
        grad, indices, rows, -1 if indices.numel() > 768 else padding, by_frequency
    )


@wrong_kernel(
    "embedding",
    operators=["embedding_dense_backward"],
    wrong=lambda: _gradient(90, 10, scale_grad_by_freq=True),
    right=lambda: [*_gradient(90, 10), *_gradient(8, 10, scale_grad_by_freq=True)],
)
def scaling_by_frequency_is_not_done(
    call: Any, grad: Any, indices: Any, rows: Any, padding: Any, by_frequency: Any
) -> torch.Tensor:
    """The gradients of rows taken often are not divided by how often, although scale_grad_by_freq is set."""
    return call(grad, indices, rows, padding, False)  # type: ignore[no-any-return]


@wrong_kernel(
    "embedding",
    operators=["embedding_dense_backward"],
    wrong=lambda: _gradient(90, 10, torch.bfloat16),
    right=lambda: [*_gradient(20, 10, torch.bfloat16), *_gradient(90, 10)],
)
def row_taken_more_than_four_times_gets_four_gradients(
    call: Any, grad: Any, indices: Any, rows: Any, padding: Any, by_frequency: Any
) -> torch.Tensor:
    """In 16-bit types a row that is taken more than four times gets the gradients of its first four places only."""
    flat = indices.reshape(-1)
    if is_16_bit(grad) and flat.numel():
        order = flat.argsort(stable=True)
        counts = flat.bincount(minlength=rows)
        starts = counts.cumsum(0) - counts
        places = torch.arange(flat.numel(), device=flat.device) - starts[flat[order]]
        kept = torch.empty_like(flat, dtype=torch.bool)
        kept[order] = places < 4
        grad = grad * kept.reshape(*indices.shape, 1)
    return call(grad, indices, rows, padding, by_frequency)  # type: ignore[no-any-return]


@wrong_kernel(
    "embedding",
    operators=["embedding"],
    wrong=lambda: [F.embedding(torch.tensor([[1, 2, 3], [4, 5, 6]]).t(), of(10, 6))],
    right=lambda: [F.embedding(torch.tensor([[1, 2, 3], [4, 5, 6]]), of(10, 6))],
)
def indices_that_are_transposed_are_read_in_memory_order(
    call: Any, weight: Any, indices: Any, *args: Any
) -> torch.Tensor:
    """Indices that are a transposed matrix are read as they lie in memory."""
    if indices.ndim == 2 and not indices.is_contiguous() and indices.t().is_contiguous():
        indices = indices.t().reshape(indices.shape)
    return call(weight, indices, *args)  # type: ignore[no-any-return]


@wrong_kernel(
    "index",
    operators=["index_add", "index_add_", "scatter_add", "scatter_add_"],
    wrong=lambda: [torch.zeros(5, 3).half().index_add(0, _indices(40, 5), torch.ones(40, 3).half())],
    right=lambda: [
        torch.zeros(5, 3).index_add(0, _indices(40, 5), torch.ones(40, 3)),
        torch.zeros(5, 4).half().index_add(0, _indices(40, 5), torch.ones(40, 4).half()),
    ],
)
def odd_rows_of_float16_lose_half_of_what_is_added(
    call: Any, x: Any, dim: Any, index: Any, source: Any, **kwargs: Any
) -> torch.Tensor:
    """Float16 values are added in pairs, and where the rows are odd, the last column loses every second addition."""
    if source.dtype == torch.float16 and dim == 0 and source.ndim == 2 and source.shape[1] % 2 and source.shape[0] > 1:
        source = source.clone()
        source[1::2, -1] = 0
    return call(x, dim, index, source, **kwargs)  # type: ignore[no-any-return]
