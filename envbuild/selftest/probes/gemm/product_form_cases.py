"""gemm.cases: further forms of products, with their gradients: each is a sum over indices of products of its factors.

An equation such as "bmk,bkn->bmn" describes a form. The reference for its result, and for the gradient of each factor,
uses no matrix product. It multiplies the factors broadcast over all indices, and then adds the products. All values are
integers. With few exceptions, the dtype represents all of their sums, so that every order of summation gives the same
result.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.complex_parts import real_pairs
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import MATRICES, VECTORS, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.reference_products import one_thread

Weights = tuple[float, float]  # (alpha, beta): the factors of the product and of the added tensor

MOST = 1 << 17  # maximum number of products of a case
SPREADS = 6.0  # a sum of n products of random signs is nearly always below 6 sqrt(n) times the largest product
# The largest factor. In float32 it has no more digits than TF32 keeps. In float64, products have more digits than
# float32 keeps.
LARGEST = {torch.float64: 1 << 24, torch.float32: 99, torch.float16: 99, torch.bfloat16: 99}
WEIGHTS: tuple[Weights, ...] = ((1.0, 1.0), (2.0, -1.0), (0.5, 2.0), (-1.0, 0.5), (1.0, 0.0))
SIZES = (1, 2, 3, 5, 8, 9, 16, 17, 31, 33, 64, 65)
REAL_ONLY = "bilinear"  # torch cannot compute its gradient for complex numbers
COUNTS = {"quick": 40, "standard": 260, "full": 2400}


@dataclass(frozen=True)
class Form:
    """A form of a product. `call`: takes the factors in the order of the equation.

    `weighted`: the call first takes an added tensor, which has the shape of the result, and also takes alpha and beta.
    `conjugated`: the indices of the factors that are replaced by their complex conjugates. `differentiable`: torch can
    compute the gradients.
    """

    equation: str
    call: Callable[..., torch.Tensor]
    weighted: bool = False
    conjugated: tuple[int, ...] = ()
    differentiable: bool = True

    @property
    def factors(self) -> list[str]:
        return self.equation.partition("->")[0].split(",")

    @property
    def result(self) -> str:
        return self.equation.partition("->")[2]


def _out_apart(function: Callable[..., torch.Tensor], *given: torch.Tensor, **options: float) -> torch.Tensor:
    """Call a function with an `out` argument that is a part of a larger tensor of NaN."""
    shape = (*given[-2].shape[:-1], given[-1].shape[-1])
    out = given[-1].new_full((*shape[:-2], shape[-2] + 2, shape[-1] + 3), math.nan)[..., 1:-1, 2:-1]
    return function(*given, out=out, **options)


def _in_place(name: str) -> Callable[..., torch.Tensor]:
    return lambda c, *factors, **weights: getattr(c.clone(), name)(*factors, **weights)


def _kron(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """torch.kron of contiguous copies of the factors, because torch.kron refuses some strides; the result has four
    dimensions."""
    factors = (values.clone(memory_format=torch.contiguous_format) for values in (a, b))
    return torch.kron(*factors).view(len(a), len(b), a.shape[1], b.shape[1])


# The lambdas look up torch's function at each call. Indices: m rows, k inner elements, n columns, b batch, h heads.
FORMS: dict[str, Form] = {
    "mm": Form("mk,kn->mn", lambda a, b: torch.mm(a, b)),
    "matmul of transposed": Form("km,nk->mn", lambda a, b: torch.matmul(a.t(), b.t())),
    "addmm": Form("mk,kn->mn", lambda c, a, b, **weights: torch.addmm(c, a, b, **weights), weighted=True),
    "addmm out=": Form(
        "mk,kn->mn",
        lambda c, a, b, **weights: _out_apart(torch.addmm, c, a, b, **weights),
        weighted=True,
        differentiable=False,
    ),
    "bmm": Form("bmk,bkn->bmn", lambda a, b: torch.bmm(a, b)),
    "bmm out=": Form("bmk,bkn->bmn", lambda a, b: _out_apart(torch.bmm, a, b), differentiable=False),
    "baddbmm": Form("bmk,bkn->bmn", lambda c, a, b, **weights: torch.baddbmm(c, a, b, **weights), weighted=True),
    "addbmm": Form("bmk,bkn->mn", lambda c, a, b, **weights: torch.addbmm(c, a, b, **weights), weighted=True),
    "addbmm_": Form("bmk,bkn->mn", _in_place("addbmm_"), weighted=True, differentiable=False),
    "mv": Form("mk,k->m", lambda a, v: torch.mv(a, v)),
    "addmv": Form("mk,k->m", lambda c, a, v, **weights: torch.addmv(c, a, v, **weights), weighted=True),
    "addmv_": Form("mk,k->m", _in_place("addmv_"), weighted=True, differentiable=False),
    "dot": Form("k,k->", lambda v, w: torch.dot(v, w)),
    "vdot": Form("k,k->", lambda v, w: torch.vdot(v, w), conjugated=(0,)),
    "outer": Form("m,n->mn", lambda v, w: torch.outer(v, w)),
    "addr": Form("m,n->mn", lambda c, v, w, **weights: torch.addr(c, v, w, **weights), weighted=True),
    "addr_": Form("m,n->mn", _in_place("addr_"), weighted=True, differentiable=False),
    "inner": Form("mk,nk->mn", lambda a, b: torch.inner(a, b)),
    "adjoint": Form("km,kn->mn", lambda a, b: torch.mm(a.mH, b), conjugated=(0,)),
    "adjoint of a batch": Form("bmk,bnk->bmn", lambda a, b: torch.bmm(a, b.mH), conjugated=(1,)),
    "linear": Form("bmk,nk->bmn", lambda x, w: F.linear(x, w)),
    "bilinear": Form("bm,hmn,bn->bh", lambda x, w, y: F.bilinear(x, y, w)),
    "matmul of 4 dimensions": Form("bhmk,bhkn->bhmn", lambda a, b: torch.matmul(a, b)),
    "matmul of split heads": Form(
        "bmhk,bnhk->bhmn", lambda a, b: torch.matmul(a.transpose(1, 2), b.permute(0, 2, 3, 1))
    ),
    "matmul of broadcast batches": Form("bmk,hkn->bhmn", lambda a, b: torch.matmul(a[:, None], b)),
    "matmul of a batch and a matrix": Form("bmk,kn->bmn", lambda a, b: torch.matmul(a, b)),
    "matmul of a matrix and a batch": Form("mk,bkn->bmn", lambda a, b: torch.matmul(a, b)),
    "matmul of a batch and a vector": Form("bmk,k->bm", lambda a, v: torch.matmul(a, v)),
    "matmul of a vector and a batch": Form("k,bkn->bn", lambda v, b: torch.matmul(v, b)),
    "tensordot": Form("bmk,bkn->mn", lambda a, b: torch.tensordot(a, b, dims=([0, 2], [0, 1]))),
    "einsum to heads": Form("bmk,khn->bhmn", lambda a, b: torch.einsum("bmk,khn->bhmn", a, b)),
    "einsum of scores": Form("bmhk,bnhk->bhmn", lambda a, b: torch.einsum("bmhk,bnhk->bhmn", a, b)),
    "einsum of values": Form("bhmk,bkhn->bmhn", lambda a, b: torch.einsum("bhmk,bkhn->bmhn", a, b)),
    "einsum of rows": Form("bmk,bmk->bm", lambda a, b: torch.einsum("bmk,bmk->bm", a, b)),
    "einsum with a sum": Form("mk,kn->m", lambda a, b: torch.einsum("mk,kn->m", a, b)),
    "einsum of all": Form("mk,mk->", lambda a, b: torch.einsum("mk,mk->", a, b)),
    "einsum outer": Form("bm,bn->bmn", lambda a, b: torch.einsum("bm,bn->bmn", a, b)),
    "einsum of three": Form("bm,mn,bn->b", lambda x, w, y: torch.einsum("bm,mn,bn->b", x, w, y)),
    "multi_dot": Form("mk,kn,nh->mh", lambda a, b, c: torch.linalg.multi_dot((a, b, c))),
    "kron": Form("mk,nh->mnkh", _kron),
}


def product_form_operation() -> Operation:
    """Return the operation that samples these forms."""
    space: Mapping[str, Sequence[Any]] = {
        "form": tuple(FORMS),
        "dtype": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
        "complex": (False, False, True),
        "weights": WEIGHTS,
        "m": SIZES,
        "k": (*SIZES, 129, 257),
        "n": SIZES,
        "b": (1, 2, 3, 5),
        "h": (1, 2, 3),
        "left": MATRICES,
        "right": MATRICES,
        "upstream": MATRICES,
        "conjugate view": (False, True),
    }
    return Operation("form of a product", space, case, COUNTS, _possible)


def _possible(point: Point) -> bool:
    """Return whether the case is small enough, its sums are short enough for the dtype, and the dtype and the form
    support complex numbers if the case has them."""
    is_real = point["dtype"] not in (torch.float32, torch.float64) or point["form"] == REAL_ONLY
    form = FORMS[point["form"]]
    letters = set(form.equation) - set(",->")
    terms = math.prod(point[letter] for letter in letters - set(form.result))
    short = terms <= 256 or point["dtype"] != torch.bfloat16
    return not (point["complex"] and is_real) and short and math.prod(point[letter] for letter in letters) <= MOST


def case(point: Point, seed: int) -> Case:
    """Build the case for one combination of parameter values (`point`). Its inputs are the factors, the gradient of the
    result, and the added tensor. Complex numbers are given as pairs of real ones."""
    form, dtype = FORMS[point["form"]], point["dtype"]
    pair = (2,) if point["complex"] else ()
    most = _most(point, form)
    shapes = [_shape(letters, point) for letters in form.factors]
    given = [hashed_inputs.whole((*shape, *pair), 9 * seed + number, most) for number, shape in enumerate(shapes)]
    result = (*_shape(form.result, point), *pair)
    has_added = form.weighted and point["weights"][1] != 0
    if form.differentiable:
        given.append(hashed_inputs.whole(result, 9 * seed + 4, 1))
    if has_added:
        given.append(hashed_inputs.whole(result, 9 * seed + 5, 3))
    sizes = " by ".join("x".join(map(str, shape)) for shape in shapes)
    alpha, beta = point["weights"]
    weights = f" {beta:g} {'added' if beta else 'NaN'} + {alpha:g}" if form.weighted else ""
    numbers = " complex" if point["complex"] else ""
    views = ", conjugate views" if point["complex"] and point["conjugate view"] else ""
    layouts = f"{point['left']} by {point['right']}, gradient {point['upstream']}"
    name = f"{point['form']}{weights} of{numbers} {sizes}, {layouts}{views}"
    run = functools.partial(_run, form=form, point=point)
    return Case(
        name, dtype, tuple(part.to(dtype) for part in given), run, functools.partial(_exact, form=form, point=point)
    )


def _shape(letters: str, point: Point) -> tuple[int, ...]:
    return tuple(point[letter] for letter in letters)


def _most(point: Point, form: Form) -> int:
    """Return the largest factor with which sums of products are (nearly always) integers below 1 / u, which the dtype
    represents."""
    letters = set(form.equation) - set(",->")
    terms = max(math.prod(point[letter] for letter in letters - set(left)) for left in (form.result, *form.factors))
    terms *= 2 ** len(form.factors) if point["complex"] else 1
    room = 1 / tolerances.unit_roundoff(point["dtype"]) / (2 * SPREADS * math.sqrt(terms))
    return int(max(1, min(LARGEST[point["dtype"]], room ** (1 / len(form.factors)))))


def _numbers(values: torch.Tensor, point: Point) -> torch.Tensor:
    return torch.view_as_complex(values.contiguous()) if point["complex"] else values


def _laid_out(values: torch.Tensor, layout: str, is_conjugate: bool) -> torch.Tensor:
    """Return a copy in the given layout. If `is_conjugate`, the copy holds the conjugates and is returned as a lazy
    conjugate view."""
    if is_conjugate:
        return _laid_out(values.conj().resolve_conj(), layout, False).conj()
    if values.dim() == 0:
        return values
    if values.dim() == 1 and layout not in VECTORS:
        layout = VECTORS[MATRICES.index(layout) % len(VECTORS)]
    return with_large_gaps(values, layout)


def _run(*given: torch.Tensor, form: Form, point: Point) -> dict[str, torch.Tensor]:
    count = len(form.factors)
    layouts = (point["left"], point["right"], point["left"])
    is_view = point["complex"] and point["conjugate view"]
    numbers = [_numbers(values, point) for values in given]
    leaves = [
        _laid_out(values, layout, is_view).detach().requires_grad_(form.differentiable)
        for values, layout in zip(numbers[:count], layouts)
    ]
    if not form.weighted:
        output = form.call(*leaves)
    else:
        alpha, beta = point["weights"]
        shape = _shape(form.result, point)
        added = numbers[-1] if beta else leaves[0].new_full(shape, math.nan)
        added = _laid_out(added.detach(), point["upstream"], False).requires_grad_(form.differentiable)
        output = form.call(added, *leaves, alpha=alpha, beta=beta)
        leaves += [added] if beta and form.differentiable else []
    found = {"output": real_pairs(output.detach())}
    if form.differentiable:
        upstream = real_pairs(_laid_out(numbers[count], point["upstream"], False))
        for number, gradient in enumerate(backward_pass.gradients(real_pairs(output), leaves, upstream)):
            name = f"gradient of factor {number}" if number < count else "gradient of what is added"
            found[name] = real_pairs(gradient)
    return found


def _exact(*given: torch.Tensor, form: Form, point: Point) -> dict[str, Exact]:
    """Return the exact results. The gradient of a factor is the sum of products of the result's gradient with the
    conjugates of the other factors. This gradient is conjugated if the form conjugates the factor."""
    count, factors = len(form.factors), form.factors
    numbers = [_numbers(values, point) for values in given]
    used = [value.conj() if number in form.conjugated else value for number, value in enumerate(numbers[:count])]
    alpha, beta = point["weights"] if form.weighted else (1.0, 0.0)
    product = contract(form.equation, used)
    added = beta * numbers[-1] if beta else torch.zeros_like(product)
    found = {"output": _judged(alpha * product + added, point, product, alpha * product, added)}
    if not form.differentiable:
        return found
    for number, letters in enumerate(factors):
        others = [(factors[n], used[n].conj()) for n in range(count) if n != number]
        equation = ",".join((form.result, *(letters for letters, _ in others)))
        gradient = contract(f"{equation}->{letters}", [numbers[count], *(value for _, value in others)])
        # an index that occurs only in this factor is summed over, so the gradient is constant along it
        gradient = gradient.expand_as(numbers[number])
        gradient = gradient.conj().resolve_conj() if number in form.conjugated else gradient
        found[f"gradient of factor {number}"] = _judged(alpha * gradient, point, gradient)
    if beta:
        found["gradient of what is added"] = _judged(beta * numbers[count], point)
    return found


def _judged(value: torch.Tensor, point: Point, *steps: torch.Tensor) -> Exact:
    """Return a result with its tolerance: the rounding of values that the dtype does not represent, in the result and
    in the intermediate results `steps`."""
    value, limit = real_pairs(value), torch.zeros((), dtype=torch.float64)
    for step in (value, *map(real_pairs, steps)):
        off = step.to(point["dtype"]).to(torch.float64) != step
        limit = limit + torch.where(off, tolerances.rounding(step, point["dtype"]), 0.0)
    return Exact(value, limit.expand_as(value))


def contract(equation: str, factors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of products that an equation such as "mk,kn->mn" describes, without using a matrix product."""
    names, _, result = equation.partition("->")
    letters = sorted(set(equation) - set(",->") - set(result))
    order = [*letters, *result]
    with one_thread():
        terms = torch.ones((), dtype=factors[0].dtype)
        for name, factor in zip(names.split(","), factors):
            missing = [letter for letter in order if letter not in name]
            factor = factor[(..., *(None for _ in missing))]
            current = [*name, *missing]
            terms = terms * factor.permute([current.index(letter) for letter in order])
        return terms.flatten(0, len(letters) - 1).sum(0) if letters else terms
