"""Functions of real and complex matrices: one stored triangle, rectangular matrices, broadcast batches and gradients.

Factors are multiplied in float64 on the host. Solutions, inverses and determinants are compared with those of
elimination in float64. Eigenvalues, singular values and the norms that are made of them are compared with the values
from which the matrix was built, and the other norms with sums in float64. Gradients are compared with their formulas
(Giles, "An extended collection of matrix derivative results", 2008). No reference calls the tested function.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.complex_parts import real_pairs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.numerics.summation_error import summation_in
from envbuild.selftest.probes.linear_algebra import float64_matrix_references
from envbuild.selftest.probes.linear_algebra.float64_matrix_references import Spectrum, hermitian, invert, solve

Results = Mapping[str, torch.Tensor]
Flags = Mapping[str, bool]
Expected = Mapping[str, Exact]

UNUSED = 77.0  # fills the triangle or the diagonal that a function must not read
COMPLEX = 2 * math.sqrt(2)  # the rounding error of a complex product relative to that of a real one (Higham, lemma 3.5)
# A solution's relative error is at most this many times its residual, which is given as a multiple of |L||U||x|. The
# docstring of `_dominant` derives the number.
AMPLIFIED = 16.0
NUMBERS = ("real", "real", "complex")
BATCHES: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (3,), (2, 3), (9,), (17,), (33,), (70,))
SIZES = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 97, 129, 130)
SHAPES: dict[str, Callable[[int], tuple[int, int]]] = {
    "square": lambda n: (n, n),
    "tall by one": lambda n: (n + 1, n),
    "tall": lambda n: (n, (n + 2) // 3),
    "wide": lambda n: ((n + 2) // 3, n),
    "wide by one": lambda n: (n, n + 1),
}
# Norms of the matrices for matrix_exp; torch chooses the degree of the polynomial by the norm. Degree 8 has a wrong
# coefficient in torch 2.13 and before (PyTorch issue 196592). The norms for which torch uses it are left out: from
# 0.0512 to 0.58 in float32, and from 0.00034 to 0.0499 in float64. The norm of a matrix is between half of the number
# listed here and that number.
NORMS = {torch.float32: (0.005, 0.05, 1.2, 2.5, 4.5), torch.float64: (0.0003, 0.4, 1.0, 2.5, 4.5)}
MATRIX_NORMS: tuple[Any, ...] = ("fro", "nuc", 2, -2, 1, -1, math.inf, -math.inf)
TALL_ONLY = ("lstsq",)
RECTANGULAR = (*TALL_ONLY, "lu", "pinv", "qr", "qr r", "qr complete", "svd", "svd full", "svdvals", "norms")
SQUARE = (
    "solve",
    "solve of vectors",
    "solve of one matrix",
    "solve with one right side",
    "inv",
    "lu_solve",
    "cholesky_solve",
    "cholesky_inverse",
    "triangular",
    "det",
    "slogdet",
    "cholesky",
    "eigh",
    "eigvalsh",
    "repeated columns",
    "matrix_exp",
    "matrix_power",
)
POWERS = (3, 5)
MOST = 20000  # maximum number of elements of a batch; a single matrix may have more
SPECTRAL = ("svdvals", "eigvalsh", "norms")  # functions whose matrices have known singular values or eigenvalues
APART = 2  # distance of neighbouring eigenvalues if the gradient of eigvalsh is computed
GRADIENTS = ("solve", "triangular", "inv", "det", "slogdet", "cholesky", "eigvalsh")
WITH_RIGHT_SIDES = ("solve", "lu_solve", "cholesky_solve", "triangular", "lstsq")
OF_GRADIENT = "gradient of "
# The boolean arguments of each function. A case has every combination of them; a gradient is tested without "turned".
FLAGS: dict[str, tuple[str, ...]] = {
    "solve": ("right",),
    "lu_solve": ("right", "turned"),
    "cholesky_solve": ("upper",),
    "cholesky_inverse": ("upper",),
    "cholesky": ("upper",),
    "eigh": ("upper",),
    "eigvalsh": ("upper",),
    "triangular": ("upper", "right", "unit", "turned"),
}


def _variants(kind: str) -> list[Flags]:
    names = FLAGS.get(kind.replace(OF_GRADIENT, ""), ())
    if kind.startswith(OF_GRADIENT):
        names = tuple(name for name in names if name != "turned")
    return [
        {**dict.fromkeys(("upper", "right", "unit", "turned"), False), **dict(zip(names, values))}
        for values in itertools.product((False, True), repeat=len(names))
    ]


def _named(results: Mapping[str, Any], flags: Flags) -> dict[str, Any]:
    """Prefix the names of results with the arguments that are set."""
    before = "".join(f"{name} " for name, value in flags.items() if value)
    return {before + name: value for name, value in results.items()}


def _spectrum(point: Point, seed: int) -> Spectrum:
    """Return matrices with singular values, or magnitudes of eigenvalues, from 1/2 to 2. For the gradient of eigvalsh,
    the eigenvalues are equally spaced, so that the eigenvectors are well determined."""
    rows, columns = SHAPES[point["shape"]](point["n"])
    count, is_complex = math.prod(point["batch"]), point["numbers"] == "complex"
    least = min(rows, columns)
    values = (1 + 3 * hashed_inputs.uniform((count, least), seed).to(torch.float64)) / 2
    if not point["kind"].endswith("eigvalsh"):
        return float64_matrix_references.with_singular_values(values, rows, columns, is_complex, seed + 1)
    if point["kind"] == "eigvalsh":
        values = values * hashed_inputs.signs(values.numel(), seed + 9).reshape(values.shape)
    else:
        values = (APART * values.argsort(-1) - least).to(torch.float64)
    return float64_matrix_references.with_eigenvalues(values, is_complex, seed + 1)


def _parts(x: torch.Tensor) -> torch.Tensor:
    """Return the real and imaginary parts as (parts, ...)."""
    return torch.stack((x.real, x.imag)) if x.is_complex() else x[None]


def _dominant(point: Point, seed: int) -> torch.Tensor:
    """Return matrices with a dominant diagonal, as real and imaginary parts (parts, matrices, rows, columns).

    In each row and column, the magnitudes off the diagonal sum to at most 1/2. For two rows or more, the diagonal
    element exceeds this sum by at least 1/2. Therefore the norms of the matrix and of its inverse are at most 2, and
    |L||U| is at most twice |A|. A backward error becomes at most 2 * 2 * 4 times as large relative to the solution. For
    functions that pivot, the rows are then exchanged.
    """
    rows, columns = SHAPES[point["shape"]](point["n"])
    count = math.prod(point["batch"]) if point["kind"] != "solve of one matrix" else 1
    parts = 2 if point["numbers"] == "complex" else 1
    shape = (parts, count, rows, columns)
    a = hashed_inputs.signed(shape, seed) / (2 * max(rows, columns) * math.sqrt(parts))
    a[0].diagonal(dim1=-2, dim2=-1).add_(1 + hashed_inputs.uniform((count, min(rows, columns)), seed + 1) / 2)
    kind = point["kind"].replace(OF_GRADIENT, "")
    if kind == "repeated columns":
        a = a[..., : (columns + 1) // 2]
    elif kind in ("solve", "lu_solve", "lu", "inv", "det", "slogdet") and rows > 2:
        a = a.roll(1, 2)  # exchanges rows, so that pivoting is needed
    return a


def structured(point: Point, seed: int) -> Case:
    """Build a case of one function of a batch of matrices."""
    kind, dtype = point["kind"], point["dtype"]
    is_spectral = kind.replace(OF_GRADIENT, "") in SPECTRAL
    known = _spectrum(point, seed) if is_spectral else None
    a = _dominant(point, seed) if known is None else _parts(known.matrices)
    count = math.prod(point["batch"]) if kind != "solve with one right side" else 1
    given = [a]
    if kind.replace(OF_GRADIENT, "").startswith(WITH_RIGHT_SIDES):
        given.append(hashed_inputs.whole((len(a), count, a.shape[2], point["columns"]), seed + 2, 4))
    if kind.startswith(OF_GRADIENT):
        shape = tuple(_output(kind, given[0].shape, given[-1].shape))
        given.append(hashed_inputs.whole(shape, seed + 3, 4))
    size = "x".join(map(str, (*point["batch"], *a.shape[2:])))
    name = f"{point['numbers']} {kind} {size} {point['shape']}, {point['columns']} columns, {point['layout']}"
    run = functools.partial(_computed, point=point)
    exact = functools.partial(_exactly, point=point, known=known)
    return Case(name, dtype, tuple(part.to(dtype) for part in given), run, exact)


def _output(kind: str, a: torch.Size, b: torch.Size) -> tuple[int, ...]:
    """Return the shape of the output's gradient, which is that of the output, as (parts, matrices, ...)."""
    if kind.endswith(("solve", "triangular")):
        return tuple(b)
    if kind.endswith(("inv", "cholesky")):
        return tuple(a)
    if kind.endswith(" det"):
        return a[0], a[1]
    return (1, a[1], a[2]) if kind.endswith("eigvalsh") else (1, a[1])


