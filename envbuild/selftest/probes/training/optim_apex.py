"""optim.apex: FusedAdam over lists of tensors, step by step against Adam in float64.

Each step is checked separately. The reference starts each step from the parameters (or the master weights) that the
optimizer stored in the previous step. It computes the moments itself from the gradients and does not take the
optimizer's; the last paragraph names the exception. All values repeat with a prime period, so that a chunk in the wrong
position is detected.

The tested features come from apex's sources at 6424da3b (2026-07-08). They are parameters in three dtypes, moments in
float32, and three variants: plain, `capturable` (step and rate on the device), and `capturable` with float32 master
weights. For bfloat16, apex keeps master weights but does not use them for its steps. FusedAdam's kernel processes a
list of tensors in chunks of 65536 elements. One launch takes at most 36 tensors (30 with master weights) and 320
chunks. FusedAdam has no CPU kernel.

Without master weights, `capturable` rounds the float32 moments to the dtype of the parameters (seen on an H200). This
is reported as the trait `rounded_moments`, and the reference then continues from the stored moments.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass
from typing import Any

import torch

from envbuild.selftest.harness.probe_context import Context, short_name
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.element_comparison import Worst, compare
from envbuild.selftest.numerics.reference_products import one_thread
from envbuild.selftest.probes import apex_loader

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 2048 * 32
FEW = (1, 3, 513, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7)
SIZES = (*FEW, *range(2, 64, 2), *reversed(FEW))  # 45 tensors, more than one launch takes
LONG = 321 * CHUNK + 1  # more chunks than one launch takes: 84 MB per list, tested only on a GPU
PERIOD = 65521  # a prime: the period of the values
STEPS = 4

RATE, BETAS, EPSILON, DECAY = 2.0**-3, (0.9, 0.999), 1e-8, 2.0**-4

VARIANTS: dict[str, dict[str, bool]] = {
    "plain": {},
    "capturable": {"capturable": True},
    "master weights": {"capturable": True, "master_weights": True},
}
_REFUSED = ("unexpected keyword argument", "only support", "not implemented for")


@dataclass(frozen=True)
class AdamCase:
    """One tested configuration. `decoupled`: use AdamW's weight decay; otherwise the decay is added to the gradient."""

    variant: str
    dtype: torch.dtype
    decoupled: bool
    sizes: tuple[int, ...] = SIZES

    @property
    def name(self) -> str:
        return f"{short_name(self.dtype)} {self.variant} {'AdamW' if self.decoupled else 'Adam'}"

    @property
    def must(self) -> bool:
        """Whether every apex release supports this case. The oldest releases support neither bfloat16 nor
        `capturable`."""
        return self.variant == "plain" and self.dtype != torch.bfloat16

    def where(self, index: int) -> str:
        """Describe the tensor and element at a position of the concatenated list."""
        ends = list(itertools.accumulate(self.sizes))
        tensor = bisect.bisect_right(ends, index)
        element = index - ends[tensor] + self.sizes[tensor]
        return f"element {element} of tensor {tensor} (of {self.sizes[tensor]})"


