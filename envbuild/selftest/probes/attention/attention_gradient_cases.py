"""The gradients of attention kernels, against known results and against float64; a part of attention.<backend>.

One batch contains three problems: random values, V = 1, and scores near -120.

With V = 1 the output does not depend on the attention weights. Therefore the gradients of q and k are 0, and the
gradient of V, summed over the keys, equals the gradient of the output summed over the queries.

With scores near -120, the log-sum-exp of each row is below -88.7. If a kernel wrongly included a key beyond the last
one, with a score of 0, its weight would be infinite in float32. cuDNN gives NaN here with a mask and a length of 64
modulo 128 (pytorch/pytorch#196678), and for a single query (NVIDIA/cudnn-frontend#1072). Such large scores, rounded to
half precision, hide small errors. For the math path in a half-precision dtype, this problem therefore checks little
more than that the results are finite.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, short_name
from envbuild.selftest.harness.shared_reference_results import EXACT
from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.element_comparison import compare
from envbuild.selftest.probes.attention.forced_attention_backend import is_refused, only

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
DEPTHS = (64, 128)
SHORT, LONG, LONG_CPU = 128, 397, 205  # LONG and LONG_CPU are not multiples of a tile
MASKED = 192  # a length of 64 modulo 128
HEADS, HEADS_CPU = 2, 1
# torch's flash kernel for the CPU processes the queries in blocks and accumulates the gradients of k and v in the
# inputs' dtype (torch 2.13).
ROUNDINGS, ROUNDINGS_CPU = 1, 5
PROBLEMS = ("random", "V=1", "scores -120")
SCORE = -120.0
TITLES = ("grad q", "grad k", "grad v")

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class GradientCase:
    """One forward and backward call on tensors of shape (len(PROBLEMS), heads, queries or keys, depth). With `masked`,
    the call gets a mask that is True everywhere."""

    dtype: torch.dtype
    heads: int
    queries: int
    keys: int
    depth: int
    causal: bool = False
    masked: bool = False

    @property
    def name(self) -> str:
        shape = "x".join(map(str, (len(PROBLEMS), self.heads, self.keys, self.depth)))
        return f"{short_name(self.dtype)} {shape}{self.how}"

    @property
    def how(self) -> str:
        one = " one query" if self.queries == 1 else ""
        return one + (" causal" if self.causal else "") + (" masked" if self.masked else "")

    @property
    def ahead(self) -> torch.Tensor:
        """Boolean matrix: True where a query (row) may not see a key (column)."""
        every = torch.ones(self.queries, self.keys, dtype=torch.bool)
        return every.triu(diagonal=1) if self.causal else ~every


@dataclass(frozen=True)
class GradientInputs:
    """q, k, v and the gradient of the output on the host, rounded to the case's dtype."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor


@dataclass(frozen=True)
class ExactGradients:
    """The gradients of q, k and v in float64, with what their tolerances are computed from.

    `spreads`: the magnitudes that tolerances.attention_gradient_* are relative to, in the shapes of the gradients.
    `logits`: for each problem, an upper bound of the sums of |q| |k| / sqrt(d).
    """

    gradients: Three
    spreads: Three
    logits: tuple[float, ...]


def gradient_cases(on_cpu: bool) -> Iterator[GradientCase]:
    heads, long = (HEADS_CPU, LONG_CPU) if on_cpu else (HEADS, LONG)
    for dtype in DTYPES:
        for depth in DEPTHS:
            for length in (SHORT, long):
                for causal in (False, True):
                    yield GradientCase(dtype, heads, length, length, depth, causal)
        yield GradientCase(dtype, heads, MASKED, MASKED, DEPTHS[0], masked=True)
        yield GradientCase(dtype, heads, 1, SHORT, DEPTHS[0])