def _joined(x: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """Return a real or complex tensor with the dimensions of the batch, given its real and imaginary parts. If there is
    one matrix for the whole batch, the tensor has no batch dimensions."""
    z = x[0] if len(x) == 1 else torch.complex(x[0], x[1])
    return z.reshape(batch + z.shape[1:]) if len(z) == math.prod(batch) else z[0]


def _host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)


def _only(a: torch.Tensor, upper: bool, unit: bool = False) -> torch.Tensor:
    """Return one triangle of a matrix, with UNUSED in the other triangle and, for a unit diagonal, also on the
    diagonal."""
    unused = torch.full_like(a, UNUSED)
    if upper:
        return torch.triu(a, 1 if unit else 0) + torch.tril(unused, 0 if unit else -1)
    return torch.tril(a, -1 if unit else 0) + torch.triu(unused, 0 if unit else 1)


def _solution(kind: str, a: torch.Tensor, b: torch.Tensor, layout: str, flags: Flags) -> torch.Tensor:
    """Return X of A X = B. With the flag "right", solve X A = B^T instead and return the transpose of X. The result has
    the shape of B, except for lstsq and "solve of vectors"."""
    upper, right, unit = flags["upper"], flags["right"], flags["unit"]
    b = with_large_gaps(b.mT if right else b, layout)
    if kind == "triangular":
        t = _only(a, upper, unit)
        given = with_large_gaps(t.mH, layout).mH if flags["turned"] else with_large_gaps(t, layout)
        found: torch.Tensor = torch.linalg.solve_triangular(given, b, upper=upper, left=not right, unitriangular=unit)
        return found.mT if right else found
    if kind == "cholesky_solve":
        factor = torch.linalg.cholesky(hermitian(a), upper=upper)
        return torch.cholesky_solve(b, with_large_gaps(_only(factor, upper), layout), upper=upper)
    a = with_large_gaps(a, layout)
    if kind == "lu_solve":
        factors = torch.linalg.lu_factor(a)
        found = torch.linalg.lu_solve(*factors, b, left=not right, adjoint=flags["turned"])
    elif kind == "lstsq":
        found = torch.linalg.lstsq(a, b).solution
    elif kind == "solve of vectors":
        found = torch.linalg.solve(a, b[..., 0])
    else:
        found = torch.linalg.solve(a, b, left=not right)
    return found.mT if right else found


