"""Operations whose results are rounded, compared with float64, forward and backward: softmax, cross-entropy and
gelu."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import backward_pass, float64_reference_operations, hashed_inputs, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Arithmetic, Exact
from envbuild.selftest.numerics.operation_case import Case

Results = Mapping[str, torch.Tensor]
Expected = Mapping[str, Exact]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Larger than 88.7, so that the exponential exceeds float32's range. At this size, bfloat16 represents multiples of 1/2.
LARGE, STEPS = 96.0, 5
SHAPES = ((37, 2), (37, 33), (5, 1025))  # (rows, classes); for more than 1024 classes, CUDA has a different softmax
ROWS = 29  # rows of cross-entropy that count; `_among_ignored` adds ignored rows
CLASSES = (33, 1031)
IGNORED = -100
ACTIVATED = 4099


@dataclass(frozen=True)
class Rounding:
    """How an operation rounds. `dtype`: the dtype of the result. `sums`: exponentials, their sum and its logarithm are
    rounded to this dtype too, as by torch's CPU kernels. Kernels for GPUs keep float32 until the result."""

    dtype: torch.dtype
    sums: bool

    @property
    def unit(self) -> float:
        """The unit roundoff of intermediate results; 0 if they are not rounded."""
        return tolerances.unit_roundoff(self.dtype) if self.sums else 0.0


def cases(rounded_sums: bool) -> Iterator[Case]:
    """Yield every case, with inputs on the host; `rounded_sums` as in Rounding."""
    for dtype in DTYPES:
        rounding = Rounding(dtype, rounded_sums)
        for rows, classes in SHAPES:
            yield from normalized_exponentials(rows, classes, rounding)
        for classes in CLASSES:
            yield cross_entropy(classes, rounding)
        for form in ("none", "tanh"):
            yield gelu_case(form, dtype)


def normalized_exponentials(rows: int, classes: int, rounding: Rounding) -> Iterator[Case]:
    """Yield softmax and log_softmax, over the last dimension and over the first."""
    x, grad = logits(rows, classes, rounding.dtype), hashed_inputs.signed((rows, classes), 403).to(rounding.dtype)
    for name, function, exact in (
        ("softmax", torch.softmax, softmax_results),
        ("log_softmax", torch.log_softmax, log_softmax_results),
    ):
        for dim in (1, 0):
            title = f"{name} of {rows} rows of {classes} over {'rows' if dim else 'columns'}"
            given = (x, grad) if dim else (x.t().contiguous(), grad.t().contiguous())
            run = functools.partial(_along, function=function, dim=dim)
            over = functools.partial(_over, exact=exact, dim=dim, rounding=rounding)
            yield Case(title, rounding.dtype, given, run, over)


def gelu_case(form: str, dtype: torch.dtype) -> Case:
    """Build a case of gelu. The arguments range from where gelu is close to 0 to where it is close to its argument."""
    x, grad = hashed_inputs.signed((ACTIVATED,), 411) * 3.5, hashed_inputs.whole((ACTIVATED,), 412, 3)
    run = functools.partial(_gelu, form=form)
    exact = functools.partial(_gelu_exactly, form=form, dtype=dtype)
    return Case(
        f"gelu {'tanh' if form == 'tanh' else 'erf'} {ACTIVATED}", dtype, (x.to(dtype), grad.to(dtype)), run, exact
    )