class Moments:
    """Adam's moments in float64, and the first moment with every term positive. Each is one long vector, or 0 before
    the first step."""

    def __init__(self) -> None:
        self.first: Any = 0.0
        self.second: Any = 0.0
        self.positive: Any = 0.0
        self.step = 0

    def next(self, case: AdamCase, p: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the parameters after the next step from `p`, and the tolerance of the step's arithmetic."""
        self.step += 1
        p, grad = p.to(torch.float64), grad.to(torch.float64)
        if not case.decoupled:
            grad = grad + DECAY * p
        first, second = BETAS
        self.first = first * self.first + (1 - first) * grad
        self.positive = first * self.positive + (1 - first) * grad.abs()
        self.second = second * self.second + (1 - second) * grad * grad
        root = (self.second / (1 - second**self.step)).sqrt() + EPSILON
        scale = 1 / (1 - first**self.step) / root
        decay = DECAY * p if case.decoupled else torch.zeros_like(p)
        correction = 0.0
        if case.variant != "plain":  # in the "plain" variant, the host computes the corrections in double precision
            correction = sum(tolerances.power_correction(beta, self.step) for beta in BETAS)
        magnitude = self.positive * scale + decay.abs()
        return p - RATE * (self.first * scale + decay), tolerances.adam(RATE, magnitude, self.step, correction)

    def take_rounded(self, first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype) -> bool:
        """If the stored moments are this object's moments rounded to `dtype`, continue from the stored ones. Return
        whether they are."""
        for stored, own, size in ((first, self.first, self.positive), (second, self.second, self.second)):
            limit = tolerances.rounding(own, dtype) + 4 * (self.step + 1) * tolerances.ROUNDED * size
            if not torch.equal(stored.to(dtype).to(stored.dtype), stored) or compare(stored, own, limit).wrong:
                return False
        self.first, self.second = first.to(torch.float64), second.to(torch.float64)
        return True


def optim_apex(context: Context) -> None:
    """optim.apex: FusedAdam's steps, plain and with master weights, in fp32, fp16 and bf16, against float64."""
    kind = apex_loader.part("optimizers", "amp_C").FusedAdam
    if context.on_cpu:
        _need_cpu(kind)
    cases = [AdamCase(*each) for each in itertools.product(VARIANTS, DTYPES, (True, False))]
    for case in cases:
        try:
            _check(context, kind, case)
        except (RuntimeError, TypeError) as error:
            if not any(words in str(error) for words in _REFUSED):
                raise
            context.unsupported(error)
            if case.must:
                context.fail("exception", f"{case.name} is refused: {str(error).splitlines()[0]}")
    if not context.on_cpu:
        check_long(context, kind)


def _need_cpu(kind: Any) -> None:
    """Raise Skip if FusedAdam cannot be created without a GPU."""
    try:
        kind([torch.nn.Parameter(torch.ones(1))])
    except (RuntimeError, AssertionError) as error:
        raise Skip(f"needs a GPU: FusedAdam has no CPU kernel ({str(error).splitlines()[0]})") from None


def _check(context: Context, kind: Any, case: AdamCase) -> None:
    """Check the steps of a case until one is wrong."""
    count = sum(case.sizes)
    begin = torch.split(start_parameters(count).to(case.dtype), list(case.sizes))
    parameters = [torch.nn.Parameter(values.to(context.device).clone()) for values in begin]
    context.step(f"{case.name}, made")
    optimizer = _made(kind, parameters, case)
    masters = _masters(optimizer) if case.variant == "master weights" else None
    reference = Moments()
    for number in range(1, STEPS + 1):
        grad = gradient(count, number, case.decoupled).to(case.dtype)
        for parameter, values in zip(parameters, torch.split(grad, list(case.sizes))):
            parameter.grad = values.to(context.device)
        before = _flat(parameters if masters is None else masters)
        with context.step(f"{case.name}, step {number}") as step:
            optimizer.step()
        got = _flat(parameters)
        if masters is not None and case.dtype == torch.bfloat16 and torch.equal(_flat(masters), before):
            context.traits.setdefault("master_weights_unused", []).append(case.name)
            masters = None
        wanted, arithmetic = reference.next(case, before, grad)
        judged = [("parameters", got, case.dtype)]
        if masters is not None:
            judged.append(("master weights", _flat(masters), torch.float32))
        for what, values, dtype in judged:
            # The step is rounded in float32, then the stored values in their dtype.
            limit = tolerances.rounding(wanted, dtype) + tolerances.rounding(wanted, torch.float32) + arithmetic
            worst = compare(values, wanted, limit)
            title = f"{case.name} {what}, step {number}"
            context.compared(title, dtype, values.shape, worst, step.seconds)
            if worst.wrong:
                context.fail(worst.kind, _said(case, title, worst))
                return
        if masters is None and case.variant != "plain" and case.dtype != torch.float32:
            stored = [_flat([optimizer.state[p][name] for p in parameters]) for name in ("exp_avg", "exp_avg_sq")]
            if reference.take_rounded(stored[0], stored[1], case.dtype):
                rounded = context.traits.setdefault("rounded_moments", [])
                rounded += [] if case.name in rounded else [case.name]
        if masters is not None:
            worst = compare(got, _flat(masters).to(case.dtype))
            if worst.wrong:
                context.fail("mismatch", _said(case, f"{case.name} against master weights, step {number}", worst))
                return


def check_long(context: Context, kind: Any) -> None:
    """Check one step over more chunks than one launch takes. The result is compared one period at a time."""
    case = AdamCase("plain", torch.float32, True, (LONG,))
    parameter = torch.nn.Parameter(start_parameters(LONG).to(context.device))
    parameter.grad = gradient(LONG, 1, True).to(context.device)
    optimizer = _made(kind, [parameter], case)
    title = f"{case.name} {LONG} elements"
    with context.step(title) as step:
        optimizer.step()
    wanted, arithmetic = Moments().next(case, start_parameters(PERIOD), gradient(PERIOD, 1, True))
    limit = 2 * tolerances.rounding(wanted, torch.float32) + arithmetic
    parts = torch.split(parameter.detach(), PERIOD)
    with one_thread():
        worsts = [compare(part, wanted[: len(part)], limit[: len(part)]) for part in parts]
    at, worst = max(enumerate(worsts), key=lambda pair: (pair[1].wrong > 0, pair[1].error / pair[1].bound))
    context.compared(title, torch.float32, (LONG,), worst, step.seconds)
    if worst.wrong:
        context.fail(worst.kind, _said(case, title, worst, at * PERIOD))


def _made(kind: Any, parameters: list[torch.nn.Parameter], case: AdamCase) -> Any:
    options = VARIANTS[case.variant]
    return kind(
        parameters, lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, adam_w_mode=case.decoupled, **options
    )


def _said(case: AdamCase, title: str, worst: Worst, before: int = 0) -> str:
    """Return a sentence about the worst element and its position in the list. `before`: the number of list elements
    that precede the compared ones."""
    what = f"is {worst.got:g}, should be {worst.expected:g} within {worst.bound:g}"
    where = case.where(before + worst.where[0])
    return f"{title}: {where} {what} ({worst.wrong} of {worst.count} wrong)"


def _masters(optimizer: Any) -> list[torch.Tensor]:
    return [values for group in optimizer.param_groups_master for values in group["params"]]


def _flat(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([values.detach().reshape(-1) for values in tensors]).cpu()


def start_parameters(count: int) -> torch.Tensor:
    """Parameters in +-[1, 2)."""
    return _periodic(hashed_inputs.signs(PERIOD, 61) * (1 + hashed_inputs.uniform((PERIOD,), 62)), count)


def gradient(count: int, step: int, decoupled: bool) -> torch.Tensor:
    """Return gradients of +-[0, 1) times 1, 2^-6 or 2^-12. The squares of small ones underflow in float16; one
    gradient in eight is 0.

    If the decay is added to the gradient, each gradient has the sign of its parameter in all steps, so that nothing
    cancels.
    """
    sizes = hashed_inputs.hashes(PERIOD, 63)
    scale = torch.tensor([1.0, 2.0**-6, 2.0**-12])[sizes % 3] * ((sizes >> 8) % 8 != 0)
    signs = hashed_inputs.signs(PERIOD, 70 + step if decoupled else 61)
    return _periodic(signs * hashed_inputs.uniform((PERIOD,), 80 + step) * scale, count)


def _periodic(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.repeat(-(-count // len(values)))[:count]
