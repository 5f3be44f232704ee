"""Functions of real and complex matrices: one stored triangle, rectangular matrices, broadcast batches and gradients.

Factors are multiplied in float64 on the host. Other results are compared with those of the same call in float64 on the
host; gradients with their formulas (Giles, "An extended collection of matrix derivative results", 2008).
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
from envbuild.selftest.probes.linear_algebra.fft_and_linalg_sampled_cases import singular_values

Results = Mapping[str, torch.Tensor]
Flags = Mapping[str, bool]
Expected = Mapping[str, Exact]

UNUSED = 77.0  # in the triangle, or on the diagonal, that a function must not read
COMPLEX = 2 * math.sqrt(2)  # roundings of a complex product relative to those of a real one (Higham, lemma 3.5)
AMPLIFIED = 16.0  # see `_given`: relative error of a solution, divided by the residual relative to |L||U||x|
NUMBERS = ("real", "real", "complex")
BATCHES: tuple[tuple[int, ...], ...] = ((), (1,), (2,), (3,), (2, 3), (17,), (70,))
SIZES = (1, 2, 3, 5, 8, 16, 17, 31, 32, 33, 63, 64, 65, 96, 129)
SHAPES: dict[str, Callable[[int], tuple[int, int]]] = {
    "square": lambda n: (n, n),
    "tall by one": lambda n: (n + 1, n),
    "tall": lambda n: (n, (n + 2) // 3),
    "wide": lambda n: ((n + 2) // 3, n),
    "wide by one": lambda n: (n, n + 1),
}
NORMS = (0.005, 0.05, 0.4, 1.0, 2.5, 4.5)  # of matrices: torch chooses the degree of an exponential's polynomial by it
MATRIX_NORMS: tuple[Any, ...] = ("fro", "nuc", 2, -2, 1, -1, math.inf, -math.inf)
TALL_ONLY = ("lstsq",)
RECTANGULAR = (*TALL_ONLY, "pinv", "qr", "qr r", "qr complete", "svd", "svd full", "svdvals", "norms")
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
)
GRADIENTS = ("solve", "triangular", "inv", "det", "slogdet", "cholesky", "eigvalsh")
WITH_RIGHT_SIDES = ("solve", "lu_solve", "cholesky_solve", "triangular", "lstsq")
OF_GRADIENT = "gradient of "
# The arguments of a function: each case has every combination of those that its function takes.
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
    """Results with the arguments that are set before their names."""
    before = "".join(f"{name} " for name, value in flags.items() if value)
    return {before + name: value for name, value in results.items()}


def _given(point: Point, seed: int) -> torch.Tensor:
    """Real and imaginary parts (parts, matrices, rows, columns) of matrices with a dominant diagonal.

    The elements off the diagonal of a row or column have a sum of at most 1/2, and the diagonal is at least 1/2 more
    than this for two rows or more: norms of the matrix and its inverse are at most 2, and |L||U| is at most twice |A|.
    A backward error becomes at most 2 * 2 * 4 times as large relative to the solution.
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
    elif kind == "eigvalsh" and point["kind"] != kind:  # eigenvalues apart, so that their vectors are determined
        a[0].diagonal(dim1=-2, dim2=-1).add_(2 * torch.arange(columns))
    elif kind in ("solve", "lu_solve", "inv", "det", "slogdet") and rows > 2:
        a = a.roll(1, 2)  # exchanged rows, so that pivots are needed
    return a


def structured(point: Point, seed: int) -> Case:
    """One function of a batch of matrices."""
    kind, dtype = point["kind"], point["dtype"]
    a = _given(point, seed)
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
    exact = functools.partial(_exactly, point=point)
    return Case(name, dtype, tuple(part.to(dtype) for part in given), run, exact)


def _output(kind: str, a: torch.Size, b: torch.Size) -> tuple[int, ...]:
    """The shape of the given gradient: that of the output, as (parts, matrices, ...)."""
    if kind.endswith(("solve", "triangular")):
        return tuple(b)
    if kind.endswith(("inv", "cholesky")):
        return tuple(a)
    if kind.endswith(" det"):
        return a[0], a[1]
    return (1, a[1], a[2]) if kind.endswith("eigvalsh") else (1, a[1])


def _joined(x: torch.Tensor, batch: tuple[int, ...]) -> torch.Tensor:
    """A real or complex tensor from its parts, with the dimensions of the batch."""
    z = x[0] if len(x) == 1 else torch.complex(x[0], x[1])
    return z.reshape(batch + z.shape[1:]) if len(z) == math.prod(batch) else z[0]


def _host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(torch.complex128 if x.is_complex() else torch.float64)


def _hermitian(a: torch.Tensor) -> torch.Tensor:
    return (a + a.mH) / 2


