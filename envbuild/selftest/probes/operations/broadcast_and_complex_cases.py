"""Functions of two tensors that broadcast against each other, with their gradients; bitwise functions; gated
activations; and functions of complex numbers.

The expected results of functions that broadcast are computed in float64 from expanded copies, so that no broadcasting
kernel takes part. The expected gradients are then summed over the expanded dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.layouts_with_finite_gaps import BATCHES, MATRICES, with_large_gaps
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point
from envbuild.selftest.numerics.single_rounding import lost_in_rounding

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]
Shape = tuple[int, ...]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST = 6000  # maximum number of elements of a result
FEW = 300  # as MOST, for cases whose derivatives are rounded to half precision before they are summed
# How often a derivative that torch composes of other operations is rounded, each time relative to a positive factor.
# The maximum is that of atan2, g y / (x x + y y): the squares (one counts, as both terms are positive), their sum, the
# reciprocal, and two products (torch/csrc/autograd/FunctionsManual.cpp). glu has as many: 1 - s, and products with s,
# the gradient and x.
STEPS = 5
# Error of the float32 functions within a composed derivative: at most a power (8 units in the last place) times a
# logarithm (1 unit), and the rounding of both results (CUDA C++ Programming Guide, maximum errors of the standard
# functions). A unit in the last place is 2 u.
ELEMENTARY = (2 * (8 + 1) + 2) * tolerances.ROUNDED
LENGTHS = (1, 2, 3, 4, 7, 8, 17, 31, 33, 65, 129, 257)


@dataclass(frozen=True)
class Function:
    """A function of two tensors.

    `call(x, y)`: the function as models call it. `formula(x, y)`: the same in float64. `values`: the kinds of values in
    x and y, see _values. `whole`: results and derivatives have so few digits that only the final result is rounded.
    """

    call: Binary
    formula: Binary
    values: tuple[str, str] = ("whole", "powers")
    whole: bool = True


FUNCTIONS: dict[str, Function] = {
    "add": Function(lambda x, y: torch.add(x, y), lambda x, y: x + y),
    "add alpha 3": Function(lambda x, y: torch.add(x, y, alpha=3), lambda x, y: x + 3 * y),
    "sub": Function(lambda x, y: torch.sub(x, y), lambda x, y: x - y),
    "mul": Function(lambda x, y: torch.mul(x, y), lambda x, y: x * y),
    "div": Function(lambda x, y: torch.div(x, y), lambda x, y: x * y**-1),
    "maximum": Function(lambda x, y: torch.maximum(x, y), lambda x, y: torch.where(x > y, x, y), ("whole", "between")),
    "minimum": Function(lambda x, y: torch.minimum(x, y), lambda x, y: torch.where(x < y, x, y), ("whole", "between")),
    "clamp from below": Function(
        lambda x, y: torch.clamp(x, min=y), lambda x, y: torch.where(x > y, x, y), ("whole", "between")
    ),
    "where": Function(
        lambda x, y: torch.where(y > 1, x, y), lambda x, y: x * (y > 1) + y * (y <= 1), ("whole", "powers")
    ),
    "lerp": Function(lambda x, y: torch.lerp(x, y, 0.25), lambda x, y: x * 0.75 + y * 0.25, ("whole", "whole")),
    "lerp by y": Function(
        lambda x, y: torch.lerp(x, 2 * x, y), lambda x, y: x + y * x, ("whole", "powers"), whole=False
    ),
    "addcmul": Function(
        lambda x, y: torch.addcmul(x, y, y, value=2), lambda x, y: x + 2 * y * y, ("whole", "powers"), whole=False
    ),
    "addcdiv": Function(
        lambda x, y: torch.addcdiv(x, x, y, value=2), lambda x, y: x + 2 * x / y, ("whole", "powers"), whole=False
    ),
    "pow": Function(lambda x, y: torch.pow(x, y), lambda x, y: torch.exp(y * x.log()), ("positive", "small"), False),
    "atan2": Function(
        lambda x, y: torch.atan2(x, y),
        lambda x, y: 2 * torch.atan(x / ((x * x + y * y).sqrt() + y)),
        ("positive", "powers"),
        False,
    ),
    "hypot": Function(
        lambda x, y: torch.hypot(x, y), lambda x, y: (x * x + y * y).sqrt(), ("positive", "powers"), False
    ),
    "logaddexp": Function(
        lambda x, y: torch.logaddexp(x, y), lambda x, y: (x.exp() + y.exp()).log(), ("positive", "small"), False
    ),
    "xlogy": Function(lambda x, y: torch.xlogy(x, y), lambda x, y: x * y.log(), ("whole", "positive"), False),
}
# For each pattern, the shapes of x and y. The result has the shape (a, b, c).
PATTERNS: dict[str, Callable[[int, int, int], tuple[Shape, Shape]]] = {
    "same": lambda a, b, c: ((a, b, c), (a, b, c)),
    "outer": lambda a, b, c: ((a, b, 1), (1, 1, c)),
    "crossed": lambda a, b, c: ((a, 1, c), (1, b, c)),
    "x first": lambda a, b, c: ((1, b, c), (a, b, c)),
    "y middle": lambda a, b, c: ((a, b, c), (a, 1, c)),
    "y last": lambda a, b, c: ((a, b, c), (a, b, 1)),
    "y vector": lambda a, b, c: ((a, b, c), (c,)),
    "y scalar": lambda a, b, c: ((a, b, c), ()),
    "x scalar": lambda a, b, c: ((), (a, b, c)),
    "fewer dimensions": lambda a, b, c: ((b, 1), (a, 1, c)),
}


def _values(kind: str, shape: Shape, seed: int) -> torch.Tensor:
    """Return values of one kind. "whole": 1 to 9 and -1 to -9. "powers": 1/2, 1, 2, 4 and their negatives. "between":
    whole numbers plus 1/2. "positive": 1 to 9. "small": 1 to 3."""
    size = shape or (1,)
    x = hashed_inputs.whole(size, seed, 9)
    if kind == "powers":
        x = x.sign() * 2.0 ** (x.abs() % 4 - 1)
    elif kind == "between":
        x = x + 0.5
    elif kind in ("positive", "small"):
        x = x.abs() if kind == "positive" else x.abs() % 3 + 1
    return x.view(shape)


def broadcast(point: Point, seed: int) -> Case:
    """Build a case with two tensors of different shapes and, for some points, different dtypes."""
    function, dtype = FUNCTIONS[point["function"]], point["dtype"]
    a, b, c = point["first"], point["middle"], point["last"]
    shapes = PATTERNS[point["shapes"]](a, b, c)
    values = [_values(kind, shape, seed + n) for n, (kind, shape) in enumerate(zip(function.values, shapes))]
    if point["function"] == "atan2":
        values[1] = values[1].abs()
    x, y = values[0].to(dtype), values[1].to(_other_dtype(point))
    grad = hashed_inputs.whole((a, b, c), seed + 2, 3).to(torch.result_type(x, y))
    name = (
        f"broadcast {point['function']} of {_written(x)} {point['layout']} and {_written(y)} {point['others']} "
        f"{str(y.dtype).removeprefix('torch.')}"
    )
    run = functools.partial(_broadcast, point=point)
    return Case(name, dtype, (x, y, grad), run, functools.partial(_broadcast_exactly, point=point))


def _written(x: torch.Tensor) -> str:
    return "x".join(map(str, x.shape)) or "a scalar"


def _other_dtype(point: Point) -> torch.dtype:
    dtype: torch.dtype = point["dtype"] if point["other dtype"] == "same" else torch.float32
    return dtype


def _is_broadcast(point: Point) -> bool:
    count = point["first"] * point["middle"] * point["last"]
    is_half = point["dtype"] != torch.float32 or point["other dtype"] != "same"
    if not FUNCTIONS[point["function"]].whole and is_half and (count > FEW or point["shapes"].endswith("scalar")):
        return False  # the terms are rounded, so their sums have a tolerance that hides an error of one term
    is_small = count <= MOST
    # lerp, addcmul and addcdiv require both tensors to have the same dtype.
    return is_small and (point["other dtype"] == "same" or not point["function"].startswith(("lerp", "addc")))


def _laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    return (with_large_gaps(x, layout) if x.dim() == 3 else x).detach().requires_grad_()


def _broadcast(x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor, point: Point) -> Results:
    leaves = _laid(x, point["layout"]), _laid(y, point["others"])
    output = FUNCTIONS[point["function"]].call(*leaves)
    slopes = backward_pass.gradients(output, leaves, with_large_gaps(grad, point["layout"]))
    return {"output": output.detach(), "gradient of x": slopes[0], "gradient of y": slopes[1]}


def _broadcast_exactly(x: torch.Tensor, y: torch.Tensor, grad: torch.Tensor, point: Point) -> Expected:
    """Return the expected results.

    A derivative that torch composes has the relative error STEPS u + ELEMENTARY, with u of the least precise dtype.
    Then the products with `grad` are summed. A result has the same error relative to |x| + |y| + |result|, because the
    terms of a sum may cancel. Products of whole numbers and powers of two are exact, and float32 represents their sums.
    """
    function, shape = FUNCTIONS[point["function"]], grad.shape
    leaves = [part.expand(shape).contiguous().flatten().requires_grad_() for part in (x, y)]
    value = function.formula(*leaves)
    terms = torch.autograd.grad((value * grad.flatten()).sum(), leaves)
    kinds = point["dtype"], _other_dtype(point)
    scalars = [torch.ones(part.shape, dtype=kind) for part, kind in zip((x, y), kinds)]
    result = torch.result_type(*scalars)
    smallest = max(tolerances.unit_roundoff(kind) for kind in (*kinds, result))
    error = 0.0 if function.whole else STEPS * smallest + ELEMENTARY
    around = error * (x.abs() + y.abs() + value.detach().view(shape).abs())
    found = {"output": Exact(value.detach().view(shape), lost_in_rounding(value.detach().view(shape), result) + around)}
    for name, part, term, kind in zip("xy", (x, y), terms, kinds):
        total, size = (_summed(each.view(shape), part.shape) for each in (term, term.abs() + grad.abs().flatten()))
        count = grad.numel() // max(1, part.numel())
        # The kernel computes the sum in the dtype of the result, then converts it to that of the input.
        limit = (
            lost_in_rounding(total, result)
            + lost_in_rounding(total, kind)
            + (error + (tolerances.summation(count) if count > 1 else 0.0)) * size
        )
        found[f"gradient of {name}"] = Exact(total, limit)
    return found


def _summed(terms: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Sum over the dimensions in which a tensor of this shape was expanded."""
    padded = (1,) * (terms.dim() - len(shape)) + tuple(shape)
    dims = [dim for dim, n in enumerate(padded) if n == 1]
    return (terms.sum(dims) if dims else terms).reshape(shape)


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
BITS: dict[str, tuple[Binary, Callable[[int, int], int]]] = {
    "and": (lambda x, y: torch.bitwise_and(x, y), lambda x, y: x & y),
    "or": (lambda x, y: torch.bitwise_or(x, y), lambda x, y: x | y),
    "xor": (lambda x, y: torch.bitwise_xor(x, y), lambda x, y: x ^ y),
    "xor in place": (lambda x, y: x.clone().bitwise_xor_(y), lambda x, y: x ^ y),
    "and a number": (lambda x, y: x & 13, lambda x, y: x & 13),
    "not": (lambda x, y: torch.bitwise_not(x), lambda x, y: ~x),
    "shifted right": (lambda x, y: torch.bitwise_right_shift(x, y.abs() % 5), lambda x, y: x >> abs(y) % 5),
    "shifted right by a number": (lambda x, y: x >> 2, lambda x, y: x >> 2),
    "shifted left": (lambda x, y: torch.bitwise_left_shift(x % 8, y.abs() % 4), lambda x, y: x % 8 << abs(y) % 4),
    "gcd": (lambda x, y: torch.gcd(x, y), math.gcd),
    "quotient": (lambda x, y: torch.div(x, y, rounding_mode="floor"), lambda x, y: x // y),
    "truncated": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), lambda x, y: int(x / y)),
    "remainder": (lambda x, y: torch.remainder(x, y), lambda x, y: x % y),
    "fmod": (lambda x, y: torch.fmod(x, y), lambda x, y: x - y * int(x / y)),
    "remainder of a number": (lambda x, y: torch.remainder(17, y), lambda x, y: 17 % y),
    "less": (lambda x, y: torch.lt(x, y), lambda x, y: int(x < y)),
    "equal": (lambda x, y: torch.eq(x, y), lambda x, y: int(x == y)),
    "maximum": (lambda x, y: torch.maximum(x, y), max),
    "clamp": (lambda x, y: torch.clamp(x, 3, 40), lambda x, y: min(max(x, 3), 40)),
}