def _function(kind: str, a: torch.Tensor, point: Point, flags: Flags) -> torch.Tensor:
    upper, layout = flags["upper"], point["layout"]
    if kind == "cholesky_inverse":
        factor = torch.linalg.cholesky(hermitian(a), upper=upper)
        return torch.cholesky_inverse(with_large_gaps(_only(factor, upper), layout), upper=upper)
    if kind == "eigvalsh":
        given = with_large_gaps(_only(hermitian(a), upper), layout)
        values: torch.Tensor = torch.linalg.eigvalsh(given, UPLO="U" if upper else "L")
        return values
    if kind == "matrix_exp":
        power: torch.Tensor = torch.linalg.matrix_exp(with_large_gaps(_scaled(a, point), layout))
        return power
    a = with_large_gaps(a, layout)
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "inv": torch.linalg.inv,
        "det": torch.linalg.det,
        "pinv": torch.linalg.pinv,
        "svdvals": torch.linalg.svdvals,
    }
    return functions[kind](a)


def _scaled(a: torch.Tensor, point: Point) -> torch.Tensor:
    """Return the matrices scaled to the norms NORMS in turn, starting with a norm that depends on the point."""
    count = math.prod(point["batch"])
    begin = point["n"] + point["columns"]
    choice = NORMS[point["dtype"]]
    norms = torch.tensor([choice[(begin + i) % len(choice)] for i in range(count)], dtype=torch.float64)
    largest = 2.0  # upper bound of the norms of the given matrices: see `_dominant`
    factors = (norms / largest).to(a.device, a.real.dtype if a.is_complex() else a.dtype)
    return a * factors.reshape(*point["batch"], 1, 1)


def _computed(*given: torch.Tensor, point: Point) -> Results:
    found: dict[str, torch.Tensor] = {}
    step = _gradients if point["kind"].startswith(OF_GRADIENT) else _of_variant
    for flags in _variants(point["kind"]):
        found.update(_named(step(*given, point=point, flags=flags), flags))
    return found


