"""matrix structure: faults that a function has in every dtype are found, as no reference calls the function."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.probes.linear_algebra.linalg_structure_and_gradient_cases import NORMS, OPERATIONS
from selftest.shared_faults import Kernel, forbidden, half_gradient, in_float32, sampled, wrong_results

(OPERATION,) = OPERATIONS
TESTED = (
    *("inv", "pinv", "solve", "solve_triangular", "lu", "lu_factor", "lu_solve", "lstsq", "cholesky"),
    *("cholesky_solve", "cholesky_inverse", "det", "slogdet", "eigh", "eigvalsh", "qr", "svd", "svdvals"),
    *("matrix_norm", "matrix_rank", "matrix_exp", "matrix_power", "norm"),
)


def larger(kernel: Kernel) -> Kernel:
    """The result is too large by a hundredth."""

    def wrong(*given: Any, **options: Any) -> Any:
        found = kernel(*given, **options)
        return (*found[:-1], found[-1] * 1.01) if isinstance(found, tuple) else found * 1.01

    return wrong


def first_larger(kernel: Kernel) -> Kernel:
    """The solution, the first of several results, is too large by a hundredth."""
    return lambda a, b: SimpleNamespace(solution=kernel(a, b).solution * 1.01)


def smallest_twice(kernel: Kernel) -> Kernel:
    """The last value is a copy of the value before it."""
    return lambda *given, **options: (lambda x: torch.cat((x[..., :-1], x[..., -2:-1]), -1))(kernel(*given, **options))


def magnitudes(kernel: Kernel) -> Kernel:
    """Eigenvalues without their sign, in rising order."""
    return lambda a, UPLO="L": kernel(a, UPLO=UPLO).abs().sort()[0]


def transposed(kernel: Kernel) -> Kernel:
    return lambda a: kernel(a.mT)


def other_triangle(kernel: Kernel) -> Kernel:
    return lambda factor, upper=False: kernel(factor, upper=not upper)


def nuclear_without_last(kernel: Kernel) -> Kernel:
    """The nuclear norm is the sum without the smallest singular value."""

    def wrong(a: torch.Tensor, order: Any) -> torch.Tensor:
        return kernel(a, order) - kernel(a, -2) if order == "nuc" else kernel(a, order)

    return wrong


def conjugated(kernel: Kernel) -> Kernel:
    return lambda a: kernel(a).conj().resolve_conj()


def one_more(kernel: Kernel) -> Kernel:
    return lambda a, **options: kernel(a, **options) + 1


def one_less(kernel: Kernel) -> Kernel:
    return lambda a, power: kernel(a, power - 1)


LINALG = torch.linalg
WRONG: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    ("inv", LINALG, "inv", transposed, {"n": 8}),
    ("cholesky_inverse", torch, "cholesky_inverse", other_triangle, {"n": 8}),
    ("cholesky_inverse", torch, "cholesky_inverse", larger, {}),
    ("cholesky_solve", torch, "cholesky_solve", larger, {}),
    ("svdvals", LINALG, "svdvals", smallest_twice, {"n": 17}),
    ("svdvals", LINALG, "svdvals", larger, {}),
    ("eigvalsh", LINALG, "eigvalsh", magnitudes, {"n": 17}),
    ("eigvalsh", LINALG, "eigvalsh", larger, {}),
    ("det", LINALG, "det", larger, {}),
    ("slogdet", LINALG, "slogdet", larger, {"n": 17}),
    ("norms", LINALG, "matrix_norm", nuclear_without_last, {"n": 17}),
    ("norms", LINALG, "matrix_norm", larger, {}),
    ("norms", LINALG, "matrix_norm", in_float32, {"dtype": torch.float64, "n": 17}),
    ("pinv", LINALG, "pinv", conjugated, {"numbers": "complex", "n": 8}),
    ("pinv", LINALG, "pinv", larger, {}),
    ("lstsq", LINALG, "lstsq", first_larger, {}),
    ("solve", LINALG, "solve", larger, {}),
    ("lu_solve", LINALG, "lu_solve", larger, {}),
    ("triangular", LINALG, "solve_triangular", larger, {}),
    ("lu", LINALG, "lu", larger, {}),
    ("repeated columns", LINALG, "matrix_rank", one_more, {}),
    ("matrix_power", LINALG, "matrix_power", one_less, {"n": 8}),
    ("matrix_power", LINALG, "matrix_power", in_float32, {"dtype": torch.float64, "n": 17}),
    ("matrix_exp", LINALG, "matrix_exp", transposed, {"n": 8}),
    ("gradient of inv", LINALG, "inv", half_gradient, {}),
    ("gradient of det", LINALG, "det", half_gradient, {}),
    ("gradient of slogdet", LINALG, "slogdet", half_gradient, {}),
    ("gradient of cholesky", LINALG, "cholesky", half_gradient, {}),
    ("gradient of eigvalsh", LINALG, "eigvalsh", half_gradient, {}),
    ("gradient of solve", LINALG, "solve", half_gradient, {}),
    ("gradient of triangular", LINALG, "solve_triangular", half_gradient, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "owner", "name", "wrong", "values"), WRONG, ids=[f"{row[0]}-{row[3].__name__}" for row in WRONG]
)
def test_a_fault_in_every_dtype_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, owner: Any, name: str, wrong: Any, values: dict[str, Any]
) -> None:
    cases = list(sampled(OPERATION, kind=kind, **values))
    assert not wrong_results(cases)
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    for case in cases:
        assert wrong_results([case]), case.name


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPERATION.space["kind"])
def test_no_reference_calls_a_tested_function(kind: str) -> None:
    cases = list(sampled(OPERATION, count=6, kind=kind))
    with forbidden((torch, torch.linalg, torch.Tensor), TESTED):
        for case in cases:
            assert case.expected()


@pytest.mark.parametrize(("dtype", "angle"), [(torch.float32, 0.5), (torch.float64, 0.04)], ids=str)
def test_torch_has_a_wrong_exponential_where_norms_are_left_out(dtype: torch.dtype, angle: float) -> None:
    """The exponential is a rotation, as in pytorch issue 196592. If torch computes it correctly, the test is skipped:
    then NORMS may contain these norms."""
    turn = torch.tensor([[0.0, -angle], [angle, 0.0]], dtype=dtype)
    error = abs(float(torch.linalg.matrix_exp(turn)[1, 0]) - math.sin(float(turn[1, 0])))
    if error < 16 * tolerances.unit_roundoff(dtype):
        pytest.skip("this torch has the right coefficient")
    left_out = {torch.float32: (0.0512, 0.58), torch.float64: (0.00034, 0.0499)}[dtype]
    assert left_out[0] < angle < left_out[1]
    assert all(norm < left_out[0] or norm / 2 > left_out[1] for norm in NORMS[dtype])


def test_right_sides_that_torch_takes_for_vectors_are_left_out() -> None:
    point = {"kind": "solve with one right side", "numbers": "real", "shape": "square", "batch": (3,), "n": 3}
    assert not OPERATION.possible({**point, "columns": 3})
    assert OPERATION.possible({**point, "columns": 2})
