"""fft and linalg: Fourier transforms, and factorizations and solutions of matrices (cuFFT and cuSOLVER on a GPU).

Transforms are compared with sums over sines and cosines in float64. A matrix has more than one correct factorization.
The factors are therefore multiplied in float64 on the host, and their product is compared with the matrix.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Callable

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import hashed_inputs, pairwise_case_sampling, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, check, without_rounding
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.probes.linear_algebra import (
    fft_block_and_gradient_cases,
    fft_sampled_cases,
    float64_matrix_references,
    linalg_structure_and_gradient_cases,
)

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

DTYPES = (torch.float32, torch.float64)
ROWS = 3  # transforms per call
LENGTHS = (256, 243, 360, 251)  # a power of 2, a power of 3, a number with several prime factors, and a prime
PLANE = (24, 45)
# (matrices per call, their size): libraries have different functions for one matrix and for several
SIZES = ((1, 129), (4, 33))
SPECTRUM = 64  # size of the matrix whose eigenvalues are known


def fft(context: Context) -> None:
    """fft: Fourier transforms of real and complex numbers, and their inverses, match sums over sines and cosines."""
    for case in transforms():
        check(context, case)
    pairwise_case_sampling.check(context, fft_sampled_cases.OPERATIONS)
    pairwise_case_sampling.check(context, fft_block_and_gradient_cases.OPERATIONS)


def linalg(context: Context) -> None:
    """linalg: factorizations, solutions, determinants and eigenvalues are right, for one matrix and for several."""
    for case in factorizations():
        check(context, case)
    pairwise_case_sampling.check(context, linalg_structure_and_gradient_cases.OPERATIONS)


def transforms() -> Iterator[Case]:
    """Yield every fixed case of fft. Complex numbers are given as pairs of real ones."""
    for dtype, n in itertools.product(DTYPES, LENGTHS):
        x = hashed_inputs.signed((ROWS, n, 2), 601).to(dtype)
        yield Case(f"fft and ifft {ROWS}x{n}", dtype, (x,), _complex, functools.partial(_complex_sums, dtype=dtype))
        real = x[..., 0].contiguous()
        run = functools.partial(_real, n=n)
        yield Case(f"rfft and irfft {ROWS}x{n}", dtype, (real,), run, functools.partial(_real_sums, dtype=dtype))
    for dtype in DTYPES:
        x = hashed_inputs.signed((*PLANE, 2), 602).to(dtype)
        yield Case("fft2 {}x{}".format(*PLANE), dtype, (x,), _plane, functools.partial(_plane_sums, dtype=dtype))
        for norm in ("backward", "ortho", "forward"):
            transform = functools.partial(_real_plane, norm=norm)
            sums = functools.partial(_real_plane_sums, norm=norm, dtype=dtype)
            real = x[..., 0].contiguous()
            yield Case("rfft2 and irfft2 {}x{}, norm {}".format(*PLANE, norm), dtype, (real,), transform, sums)


def _complex(x: torch.Tensor) -> Results:
    z = torch.view_as_complex(x)
    return {"fft": torch.view_as_real(torch.fft.fft(z)), "ifft": torch.view_as_real(torch.fft.ifft(z))}


def _complex_sums(x: torch.Tensor, dtype: torch.dtype) -> Expected:
    n = x.shape[1]
    forth, back = (_transform(x[..., 0], x[..., 1], sign) for sign in (-1, 1))
    return {"fft": _transformed(forth, n, dtype), "ifft": _transformed(back / n, n, dtype)}


def _real(x: torch.Tensor, n: int) -> Results:
    found = torch.fft.rfft(x)
    return {"rfft": torch.view_as_real(found), "irfft of rfft": torch.fft.irfft(found, n)}


def _real_sums(x: torch.Tensor, dtype: torch.dtype) -> Expected:
    n = x.shape[1]
    whole = _transform(x, torch.zeros_like(x), -1)
    once = _transformed(whole, n, dtype)
    back = Exact(x, 2 * tolerances.fourier(n, dtype) * x.square().mean(dim=1, keepdim=True).sqrt())
    return {"rfft": Exact(once.value[:, : n // 2 + 1], once.bound), "irfft of rfft": back}


def _plane(x: torch.Tensor) -> Results:
    return {"output": torch.view_as_real(torch.fft.fft2(torch.view_as_complex(x)))}


def _plane_sums(x: torch.Tensor, dtype: torch.dtype) -> Expected:
    rows = _transform(x[..., 0], x[..., 1], -1)
    columns = _transform(rows[..., 0].t(), rows[..., 1].t(), -1).transpose(0, 1)
    return {
        "output": Exact(
            columns, tolerances.fourier(math.prod(PLANE), dtype) * columns.square().sum(dim=-1).mean().sqrt()
        )
    }


def _real_plane(x: torch.Tensor, norm: str) -> Results:
    found = torch.fft.rfft2(x, norm=norm)
    return {"rfft2": torch.view_as_real(found), "irfft2 of rfft2": torch.fft.irfft2(found, x.shape, norm=norm)}


def _real_plane_sums(x: torch.Tensor, norm: str, dtype: torch.dtype) -> Expected:
    """Return the expected results of `_real_plane`. `norm`: the transform is divided by nothing ("backward"), by the
    root of its number of elements ("ortho"), or by this number ("forward")."""
    count = math.prod(x.shape)
    scale = {"backward": 1.0, "ortho": count**-0.5, "forward": 1.0 / count}[norm]
    found = _plane_sums(torch.stack((x, torch.zeros_like(x)), dim=-1), dtype)["output"]
    half = Exact(found.value[:, : x.shape[1] // 2 + 1] * scale, found.bound * scale)
    back = Exact(x, 2 * tolerances.fourier(count, dtype) * x.square().mean().sqrt())
    return {"rfft2": half, "irfft2 of rfft2": back}


def _transform(real: torch.Tensor, imaginary: torch.Tensor, sign: int) -> torch.Tensor:
    """Return sum over k of x_k exp(sign 2 pi i j k / n) for each row. The inputs are (rows, n); the result is (rows, n,
    2), with real and imaginary parts."""
    n = real.shape[1]
    numbers = torch.arange(n)
    angles = (numbers[:, None] * numbers % n).to(torch.float64) * (2 * math.pi / n)
    cosines, sines = torch.cos(angles), torch.sin(angles) * sign
    parts = (
        product(real, cosines) - product(imaginary, sines),
        product(real, sines) + product(imaginary, cosines),
    )
    return torch.stack(parts, dim=-1)


def _transformed(value: torch.Tensor, n: int, dtype: torch.dtype) -> Exact:
    """Return a result of (rows, n, 2) with a tolerance for each row."""
    return Exact(value, tolerances.fourier(n, dtype) * value.square().sum(dim=2).mean(dim=1).sqrt()[:, None, None])


def factorizations() -> Iterator[Case]:
    """Yield every fixed case of linalg."""
    for dtype, (count, n) in itertools.product(DTYPES, SIZES):
        shape = f"{count}x{n}x{n}"
        a = hashed_inputs.signed((count, n, n), 611)
        # Diagonally dominant, so that the matrix is far from singular. The symmetric matrices made from it are positive
        # definite.
        heavy = a + n * torch.eye(n)
        rows, columns = torch.tril_indices(n, n)
        # All values have a similar size, so that every column of the matrix matters.
        b = hashed_inputs.signs(count * n * 3, 612).reshape(count, n, 3) * (
            1 + hashed_inputs.uniform((count, n, 3), 613)
        )
        yield _case(f"qr {shape}", dtype, (a,), _qr, _qr_again)
        yield _case(f"cholesky {shape}", dtype, (heavy[:, rows, columns],), _cholesky, _cholesky_again)
        yield _case(f"solve {shape}", dtype, (heavy, b), _solve, _solve_again)
        yield _case(f"eigh {shape}", dtype, (a[:, rows, columns],), _eigh, _eigh_again)
        for upper, unit in itertools.product((False, True), (False, True)):
            below = torch.tril_indices(n, n, -1 if unit else 0)
            # With a unit diagonal, the other elements are small, so that the solutions do not grow.
            given = (a / n if unit else heavy)[:, below[0], below[1]]
            kind = f"{'upper' if upper else 'lower'}{', unit diagonal' if unit else ''}"
            run = functools.partial(_triangular, upper=upper, unit=unit)
            exact = functools.partial(_triangular_again, upper=upper, unit=unit)
            yield _case(f"solve_triangular {shape} {kind}", dtype, (given, b), run, exact)
    for dtype in DTYPES:
        yield _case(f"eigenvalues {SPECTRUM}x{SPECTRUM}", dtype, (eigenvalues(),), _reflected, _eigenvalues_again)


def _case(
    name: str,
    dtype: torch.dtype,
    given: tuple[torch.Tensor, ...],
    run: Callable[..., Results],
    exact: Callable[..., Expected],
) -> Case:
    parts = tuple(part.to(dtype) for part in given)
    return Case(name, dtype, parts, run, functools.partial(exact, dtype=dtype))


def _times(*factors: torch.Tensor) -> torch.Tensor:
    """Multiply several matrices in float64 on the host."""
    left, *rest = (factor.cpu().to(torch.float64) for factor in factors)
    for right in rest:
        left = torch.stack([product(*pair) for pair in zip(left, right)])
    return left


def _qr(a: torch.Tensor) -> Results:
    q, r = torch.linalg.qr(a)
    return {"q r": _times(q, r), "q^T q": _times(q.mT, q), "r below its diagonal": torch.tril(r, -1)}


def _qr_again(a: torch.Tensor, dtype: torch.dtype) -> Expected:
    factor = tolerances.orthogonal(a.shape[-1], dtype)
    return {
        "q r": Exact(a, factor * a.norm(dim=1, keepdim=True)),
        "q^T q": _orthonormal(a, dtype),
        "r below its diagonal": without_rounding(torch.zeros_like(a)),
    }


def _orthonormal(a: torch.Tensor, dtype: torch.dtype) -> Exact:
    n = a.shape[-1]
    limit = torch.full((), tolerances.orthogonal(n, dtype), dtype=torch.float64)
    return Exact(torch.eye(n, dtype=torch.float64).expand_as(a), limit)


def _symmetric(below: torch.Tensor) -> torch.Tensor:
    """Return symmetric matrices (count, n, n), given the elements on and below their diagonals, row by row."""
    n = math.isqrt(2 * below.shape[1])
    rows, columns = torch.tril_indices(n, n, device=below.device)
    whole = below.new_zeros(len(below), n, n)
    whole[:, rows, columns] = below
    whole[:, columns, rows] = below
    return whole


def _cholesky(below: torch.Tensor) -> Results:
    factor = torch.linalg.cholesky(_symmetric(below))
    return {"l l^T": _times(factor, factor.mT), "l above its diagonal": torch.triu(factor, 1)}


def _cholesky_again(below: torch.Tensor, dtype: torch.dtype) -> Expected:
    """Return the expected results. |A - L L^T| is at most gamma_(n + 1) |L||L^T| (Higham, 2nd ed., theorem 10.3). By
    the Cauchy-Schwarz inequality, (|L||L^T|)_ij is at most sqrt(a_ii a_jj) / (1 - gamma_(n + 1)); the divisor is left
    out because it is nearly 1."""
    a = _symmetric(below)
    roots = a.diagonal(dim1=1, dim2=2).sqrt()
    limit = tolerances.gamma(a.shape[-1] + 1, tolerances.unit_roundoff(dtype)) * roots[:, :, None] * roots[:, None, :]
    return {"l l^T": Exact(a, limit), "l above its diagonal": without_rounding(torch.zeros_like(a))}


def _solve(a: torch.Tensor, b: torch.Tensor) -> Results:
    return {"x": torch.linalg.solve(a, b)}


def _solve_again(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> Expected:
    """Solve by elimination. The diagonal is dominant, so |L||U| is at most twice |A|. The residual b - A x changes x by
    at most the norm of the inverse times the residual. The norm of the inverse is at most the reciprocal of the
    smallest excess of a diagonal element over the sum of the rest of its row."""
    x = float64_matrix_references.solve(a, b)
    rows, diagonal = a.abs().sum(dim=2), a.diagonal(dim1=1, dim2=2).abs()
    left = 2 * tolerances.elimination(a.shape[-1], dtype) * rows.amax(dim=1) / (2 * diagonal - rows).amin(dim=1)
    return {"x": Exact(x, left[:, None, None] * x.abs().amax(dim=1, keepdim=True))}


def _triangle(below: torch.Tensor, n: int, upper: bool, unit: bool, diagonal: float) -> torch.Tensor:
    """Return triangular matrices, given the elements on and below their diagonals, row by row; for a unit diagonal,
    only those below."""
    rows, columns = torch.tril_indices(n, n, -1 if unit else 0, device=below.device)
    whole = torch.eye(n, dtype=below.dtype, device=below.device) * diagonal
    whole = whole.repeat(len(below), 1, 1)
    whole[:, rows, columns] = below
    return whole.mT.contiguous() if upper else whole


def _triangular(below: torch.Tensor, b: torch.Tensor, upper: bool, unit: bool) -> Results:
    """Solve with triangular matrices in both memory orders. With a unit diagonal, the stored diagonal contains 7,
    because it must not be read."""
    a = _triangle(below, b.shape[1], upper, unit, 7.0)
    solve = functools.partial(torch.linalg.solve_triangular, upper=upper, unitriangular=unit)
    from_right = solve(a.mT.contiguous().mT, b.mT.contiguous(), left=False)
    return {"x": solve(a, b), "x of columns": solve(a.mT.contiguous().mT, b), "x from the right": from_right.mT}


def _triangular_again(below: torch.Tensor, b: torch.Tensor, upper: bool, unit: bool, dtype: torch.dtype) -> Expected:
    """Return the expected results. The tolerance is that of elimination, whose second half solves triangular
    systems."""
    a = _triangle(below, b.shape[1], upper, unit, 1.0)
    left = _solve_again(a, b, dtype)["x"]
    return {"x": left, "x of columns": left, "x from the right": _solve_again(a.mT, b, dtype)["x"]}


def _eigh(below: torch.Tensor) -> Results:
    values, vectors = torch.linalg.eigh(_symmetric(below))
    return {"v w v^T": _times(vectors * values[:, None, :].double(), vectors.mT), "v^T v": _times(vectors.mT, vectors)}


def _eigh_again(below: torch.Tensor, dtype: torch.dtype) -> Expected:
    a = _symmetric(below)
    limit = tolerances.orthogonal(a.shape[-1], dtype) * a.norm(dim=(1, 2), keepdim=True)
    return {"v w v^T": Exact(a, limit), "v^T v": _orthonormal(a, dtype)}


def eigenvalues() -> torch.Tensor:
    """Return the integers from -32 to 31."""
    return torch.arange(SPECTRUM, dtype=torch.float32) - SPECTRUM // 2


def _reflected(values: torch.Tensor) -> Results:
    """Return the eigenvalues of H diag(values) H with the reflection H = 1 - 2 v v^T / n, where v consists of +-1.
    float32 represents this matrix exactly."""
    v = hashed_inputs.signs(SPECTRUM, 613).to(values.device, values.dtype)
    reflection = torch.eye(SPECTRUM, device=v.device, dtype=v.dtype) - v[:, None] * v * (2 / SPECTRUM)
    a = ((reflection * values)[:, :, None] * reflection[None]).sum(dim=1)
    return {"values": torch.linalg.eigvalsh(a), "by eigh": torch.linalg.eigh(a)[0]}


def _eigenvalues_again(values: torch.Tensor, dtype: torch.dtype) -> Expected:
    """Return the expected eigenvalues. Eigenvalues change by at most the 2-norm of the change of the matrix (Weyl)."""
    exact = Exact(values.sort()[0], tolerances.orthogonal(SPECTRUM, dtype) * values.norm())
    return {"values": exact, "by eigh": exact}