def gradient_inputs(case: GradientCase) -> GradientInputs:
    """Return q and k in [-1, 1], v in [0, 1] and the gradient of the output in [-1, 1], rounded to the case's dtype,
    with the special values of the problems filled in."""
    return GradientInputs(
        *(values.to(case.dtype) for values in _values(case.heads, case.queries, case.keys, case.depth))
    )


@functools.lru_cache(maxsize=6)
def _values(heads: int, queries: int, keys: int, depth: int) -> tuple[torch.Tensor, ...]:
    """Return q, k, v and grad in float32. Cached, because all dtypes use the same values; there are 6 shapes."""
    of_queries, of_keys = ((len(PROBLEMS), heads, length, depth) for length in (queries, keys))
    q, k, v = (
        hashed_inputs.signed(of_queries, 34),
        hashed_inputs.signed(of_keys, 35),
        hashed_inputs.uniform(of_keys, 36),
    )
    grad = hashed_inputs.signed(of_queries, 37)
    constant = PROBLEMS.index("V=1")
    v[constant] = 1
    grad[constant] = grad[constant].abs()  # avoids cancellation in the sum over the queries
    low = PROBLEMS.index("scores -120")
    q[low, ..., 0] = 1
    k[low, ..., 0] = SCORE * math.sqrt(depth)
    return q, k, v, grad


def exact_gradients(case: GradientCase, given: GradientInputs) -> ExactGradients:
    """Return the exact gradients and their spreads.

    With the weights P, dP = dO V^T and D = the row sums of P dP (elementwise): dS = P (dP - D), and the gradients are
    dS K / sqrt(d), dS^T Q / sqrt(d) and P^T dO.

    In the spreads, |dP| + |dO| |V| + |D| + the row sums of P |dO| |V| replaces dP - D, where |dO| |V| is the root of
    the sum of squares. An error of D shifts a whole row of dS. Its effect on the gradient of q is therefore a signed
    sum over K, not a root of squares.
    """
    q, k, v, grad = (values.to(torch.float64) for values in (given.q, given.k, given.v, given.grad))
    scale = 1 / math.sqrt(case.depth)
    # In place: allocating memory for each of these tensors took a tenth of the time (measured).
    weights = torch.softmax((q @ k.mT).mul_(scale).masked_fill_(case.ahead, -math.inf), dim=-1)
    slope, sizes = grad @ v.mT, (grad.square() @ v.square().mT).sqrt_()
    total = (weights * slope).sum(dim=-1, keepdim=True)
    row = total.abs() + (weights * sizes).sum(dim=-1, keepdim=True)
    terms = sizes.add_(slope.abs()).add_(row).mul_(weights).square_()
    change = slope.sub_(total).mul_(weights)
    change[PROBLEMS.index("V=1")] = 0  # removes float64's rounding errors
    spread_q = (terms @ k.square()).sqrt() + row * (weights @ k).abs()
    spreads = (scale * spread_q, scale * (terms.mT @ q.square()).sqrt(), (weights.square().mT @ grad.square()).sqrt())
    gradients = (scale * (change @ k), scale * (change.mT @ q), weights.mT @ grad)
    largest = scale * q.norm(dim=-1).amax(dim=(1, 2)) * k.norm(dim=-1).amax(dim=(1, 2))  # Cauchy-Schwarz inequality
    return ExactGradients(gradients, spreads, tuple(largest.tolist()))


def shared(case: GradientCase, given: GradientInputs) -> ExactGradients:
    """The exact gradients, computed once for all backends."""

    def compute() -> tuple[torch.Tensor, ...]:
        found = exact_gradients(case, given)
        return *found.gradients, *found.spreads, torch.tensor(found.logits, dtype=torch.float64)

    q, k, v, of_q, of_k, of_v, logits = EXACT.get(f"attention gradients {case}", compute)
    return ExactGradients((q, k, v), (of_q, of_k, of_v), tuple(logits.tolist()))