def _only(a: torch.Tensor, upper: bool, unit: bool = False) -> torch.Tensor:
    """One triangle of a matrix, and UNUSED in the other one; for a unit diagonal there, too."""
    unused = torch.full_like(a, UNUSED)
    if upper:
        return torch.triu(a, 1 if unit else 0) + torch.tril(unused, 0 if unit else -1)
    return torch.tril(a, -1 if unit else 0) + torch.triu(unused, 0 if unit else 1)


def _solution(kind: str, a: torch.Tensor, b: torch.Tensor, layout: str, flags: Flags) -> torch.Tensor:
    """X of A X = B, and from the right the transpose of X with X A = B^T, in the shape of B."""
    upper, right, unit = flags["upper"], flags["right"], flags["unit"]
    b = with_large_gaps(b.mT if right else b, layout)
    if kind == "triangular":
        t = _only(a, upper, unit)
        given = with_large_gaps(t.mH, layout).mH if flags["turned"] else with_large_gaps(t, layout)
        found: torch.Tensor = torch.linalg.solve_triangular(given, b, upper=upper, left=not right, unitriangular=unit)
        return found.mT if right else found
    if kind == "cholesky_solve":
        factor = torch.linalg.cholesky(_hermitian(a), upper=upper)
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
        factor = torch.linalg.cholesky(_hermitian(a), upper=upper)
        return torch.cholesky_inverse(with_large_gaps(_only(factor, upper), layout), upper=upper)
    if kind == "eigvalsh":
        given = with_large_gaps(_only(_hermitian(a), upper), layout)
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
    """Matrices without their diagonal's excess and with the norms NORMS in turns, beginning with one that depends on
    the point."""
    count = math.prod(point["batch"])
    begin = point["n"] + point["columns"]
    norms = torch.tensor([NORMS[(begin + i) % len(NORMS)] for i in range(count)], dtype=torch.float64)
    largest = 2.0  # of the given matrices: see `_given`
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
    if kind in _FACTORED:
        return {name: real_pairs(part) for name, part in _factors(kind, a, point, flags).items()}
    return {"output": real_pairs(_function(kind, a, point, flags))}


_FACTORED = ("cholesky", "eigh", "qr", "qr r", "qr complete", "svd", "svd full", "repeated columns")


def _factors(kind: str, a: torch.Tensor, point: Point, flags: Flags) -> dict[str, torch.Tensor]:
    upper, layout = flags["upper"], point["layout"]
    if kind == "cholesky":
        factor = torch.linalg.cholesky(with_large_gaps(_only(_hermitian(a), upper), layout), upper=upper)
        wide = _host(factor)
        zeros = torch.tril(factor, -1) if upper else torch.triu(factor, 1)
        return {"product": wide.mH @ wide if upper else wide @ wide.mH, "zeros": zeros}
    if kind == "eigh":
        values, vectors = torch.linalg.eigh(
            with_large_gaps(_only(_hermitian(a), upper), layout), UPLO="U" if upper else "L"
        )
        wide = _host(vectors)
        order = (values[..., 1:] >= values[..., :-1]).all()[None]
        return {"product": (wide * _host(values)[..., None, :]) @ wide.mH, "v^H v": wide.mH @ wide, "in order": order}
    if kind == "repeated columns":
        a = with_large_gaps(_repeated(a, point["n"]), layout)
        u, values, v = torch.linalg.svd(a, full_matrices=False)
        rank = (values > _of_values(point) * values[..., :1]).sum(-1)
        return {"product": (_host(u) * _host(values)[..., None, :]) @ _host(v), "rank": rank}
    a = with_large_gaps(a, layout)
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


def _repeated(a: torch.Tensor, n: int) -> torch.Tensor:
    """(..., n, n) from its first half of columns, which occur twice."""
    return torch.cat((a, a[..., : n - a.shape[-1]]), -1)


def _error(point: Point) -> float:
    """Of reflections and rotations, relative to the norm of the matrix. Iterations of small matrices rotate more often
    than once for each row."""
    factor = COMPLEX if point["numbers"] == "complex" else 1.0
    return factor * tolerances.orthogonal(max(point["n"] + 1, 16), point["dtype"])


def _of_values(point: Point) -> float:
    """Of singular values, and of the product of the factors, relative to the norm of the matrix."""
    factor = COMPLEX if point["numbers"] == "complex" else 1.0
    return factor * singular_values(max(point["n"] + 1, 16), point["dtype"])


def _solving(point: Point) -> float:
    """Relative error of a solution: see `_given`."""
    factor = COMPLEX if point["numbers"] == "complex" else 1.0
    return factor * AMPLIFIED * tolerances.elimination(max(point["n"], 4), point["dtype"])