def _of_variant(a: torch.Tensor, *rest: torch.Tensor, point: Point, flags: Flags) -> Results:
    kind = point["kind"]
    a = _joined(a, point["batch"])
    if rest:
        return {"output": real_pairs(_solution(kind, a, _joined(rest[0], point["batch"]), point["layout"], flags))}
    if kind == "slogdet":
        sign, logarithm = torch.linalg.slogdet(with_large_gaps(a, point["layout"]))
        return {"sign": real_pairs(sign), "logarithm": logarithm}
    if kind == "norms":
        given = with_large_gaps(a, point["layout"])
        return {f"norm {order}": torch.linalg.matrix_norm(given, order) for order in MATRIX_NORMS}
    if kind == "matrix_power":
        given = with_large_gaps(a, point["layout"])
        return {f"power {power}": real_pairs(torch.linalg.matrix_power(given, power)) for power in POWERS}
    if kind in _FACTORED:
        return {name: real_pairs(part) for name, part in _factors(kind, a, point, flags).items()}
    return {"output": real_pairs(_function(kind, a, point, flags))}


_FACTORED = ("cholesky", "lu", "eigh", "qr", "qr r", "qr complete", "svd", "svd full", "repeated columns")


def _factors(kind: str, a: torch.Tensor, point: Point, flags: Flags) -> dict[str, torch.Tensor]:
    """Return the product of the factors, the product of each orthogonal factor with its adjoint, the elements that must
    be 0, and whether the values are in order; for each kind, those that it has."""
    upper, layout = flags["upper"], point["layout"]
    if kind == "cholesky":
        factor = torch.linalg.cholesky(with_large_gaps(_only(hermitian(a), upper), layout), upper=upper)
        wide = _host(factor)
        zeros = torch.tril(factor, -1) if upper else torch.triu(factor, 1)
        return {"product": wide.mH @ wide if upper else wide @ wide.mH, "zeros": zeros}
    if kind == "eigh":
        values, vectors = torch.linalg.eigh(
            with_large_gaps(_only(hermitian(a), upper), layout), UPLO="U" if upper else "L"
        )
        wide = _host(vectors)
        order = (values[..., 1:] >= values[..., :-1]).all()[None]
        return {"product": (wide * _host(values)[..., None, :]) @ wide.mH, "v^H v": wide.mH @ wide, "in order": order}
    if kind == "repeated columns":
        return _of_repeated(a, point)
    a = with_large_gaps(a, layout)
    if kind == "lu":
        p, low, up = torch.linalg.lu(a)
        outside = {"zeros of l": torch.triu(low, 1), "zeros of u": torch.tril(up, -1)}
        ones = low.diagonal(dim1=-2, dim2=-1)
        return {"product": _host(p) @ _host(low) @ _host(up), "diagonal of l": ones, **outside}
    if kind == "qr r":
        r = torch.linalg.qr(a, "r")[1]
        wide = _host(r)
        return {"r^H r": wide.mH @ wide, "zeros": torch.tril(r, -1)}
    if kind.startswith("qr"):
        q, r = torch.linalg.qr(a, "complete" if kind.endswith("complete") else "reduced")
        wide = _host(q)
        return {"product": wide @ _host(r), "q^H q": wide.mH @ wide, "zeros": torch.tril(r, -1)}
    u, values, v = torch.linalg.svd(a, full_matrices=kind.endswith("full"))
    left, right, count = _host(u), _host(v), values.shape[-1]
    product = (left[..., :count] * _host(values)[..., None, :]) @ right[..., :count, :]
    order = ((values[..., 1:] <= values[..., :-1]).all() & (values >= 0).all())[None]
    return {"product": product, "u^H u": left.mH @ left, "v v^H": right @ right.mH, "in order": order}


def _of_repeated(a: torch.Tensor, point: Point) -> dict[str, torch.Tensor]:
    """Return factors and ranks of matrices with repeated columns. The symmetric matrix is [[H, H], [H, H]], whose rank
    is that of H."""
    layout, count = point["layout"], a.shape[-1]
    whole = with_large_gaps(_repeated(a, point["n"]), layout)
    u, values, v = torch.linalg.svd(whole, full_matrices=False)
    half = hermitian(a[..., :count, :])
    twice = with_large_gaps(torch.cat((torch.cat((half, half), -1), torch.cat((half, half), -1)), -2), layout)
    return {
        "product": (_host(u) * _host(values)[..., None, :]) @ _host(v),
        "rank": (values > _of_values(point) * values[..., :1]).sum(-1),
        "matrix_rank": torch.linalg.matrix_rank(whole, rtol=_of_values(point)),
        "matrix_rank of a Hermitian one": torch.linalg.matrix_rank(twice, rtol=2 * _of_values(point), hermitian=True),
    }


