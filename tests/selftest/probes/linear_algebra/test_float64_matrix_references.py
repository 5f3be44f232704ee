"""References of linear algebra: elimination, Cholesky factors and matrices with known values."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.probes.linear_algebra import float64_matrix_references

LEAST = 1e-13  # relative error of some hundred roundings


def matrices(is_complex: bool, *shape: int) -> torch.Tensor:
    real, imaginary = (hashed_inputs.signed(shape, seed).to(torch.float64) for seed in (1, 2))
    return torch.complex(real, imaginary) if is_complex else real


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (7, 7), (3, 9, 9), (2, 3, 5, 5)], ids=str)
def test_elimination_solves_and_gives_the_determinant(is_complex: bool, shape: tuple[int, ...]) -> None:
    a, b = matrices(is_complex, *shape), matrices(is_complex, *shape[:-1], 4)
    found = float64_matrix_references.eliminate(a, b)
    assert (a @ found.solution - b).abs().max() < LEAST * 100
    assert (a @ float64_matrix_references.invert(a) - torch.eye(shape[-1])).abs().max() < LEAST * 100
    sign, logarithm = float64_matrix_references.sign_and_logarithm(a)
    assert torch.allclose(found.pivots.prod(-1), torch.linalg.det(a), rtol=1e-11)
    assert torch.allclose(sign * logarithm.exp(), torch.linalg.det(a), rtol=1e-11)


def test_rows_are_exchanged_where_a_pivot_is_zero() -> None:
    a = torch.tensor([[0.0, 2.0], [3.0, 0.0]], dtype=torch.float64)
    assert float64_matrix_references.invert(a).tolist() == [[0.0, 1 / 3], [0.5, 0.0]]
    assert float64_matrix_references.sign_and_logarithm(a)[0] == -1


@pytest.mark.parametrize("is_complex", [False, True])
def test_a_cholesky_factor_is_lower_and_gives_its_matrix(is_complex: bool) -> None:
    half = matrices(is_complex, 3, 6, 6)
    a = half @ half.mH + torch.eye(6)
    factor = float64_matrix_references.cholesky_factor(a)
    assert (factor @ factor.mH - a).abs().max() < LEAST * 100
    assert not torch.triu(factor, 1).any() and (factor.diagonal(dim1=-2, dim2=-1).real > 0).all()


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 16, 33])
def test_matrices_have_their_values_and_vectors(n: int, is_complex: bool) -> None:
    unit = torch.eye(n, dtype=torch.float64)
    u = float64_matrix_references.orthonormal(2, n, is_complex, 3)
    assert (u.mH @ u - unit).abs().max() < LEAST
    assert n == 1 or u.abs().min() > 0, "no element is 0"
    values = hashed_inputs.signed((2, n), 5).to(torch.float64)
    found = float64_matrix_references.with_eigenvalues(values, is_complex, 3)
    assert torch.equal(found.values, values.sort()[0]) and torch.equal(found.matrices, found.matrices.mH)
    assert (found.matrices @ found.left - found.left * found.values[:, None, :]).abs().max() < LEAST
    for rows, columns in ((n, n), (n + 2, n), (n, n + 1)):
        made = float64_matrix_references.with_singular_values(values.abs(), rows, columns, is_complex, 3)
        assert torch.allclose(torch.linalg.svdvals(made.matrices), made.values, rtol=0, atol=LEAST)
        assert made.values.tolist() == values.abs().sort(descending=True)[0].tolist()
