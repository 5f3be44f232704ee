"""Fourier transforms, and solutions and factorizations of matrices, of sampled sizes, layouts and arguments.

Fourier transforms are compared with products with matrices of sines and cosines in float64. Factors are multiplied in
float64 on the host; solutions are compared with float64 ones of well-conditioned matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.complex_parts import real_pairs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

DTYPES = (torch.float32, torch.float32, torch.float64)
LENGTHS = (2, 3, 5, 7, 8, 9, 15, 16, 17, 21, 30, 34, 49, 53, 64, 97, 100, 127, 128, 129, 243, 255, 256, 257, 360, 509)
LAYOUTS = ("contiguous", "transposed", "rows apart", "shifted", "elements apart")
PADS = (-3, -1, 0, 1, 4)  # relative to the length of the signal; others are cut off or filled with zeros
NORMS = ("backward", "ortho", "forward")
TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft", "fft2", "ifft2", "rfft2", "irfft2")


FROM_HALF = ("irfft", "hfft", "irfft2")


def _size(point: Point) -> int:
    """The length of the transform. For an input that is half of a spectrum, it is the length of the whole signal."""
    n = 2 * (point["length"] - 1) if point["kind"] in FROM_HALF else point["length"]
    return int(n + point["pad"])


def transform(point: Point, seed: int) -> Case:
    """Rows, or columns, of numbers; a plane for transforms of two dimensions."""
    kind, rows, n, dtype = point["kind"], point["rows"], point["length"], point["dtype"]
    is_complex = kind not in ("rfft", "ihfft", "rfft2")
    x = hashed_inputs.signed((2 if is_complex else 1, rows, n), seed)
    what = f"{'cut' if point['pad'] < 0 else 'filled'} to {_size(point)}"
    name = f"{kind} {rows}x{n} {what}, {point['norm']}, {point['over']}, {point['layout']}"
    run = functools.partial(_transform, point=point)
    return Case(name, dtype, (x.to(dtype),), run, functools.partial(_transform_exactly, point=point))


def _transform(x: torch.Tensor, point: Point) -> Results:
    kind, over = point["kind"], point["over"]
    parts = [with_large_gaps(part.t() if over == "columns" else part, point["layout"]) for part in x]
    z = parts[0] if len(parts) == 1 else torch.complex(*parts)
    if len(parts) == 2 and point["layout"] == "elements apart":  # torch.complex gives a dense tensor
        z = torch.stack((z, z.flip(0)), -1)[..., 0]
    size = _size(point)
    if kind.endswith("2"):
        found = getattr(torch.fft, kind)(
            z, (point["rows"], size), (1, 0) if over == "columns" else (0, 1), point["norm"]
        )
    else:
        found = getattr(torch.fft, kind)(z, size, 0 if over == "columns" else 1, point["norm"])
    return {"output": real_pairs(found.t() if over == "columns" else found)}


def _transform_exactly(x: torch.Tensor, point: Point) -> Expected:
    """Sums over a period of `size`; half of a spectrum is completed to the whole one before it is transformed back."""
    kind, rows, size = point["kind"], point["rows"], _size(point)
    re, im = x[0], x[1] if len(x) == 2 else torch.zeros_like(x[0])
    from_half = kind in FROM_HALF
    back = kind in ("ifft", "irfft", "ihfft", "ifft2", "irfft2")
    count = size * (rows if kind.endswith("2") else 1)
    power = {"backward": 1.0 if back else 0.0, "ortho": 0.5, "forward": 0.0 if back else 1.0}[point["norm"]]
    sign = 1 if back else -1
    if kind.endswith("2"):  # over the other dimension first
        re, im = (part.t() for part in _sums(re.t(), im.t(), sign))
    if from_half:
        re, im = _fit(re, size // 2 + 1), _fit(im, size // 2 + 1)
        im = im.clone()
        im[:, 0] = 0
        if size % 2 == 0:
            im[:, -1] = 0
        last = size - (size // 2 + 1)
        re = torch.cat((re, re[:, 1 : 1 + last].flip(1)), 1)
        im = torch.cat((im, -im[:, 1 : 1 + last].flip(1)), 1)
    else:
        re, im = _fit(re, size), _fit(im, size)
    re, im = _sums(re, im, sign)
    scale = float(count) ** -power
    if kind in ("rfft", "ihfft", "rfft2"):
        re, im = re[:, : size // 2 + 1], im[:, : size // 2 + 1]
    value = re if from_half else torch.stack((re, im), -1)
    of_row = value.square().sum() if kind.endswith("2") else value.reshape(rows, -1).square().sum(1)
    # Of the whole spectrum: the half has at least half of the squares.
    root = (2 * of_row / (count if kind.endswith("2") else size)).sqrt() + 2.0**-20
    limit = 2 * tolerances.fourier(max(2, count), point["dtype"]) * root
    limit = limit if kind.endswith("2") else limit.reshape(-1, *[1] * (value.dim() - 1))
    return {"output": Exact(value * scale, limit * scale)}


def _fit(x: torch.Tensor, size: int) -> torch.Tensor:
    filled = torch.zeros(len(x), max(0, size - x.shape[1]), dtype=x.dtype)
    return torch.cat((x[:, :size], filled), 1)


def _sums(re: torch.Tensor, im: torch.Tensor, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = re.shape[1]
    numbers = torch.arange(n)
    angles = (numbers[:, None] * numbers % n).to(torch.float64) * (2 * math.pi / n)
    cosines, sines = torch.cos(angles), torch.sin(angles) * sign
    return re @ cosines - im @ sines, re @ sines + im @ cosines


SOLVERS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "solve": lambda a, s, b: torch.linalg.solve(a, b),
    "solve from the right": lambda a, s, b: torch.linalg.solve(a.mT, b.mT, left=False).mT,
    "solve of vectors": lambda a, s, b: torch.linalg.solve(a, b[..., 0].unsqueeze(-1)),
    "inv": lambda a, s, b: torch.linalg.inv(a),
    "lu_solve": lambda a, s, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
    "lstsq": lambda a, s, b: torch.linalg.lstsq(a, b).solution,
    "cholesky_solve": lambda a, s, b: torch.cholesky_solve(b, torch.linalg.cholesky(s)),
    "cholesky_solve upper": lambda a, s, b: torch.cholesky_solve(b, torch.linalg.cholesky(s, upper=True), upper=True),
    "cholesky_inverse": lambda a, s, b: torch.cholesky_inverse(torch.linalg.cholesky(s)),
    "triangular lower": lambda a, s, b: torch.linalg.solve_triangular(a, b, upper=False),
    "triangular upper": lambda a, s, b: torch.linalg.solve_triangular(a, b, upper=True),
}
FACTORS = ("cholesky", "cholesky upper", "lu", "qr", "qr complete", "svd", "svd full", "eigh", "eigh upper")
VALUES = ("det", "slogdet", "svdvals", "eigvalsh", "matrix_power")


def system(point: Point, seed: int) -> Case:
    """Matrices with a dominant diagonal, of which one has its first rows exchanged, so that pivots are needed."""
    n, batch, dtype, kind = point["n"], point["batch"], point["dtype"], point["kind"]
    a = hashed_inputs.signed((batch, n, n), seed)
    a = a / n + torch.eye(n) * (1 + hashed_inputs.uniform((batch, n, 1), seed + 1) / 2)
    b = hashed_inputs.whole((batch, n, point["columns"]), seed + 2, 4)
    is_tall = kind in ("qr", "qr complete", "svd", "svd full", "svdvals")
    if is_tall:
        a = a[:, :, : max(1, n - point["less"])]
    elif kind in ("solve", "solve from the right", "lu_solve", "inv", "lu", "det") and n > 2:
        a[-1] = a[-1].roll(1, 0)  # exchanged rows
    name = f"{kind} {batch}x{n}x{a.shape[2]}, {point['columns']} columns, {point['layout']}"
    run = functools.partial(_solved, point=point)
    given = (a.to(dtype), b.to(dtype)) if kind in SOLVERS and "inv" not in kind else (a.to(dtype),)
    return Case(name, dtype, given, run, functools.partial(_solved_exactly, point=point))


def _symmetric(a: torch.Tensor) -> torch.Tensor:
    return (a + a.mT) / 2


def _host(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().to(torch.float64)


def _solved(a: torch.Tensor, b: torch.Tensor | None = None, *, point: Point) -> Results:
    kind = point["kind"]
    s = with_large_gaps(_symmetric(a) if a.shape[1] == a.shape[2] else a, point["layout"])
    a = with_large_gaps(a, point["layout"])
    if kind in SOLVERS:
        return {"output": SOLVERS[kind](a, s, s if b is None else with_large_gaps(b, point["layout"]))}
    if kind in FACTORS:
        return _factors(a, s, kind)
    if kind == "slogdet":
        sign, logarithm = torch.linalg.slogdet(a)
        return {"sign": sign, "logarithm": logarithm}
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "det": lambda: torch.linalg.det(a),
        "svdvals": lambda: torch.linalg.svdvals(a),
        "eigvalsh": lambda: torch.linalg.eigvalsh(s),
        "matrix_power": lambda: torch.linalg.matrix_power(a, 5),
    }
    return {"output": calls[kind]()}


def _factors(a: torch.Tensor, s: torch.Tensor, kind: str) -> Results:
    """The product of the factors, the products of orthogonal ones with themselves, and what must be 0."""
    if kind.startswith("cholesky"):
        upper = kind.endswith("upper")
        factor = torch.linalg.cholesky(s, upper=upper)
        wide = _host(factor)
        return {
            "product": wide.mT @ wide if upper else wide @ wide.mT,
            "zeros": torch.tril(factor, -1) if upper else torch.triu(factor, 1),
        }
    if kind == "lu":
        p, low, up = torch.linalg.lu(a)
        return {"product": _host(p) @ _host(low) @ _host(up), "zeros": torch.tril(up, -1) + torch.triu(low, 1)}
    if kind.startswith("qr"):
        q, r = torch.linalg.qr(a, "complete" if kind.endswith("complete") else "reduced")
        wide = _host(q)
        return {"product": wide @ _host(r), "q^T q": wide.mT @ wide, "zeros": torch.tril(r, -1)}
    if kind.startswith("svd"):
        u, values, v = torch.linalg.svd(a, full_matrices=kind.endswith("full"))
        left, right, count = _host(u), _host(v), values.shape[-1]
        product = (left[..., :count] * _host(values)[..., None, :]) @ right[..., :count, :]
        order = (values[..., 1:] <= values[..., :-1]).all() & (values >= 0).all()
        return {"product": product, "u^T u": left.mT @ left, "v v^T": right @ right.mT, "in order": order[None]}
    values, vectors = torch.linalg.eigh(s, UPLO="U" if kind.endswith("upper") else "L")
    wide = _host(vectors)
    order = (values[..., 1:] >= values[..., :-1]).all()
    product = (wide * _host(values)[..., None, :]) @ wide.mT
    return {"product": product, "v^T v": wide.mT @ wide, "in order": order[None]}


def _unit(n: int, batch: int, limit: float) -> Exact:
    return Exact(torch.eye(n, dtype=torch.float64).expand(batch, n, n), torch.tensor(limit, dtype=torch.float64))


def singular_values(n: int, dtype: torch.dtype) -> float:
    """Error of singular values, and of the product of the factors, relative to the largest singular value.

    LAPACK's iterations take off-diagonal elements below a threshold for 0, in addition to the error of the rotations:
    100 u in xLASQ2, which computes the values alone, and at most 100 u in xBDSQR (u^(-1/8) u within 10 u and 100 u).
    Measured for matrices of 3 to 65 rows: 107 u without and 133 u with vectors.
    """
    return tolerances.orthogonal(n, dtype) + 100 * tolerances.unit_roundoff(dtype)


def _solved_exactly(a: torch.Tensor, b: torch.Tensor | None = None, *, point: Point) -> Expected:
    """Norms of the matrices are below 3, and of their inverses below 5: a backward error becomes at most 15 times as
    large relative to the solution."""
    kind, n, dtype = point["kind"], point["n"], point["dtype"]
    ones = torch.ones((), dtype=torch.float64)
    batch, columns = len(a), a.shape[2]
    s = _symmetric(a) if a.shape[1] == columns else a
    # Iterations of small matrices rotate more often than once for each row.
    of_vectors = tolerances.orthogonal(max(n, 4 if kind[:2] in ("ch", "lu", "qr") else 16), dtype)
    error = singular_values(max(n, 16), dtype) if kind.startswith("svd") else of_vectors
    if kind in SOLVERS:
        value = SOLVERS[kind](a, s, s if b is None else b)
        size = value.norm(dim=-2, keepdim=True)
        return {"output": Exact(value, 15 * tolerances.elimination(max(n, 4), dtype) * size)}
    if kind in FACTORS:
        of = a if kind[:2] in ("qr", "sv", "lu") else s
        norm = of.norm(dim=(1, 2), keepdim=True)
        found = {"product": Exact(of, error * norm)}
        full = kind in ("qr complete", "svd full")
        names = {"qr": ("q^T q",), "sv": ("u^T u", "v v^T"), "ei": ("v^T v",)}.get(kind[:2], ())
        # cuSOLVER's Jacobi rotations divide by the singular values, which makes an error up to 15 times as large.
        angle = 15 * of_vectors if kind.startswith("svd") else of_vectors
        for name in names:
            found[name] = _unit(columns if name == "v v^T" or not full else n, batch, angle)
        if kind[:2] in ("ch", "lu", "qr"):
            rows = n if full or kind[:2] in ("ch", "lu") else columns
            found["zeros"] = without_rounding(torch.zeros(batch, rows, columns, dtype=torch.float64))
        else:
            found["in order"] = without_rounding(torch.ones(1, dtype=torch.float64))
        return found
    if kind in ("det", "slogdet"):
        sign, logarithm = torch.linalg.slogdet(a)
        limit = 15 * n * tolerances.unit_roundoff(dtype) + tolerances.rounding(logarithm, dtype)
        if kind == "det":
            value = sign * logarithm.exp()
            return {"output": Exact(value, 2 * limit * value.abs())}
        return {"sign": without_rounding(sign), "logarithm": Exact(logarithm, limit)}
    if kind == "matrix_power":
        value, size = a @ a @ a @ a @ a, a.abs() @ a.abs() @ a.abs() @ a.abs() @ a.abs()
        return {"output": Exact(value, 5 * tolerances.gamma(n + 4, tolerances.ACCUMULATOR) * size * ones)}
    value = torch.linalg.svdvals(a) if kind == "svdvals" else torch.linalg.eigvalsh(s)
    return {"output": Exact(value, error * value.abs().amax(1, keepdim=True))}


def _is_system(point: Point) -> bool:
    return bool(point["batch"] * point["n"] ** 2 <= 40000)


def _is_transform(point: Point) -> bool:
    fits = point["rows"] * point["length"] <= 3000 and _size(point) <= 514
    return bool(fits and _size(point) > 1)


TRANSFORM_OPERATIONS: tuple[Any, ...] = (
    Operation(
        "fft",
        {
            "kind": TRANSFORMS,
            "dtype": DTYPES,
            "rows": (1, 2, 3, 5, 17, 33),
            "length": LENGTHS,
            "pad": PADS,
            "norm": NORMS,
            "over": ("rows", "columns"),
            "layout": LAYOUTS,
        },
        transform,
        {"standard": 160, "full": 1500},
        _is_transform,
    ),
)
SYSTEM_OPERATIONS: tuple[Any, ...] = (
    Operation(
        "matrix solution",
        {
            "kind": (*SOLVERS, *FACTORS, *VALUES),
            "dtype": DTYPES,
            "batch": (1, 2, 3, 9, 33),
            "n": (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 65, 80, 97, 129, 130),
            "columns": (1, 2, 3, 17, 33),
            "less": (0, 1, 3),
            "layout": ("contiguous", "transposed", "rows apart", "matrices apart", "shifted"),
        },
        system,
        {"standard": 200, "full": 1500},
        _is_system,
    ),
)
OPERATIONS = (*TRANSFORM_OPERATIONS, *SYSTEM_OPERATIONS)