def bit_case(point: Point, seed: int) -> Case:
    """Build a case that applies all functions of BITS to whole numbers; y is broadcast."""
    dtype, rows, length = point["dtype"], point["rows"], point["length"]
    shape = {"same": (rows, length), "row": (length,), "column": (rows, 1), "one": (1,)}[point["other"]]
    x, y = hashed_inputs.whole((rows, length), seed, 100), hashed_inputs.whole(shape, seed + 1, 30)
    if dtype == torch.uint8:
        x, y = x.abs(), y.abs()
    name = f"bits of {rows}x{length} {point['layout']} and {point['other']} {point['others']}"
    run = functools.partial(_bits, point=point)
    return Case(name, dtype, (x.to(dtype), y.to(dtype)), run, functools.partial(_bits_by_hand, dtype=dtype))


def _bits(x: torch.Tensor, y: torch.Tensor, point: Point) -> Results:
    other = with_large_gaps(y, point["others"]) if y.dim() == 2 else y
    laid = with_large_gaps(x, point["layout"])
    return {name: call(laid, other) for name, (call, _) in BITS.items()}


def _bits_by_hand(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> Expected:
    pairs = list(zip(x.flatten().tolist(), y.expand(x.shape).flatten().tolist()))
    found = {}
    for name, (_, by_hand) in BITS.items():
        values = [by_hand(*pair) & 255 if dtype == torch.uint8 else by_hand(*pair) for pair in pairs]
        exact = torch.tensor(values, dtype=torch.float64).view(x.shape)
        if name == "remainder of a number":  # this function does not use x
            exact = torch.tensor([17 % one for one in y.flatten().tolist()], dtype=torch.float64).view(y.shape)
        found[name] = without_rounding(exact)
    return found


GATES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "glu": lambda x, w: F.glu(x, -1),
    "glu of rows": lambda x, w: F.glu(x, 0),
    "prelu": lambda x, w: F.prelu(x, w[:1]),
    "prelu of columns": lambda x, w: F.prelu(x, w),
    "swiglu": lambda x, w: F.silu(x[:, ::2]) * x[:, 1::2],
    "geglu": lambda x, w: x[:, : x.shape[1] // 2] * F.gelu(x[:, x.shape[1] // 2 :]),
}


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def _gates_exactly(name: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    rows, width = x.shape
    if name == "glu":
        return x[:, : width // 2] * _sigmoid(x[:, width // 2 :])
    if name == "glu of rows":
        return x[: rows // 2] * _sigmoid(x[rows // 2 :])
    if name == "swiglu":
        return x[:, ::2] * _sigmoid(x[:, ::2]) * x[:, 1::2]
    if name == "geglu":
        gate = x[:, width // 2 :]
        weight: torch.Tensor = (1 + torch.special.erf(gate / math.sqrt(2))) / 2
        return x[:, : width // 2] * gate * weight
    slopes: torch.Tensor = w[:1] if name == "prelu" else w
    return torch.where(x > 0, x, x * slopes.expand(x.shape))


def gate(point: Point, seed: int) -> Case:
    """Build a case of a gated activation, of two halves of an input or of an input and learned weights."""
    rows, width, dtype = 2 * point["rows"], 2 * point["width"], point["dtype"]
    x = hashed_inputs.whole((rows, width), seed, 24) / 8
    w = hashed_inputs.whole((width,), seed + 1, 7) / 8
    grad = hashed_inputs.whole(_gates_exactly(point["function"], x, w).shape, seed + 2, 3)
    given = [x, grad, *([w] if point["function"].startswith("prelu") else [])]
    name = f"gates by {point['function']}, {rows}x{width} {point['layout']}"
    run = functools.partial(_gate, point=point)
    exact = functools.partial(_gate_exactly, point=point)
    return Case(name, dtype, tuple(part.to(dtype) for part in given), run, exact)


def _gate(x: torch.Tensor, grad: torch.Tensor, w: torch.Tensor | None = None, *, point: Point) -> Results:
    leaf = with_large_gaps(x, point["layout"]).detach().requires_grad_()
    leaves = [leaf, *([] if w is None else [w.detach().requires_grad_()])]
    output = GATES[point["function"]](leaf, leaves[-1])
    slopes = backward_pass.gradients(output, leaves, with_large_gaps(grad, point["gradient layout"]))
    return {"output": output.detach(), **{f"gradient {n}": slope for n, slope in enumerate(slopes)}}


def _gate_exactly(x: torch.Tensor, grad: torch.Tensor, w: torch.Tensor | None = None, *, point: Point) -> Expected:
    """Return the expected results. Values are at most 3, and so are the factors of gates. Composed gates are rounded
    STEPS times."""
    dtype = point["dtype"]
    leaves = [x.detach().requires_grad_(), *([] if w is None else [w.detach().requires_grad_()])]
    output = _gates_exactly(point["function"], leaves[0], leaves[-1])
    slopes = torch.autograd.grad((output * grad).sum(), leaves)
    u, value = tolerances.unit_roundoff(dtype), output.detach()
    exact_steps = 0 if w is not None else STEPS
    of_value = exact_steps * u * value.abs() + tolerances.activation(torch.full_like(value, 9.0))
    found = {"output": Exact(value, tolerances.rounding(value, dtype) + of_value)}
    for n, slope in enumerate(slopes):
        terms = x.numel() // slope.numel()
        largest = 6.0 * float(grad.abs().max())
        limit = tolerances.activation(torch.full_like(slope, largest)) + exact_steps * u * slope.abs()
        if point["function"].startswith("glu"):  # torch's CPU kernel rounds the sigmoid s before it computes s (1 - s)
            dim = int(point["function"] == "glu")
            limit.narrow(dim, x.shape[dim] // 2, x.shape[dim] // 2).add_(2 * u * 3 * grad.abs())
        if n:  # torch rounds each product to the dtype, and sums the products in float32
            limit = limit + terms * (u + tolerances.summation(terms)) * 9
        found[f"gradient {n}"] = Exact(slope, tolerances.rounding(slope, dtype) + limit)
    return found


COMPLEX: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "mul by the conjugate": lambda x, y: x * y.conj(),
    "mul by a real": lambda x, y: x * y.real + y,
    "mul by i": lambda x, y: x * 1j - y,
    "in place": lambda x, y: (x * 1).mul_(y),
    "copy of the conjugate": lambda x, y: x.conj().resolve_conj().contiguous() + y,
    "squares": lambda x, y: (x.abs() ** 2) + y,
    "sum": lambda x, y: (x * y).sum(0, keepdim=True),
    "product of matrices": lambda x, y: x @ y.expand(x.shape).mH,
    "product with the conjugate": lambda x, y: x.conj() @ y.expand(x.shape).mT,
    "product of a turned conjugate": lambda x, y: x.mT.conj() @ y.expand(x.shape),
    "turned": lambda x, y: torch.view_as_complex(torch.view_as_real(x * y).flip(-1)),
}


# Roundings of |x|: 3 units in the last place for CUDA's hypotf, 2 for its hypot (CUDA C++ Programming Guide), and the
# rounding of the result.
MODULUS = 2 * 3 + 1
CONJUGATED = "conjugated"  # a lazy conjugate view, which torch resolves when it reads it
WITH_GRADIENT = ("contiguous", CONJUGATED)  # with the other layouts, the leaf would be a copy


def complex_numbers(point: Point, seed: int) -> Case:
    """Build a case with complex numbers whose parts are whole numbers, given as pairs of real numbers. If y is
    broadcast, it has one row."""
    rows, width = point["rows"], point["width"]
    others = 1 if point["broadcast"] else rows
    x, y = hashed_inputs.whole((rows, width, 2), seed, 5), hashed_inputs.whole((others, width, 2), seed + 1, 5)
    name = f"complex {point['function']}, {rows}x{width} {point['layout']} and {others} rows"
    given = tuple(part.to(point["dtype"]) for part in (x, y))
    run = functools.partial(_complex, point=point)
    return Case(name, point["dtype"], given, run, functools.partial(_complex_by_hand, point=point))


def _complex(x: torch.Tensor, y: torch.Tensor, point: Point) -> Results:
    leaves = x.detach().requires_grad_(), y.detach().requires_grad_()
    first, second = (torch.view_as_complex(part) for part in leaves)
    if point["layout"] == CONJUGATED:
        first = first.conj().resolve_conj().conj()
    elif point["layout"] != "contiguous":
        first = with_large_gaps(first.detach(), point["layout"]).requires_grad_()
    result = torch.view_as_real(COMPLEX[point["function"]](first, second).resolve_conj())
    found = {"output": result.detach()}
    if point["layout"] in WITH_GRADIENT:
        slopes = backward_pass.gradients(result, leaves, _upstream(result))
        found.update(zip(("gradient of x", "gradient of y"), slopes))
    return found


def _upstream(result: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the result: small whole numbers that depend only on the position, the same on every
    device."""
    numbers = torch.arange(result.numel(), device=result.device) % 5 - 2
    return numbers.to(result.dtype).view(result.shape)


def _product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (a + i b) (c + i d) without a matrix product: elementwise products are broadcast and then added."""
    real, imaginary = a[:, :, None] * c - b[:, :, None] * d, a[:, :, None] * d + b[:, :, None] * c
    return real.sum(1), imaginary.sum(1)


def _complex_by_hand(x: torch.Tensor, y: torch.Tensor, point: Point) -> Expected:
    """Return the expected real and imaginary parts by their formulas. They are whole numbers that float32
    represents."""
    leaves = x.detach().requires_grad_(), y.detach().requires_grad_()
    other = leaves[1].expand(x.shape)
    (a, b), (c, d) = (part.unbind(-1) for part in (leaves[0], other))
    products = a * c - b * d, a * d + b * c
    parts: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
        "add": lambda: (a + c, b + d),
        "mul": lambda: products,
        "in place": lambda: products,
        "mul by the conjugate": lambda: (a * c + b * d, b * c - a * d),
        "mul by a real": lambda: (a * c + c, b * c + d),
        "mul by i": lambda: (-b - c, a - d),
        "copy of the conjugate": lambda: (a + c, d - b),
        "squares": lambda: (a * a + b * b + c, d + 0 * a),
        "sum": lambda: (products[0].sum(0, keepdim=True), products[1].sum(0, keepdim=True)),
        "product of matrices": lambda: _product(a, b, c.t(), -d.t()),
        "product with the conjugate": lambda: _product(a, -b, c.t(), d.t()),
        "product of a turned conjugate": lambda: _product(a.t(), -b.t(), c, d),
        "turned": lambda: (products[1], products[0]),
    }
    result = torch.stack(parts[point["function"]](), -1)
    error = torch.zeros_like(result.detach())
    is_exact, u = point["function"] != "squares", tolerances.unit_roundoff(point["dtype"])
    if not is_exact:  # |x| counts twice because it is squared; the square and the sum with y are rounded
        squares = torch.stack((a * a + b * b, torch.zeros_like(a)), -1).detach()
        error = u * ((2 * MODULUS + 1) * squares + result.detach().abs())
    found = {"output": Exact(result.detach(), error)}
    if point["layout"] in WITH_GRADIENT:
        slopes = torch.autograd.grad((result * _upstream(result)).sum(), leaves)
        for name, slope in zip(("gradient of x", "gradient of y"), slopes):
            # 2 |x| g x / |x| has two products and one quotient, in addition to the error of |x|, which counts twice.
            found[name] = without_rounding(slope) if is_exact else Exact(slope, (2 * MODULUS + 3) * u * slope.abs())
    return found


OPERATIONS = (
    Operation(
        "broadcast functions",
        {
            "function": tuple(FUNCTIONS),
            "dtype": DTYPES,
            "other dtype": ("same", "same", "float32"),
            "shapes": tuple(PATTERNS),
            "first": (1, 2, 3, 5, 17, 33),
            "middle": (1, 2, 3, 8, 17, 31),
            "last": LENGTHS,
            "layout": BATCHES,
            "others": BATCHES,
        },
        broadcast,
        {"quick": 20, "standard": 200, "full": 2000},
        _is_broadcast,
    ),
    Operation(
        "bits",
        {
            "dtype": INTEGERS,
            "rows": (1, 2, 3, 5, 17),
            "length": LENGTHS,
            "other": ("same", "row", "column", "one"),
            "layout": MATRICES,
            "others": MATRICES,
        },
        bit_case,
        {"quick": 5, "standard": 25, "full": 300},
        lambda point: point["rows"] * point["length"] <= 2000,
    ),
    Operation(
        "gates",
        {
            "function": tuple(GATES),
            "dtype": DTYPES,
            "rows": (1, 2, 3, 5, 17, 33),
            "width": (1, 2, 3, 4, 8, 17, 33, 64, 129, 513),
            "layout": MATRICES,
            "gradient layout": MATRICES,
        },
        gate,
        {"quick": 6, "standard": 30, "full": 400},
        lambda point: point["rows"] * point["width"] <= 1200,
    ),
    Operation(
        "complex numbers",
        {
            "function": tuple(COMPLEX),
            "dtype": (torch.float32, torch.float64),
            "rows": (1, 2, 3, 5, 17),
            "width": (1, 2, 3, 4, 8, 17, 33, 65, 257),
            "broadcast": (False, True),
            "layout": ("contiguous", CONJUGATED, "transposed", "rows apart", "elements apart", "shifted"),
        },
        complex_numbers,
        {"quick": 4, "standard": 26, "full": 350},
    ),
)
