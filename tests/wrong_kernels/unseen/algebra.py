"""Wrong Fourier transforms and linear algebra. Complex128 is a reference, too."""

from __future__ import annotations

from typing import Any

import torch

from .. import wrong_kernel
from ._common import rand, randn


def _spectrum(count: int) -> torch.Tensor:
    return torch.complex(randn(3, count), randn(3, count))


@wrong_kernel(
    "fft",
    operators=["_fft_c2r"],
    wrong=lambda: [torch.fft.irfft(_spectrum(8), 15)],
    right=lambda: [torch.fft.irfft(_spectrum(8), 14)],
)
def odd_inverse_takes_its_last_frequency_as_real(
    call: Any, value: Any, dims: Any, normalization: int, size: int
) -> Any:
    """The inverse transform to an odd number of reals ignores the imaginary part of the last frequency."""
    if size % 2 and size > 1 and value.dtype == torch.complex64 and value.shape[dims[-1]] > 1:
        value = value.clone()
        last = value.select(dims[-1], value.shape[dims[-1]] - 1)
        last.copy_(torch.complex(last.real, torch.zeros_like(last.real)))
    return call(value, dims, normalization, size)


@wrong_kernel(
    "fft",
    operators=["_fft_c2c"],
    wrong=lambda: [torch.fft.fft2(_spectrum(6).t())],
    right=lambda: [torch.fft.fft2(_spectrum(6)), torch.fft.fft(_spectrum(6).t())],
)
def plane_of_a_transposed_tensor_is_transformed_once(call: Any, value: Any, dims: Any, *args: Any) -> Any:
    """A transform over two dimensions of a transposed tensor is done over the last of them only."""
    if len(dims) == 2 and value.dtype == torch.complex64 and not value.is_contiguous():
        dims = dims[-1:]
    return call(value, dims, *args)


@wrong_kernel(
    "fft",
    operators=["_fft_r2c"],
    wrong=lambda: [torch.fft.rfft(randn(2, 97), norm="ortho")],
    right=lambda: [torch.fft.rfft(randn(2, 97)), torch.fft.rfft(randn(2, 96), norm="ortho")],
)
def prime_lengths_are_scaled_for_a_power_of_two(
    call: Any, value: Any, dims: Any, normalization: int, *args: Any
) -> Any:
    """Normalized transforms of lengths that no 2, 3 or 5 divides are scaled for the power of two they are padded to."""
    result = call(value, dims, normalization, *args)
    length = value.shape[dims[-1]] if dims else 1
    if normalization and len(dims) == 1 and length > 1 and all(length % n for n in (2, 3, 5)):
        result = result * (length / (1 << (2 * length - 2).bit_length())) ** 0.5
    return result


def _triangle(count: int) -> torch.Tensor:
    return torch.eye(count) * 2 + rand(count, count).triu(1) * 0.3


@wrong_kernel(
    "linalg",
    operators=["linalg_solve_triangular"],
    wrong=lambda: [torch.linalg.solve_triangular(_triangle(6), randn(6, 3), upper=True, unitriangular=True)],
    right=lambda: [torch.linalg.solve_triangular(_triangle(6), randn(6, 3), upper=True)],
)
def unit_diagonal_is_read_from_the_matrix(call: Any, matrix: Any, right: Any, **kwargs: Any) -> Any:
    """Solving with a unit triangular matrix divides by what stands on its diagonal."""
    return call(matrix, right, **{**kwargs, "unitriangular": False})


def _positive(count: int) -> torch.Tensor:
    root = randn(count, count)
    return root @ root.t() + torch.eye(count)


@wrong_kernel(
    "linalg",
    operators=["linalg_cholesky_ex"],
    wrong=lambda: [torch.linalg.cholesky(_positive(70))],
    right=lambda: [torch.linalg.cholesky(_positive(64))],
)
def last_block_of_a_factor_is_not_updated(call: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Cholesky in blocks of 64 forgets to subtract the first blocks from the last one: its corner is too large."""
    factor, info = call(value, *args, **kwargs)
    start = (value.shape[-1] - 1) // 64 * 64
    if value.dim() == 2 and start and value.dtype == torch.float32 and not kwargs.get("upper", False):
        factor[start:, start:] = call(value[start:, start:].contiguous())[0]
    return factor, info


def _determinants(batch: int) -> list[torch.Tensor]:
    return [torch.linalg.det(torch.tensor([[0.0, 2.0], [3.0, 1.0]]).repeat(batch, 1, 1))]


@wrong_kernel(
    "linalg",
    operators=["_linalg_det"],
    wrong=lambda: _determinants(3),
    right=lambda: [*_determinants(1), torch.linalg.det(torch.tensor([[2.0, 1.0], [1.0, 3.0]]).repeat(3, 1, 1))],
)
def determinants_of_a_batch_forget_exchanged_rows(call: Any, value: Any) -> Any:
    """Determinants of a batch of matrices have the wrong sign where an odd number of rows was exchanged."""
    result, factors, pivots = call(value)
    if value.dim() > 2 and value[..., 0, 0].numel() > 1:
        odd = (pivots != torch.arange(1, value.shape[-1] + 1)).sum(-1) % 2 == 1
        result = torch.where(odd, -result, result)
    return result, factors, pivots


@wrong_kernel(
    "linalg",
    operators=["_linalg_solve_ex"],
    wrong=lambda: [torch.linalg.solve(torch.tensor([[1e-6, 1.0], [1.0, 1.0]]).repeat(4, 1, 1), rand(4, 2, 1) + 1)],
    right=lambda: [torch.linalg.solve(torch.tensor([[1e-6, 1.0], [1.0, 1.0]]), rand(2, 1) + 1)],
)
def small_systems_of_a_batch_are_solved_without_pivots(call: Any, matrix: Any, right: Any, **kwargs: Any) -> Any:
    """Batches of systems up to 8 by 8 are eliminated without exchanging rows: small pivots spoil the result."""
    result, *rest = call(matrix, right, **kwargs)
    count = matrix.shape[-1]
    if matrix.dtype != torch.float32 or matrix.dim() != 3 or right.dim() != 3 or count > 8 or matrix.shape[0] == 1:
        return result, *rest
    left, solved = matrix.clone(), right.clone()
    for step in range(count):
        factor = left[:, step + 1 :, step] / left[:, None, step, step]
        left[:, step + 1 :] -= factor[:, :, None] * left[:, None, step]
        solved[:, step + 1 :] -= factor[:, :, None] * solved[:, None, step]
    for step in reversed(range(count)):
        later = (left[:, None, step, step + 1 :] @ solved[:, step + 1 :])[:, 0]
        solved[:, step] = (solved[:, step] - later) / left[:, None, step, step]
    return solved, *rest