def _repeated(a: torch.Tensor, n: int) -> torch.Tensor:
    """Return a matrix (..., n, n) whose columns are those of `a`, repeated."""
    return torch.cat((a, a[..., : n - a.shape[-1]]), -1)


def _singular_values(n: int, dtype: torch.dtype) -> float:
    """Return the error of singular values, and of the product of the factors, relative to the largest singular value.

    It is the error of the rotations plus a threshold: LAPACK's iterations set off-diagonal elements below this
    threshold to 0. The threshold is 100 u in xLASQ2, which computes only the values, and at most 100 u in xBDSQR
    (u^(-1/8) u, limited to 10 u to 100 u). Measured errors for matrices of 3 to 65 rows: 107 u without and 133 u with
    vectors.
    """
    return tolerances.orthogonal(n, dtype) + 100 * tolerances.unit_roundoff(dtype)


def _error(point: Point) -> float:
    """Return the error of reflections and rotations, relative to the norm of the matrix. Iterations on small matrices
    rotate more often than once for each row, so n counts as at least 16."""
    factor = COMPLEX if point["numbers"] == "complex" else 1.0
    return factor * tolerances.orthogonal(max(point["n"] + 1, 16), point["dtype"])


def _of_values(point: Point) -> float:
    """Return the error of singular values, and of the product of the factors, relative to the norm of the matrix."""
    factor = COMPLEX if point["numbers"] == "complex" else 1.0
    return factor * _singular_values(max(point["n"] + 1, 16), point["dtype"])


def _solving(point: Point) -> float:
    """Return the relative error of a solution: see `_dominant`."""
    factor = COMPLEX if point["numbers"] == "complex" else 1.0
    return factor * AMPLIFIED * tolerances.elimination(max(point["n"], 4), point["dtype"])


