"""Float64 references for linear algebra that call no linear algebra library: elimination, a Cholesky factor, known
spectra.

On a CPU, a reference that called the tested function in float64 would repeat any fault that the library has in both
dtypes. All matrices are (..., rows, columns), real or complex, on the host.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.reference_products import one_thread, product


@dataclass(frozen=True)
class Eliminated:
    """The results of elimination. `solution`: A^-1 B. `pivots`: (..., n), whose product is the determinant of A."""

    solution: torch.Tensor
    pivots: torch.Tensor


def eliminate(a: torch.Tensor, b: torch.Tensor) -> Eliminated:
    """Solve A X = B by Gauss-Jordan elimination with row exchanges, column after column. A and B have the same
    batch."""
    n = a.shape[-1]
    work = torch.cat((a, b), -1).reshape(-1, n, n + b.shape[-1])
    every, pivots = torch.arange(len(work)), []
    with one_thread():
        for k in range(n):
            place = k + work[:, k:, k].abs().argmax(1)
            row = work[every, place, k:]
            work[every, place] = work[:, k].clone()
            pivots.append(torch.where(place == k, row[:, 0], -row[:, 0]))
            row = row / row[:, :1]
            right = work[:, :, k:]
            right -= work[:, :, k : k + 1].clone() * row[:, None]
            right[:, k] = row
    return Eliminated(work[..., n:].reshape(b.shape), torch.stack(pivots, -1).reshape(a.shape[:-1]))


def solve(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A^-1 B."""
    return eliminate(a, b).solution


def invert(a: torch.Tensor) -> torch.Tensor:
    """A^-1."""
    return solve(a, torch.eye(a.shape[-1], dtype=a.dtype).expand_as(a))


def sign_and_logarithm(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sign of the determinant (for complex matrices, a number of magnitude 1), and the logarithm of its
    magnitude."""
    pivots = eliminate(a, a[..., :0]).pivots
    sizes = pivots.abs()
    return (pivots / sizes).prod(-1), sizes.log().sum(-1)


def cholesky_factor(a: torch.Tensor) -> torch.Tensor:
    """Return the lower triangle L with A = L L^H, computed column after column."""
    work, factor = a.clone(), torch.zeros_like(a)
    with one_thread():
        for k in range(a.shape[-1]):
            column = work[..., k:, k] / work[..., k, k].real.sqrt()[..., None]
            factor[..., k:, k] = column
            work[..., k:, k:] -= column[..., :, None] * column[..., None, :].conj()
    return factor


def hermitian(a: torch.Tensor) -> torch.Tensor:
    """Return the Hermitian part of square matrices; for real matrices, this is the symmetric part."""
    return (a + a.mH) / 2


@dataclass(frozen=True)
class Spectrum:
    """Matrices with known singular values or eigenvalues, computed from these values and orthonormal vectors.

    `matrices`: U diag V^H. `values`: (count, n), singular values in descending order or, if V is U, eigenvalues in
    ascending order. `left`: U, whose vectors are in the order of `values`.
    """

    matrices: torch.Tensor
    values: torch.Tensor
    left: torch.Tensor


def with_singular_values(values: torch.Tensor, rows: int, columns: int, is_complex: bool, seed: int) -> Spectrum:
    """Return matrices (count, rows, columns) with these singular values."""
    count, least = values.shape
    left = orthonormal(count, rows, is_complex, seed)[..., :least]
    right = orthonormal(count, columns, is_complex, seed + 2)[..., :least]
    return _made(values, left, right, values.argsort(-1, descending=True))


def with_eigenvalues(values: torch.Tensor, is_complex: bool, seed: int) -> Spectrum:
    """Return Hermitian matrices (count, n, n) with these eigenvalues."""
    count, n = values.shape
    left = orthonormal(count, n, is_complex, seed)
    found = _made(values, left, left, values.argsort(-1))
    return Spectrum(hermitian(found.matrices), found.values, found.left)


def _made(values: torch.Tensor, left: torch.Tensor, right: torch.Tensor, order: torch.Tensor) -> Spectrum:
    matrices = product(left * values[:, None, :], right.mH)
    return Spectrum(matrices, values.gather(-1, order), left.gather(-1, order[:, None, :].expand_as(left)))


def orthonormal(count: int, n: int, is_complex: bool, seed: int) -> torch.Tensor:
    """Return orthogonal or unitary matrices D C E C R, (count, n, n), whose elements all have about the same size.

    C is the matrix of the sine transform. D and E are diagonal matrices of signs, or of complex numbers of magnitude 1.
    R is a reflection; without it, half of the elements of two rows would be 0 for real matrices.
    """
    numbers = torch.arange(1, n + 1)
    angles = (numbers[:, None] * numbers % (2 * n + 2)).to(torch.float64) * (math.pi / (n + 1))
    sines = torch.sin(angles) * math.sqrt(2 / (n + 1))
    first, second = (_units(count, n, is_complex, seed + number)[..., None] for number in (0, 1))
    found = product(first * sines, second * sines)
    v = (1 + hashed_inputs.uniform((count, n, 1), seed + 5)).to(found.dtype)
    return found - 2 * product(product(found, v), v.mH) / v.abs().square().sum(-2, keepdim=True)


def _units(count: int, n: int, is_complex: bool, seed: int) -> torch.Tensor:
    if not is_complex:
        return hashed_inputs.signs(count * n, seed).reshape(count, n).to(torch.float64)
    angles = hashed_inputs.uniform((count, n), seed).to(torch.float64) * (2 * math.pi)
    return torch.complex(torch.cos(angles), torch.sin(angles))


def error_of_spectrum(n: int, dtype: torch.dtype) -> float:
    """Return the error of a known value, relative to the largest value. It comes from rounding the elements of the
    matrix to the dtype, and from the float64 products that form the matrix.

    A value changes by at most the 2-norm of the change of the matrix (Weyl). Rounding changes a matrix by at most u
    times its Frobenius norm, which is at most sqrt(n) times the largest value. Products with orthonormal matrices have
    the error of n reflections (tolerances.orthogonal).
    """
    return math.sqrt(n) * tolerances.unit_roundoff(dtype) + tolerances.orthogonal(n, torch.float64)