def _longest(value: torch.Tensor) -> torch.Tensor:
    """The largest norm of a row or column of each matrix, (..., 1, 1)."""
    rows, columns = value.norm(dim=-1).amax(-1), value.norm(dim=-2).amax(-1)
    return torch.maximum(rows, columns)[..., None, None]


def _within(value: torch.Tensor, limit: torch.Tensor) -> Exact:
    """A real or complex result and its tolerance, which has the same number of dimensions or none."""
    return Exact(real_pairs(value), limit[..., None] if value.is_complex() and limit.dim() else limit)


def _exactly(*given: torch.Tensor, point: Point) -> Expected:
    found: dict[str, Exact] = {}
    step = _gradients_exactly if point["kind"].startswith(OF_GRADIENT) else _of_variant_exactly
    for flags in _variants(point["kind"]):
        found.update(_named(step(*given, point=point, flags=flags), flags))
    return found


def _solved_matrix(kind: str, a: torch.Tensor, flags: Flags) -> torch.Tensor:
    """The matrix whose inverse times the right sides is the solution; from the right it is the transposed one."""
    if kind == "cholesky_solve":
        a = _hermitian(a)
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
    plain = {**point, "layout": "contiguous"}
    if rest:
        b = _joined(rest[0], point["batch"])
        if kind == "lstsq":  # the residual is part of a solution's error (Higham, 2nd ed., theorem 20.1)
            value = torch.linalg.solve(a.mH @ a, a.mH @ b)
            return {"output": _within(value, AMPLIFIED * _error(point) * _longest(b))}
        value = torch.linalg.inv(_solved_matrix(kind, a, flags)) @ b
        value = value[..., 0] if kind == "solve of vectors" else value
        size = value.norm(dim=-1, keepdim=True) if kind == "solve of vectors" else _longest(value)
        return {"output": _within(value, _solving(point) * size)}
    if kind in _FACTORED:
        return _factors_exactly(kind, a, point)
    if kind == "norms":
        return _norms_exactly(a, point)
    if kind in ("det", "slogdet"):
        sign, logarithm = torch.linalg.slogdet(a)
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
    if kind == "pinv":
        tall = a.shape[-2] >= a.shape[-1]
        value = torch.linalg.solve(a.mH @ a, a.mH) if tall else torch.linalg.solve(a @ a.mH, a).mH
        return {"output": _within(value, AMPLIFIED * _error(point) * _longest(value))}
    value = _function(kind, a, plain, flags)
    if kind in ("eigvalsh", "svdvals"):
        error = _of_values(point) if kind == "svdvals" else _error(point)
        return {"output": Exact(value, error * value.abs().amax(-1, keepdim=True))}
    return {"output": _within(value, _solving(point) * _longest(value))}


def _exponential(a: torch.Tensor, point: Point) -> Expected:
    """The series. Norms are at most 4.5, so that 40 terms suffice. torch's polynomial has up to 5 products and at most
    norm + 1 doublings of their error, each of n terms: 6 sqrt(n) u (2 norm + 8) exp(norm)."""
    n = a.shape[-1]
    value = term = torch.eye(n, dtype=a.dtype).expand_as(a)
    for k in range(1, 41):
        term = term @ a / k
        value = value + term
    norm = torch.minimum(a.abs().sum(-1).amax(-1), a.abs().sum(-2).amax(-1))[..., None, None]
    factor = COMPLEX if a.is_complex() else 1.0
    u = factor * tolerances.LIKELY * math.sqrt(n) * tolerances.unit_roundoff(point["dtype"])
    return {"output": _within(value, u * (2 * norm + 8) * norm.exp())}


def _norms_exactly(a: torch.Tensor, point: Point) -> Expected:
    """Singular values change by at most the 2-norm of the matrix's change (Weyl); sums have the error of a
    summation."""
    values = torch.linalg.svdvals(a)
    largest = values[..., 0]
    error = _of_values(point) * largest
    rows, columns = (a.abs().sum(dim) for dim in (-1, -2))
    sums = {1: columns.amax(-1), -1: columns.amin(-1), math.inf: rows.amax(-1), -math.inf: rows.amin(-1)}
    u = 8 * tolerances.summation(a.shape[-1] * a.shape[-2])
    found = {f"norm {order}": Exact(value, u * value) for order, value in sums.items()}
    total = a.abs().square().sum((-1, -2)).sqrt()
    return {
        **found,
        "norm fro": Exact(total, u * total),
        "norm nuc": Exact(values.sum(-1), values.shape[-1] * error),
        "norm 2": Exact(largest, error),
        "norm -2": Exact(values[..., -1], error),
    }