def _length(value: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the root of the sum of squares over `dim`."""
    return value.abs().square().sum(dim).sqrt()


def _longest(value: torch.Tensor) -> torch.Tensor:
    """The largest norm of a row or column of each matrix, (..., 1, 1)."""
    rows, columns = _length(value, -1).amax(-1), _length(value, -2).amax(-1)
    return torch.maximum(rows, columns)[..., None, None]


def _within(value: torch.Tensor, limit: torch.Tensor) -> Exact:
    """Return a real or complex result with its tolerance. The tolerance has as many dimensions as the result,
    or none."""
    return Exact(real_pairs(value), limit[..., None] if value.is_complex() and limit.dim() else limit)


def _exactly(*given: torch.Tensor, point: Point, known: Spectrum | None) -> Expected:
    found: dict[str, Exact] = {}
    step: Callable[..., Expected]
    if known is not None:
        step = functools.partial(_of_spectrum_exactly, known=known)
    else:
        step = _gradients_exactly if point["kind"].startswith(OF_GRADIENT) else _of_variant_exactly
    for flags in _variants(point["kind"]):
        found.update(_named(step(*given, point=point, flags=flags), flags))
    return found


def _of_spectrum_exactly(a: torch.Tensor, *rest: torch.Tensor, point: Point, flags: Flags, known: Spectrum) -> Expected:
    """Return the expected results for matrices with known singular values or eigenvalues."""
    values = known.values.reshape(*point["batch"], -1)
    made = float64_matrix_references.error_of_spectrum(max(a.shape[-2:]), point["dtype"])
    of_values = _of_values(point) if point["kind"] in ("svdvals", "norms") else _error(point)
    limit = (of_values + made) * values.abs().amax(-1, keepdim=True)
    if point["kind"] == "norms":
        return _norms_exactly(_joined(a, point["batch"]), values, limit[..., 0], point)
    if not rest:
        return {"output": Exact(values, limit)}
    # The angle between a computed eigenvector and the exact one is at most the error divided by the distance of the
    # eigenvalues. This changes V g V^H by at most twice as much, relative to the largest g.
    g = _joined(rest[0], point["batch"])
    vectors = known.left.reshape(*point["batch"], *known.left.shape[1:])
    value = (vectors * g[..., None, :].to(vectors.dtype)) @ vectors.mH
    error = 2 * (_error(point) + made) * values.square().sum(-1).sqrt() / APART
    return {"gradient of a": _within(value, (error * g.abs().amax(-1))[..., None, None])}


def _solved_matrix(kind: str, a: torch.Tensor, flags: Flags) -> torch.Tensor:
    """Return the matrix whose inverse times the right sides is the solution. With the flag "right", it is the
    transposed matrix."""
    if kind == "cholesky_solve":
        a = hermitian(a)
    elif kind == "triangular":
        a = (torch.triu(a) if flags["upper"] else torch.tril(a)).clone()
        if flags["unit"]:
            a.diagonal(dim1=-2, dim2=-1).fill_(1)
    elif kind == "lu_solve" and flags["turned"]:
        a = a.mH
    return a.mT if flags["right"] else a


def _of_variant_exactly(a: torch.Tensor, *rest: torch.Tensor, point: Point, flags: Flags) -> Expected:
    kind, dtype = point["kind"], point["dtype"]
    a = _joined(a, point["batch"])
    if rest:
        b = _joined(rest[0], point["batch"])
        if kind == "lstsq":  # the residual contributes to the error of a solution (Higham, 2nd ed., theorem 20.1)
            value = solve(a.mH @ a, a.mH @ b)
            return {"output": _within(value, AMPLIFIED * _error(point) * _longest(b))}
        value = _solved(_solved_matrix(kind, a, flags), b)
        value = value[..., 0] if kind == "solve of vectors" else value
        size = _length(value, -1)[..., None] if kind == "solve of vectors" else _longest(value)
        return {"output": _within(value, _solving(point) * size)}
    if kind in _FACTORED:
        return _factors_exactly(kind, a, point)
    if kind in ("det", "slogdet"):
        sign, logarithm = float64_matrix_references.sign_and_logarithm(a)
        factor = COMPLEX if a.is_complex() else 1.0
        limit = factor * AMPLIFIED * point["n"] * tolerances.unit_roundoff(dtype)
        limits = limit + tolerances.rounding(logarithm, dtype)
        if kind == "det":
            value = sign * logarithm.exp()
            return {"output": _within(value, 2 * limits * value.abs())}
        of_sign = _within(sign, limits) if a.is_complex() else without_rounding(sign)
        return {"sign": of_sign, "logarithm": Exact(logarithm, limits)}
    if kind == "matrix_exp":
        return _exponential(_scaled(a, point), point)
    if kind == "matrix_power":
        return {f"power {power}": _power(a, power, point) for power in POWERS}
    if kind == "pinv":
        tall = a.shape[-2] >= a.shape[-1]
        value = solve(a.mH @ a, a.mH) if tall else solve(a @ a.mH, a).mH
        return {"output": _within(value, AMPLIFIED * _error(point) * _longest(value))}
    value = invert(hermitian(a) if kind == "cholesky_inverse" else a)
    return {"output": _within(value, _solving(point) * _longest(value))}


def _solved(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return A^-1 B. A or B is expanded if the other one has more batch dimensions."""
    batch = a.shape[:-2] if a.dim() > b.dim() else b.shape[:-2]
    return solve(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))


def _power(a: torch.Tensor, power: int, point: Point) -> Exact:
    """Return a power of A, computed with `product`, which calls no library. Each product sums n terms; a float32 sum
    may truncate (tolerances.ACCUMULATOR)."""
    value, size = a, a.abs()
    for _ in range(power - 1):
        value, size = product(value, a), product(size, a.abs())
    n, is_wide = a.shape[-1], point["dtype"] == torch.float64
    u = tolerances.unit_roundoff(torch.float64) if is_wide else tolerances.ACCUMULATOR
    factor = COMPLEX if a.is_complex() else 1.0
    return _within(value, power * factor * tolerances.gamma(n + 4, u) * size)


def _exponential(a: torch.Tensor, point: Point) -> Expected:
    """Return the sum of the exponential series. Norms are at most 4.5, so that 40 terms suffice. torch's polynomial
    takes up to 5 products, and then at most norm + 1 doublings of their error, each with n terms. The tolerance is 6
    sqrt(n) u (2 norm + 8) exp(norm)."""
    n = a.shape[-1]
    value = term = torch.eye(n, dtype=a.dtype).expand_as(a)
    for k in range(1, 41):
        term = term @ a / k
        value = value + term
    norm = torch.minimum(a.abs().sum(-1).amax(-1), a.abs().sum(-2).amax(-1))[..., None, None]
    factor = COMPLEX if a.is_complex() else 1.0
    u = factor * tolerances.LIKELY * math.sqrt(n) * tolerances.unit_roundoff(point["dtype"])
    return {"output": _within(value, u * (2 * norm + 8) * norm.exp())}