def logits(rows: int, classes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return logits from 96 to 98. They are so close to each other that every class has a measurable probability."""
    return (LARGE + hashed_inputs.hashes(rows * classes, 401).reshape(rows, classes) % STEPS / 2).to(dtype)


def _forward_backward(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    leaf = x.detach().requires_grad_()
    output = function(leaf)
    backward_pass.accumulate(output, grad)
    assert leaf.grad is not None
    return {"output": output.detach(), "gradient": leaf.grad}


def _along(x: torch.Tensor, grad: torch.Tensor, function: Callable[..., torch.Tensor], dim: int) -> Results:
    return _forward_backward(functools.partial(function, dim=dim), x, grad)


def _over(
    x: torch.Tensor, grad: torch.Tensor, exact: Callable[..., dict[str, Exact]], dim: int, rounding: Rounding
) -> Expected:
    """Apply `exact`, which works over the last dimension, over the dimension `dim`."""
    if dim:
        return exact(x, grad, rounding)
    return {name: Exact(part.value.t(), part.bound.t()) for name, part in exact(x.t(), grad.t(), rounding).items()}


def softmax_results(x: torch.Tensor, grad: torch.Tensor, rounding: Rounding) -> dict[str, Exact]:
    """Return the expected results of softmax. The gradient y (g - sum g y) has the errors of the rounded y, and of the
    sum."""
    found = float64_reference_operations.softmax(Arithmetic(rounding.dtype), x)
    y, n = found.value, x.shape[-1]
    error = found.bound + 2 * rounding.unit * y
    weighed, size = (grad * y).sum(-1, keepdim=True), (grad.abs() * y).sum(-1, keepdim=True)
    value = y * (grad - weighed)
    sums = (grad.abs() * error).sum(-1, keepdim=True) + (4 * tolerances.summation(n) + rounding.unit) * size
    limit = tolerances.rounding(value, rounding.dtype) + error * (grad.abs() + size) + y * sums
    return {"output": Exact(y, error), "gradient": Exact(value, limit)}


def log_softmax_results(x: torch.Tensor, grad: torch.Tensor, rounding: Rounding) -> dict[str, Exact]:
    """Return the expected results of log_softmax. The gradient g - exp(y) sum g has the errors of the rounded y, and of
    the sum."""
    output = log_probabilities(x, rounding)
    total, size = grad.sum(-1, keepdim=True), grad.abs().sum(-1, keepdim=True)
    p = output.value.exp()
    value = grad - p * total
    arithmetic = (4 * tolerances.summation(x.shape[-1]) + rounding.unit) * (grad.abs() + p * size)
    limit = tolerances.rounding(value, rounding.dtype) + p * torch.expm1(output.bound) * total.abs() + arithmetic
    return {"output": output, "gradient": Exact(value, limit)}


def log_probabilities(x: torch.Tensor, rounding: Rounding) -> Exact:
    """Return log-softmax with its tolerance. Rounding the sum changes its logarithm by one unit roundoff; then the
    logarithm itself is rounded."""
    shifted = x - x.amax(dim=-1, keepdim=True)
    total = shifted.exp().sum(dim=-1, keepdim=True).log()
    value = shifted - total
    limit = tolerances.rounding(value, rounding.dtype) + rounding.unit * (1 + total)
    return Exact(value, limit + tolerances.log_softmax(value, x.shape[-1]))


def cross_entropy(classes: int, rounding: Rounding) -> Case:
    """Build a case of the mean loss of the rows that count. Ignored rows lie between them, and their gradients must be
    0."""
    x, targets = logits(ROWS, classes, rounding.dtype), hashed_inputs.hashes(ROWS, 421) % classes
    exact = functools.partial(_mean_of_counted, rounding=rounding)
    return Case(f"cross_entropy {ROWS}x{classes}", rounding.dtype, (x, targets), _cross_entropy, exact)


def _cross_entropy(x: torch.Tensor, targets: torch.Tensor) -> Results:
    kept, all_targets = _among_ignored(targets)
    rows = x.new_full((len(all_targets), x.shape[1]), LARGE)
    rows[kept] = x
    leaf = rows.requires_grad_()
    loss = F.cross_entropy(leaf, all_targets, ignore_index=IGNORED)
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    return {"output": loss.detach(), "gradient": leaf.grad}


def _among_ignored(targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of the rows that count among all rows, and the targets of all rows. The first row, every
    fourth one after it and the last row are ignored."""
    kept = torch.arange(len(targets), device=targets.device)
    kept = kept + kept // 3 + 1
    everyone = torch.full((int(kept[-1]) + 2,), IGNORED, device=targets.device)
    everyone[kept] = targets
    return kept, everyone


def _mean_of_counted(x: torch.Tensor, targets: torch.Tensor, rounding: Rounding) -> Expected:
    """Return the expected results. The log-probabilities and the gradients of their mean are rounded; sums are in
    float32."""
    dtype = rounding.dtype
    kept, everyone = _among_ignored(targets)
    hits = targets[:, None] == torch.arange(x.shape[1])
    y, share = log_probabilities(x, rounding), 1 / len(targets)
    loss = -y.value[hits].mean()
    around = y.bound[hits].mean() + tolerances.summation(len(targets)) * y.value[hits].abs().mean()
    p = y.value.exp()
    value = (p - hits.to(torch.float64)) * share
    rounded = 2 * tolerances.unit_roundoff(dtype) + 4 * tolerances.summation(x.shape[1])
    limit = tolerances.rounding(value, dtype) + share * (p * torch.expm1(y.bound) + rounded * (p + hits))
    whole = [
        torch.zeros(len(everyone), x.shape[1], dtype=torch.float64).index_copy_(0, kept, part)
        for part in (value, limit)
    ]
    return {"output": Exact(loss, tolerances.rounding(loss, dtype) + around), "gradient": Exact(*whole)}


def _gelu(x: torch.Tensor, grad: torch.Tensor, form: str) -> Results:
    return _forward_backward(functools.partial(F.gelu, approximate=form), x, grad)


def _gelu_exactly(x: torch.Tensor, grad: torch.Tensor, form: str, dtype: torch.dtype) -> Expected:
    """Return the expected results: x w with w in [0, 1], and its derivative w + x w'. The accuracy of both factors is
    that of tolerances.activation."""
    how = Arithmetic(dtype)
    if form == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        slope = (1 - torch.tanh(inner) ** 2) / 2 * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        output, weight = float64_reference_operations.gelu_tanh(how, x), (1 + torch.tanh(inner)) / 2
    else:
        slope = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
        output, weight = float64_reference_operations.gelu(how, x), torch.special.erfc(-x / math.sqrt(2)) / 2
    value = grad * (weight + x * slope)
    limit = tolerances.rounding(value, dtype) + grad.abs() * tolerances.activation(1 + x.abs())
    return {"output": output, "gradient": Exact(value, limit)}