def check_gradients(context: Context, backend: str) -> None:
    """Run and check every case. Record the cases for which the backend has no kernel."""
    for case in gradient_cases(context.on_cpu):
        given = gradient_inputs(case)
        try:
            with context.step(f"{backend} backward {case.name}") as step:
                got = _gradients(context, backend, case, given)
            plain = None if backend == "math" else _gradients(context, "math", case, given)
        except RuntimeError as error:
            if not is_refused(error):
                raise
            context.unsupported(error)
            continue
        _judge(context, case, given, got, plain, step.seconds)


def _gradients(context: Context, backend: str, case: GradientCase, given: GradientInputs) -> Three:
    """The gradients of q, k and v on the host."""
    q, k, v = (values.to(context.device).detach().requires_grad_() for values in (given.q, given.k, given.v))
    mask = ~case.ahead.to(context.device) if case.masked else None
    with only(backend):
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=case.causal)
        found = backward_pass.gradients(output, (q, k, v), given.grad.to(context.device, output.dtype))
    return found[0].cpu(), found[1].cpu(), found[2].cpu()


def _judge(
    context: Context, case: GradientCase, given: GradientInputs, got: Three, plain: Three | None, seconds: float
) -> None:
    wrong = [f"{title} {values.dtype}" for title, values in zip(TITLES, got) if values.dtype != case.dtype]
    if wrong:
        context.fail("mismatch", f"{case.name}: {', '.join(wrong)}")
        return
    known = shared(case, given)
    limits = _limits(context, case, known, plain)
    for index, problem in enumerate(PROBLEMS):
        for title, values, wanted, limit in zip(TITLES, got, known.gradients, limits):
            _compare(context, f"{title} of {problem}", case, values[index], wanted[index], limit[index], seconds)
    constant = PROBLEMS.index("V=1")
    summed, wanted = (values[constant].to(torch.float64).sum(dim=-2) for values in (got[2], given.grad))
    _compare(context, "sum of grad v", case, summed, wanted, limits[2][constant].sum(dim=-2), seconds)


def _compare(
    context: Context,
    what: str,
    case: GradientCase,
    got: torch.Tensor,
    wanted: torch.Tensor,
    limit: torch.Tensor,
    seconds: float,
) -> None:
    worst = compare(got, wanted, limit)
    context.compared(what + case.how, case.dtype, got.shape, worst, seconds)
    if worst.wrong:
        context.fail(worst.kind, f"{what} {case.name}: {worst}")


def _limits(context: Context, case: GradientCase, known: ExactGradients, plain: Three | None) -> Three:
    """Return the tolerance of each gradient element.

    `plain`: the gradients of the math path in the same precision. The tolerance is the floor times a factor that is the
    same for a whole gradient of a problem. The factor is twice the largest error of `plain` relative to the floor, but
    at least 1, and the tolerance is at most the cap. Without `plain`, the tolerance is the cap.
    """
    length, tf32 = max(case.queries, case.keys), context.job.allow_tf32
    floors, caps = (
        torch.tensor([form(case.dtype, logit, case.depth, length, tf32) for logit in known.logits], dtype=torch.float64)
        for form in (tolerances.attention_gradient_floor, tolerances.attention_gradient_cap)
    )
    limits = []
    for index, (wanted, spread) in enumerate(zip(known.gradients, known.spreads)):
        single = (ROUNDINGS_CPU if context.on_cpu else ROUNDINGS) * tolerances.rounding(wanted, case.dtype)
        factors = caps if plain is None else floors
        if plain is not None:
            error = (plain[index].to(torch.float64) - wanted).abs()
            times = (error / (floors.view(-1, 1, 1, 1) * spread + single)).amax(dim=(1, 2, 3))
            factors = torch.minimum(caps, floors * (2 * torch.nan_to_num(times, nan=math.inf)).clamp(min=1))
        limits.append(factors.view(-1, 1, 1, 1) * spread + single)
    return limits[0], limits[1], limits[2]