def _norms_exactly(a: torch.Tensor, values: torch.Tensor, error: torch.Tensor, point: Point) -> Expected:
    """Return the expected norms. The norms 2, -2 and "nuc" come from the singular values `values`, with their `error`.
    The other norms are sums of magnitudes or of squares, and have the error of a summation."""
    rows, columns = (a.abs().sum(dim) for dim in (-1, -2))
    sums: dict[float | str, torch.Tensor] = {
        1: columns.amax(-1),
        -1: columns.amin(-1),
        math.inf: rows.amax(-1),
        -math.inf: rows.amin(-1),
    }
    sums["fro"] = a.abs().square().sum((-1, -2)).sqrt()
    u = 8 * summation_in(a.shape[-1] * a.shape[-2], point["dtype"])
    return {
        **{f"norm {order}": Exact(value, u * value) for order, value in sums.items()},
        "norm nuc": Exact(values.sum(-1), values.shape[-1] * error),
        "norm 2": Exact(values[..., 0], error),
        "norm -2": Exact(values[..., -1], error),
    }


def _factors_exactly(kind: str, a: torch.Tensor, point: Point) -> Expected:
    error = _error(point)
    if kind == "repeated columns":
        whole = _repeated(a, point["n"])
        rank = torch.full(point["batch"], a.shape[-1], dtype=torch.float64)
        product_of_factors = _within(whole, _of_values(point) * _frobenius(whole))
        ranks = dict.fromkeys(("rank", "matrix_rank", "matrix_rank of a Hermitian one"), without_rounding(rank))
        return {"product": product_of_factors, **ranks}
    of = hermitian(a) if kind in ("cholesky", "eigh") else a
    norm = _frobenius(of)
    rows, columns = a.shape[-2:]
    least = min(rows, columns)
    if kind == "lu":
        return _lu_exactly(a, point)
    if kind == "qr r":
        found = {"r^H r": _within(a.mH @ a, 3 * error * norm.square())}
    else:
        found = {"product": _within(of, (_of_values(point) if kind.startswith("svd") else error) * norm)}
    full = kind.endswith(("full", "complete"))
    # cuSOLVER's Jacobi rotations divide by the singular values, which makes the error up to 15 times as large.
    angle = 15 * error if kind.startswith("svd") else error
    sizes = {"qr": {"q^H q": rows}, "sv": {"u^H u": rows, "v v^H": columns}, "ei": {"v^H v": rows}}
    for name, size in sizes.get(kind[:2], {}).items():
        if kind == "qr r":
            break
        order = size if full else least
        unit = torch.eye(order, dtype=a.dtype).expand(*a.shape[:-2], order, order)
        found[name] = _within(unit, torch.tensor(angle, dtype=torch.float64))
    if kind[:2] in ("ch", "qr"):
        zeros = torch.zeros(*a.shape[:-2], rows if full else least, columns, dtype=a.dtype)
        found["zeros"] = without_rounding(real_pairs(zeros))
    else:
        found["in order"] = without_rounding(torch.ones(1, dtype=torch.float64))
    return found


def _lu_exactly(a: torch.Tensor, point: Point) -> Expected:
    """Return the expected results. The residual is that of elimination, relative to |L||U|, whose elements are at most
    four times the largest element of A: see `_dominant`."""
    rows, columns = a.shape[-2:]
    least = min(rows, columns)
    factor = COMPLEX if a.is_complex() else 1.0
    residual = 4 * factor * tolerances.elimination(max(rows, columns, 4), point["dtype"])
    parts = {
        "diagonal of l": torch.ones(*a.shape[:-2], least, dtype=a.dtype),
        "zeros of l": torch.zeros(*a.shape[:-2], rows, least, dtype=a.dtype),
        "zeros of u": torch.zeros(*a.shape[:-2], least, columns, dtype=a.dtype),
    }
    product_of_factors = _within(a, residual * a.abs().amax((-1, -2), keepdim=True))
    return {"product": product_of_factors, **{name: without_rounding(real_pairs(x)) for name, x in parts.items()}}


def _frobenius(a: torch.Tensor) -> torch.Tensor:
    """Return the Frobenius norm of each matrix, (..., 1, 1)."""
    return a.abs().square().sum((-1, -2), keepdim=True).sqrt()


