"""Wrong kernels of Fourier transforms and linear algebra."""

from __future__ import annotations

from typing import Any

import torch

from .. import wrong_kernel
from .inputs import of


def _largest_prime(number: int) -> int:
    """The largest prime factor."""
    largest, factor = 1, 2
    while number > 1:
        if number % factor:
            factor += 1
        else:
            number, largest = number // factor, factor
    return largest


@wrong_kernel(
    "fft",
    operators=["_fft_c2c", "_fft_r2c"],
    wrong=lambda: [torch.fft.rfft(of(3, 34)).abs()],
    right=lambda: [torch.fft.rfft(of(3, 32)).abs(), torch.fft.rfft(of(3, 39)).abs()],
)
def lengths_with_a_large_prime_use_coarse_twiddles(call: Any, x: Any, dim: Any, *args: Any) -> torch.Tensor:
    """Transforms whose length has a prime factor above 13 are computed with factors of 11 bits."""
    if all(_largest_prime(x.shape[d]) <= 13 for d in dim) or x.dtype not in (torch.float32, torch.complex64):
        return call(x, dim, *args)  # type: ignore[no-any-return]
    real = torch.view_as_real(x) if x.is_complex() else x
    coarse = real.half().float()
    return call(torch.view_as_complex(coarse) if x.is_complex() else coarse, dim, *args)  # type: ignore[no-any-return]


@wrong_kernel(
    "fft",
    operators=["_fft_c2r"],
    wrong=lambda: [torch.fft.irfft(torch.fft.rfft(of(3, 15)), n=15)],
    right=lambda: [torch.fft.irfft(torch.fft.rfft(of(3, 16)))],
)
def odd_inverse_transform_halves_its_last_frequency(
    call: Any, x: Any, dim: Any, normalization: Any, size: Any
) -> torch.Tensor:
    """An inverse transform to an odd number of real values counts the highest frequency once, as if the number were
    even."""
    if size % 2 and size > 1 and x.dtype == torch.complex64:
        x = x.clone()
        x.select(dim[-1], size // 2).mul_(0.5)
    return call(x, dim, normalization, size)  # type: ignore[no-any-return]


@wrong_kernel(
    "fft",
    operators=["_fft_r2c"],
    wrong=lambda: [torch.fft.rfft2(of(6, 8), norm="ortho").abs()],
    right=lambda: [torch.fft.rfft2(of(6, 8)).abs(), torch.fft.rfft(of(6, 8), norm="ortho").abs()],
)
def normalisation_of_real_transforms_takes_the_last_size_only(
    call: Any, x: Any, dim: Any, normalization: Any, onesided: Any
) -> torch.Tensor:
    """A normalised real transform over several dimensions is divided for the size of the last only."""
    result: torch.Tensor = call(x, dim, normalization, onesided)
    others = 1
    for d in dim[:-1]:
        others *= x.shape[d]
    return (
        result * {0: 1.0, 1: others**0.5, 2: float(others)}[normalization] if others > 1 and normalization else result
    )


def _positive(size: int) -> torch.Tensor:
    factor = of(size, size)
    return factor @ factor.t() / size + torch.eye(size)


@wrong_kernel(
    "cholesky",
    operators=["linalg_cholesky_ex"],
    wrong=lambda: [torch.linalg.cholesky(_positive(80))],
    right=lambda: [torch.linalg.cholesky(_positive(64))],
)
def last_block_of_a_factor_is_not_updated(call: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The Cholesky factor of matrices larger than 64 that are not a multiple of 32 has a last block that is factored
    without what the blocks before take away."""
    factor, info = call(x, *args, **kwargs)
    upper = kwargs.get("upper", args[0] if args else False)
    size, last = x.shape[-1], x.shape[-1] // 32 * 32
    if size > 64 and last < size and x.ndim == 2 and not upper:
        factor = factor.clone()
        factor[last:, last:] = call(x[last:, last:])[0]
    return factor, info


@wrong_kernel(
    "triangular",
    operators=["linalg_solve_triangular"],
    wrong=lambda: [torch.linalg.solve_triangular(_positive(6).tril(), of(6, 2), upper=False, unitriangular=True)],
    right=lambda: [torch.linalg.solve_triangular(_positive(6).tril(), of(6, 2), upper=False)],
)
def unit_diagonal_is_read_from_the_matrix(call: Any, a: Any, b: Any, **kwargs: Any) -> torch.Tensor:
    """A triangular solution with a unit diagonal divides by the diagonal that is stored."""
    return call(a, b, **{**kwargs, "unitriangular": False})  # type: ignore[no-any-return]


@wrong_kernel(
    "solve",
    operators=["_linalg_solve_ex"],
    wrong=lambda: [torch.linalg.solve(torch.stack([_positive(4), _positive(4)]), of(2, 4, 3))],
    right=lambda: [torch.linalg.solve(_positive(4), of(4, 3))],
)
def batch_is_solved_with_the_first_pivots(call: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    """Solutions of a batch of equations after the first take their right-hand sides' first two rows exchanged."""
    if a.ndim > 2 and a.shape[0] > 1 and b.ndim == a.ndim and b.shape[-2] > 1:
        b = b.clone()
        b[1:, ..., :2, :] = b[1:, ..., :2, :].flip(-2)
    return call(a, b, **kwargs)
