"""gemm.cases: matrix products of sampled sizes, layouts, dtypes and arguments.

Each case tests several sizes: products of the first rows, inner elements and columns of two matrices. One running sum
of outer products gives the expected results for all sizes, so that further sizes cost little.

There are two kinds of values. With "integers", results that the dtype represents must be exact. In float32 (without
TF32) and float64 these integers may have more digits than TF32, float16 or bfloat16 keep. With "fractions", the
products in the first half of a sum are positive and those in the second half negative, so that the two halves nearly
cancel. The result and its rounding error are then small, while a partial sum that was kept in too few digits, or was
left out, changes the result fully.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import backward_pass, hashed_inputs, pairwise_case_sampling, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, MATRICES, VECTORS, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.probes.gemm import product_form_cases

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Size = tuple[int, int, int]  # rows, inner elements, columns
Pair = tuple[str, str]  # the layouts of both factors
Weights = tuple[float, float]  # (alpha, beta): the factors of the product and of the added tensor

SMALL = (torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*SMALL, *SMALL, torch.float64)  # float64 once, because models seldom use it
VALUES = ("integers", "fractions")
# each size of a case differs from one of these, or of LONG and LONGER, by at most REACH
MULTIPLES = (0, 16, 32, 64, 128, 256)
LONG = (512, 2048)
LONGER = 4096  # a number of inner elements for which kernels split a sum over several blocks
REACH = 8
NEAREST = (-1, 0, 1)  # offsets from a multiple, for about half of the smaller sizes of a case
TRIED = 5  # number of sizes in a case, or fewer if some are equal; the largest comes first
MOST = 1 << 21  # maximum number of multiplications in a case's largest product
SUMMED = 1 << 11  # longest sum of fractions: in longer sums the tolerance hides an error of a single element
_ZERO = torch.zeros((), dtype=torch.float64)
# integers of up to this many bits are exact in the dtype
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
FACTOR_BITS = 12  # bits of an integer factor: one more than TF32 and float16 keep
TF32_BITS = 11

WEIGHTS: tuple[Weights, ...] = ((1.0, 1.0), (2.0, -1.0), (0.5, 3.0), (-1.0, 0.5), (1.0, 0.0), (-0.25, 1.0))
ADDED = ("matrix", "row", "column", "number", "row of each matrix", "one matrix for all")
BIASES = ("none", *VECTORS)


def gemm_cases(context: Context) -> None:
    """gemm.cases: products of many sizes, layouts, dtypes and arguments are right, and the gradients of linear too."""
    pairwise_case_sampling.check(context, sampled_operations(context.job.allow_tf32))


def sampled_operations(tf32: bool) -> tuple[Operation, ...]:
    """Return the operations of this probe. `tf32`: float32 factors may be rounded to TF32."""
    sizes = {"rows": (*MULTIPLES, *LONG), "inner": (*MULTIPLES, *LONG, LONGER), "columns": (*MULTIPLES, *LONG)}
    few = {"rows": MULTIPLES[:5], "inner": (*MULTIPLES, 512), "columns": MULTIPLES[:5]}
    kinds = {"dtype": DTYPES, "values": VALUES}
    matrices = {"left": MATRICES, "right": MATRICES}
    batches = {"left": BATCHES, "right": BATCHES, "batch": (1, 2, 3, 5)}
    makers = GemmMakers(tf32)
    return (
        Operation(
            "matrix product",
            {"call": tuple(PLAIN), **kinds, **sizes, **matrices},
            makers.plain,
            {"quick": 24, "standard": 130, "full": 1200},
            _fits,
        ),
        Operation(
            "batched product",
            {"call": tuple(BATCHED), **kinds, **few, **batches},
            makers.batched,
            {"quick": 18, "standard": 100, "full": 900},
            _fits,
        ),
        Operation(
            "weighted product",
            {"added": ADDED, "weights": WEIGHTS, **kinds, **few, **batches, "third": MATRICES},
            makers.weighted,
            {"quick": 14, "standard": 80, "full": 800},
            _fits_added,
        ),
        Operation(
            "long weighted product",
            {
                "added": ADDED[:2],
                "weights": WEIGHTS[:1],
                "dtype": SMALL,
                "values": VALUES,
                "rows": MULTIPLES[:3],
                "inner": (*LONG, LONGER),
                "columns": MULTIPLES[:3],
                "left": MATRICES[:2],
                "right": MATRICES[:2],
                "batch": (1, 2),
                "third": MATRICES[:1],
            },
            makers.weighted,
            {"quick": 8, "standard": 24, "full": 120},
            _fits_added,
        ),
        Operation(
            "product with a vector",
            {
                "call": tuple(OF_VECTORS),
                "weights": WEIGHTS,
                **kinds,
                "rows": sizes["rows"],
                "inner": sizes["inner"],
                "left": MATRICES,
                "right": VECTORS,
            },
            makers.with_vector,
            {"quick": 16, "standard": 80, "full": 700},
            _fits,
        ),
        Operation(
            "linear",
            {"bias": BIASES, "dimensions": (2, 3), **kinds, **sizes, **matrices},
            makers.linear,
            {"quick": 10, "standard": 60, "full": 600},
            _fits,
        ),
        Operation(
            "many small matrices",
            {"batch": (65537, 65543), "dtype": SMALL, "rows": (1, 2), "inner": (1, 3), "columns": (1, 2)},
            makers.many,
            {"quick": 1, "standard": 3, "full": 12},
        ),
        Operation(
            "product of 8-bit integers",
            {
                "rows": (17, 31, 33, 64, 129),
                "inner": (16, 32, 48, 128, 512),
                "columns": (16, 48, 64, 144),
                "left": MATRICES[:2],
                "right": MATRICES[:2],
            },
            of_bytes,
            {"quick": 2, "standard": 10, "full": 60},
        ),
        product_form_cases.product_form_operation(),
    )


def neighbour_sizes(multiple: int) -> list[int]:
    """Return the sizes within REACH of a multiple."""
    return list(range(max(1, multiple - REACH), multiple + REACH + 1))


def _fits(point: Point) -> bool:
    """Return whether at most one size is large, so that the reference is cheap, and whether the tolerance still detects
    an error of a single element."""
    most = [point[name] + REACH for name in ("rows", "inner", "columns") if name in point]
    work = math.prod(most) * point.get("batch", 1)
    # bfloat16 may not represent the partial sums of longer sums of random signs.
    is_seen = point["inner"] <= SUMMED or bool(point["values"] != "fractions" and point["dtype"] != torch.bfloat16)
    return is_seen and work <= MOST and sum(size > LONG[0] for size in most) <= 1


def _fits_added(point: Point) -> bool:
    """Return whether _fits holds, and the batch has several matrices if the arguments in `point` require a batch."""
    single = point["batch"] == 1
    alone = single and (point["added"] == "row of each matrix" or _is_batched(point["left"], point["right"]))
    return _fits(point) and not alone


def _is_batched(*layouts: str) -> bool:
    return any(layout not in MATRICES for layout in layouts)


def _mm_into_columns(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = a.new_full((b.shape[-1], a.shape[0]), math.nan).t()
    return torch.mm(a, b, out=out)


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# How each product is called. The lambdas look up torch's function at each call.
PLAIN: dict[str, Product] = {
    "mm": lambda a, b: torch.mm(a, b),
    "mm out= columns": _mm_into_columns,
    "matmul": lambda a, b: torch.matmul(a, b),
    "linear": lambda a, b: F.linear(a, b.t()),
    "einsum ik,kj->ij": lambda a, b: torch.einsum("ik,kj->ij", a, b),
    "einsum ik,kj->ji": lambda a, b: torch.einsum("ik,kj->ji", a, b).t(),
}


@dataclass(frozen=True)
class Batched:
    """A call with (batch, rows, inner) and (batch, inner, columns). If `single` is "left" or "right", that factor is
    one matrix."""

    call: Product
    single: str = ""
    pairs: bool = False  # multiply each left matrix by each right one


BATCHED = {
    "bmm": Batched(lambda a, b: torch.bmm(a, b)),
    "matmul": Batched(lambda a, b: torch.matmul(a, b)),
    "einsum bik,bkj->bij": Batched(lambda a, b: torch.einsum("bik,bkj->bij", a, b)),
    "einsum bik,bkj->ijb": Batched(lambda a, b: torch.einsum("bik,bkj->ijb", a, b).permute(2, 0, 1)),
    "bmm of an expanded left": Batched(lambda a, b: torch.bmm(a.expand(len(b), -1, -1), b), "left"),
    "bmm of an expanded right": Batched(lambda a, b: torch.bmm(a, b.expand(len(a), -1, -1)), "right"),
    "matmul of one left": Batched(lambda a, b: torch.matmul(a[0], b), "left"),
    "matmul of one right": Batched(lambda a, b: torch.matmul(a, b[0]), "right"),
    "matmul of all pairs": Batched(lambda a, b: torch.matmul(a[:, None], b[None]), pairs=True),
    "einsum bik,ckj->bcij": Batched(lambda a, b: torch.einsum("bik,ckj->bcij", a, b), pairs=True),
}


@dataclass(frozen=True)
class OfVector:
    """A call that multiplies a matrix and a vector.

    `rows`: the number of rows that the matrix must have; None allows any. `left`: the vector is the left factor.
    `weighted`: the call takes alpha and beta.
    """

    call: Callable[..., torch.Tensor]
    rows: int | None = None
    left: bool = False
    weighted: bool = False


OF_VECTORS = {
    "mv": OfVector(lambda a, v: torch.mv(a, v)),
    "matmul": OfVector(lambda a, v: torch.matmul(a, v)),
    "matmul of a vector": OfVector(lambda a, v: torch.matmul(v, a.t()), left=True),
    "linear of a vector": OfVector(lambda a, v: F.linear(v, a), left=True),
    "linear of one row": OfVector(lambda a, v: F.linear(v[None], a)[0], left=True),
    "mm of one row": OfVector(lambda a, v: torch.mm(v[None], a.t())[0], left=True),
    "mm of one column": OfVector(lambda a, v: torch.mm(a, v[:, None])[:, 0]),
    "dot": OfVector(lambda a, v: torch.dot(a[0], v)[None], rows=1),
    "addmv": OfVector(lambda a, v, c, **weights: torch.addmv(c, a, v, **weights), weighted=True),
}


@dataclass(frozen=True)
class GemmMakers:
    """Build the case of each operation for one combination of parameter values (`point`)."""

    tf32: bool

    def plain(self, point: Point, seed: int) -> Case:
        sizes = _sizes(point, seed)
        given = self._factors(point, sizes[0], seed)
        layouts = [_layouts(point, number, is_batched=False) for number in range(len(sizes))]
        call = functools.partial(_call, call=PLAIN[point["call"]], sizes=sizes, layouts=layouts)
        exact = functools.partial(_products, how=self._how(point), sizes=sizes, layouts=layouts)
        return Case(f"{point['call']} of {point['values']}", point["dtype"], given, call, exact)

    def batched(self, point: Point, seed: int) -> Case:
        batched, count, sizes = BATCHED[point["call"]], point["batch"], _sizes(point, seed)
        left, right = (1 if batched.single == side else count for side in ("left", "right"))
        given = self._factors(point, sizes[0], seed, (left,), (right,))
        layouts = [_layouts(point, number, is_batched=True) for number in range(len(sizes))]
        call = functools.partial(_call, call=batched.call, sizes=sizes, layouts=layouts)
        name = f"{point['call']} of {left} by {right} matrices of {point['values']}"
        exact = functools.partial(_products, how=self._how(point), sizes=sizes, layouts=layouts, pairs=batched.pairs)
        return Case(name, point["dtype"], given, call, exact)

    def weighted(self, point: Point, seed: int) -> Case:
        """Build a case of addmm or baddbmm: beta times the added tensor, plus alpha times the product."""
        sizes = _sizes(point, seed)
        count = point["batch"]
        batch = (count,) if count > 1 else ()
        m, _, n = sizes[0]
        alpha, beta = point["weights"]
        shape = {
            "matrix": (*batch, m, n),
            "row": (n,),
            "column": (m, 1),
            "number": (1, 1),
            "row of each matrix": (*batch, 1, n),
            "one matrix for all": (*(1 for _ in batch), m, n),
        }[point["added"]]
        given = self._factors(point, sizes[0], seed, batch, batch)
        added = hashed_inputs.whole(shape, seed + 2, 3).to(point["dtype"])
        layouts = [_layouts(point, number, bool(batch)) for number in range(len(sizes))]
        call = functools.partial(_weighted, point=point, sizes=sizes, layouts=layouts)
        exact = functools.partial(
            _weighted_products, how=self._how(point), sizes=sizes, weights=(alpha, beta), layouts=layouts
        )
        what = f"{beta:g} {point['third']} {point['added']}" if beta else "0 NaN"
        many = f"baddbmm {count}x" if batch else "addmm"
        name = f"{many} {what} + {alpha:g} product of {point['values']}"
        return Case(name, point["dtype"], (*given, *([added] if beta else [])), call, exact)

    def with_vector(self, point: Point, seed: int) -> Case:
        how, sizes = OF_VECTORS[point["call"]], _sizes(point, seed)
        sizes = [(how.rows or m, k, 1) for m, k, _ in sizes]
        a, b = self._factors(point, sizes[0], seed)
        alpha, beta = point["weights"] if how.weighted else (1.0, 0.0)
        added = hashed_inputs.whole((sizes[0][0], 1), seed + 2, 3).to(point["dtype"])
        call = functools.partial(_with_vector, call=how, point=point, sizes=sizes, weights=(alpha, beta))
        exact = functools.partial(_weighted_products, how=self._how(point), sizes=sizes, weights=(alpha, beta))
        what = f"{beta:g} {'vector' if beta else 'NaN'} + {alpha:g} " if how.weighted else "of "
        name = f"{point['call']} {what}{point['left']} and {point['right']}, {point['values']}"
        return Case(name, point["dtype"], (a, b, *([added] if beta else [])), call, exact)

    def linear(self, point: Point, seed: int) -> Case:
        sizes = _sizes(point, seed)[: TRIED // 2]
        m, _, n = sizes[0]
        x, w = self._factors(point, sizes[0], seed)
        grad = hashed_inputs.whole((m, n), seed + 2, 1).to(point["dtype"])
        given = [x, w.t().contiguous(), grad]
        if point["bias"] != "none":
            given.append(hashed_inputs.whole((n,), seed + 3, 3).to(point["dtype"]))
        name = (
            f"linear of {point['dimensions']} dimensions, {point['left']} by {point['right']}, bias {point['bias']}, "
            f"{point['values']}"
        )
        run = functools.partial(_linear, point=point, sizes=sizes)
        exact = functools.partial(_linear_exactly, how=self._how(point), sizes=sizes)
        return Case(name, point["dtype"], tuple(given), run, exact)

    def many(self, point: Point, seed: int) -> Case:
        count, m, k, n = (point[name] for name in ("batch", "rows", "inner", "columns"))
        a, b = hashed_inputs.whole((count, m, k), seed, 7), hashed_inputs.whole((count, k, n), seed + 1, 3)
        name = f"bmm {count}x{m}x{k}x{n}"
        return Case(name, point["dtype"], (a.to(point["dtype"]), b.to(point["dtype"])), _many, _many_exactly)

    def _how(self, point: Point) -> How:
        return How(point["dtype"], point["values"], self.tf32)

    def _factors(
        self, point: Point, size: Size, seed: int, left: tuple[int, ...] = (), right: tuple[int, ...] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors on the host, (left, rows, inner) and (right, inner, columns)."""
        (m, k, n), dtype = size, point["dtype"]
        if point["values"] == "fractions":
            # Magnitudes between 1/2 and 1, so that all elements matter about equally.
            a, b = (
                (1 + hashed_inputs.uniform((*left, m, k), seed)) / 2,
                (1 + hashed_inputs.uniform((*right, k, n), seed + 1)) / 2,
            )
            a[..., k // 2 :] *= -1
        else:
            most = [self._most(dtype, k), 1]
            if seed % 2:
                most.reverse()
            a, b = (
                hashed_inputs.whole((*left, m, k), seed, most[0]),
                hashed_inputs.whole((*right, k, n), seed + 1, most[1]),
            )
        return a.to(dtype), b.to(dtype)

    def _most(self, dtype: torch.dtype, k: int) -> int:
        """Return the largest integer factor with which sums of k products of random signs (nearly always) are integers
        that the dtype represents."""
        bits = TF32_BITS if self.tf32 and dtype == torch.float32 else min(FACTOR_BITS, BITS[dtype])
        return int(max(1, min((1 << bits) - 1, 2 ** BITS[dtype] // (4 * math.sqrt(k)))))


@dataclass(frozen=True)
class How:
    """The dtype of the results, the kind of values in the factors, and whether TF32 is allowed."""

    dtype: torch.dtype
    values: str
    tf32: bool

    def judged(self, value: torch.Tensor, magnitude: torch.Tensor, k: int, *steps: torch.Tensor) -> Exact:
        """A result with its tolerance. `steps`: intermediate results that a kernel may round to the dtype, as it does
        the result; values that the dtype can represent add no rounding error. `magnitude`: the result with every
        product and every term positive."""
        rounded = sum((self._rounding(step) for step in steps), self._rounding(value))
        if self.values == "integers":
            return Exact(value, rounded.expand_as(value))
        # The added tensor and alpha cause four more roundings in the accumulator.
        return Exact(value, tolerances.gemm(_ZERO, magnitude, k + 4, self.dtype, self.tf32) + rounded)

    def _rounding(self, value: torch.Tensor) -> torch.Tensor:
        """Return the rounding errors in the shape of the value, or a single zero if nothing is rounded."""
        nearest = value.to(self.dtype).to(torch.float64)
        if torch.equal(nearest, value):
            return _ZERO
        return torch.where(nearest != value, tolerances.rounding(value, self.dtype), 0.0)


def _sizes(point: Point, seed: int) -> list[Size]:
    """Return the sizes of a case. The first one is the largest and contains every element."""
    numbers = random.Random(f"sizes {seed}")
    dimensions = [neighbour_sizes(point.get(name, 0)) for name in ("rows", "inner", "columns")]
    sizes = [tuple(sizes[-1] for sizes in dimensions)]
    for _ in range(TRIED - 1):
        sizes.append(tuple(_near(numbers, around) for around in dimensions))
    return list(dict.fromkeys(sizes))  # type: ignore[arg-type]


def _near(numbers: random.Random, sizes: Sequence[int]) -> int:
    """Return one of these sizes. Half of the time it is the multiple at their centre or a direct neighbour of it,
    otherwise any size. For the multiple 0, all sizes are equally likely."""
    if len(sizes) > REACH and numbers.random() < 0.5:
        return sizes[-1] - REACH + NEAREST[int(numbers.random() * len(NEAREST))]
    return sizes[int(numbers.random() * len(sizes))]


def leading(a: torch.Tensor, b: torch.Tensor, sizes: Sequence[Size]) -> list[torch.Tensor]:
    """Return a[..., :m, :k] times b[..., :k, :n] for each (m, k, n), in float64. Each sum over k continues the sum of
    the next smaller k."""
    found: dict[Size, torch.Tensor] = {}
    total, done = torch.zeros((), dtype=torch.float64), 0
    for m, k, n in sorted(sizes, key=lambda size: size[1]):
        if k > done:
            total = total + product(a[..., done:k], b[..., done:k, :])
            done = k
        found[m, k, n] = total[..., :m, :n]
    return [found[size] for size in sizes]


def _each(
    how: How, a: torch.Tensor, b: torch.Tensor, sizes: Sequence[Size]
) -> Iterator[tuple[Size, torch.Tensor, torch.Tensor]]:
    """Yield each size with its product, and with the product of the absolute values. Only fractions need the latter;
    for integers, the product itself takes its place."""
    values = leading(a, b, sizes)
    magnitudes = leading(a.abs(), b.abs(), sizes) if how.values == "fractions" else values
    yield from zip(sizes, values, magnitudes)


def _with_optional(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return both factors, and the added tensor or None."""
    a, b, *added = given
    return a, b, added[0] if added else None


def _title(size: Size, layouts: Pair | None = None) -> str:
    name = "x".join(map(str, size))
    return f"{name} {' by '.join(layouts)}" if layouts else name


def _part(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return the first rows and columns; a dimension of size 1 is kept, because it is broadcast."""
    x = x[..., :columns] if x.shape[-1] > 1 else x
    return x[..., :rows, :] if x.dim() > 1 and x.shape[-2] > 1 else x


def _layouts(point: Point, number: int, is_batched: bool) -> tuple[str, str]:
    """Return the layouts for the size with this index. The first size has the layouts in `point`, each further size has
    different ones."""
    choices = BATCHES if is_batched else MATRICES
    left, right = (choices.index(layout) if layout in choices else 0 for layout in (point["left"], point["right"]))
    return choices[(left + number) % len(choices)], choices[(right + 3 * number) % len(choices)]


def _call(a: torch.Tensor, b: torch.Tensor, call: Product, sizes: Sequence[Size], layouts: Sequence[Pair]) -> Results:
    """Return the products of all sizes. Then repeat the largest, and compute it with its rows reversed, to detect a
    result kept in a cache."""

    def run(left: torch.Tensor, right: torch.Tensor, pair: Pair) -> torch.Tensor:
        return call(with_large_gaps(left, pair[0]), with_large_gaps(right, pair[1]))

    found = {}
    for (m, k, n), pair in zip(sizes, layouts):
        found[_title((m, k, n), pair)] = run(a[..., :m, :k], b[..., :k, :n], pair)
    largest = _title(sizes[0])
    found[f"{largest} again"] = run(a, b, layouts[0])
    found[f"{largest} of reversed rows"] = run(a.flip(-2), b, layouts[0])
    return found


def _products(
    a: torch.Tensor, b: torch.Tensor, how: How, sizes: Sequence[Size], layouts: Sequence[Pair], pairs: bool = False
) -> Expected:
    if pairs:
        a, b = a[:, None], b[None]
    found = {}
    for (size, value, magnitude), pair in zip(_each(how, a, b, sizes), layouts):
        found[_title(size, pair)] = how.judged(value, magnitude, size[1])
    largest = _title(sizes[0])
    whole = found[_title(sizes[0], layouts[0])]
    found[f"{largest} again"] = whole
    found[f"{largest} of reversed rows"] = Exact(whole.value.flip(-2), whole.bound.flip(-2))
    return found


def _weighted(*given: torch.Tensor, point: Point, sizes: Sequence[Size], layouts: Sequence[Pair]) -> Results:
    """Return the weighted products in a new tensor, and computed in place where the added tensor has the shape of the
    result. If beta is 0, the added tensor is NaN, because torch must not read it (torch.addmm's documentation)."""
    a, b, c = _with_optional(given)
    alpha, beta = point["weights"]
    found = {}
    for (m, k, n), pair in zip(sizes, layouts):
        title = _title((m, k, n), pair)
        left, right = with_large_gaps(a[..., :m, :k], pair[0]), with_large_gaps(b[..., :k, :n], pair[1])
        added = left.new_full((*left.shape[:-1], n), math.nan) if c is None else _part(c, m, n)
        if added.dim() > 1 or point["third"] in VECTORS:
            added = with_large_gaps(added, point["third"])
        function = torch.addmm if left.dim() == 2 else torch.baddbmm
        found[title] = function(added, left, right, beta=beta, alpha=alpha)
        if added.shape == (*left.shape[:-1], n):
            place = added.clone()
            inside = place.addmm_ if left.dim() == 2 else place.baddbmm_
            found[f"{title} in place"] = inside(left, right, beta=beta, alpha=alpha)
    return found


def _weighted_products(
    *given: torch.Tensor, how: How, sizes: Sequence[Size], weights: Weights, layouts: Sequence[Pair] | None = None
) -> Expected:
    """Return the expected results. The kernel may round the product before it is multiplied by alpha, and the weighted
    product before it is added."""
    a, b, c = _with_optional(given)
    alpha, beta = weights
    found = {}
    for number, (size, value, magnitude) in enumerate(_each(how, a, b, sizes)):
        m, k, n = size
        title = _title(size, layouts[number] if layouts else None)
        steps = [value, alpha * value]
        total, most = alpha * value, abs(alpha) * magnitude
        if c is not None:
            added = beta * _part(c, m, n)
            total, most = total + added, most + added.abs()
        exact = how.judged(total, most, k, *steps)
        found[title] = exact
        if layouts and (c is None or _part(c, m, n).shape == total.shape):
            found[f"{title} in place"] = exact
    return found


def _with_vector(
    *given: torch.Tensor, call: OfVector, point: Point, sizes: Sequence[Size], weights: Weights
) -> Results:
    a, b, c = _with_optional(given)
    alpha, beta = weights
    found = {}
    for m, k, n in sizes:
        matrix, vector = with_large_gaps(a[:m, :k], point["left"]), with_large_gaps(b[:k, 0], point["right"])
        rest: list[Any] = []
        options: dict[str, float] = {}
        if call.weighted:
            rest.append(a.new_full((m,), math.nan) if c is None else with_large_gaps(c[:m, 0], point["right"]))
            options = {"alpha": alpha, "beta": beta}
        found[_title((m, k, n))] = call.call(matrix, vector, *rest, **options)[:, None]
    return found


def _linear(*given: torch.Tensor, point: Point, sizes: Sequence[Size]) -> Results:
    x, w, grad, *bias = given
    found = {}
    for m, k, n in sizes:
        title = _title((m, k, n))
        leaves = [with_large_gaps(x[:m, :k], point["left"]), with_large_gaps(w[:n, :k], point["right"])]
        leaves += [with_large_gaps(b[:n], point["bias"]) for b in bias]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        batch = [m]
        if point["dimensions"] == 3:
            rows = next(count for count in (4, 3, 2, 1) if m % count == 0)
            batch = [rows, m // rows]
        output = F.linear(leaves[0].view(*batch, k), *leaves[1:])
        computed = backward_pass.gradients(output, leaves, grad[:m, :n].reshape(*batch, n))
        found[title] = output.detach().reshape(m, n)
        for name, gradient in zip(("x", "weight", "bias"), computed):
            found[f"{title} gradient of {name}"] = gradient
    return found


def _linear_exactly(*given: torch.Tensor, how: How, sizes: Sequence[Size]) -> Expected:
    x, w, grad, *bias = given
    found = {}
    for size, value, magnitude in _each(how, x, w.t(), sizes):
        _, k, n = size
        found[_title(size)] = how.judged(value, magnitude, k)
        for b in bias:
            found[_title(size)] = how.judged(value + b[:n], magnitude + b[:n].abs(), k, value)
    ones = torch.ones(1, len(grad), dtype=torch.float64)
    factors = {
        "x": (grad, w, [(m, n, k) for m, k, n in sizes]),
        "weight": (grad.t(), x, [(n, m, k) for m, k, n in sizes]),
        **({"bias": (ones, grad, [(1, m, n) for m, k, n in sizes])} if bias else {}),
    }
    for name, (left, right, turned) in factors.items():
        for size, (inner, value, magnitude) in zip(sizes, _each(how, left, right, turned)):
            exact = how.judged(value, magnitude, inner[1])
            if name == "bias":
                exact = Exact(exact.value[0], exact.bound[0])
            found[f"{_title(size)} gradient of {name}"] = exact
    return found


def of_bytes(point: Point, seed: int) -> Case:
    """Build a case of torch._int_mm. Each product is at most 127^2; many of their sums need more than 16 bits."""
    m, k, n = (point[name] for name in ("rows", "inner", "columns"))
    a, b = (
        hashed_inputs.whole((m, k), seed, 127).to(torch.int8),
        hashed_inputs.whole((k, n), seed + 1, 63).abs().to(torch.int8) + 64,
    )
    layouts = point["left"], point["right"]
    run = functools.partial(_of_bytes, layouts=layouts)
    return Case(f"_int_mm {_title((m, k, n), layouts)}", torch.int8, (a, b), run, _of_bytes_exactly)


def _of_bytes(a: torch.Tensor, b: torch.Tensor, layouts: Pair) -> Results:
    if not hasattr(torch, "_int_mm") or (a.is_cuda and torch.cuda.get_device_capability(a.device) < (8, 0)):
        raise NotImplementedError("no product of 8-bit integers")
    try:
        return {"output": torch._int_mm(with_large_gaps(a, layouts[0]), with_large_gaps(b, layouts[1]))}
    except RuntimeError as error:
        if layouts == ("contiguous", "contiguous") or "CUBLAS_STATUS_NOT_SUPPORTED" not in str(error):
            raise
        raise NotImplementedError(f"no product of 8-bit integers in these layouts: {error}") from error


def _of_bytes_exactly(a: torch.Tensor, b: torch.Tensor) -> Expected:
    return {"output": without_rounding(product(a.to(torch.int64), b.to(torch.int64)))}


def _many(a: torch.Tensor, b: torch.Tensor) -> Results:
    return {"output": torch.bmm(a, b)}


def _many_exactly(a: torch.Tensor, b: torch.Tensor) -> Expected:
    return {"output": without_rounding((a[..., None] * b[:, None]).sum(2))}


OPERATIONS = sampled_operations(tf32=False)