def _gradients(*given: torch.Tensor, point: Point, flags: Flags) -> Results:
    """Return the gradients of the inputs for a given gradient of the output."""
    kind, batch = point["kind"].replace(OF_GRADIENT, ""), point["batch"]
    leaves = [_joined(x, batch).detach().clone().requires_grad_() for x in given[:-1]]
    if len(leaves) == 2:
        output = _solution(kind, leaves[0], leaves[1], point["layout"], flags)
    elif kind == "slogdet":
        output = torch.linalg.slogdet(with_large_gaps(leaves[0], point["layout"]))[1]
    elif kind == "cholesky":
        h = with_large_gaps(hermitian(leaves[0]), point["layout"])
        output = torch.linalg.cholesky(h, upper=flags["upper"])
    elif kind == "eigvalsh":
        h = with_large_gaps(hermitian(leaves[0]), point["layout"])
        output = torch.linalg.eigvalsh(h, UPLO="U" if flags["upper"] else "L")
    else:
        output = _function(kind, leaves[0], point, flags)
    gradient = _joined(given[-1], batch)
    found = backward_pass.gradients(real_pairs(output), leaves, real_pairs(gradient))
    return {name: real_pairs(part) for name, part in zip(("gradient of a", "gradient of b"), found)}


def _gradients_exactly(*given: torch.Tensor, point: Point, flags: Flags) -> Expected:
    kind, batch, upper = point["kind"].replace(OF_GRADIENT, ""), point["batch"], flags["upper"]
    a, *rest = (_joined(x, batch) for x in given)
    g = rest[-1]
    # Two solutions, one after the other. The second enlarges the error of the first by at most the condition number, 4.
    error = (4 + 1) * _solving(point)
    if kind in ("det", "slogdet"):
        value = invert(a).mH * g[..., None, None]
        if kind == "det":
            sign, logarithm = float64_matrix_references.sign_and_logarithm(a)
            value = value * (sign * logarithm.exp()).conj()[..., None, None]
        return {"gradient of a": _within(value, error * _longest(value))}
    if kind == "inv":
        inverse = invert(a).mH
        value = -inverse @ g @ inverse
        return {"gradient of a": _within(value, error * _longest(value))}
    if kind == "cholesky":
        factor = float64_matrix_references.cholesky_factor(hermitian(a))
        inverse = invert(factor)
        low = torch.tril(factor.mH @ torch.tril(g.mH if upper else g))
        low.diagonal(dim1=-2, dim2=-1).copy_(low.diagonal(dim1=-2, dim2=-1).real / 2)
        value = inverse.mH @ hermitian(low) @ inverse
        return {"gradient of a": _within(value, error * _longest(value))}
    t = a
    if kind == "triangular":
        t = torch.triu(a) if upper else torch.tril(a)
        if flags["unit"]:
            t = t.clone()
            t.diagonal(dim1=-2, dim2=-1).fill_(1)
    # With the flag "right", the transposed matrix is solved.
    inverse = invert(t.mT if flags["right"] else t)
    of_b, x = inverse.mH @ g, inverse @ rest[0]
    of_a = -of_b @ x.mH
    of_a = of_a.mT if flags["right"] else of_a
    size = _frobenius(of_b) * _longest(x)
    if kind == "triangular":
        of_a = torch.triu(of_a, int(flags["unit"])) if upper else torch.tril(of_a, -int(flags["unit"]))
    return {"gradient of a": _within(of_a, error * size), "gradient of b": _within(of_b, error * _longest(of_b))}


def _is_possible(point: Point) -> bool:
    kind, shape, n = point["kind"], point["shape"], point["n"]
    if math.prod(point["batch"]) * n * n > max(MOST, n * n):
        return False
    if kind.startswith(OF_GRADIENT) and n > 65:
        return False
    if kind == "gradient of eigvalsh" and n == 1:  # for n = 1 this result does not depend on the matrix
        return False
    if shape != "square":
        return kind in RECTANGULAR and n > 2 and not (kind in TALL_ONLY and shape.startswith("wide"))
    # torch interprets a right side of this shape as one vector for each matrix.
    return kind != "solve with one right side" or (*point["batch"], n) != (n, point["columns"])


OPERATIONS: tuple[Any, ...] = (
    Operation(
        "matrix structure",
        {
            "kind": (*SQUARE, *RECTANGULAR, *(OF_GRADIENT + kind for kind in GRADIENTS)),
            "numbers": NUMBERS,
            "dtype": (torch.float32, torch.float32, torch.float32, torch.float64),
            "batch": BATCHES,
            "n": SIZES,
            "shape": tuple(SHAPES),
            "columns": (1, 2, 3, 17, 33),
            "layout": ("contiguous", "transposed", "rows apart", "matrices apart", "shifted"),
        },
        structured,
        {"standard": 250, "full": 2000},
        _is_possible,
    ),
)