def _factors_exactly(kind: str, a: torch.Tensor, point: Point) -> Expected:
    error = _error(point)
    if kind == "repeated columns":
        whole = _repeated(a, point["n"])
        rank = torch.full(point["batch"], a.shape[-1], dtype=torch.float64)
        return {
            "product": _within(whole, _of_values(point) * torch.linalg.matrix_norm(whole, keepdim=True)),
            "rank": without_rounding(rank),
        }
    of = _hermitian(a) if kind in ("cholesky", "eigh") else a
    norm = torch.linalg.matrix_norm(of, keepdim=True)
    rows, columns = a.shape[-2:]
    least = min(rows, columns)
    if kind == "qr r":
        found = {"r^H r": _within(a.mH @ a, 3 * error * norm.square())}
    else:
        found = {"product": _within(of, (_of_values(point) if kind.startswith("svd") else error) * norm)}
    full = kind.endswith(("full", "complete"))
    # cuSOLVER's Jacobi rotations divide by the singular values, which makes an error up to 15 times as large.
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


def _gradients(*given: torch.Tensor, point: Point, flags: Flags) -> Results:
    """Gradients of the inputs for a given gradient of the output."""
    kind, batch = point["kind"].replace(OF_GRADIENT, ""), point["batch"]
    leaves = [_joined(x, batch).detach().clone().requires_grad_() for x in given[:-1]]
    if len(leaves) == 2:
        output = _solution(kind, leaves[0], leaves[1], point["layout"], flags)
    elif kind == "slogdet":
        output = torch.linalg.slogdet(with_large_gaps(leaves[0], point["layout"]))[1]
    elif kind == "cholesky":
        h = with_large_gaps(_hermitian(leaves[0]), point["layout"])
        output = torch.linalg.cholesky(h, upper=flags["upper"])
    elif kind == "eigvalsh":
        h = with_large_gaps(_hermitian(leaves[0]), point["layout"])
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
    if kind == "eigvalsh":
        # The angle between a computed eigenvector and the exact one is at most the error over the gap, which is 1.
        vectors = torch.linalg.eigh(_hermitian(a))[1]
        value = (vectors * g[..., None, :].to(a.dtype)) @ vectors.mH
        error = 2 * _error(point) * torch.linalg.matrix_norm(_hermitian(a), keepdim=True)
        return {"gradient of a": _within(value, error * g.abs().amax(-1)[..., None, None])}
    # Two solutions in turn, of which the second enlarges the error of the first by at most the condition, 4.
    error = (4 + 1) * _solving(point)
    if kind in ("det", "slogdet"):
        value = torch.linalg.inv(a).mH * g[..., None, None]
        value = value * torch.linalg.det(a).conj()[..., None, None] if kind == "det" else value
        return {"gradient of a": _within(value, error * _longest(value))}
    if kind == "inv":
        inverse = torch.linalg.inv(a).mH
        value = -inverse @ g @ inverse
        return {"gradient of a": _within(value, error * _longest(value))}
    if kind == "cholesky":
        factor = torch.linalg.cholesky(_hermitian(a))
        inverse = torch.linalg.inv(factor)
        low = torch.tril(factor.mH @ torch.tril(g.mH if upper else g))
        low.diagonal(dim1=-2, dim2=-1).copy_(low.diagonal(dim1=-2, dim2=-1).real / 2)
        value = inverse.mH @ _hermitian(low) @ inverse
        return {"gradient of a": _within(value, error * _longest(value))}
    t = a
    if kind == "triangular":
        t = torch.triu(a) if upper else torch.tril(a)
        if flags["unit"]:
            t = t.clone()
            t.diagonal(dim1=-2, dim2=-1).fill_(1)
    # From the right the transposed matrix is solved for.
    inverse = torch.linalg.inv(t.mT if flags["right"] else t)
    of_b, x = inverse.mH @ g, inverse @ rest[0]
    of_a = -of_b @ x.mH
    of_a = of_a.mT if flags["right"] else of_a
    size = torch.linalg.matrix_norm(of_b, keepdim=True) * _longest(x)
    if kind == "triangular":
        of_a = torch.triu(of_a, int(flags["unit"])) if upper else torch.tril(of_a, -int(flags["unit"]))
    return {"gradient of a": _within(of_a, error * size), "gradient of b": _within(of_b, error * _longest(of_b))}


def _is_possible(point: Point) -> bool:
    kind, shape, n = point["kind"], point["shape"], point["n"]
    if math.prod(point["batch"]) * n * n > (10000 if n < 129 else n * n):
        return False
    if kind.startswith(OF_GRADIENT) and n > 65:
        return False
    if (
        kind == "pinv" and point["numbers"] == "complex"
    ):  # the tests' simulated GPUs lose torch's lazy conjugation in it
        return False
    if shape != "square":
        return kind in RECTANGULAR and n > 2 and not (kind in TALL_ONLY and shape.startswith("wide"))
    return True


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
        {"standard": 150, "full": 1200},
        _is_possible,
    ),
)
