"""norm.torch: LayerNorm, RMSNorm and GroupNorm over mixed dtypes, with and without autocast, forward and backward.

All implementations run the same cases, so that replacements such as apex's norms can be compared with torch's own. If
an implementation refuses a pair of dtypes, its message is reported. This is a failure only if the implementation
declares the pair.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import backward_pass, tolerances
from envbuild.selftest.numerics.element_comparison import Worst, compare
from envbuild.selftest.probes.normalization.norm_fixed_cases import (
    MANY_ROWS,
    NARROW,
    ROWS,
    Norm,
    NormCase,
    NormInputs,
    Results,
    exact_norm,
    long_sum,
    norm_case_groups,
    norm_inputs,
    torch_norms,
)

# torch's CPU kernels keep mean and 1 / sigma in the input's dtype for the backward pass. They sum the gradients of
# weights in the input's dtype too, row by row (tested with 2.0, 2.4 and 2.13).
ROUNDINGS_X, ROUNDINGS_WEIGHT = 2, ROWS + 2
TITLES = {"y": "y", "x": "grad input", "weight": "grad weight", "bias": "grad bias"}

_REFUSED = ("dtype", "scalar type", "not implemented for")


def norm_torch(context: Context) -> None:
    """norm.torch: LayerNorm, RMSNorm, GroupNorm over mixed dtypes, with and without autocast, forward and backward."""
    check_norms(context, torch_norms(context.on_cpu))


def check_norms(context: Context, norms: Sequence[Norm]) -> None:
    """Run the cases of these norms. If the first case of a pair of dtypes is refused, the pair's other cases are left
    out. Raises Skip if no norm supports any pair of dtypes, and none was required to."""
    pairs: dict[str, dict[str, str]] = {norm.name: {} for norm in norms}
    context.traits.update(pairs=pairs, needs_upcast=[], accumulates_in_half=[])
    for first, *others in norm_case_groups(norms):
        said = "supported"
        try:
            _check(context, first)
        except RuntimeError as error:
            said = str(error).strip().splitlines()[0]
            if not any(words in said for words in _REFUSED):
                raise
            if first.is_declared:
                context.traits.setdefault("refusal", said)
                context.fail("exception", f"{first.label} is refused: {said}")
        else:
            for case in others:
                _check(context, case)
            _note_extreme(context, first)
            _note_long_sum(context, first)
        pairs[first.norm.name][first.pair] = said
    if not context.figures and not context.faults:
        raise Skip(f"on this device no norm supports any of these pairs of dtypes: {pairs}")


def _check(context: Context, case: NormCase) -> None:
    """Run the case and judge its result and its gradients."""
    given = norm_inputs(case)
    with context.step(case.name) as step:
        got = _call(context, case, given)
    if got.y.dtype not in case.outputs or got.y.shape != case.shape:
        context.fail("mismatch", f"{case.name}: the result is {tuple(got.y.shape)} {got.y.dtype}")
        return
    worsts = _compare(case, got, given)
    for name, worst in worsts.items():
        title, values = f"{case.label} {TITLES[name]}", getattr(got, name)
        context.compared(title, values.dtype, values.shape, worst, step.seconds)
        if worst.wrong:
            context.fail(worst.kind, f"{TITLES[name]} of {case.name}: {worst}")
    if any(worst.wrong for worst in worsts.values()):
        _note_upcast(context, case, given)
        context.traits.setdefault("workaround", "upcast" if case.label in context.traits["needs_upcast"] else "none")


def _call(context: Context, case: NormCase, given: NormInputs) -> Results:
    """Return the norm's results on the host."""
    leaves = [values.to(context.device).detach().requires_grad_() for values in (given.x, given.weight, given.bias)]
    with _autocast(context) if case.autocast else contextlib.nullcontext():
        y = case.norm.call(*leaves)
    backward_pass.accumulate(y, given.grad.to(context.device, y.dtype))
    found = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return Results(y.detach().cpu(), *(gradient.cpu() for gradient in found))


def _autocast(context: Context) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(context.device.type, autocast_dtype(context))


def autocast_dtype(context: Context) -> torch.dtype:
    """Return the dtype that autocast casts to on this device."""
    return torch.bfloat16 if context.on_cpu else torch.float16


def _compare(case: NormCase, got: Results, given: NormInputs) -> dict[str, Worst]:
    """Return the worst element of the result and of each gradient that this norm has. The keys are the fields of
    Results."""
    seen = given.to(case.cast) if case.cast else given
    results, magnitudes = exact_norm(case.norm, dataclasses.replace(seen, grad=given.grad.to(got.y.dtype)))
    roundings = case.norm.roundings
    coarser = max(case.x, got.y.dtype, key=tolerances.unit_roundoff)

    def worst(name: str, dtype: torch.dtype, times: int, roundings: int) -> Worst:
        wanted = getattr(results, name)
        arithmetic = tolerances.norm(getattr(magnitudes, name), case.width, times, coarser, roundings)
        return compare(getattr(got, name), wanted, tolerances.rounding(wanted, dtype) + arithmetic)

    found = {
        "y": worst("y", got.y.dtype, 1, roundings),
        "x": worst("x", case.x, 2, roundings + ROUNDINGS_X),
        "weight": worst("weight", case.weight, 2, roundings + ROUNDINGS_WEIGHT),
    }
    if case.norm.centred:
        found["bias"] = worst("bias", case.weight, 2, roundings + ROUNDINGS_WEIGHT)
    return found


def _note_upcast(context: Context, case: NormCase, given: NormInputs) -> None:
    """If a wrong case gives the right result with the same values in float32, record that upcasting fixes it."""
    upcast = dataclasses.replace(case, x=torch.float32, weight=torch.float32, autocast=False)
    known = context.traits["needs_upcast"]
    if case.label in known or case.label == upcast.label:
        return
    wide = given.to(torch.float32)
    if not any(worst.wrong for worst in _compare(upcast, _call(context, upcast, wide), wide).values()):
        known.append(case.label)


def _note_extreme(context: Context, first: NormCase) -> None:
    """If a norm is wrong for values whose intermediate results exceed float16's range, and right with the same values
    in float32, record that upcasting fixes it. Only for float16 inputs of norms that need not compute in float32."""
    if first.extreme:
        return
    case = dataclasses.replace(first, extreme=True)
    given = norm_inputs(case)
    context.step(f"{case.name}, extreme values")
    if any(worst.wrong for worst in _compare(case, _call(context, case, given), given).values()):
        _note_upcast(context, case, given)


def _note_long_sum(context: Context, first: NormCase) -> None:
    """Record which gradients of weights are summed over many rows in half precision."""
    if first.autocast or first.x == first.weight == torch.float32:
        return
    case = dataclasses.replace(first, rows=MANY_ROWS, width=NARROW)
    given = long_sum(case)
    context.step(f"{case.name}, long sums")
    got = _call(context, case, given)
    results, magnitudes = exact_norm(case.norm, dataclasses.replace(given, grad=given.grad.to(got.y.dtype)))
    for name in ("weight", "bias") if case.norm.centred else ("weight",):
        wanted = getattr(results, name)
        # A single rounding to either dtype does not count as accumulation in half precision.
        single = tolerances.rounding(wanted, case.x) + tolerances.rounding(wanted, case.weight)
        limit = single + tolerances.gamma(MANY_ROWS, tolerances.ACCUMULATOR) * getattr(magnitudes, name)
        if compare(getattr(got, name), wanted, limit).wrong:
            context.traits["accumulates_in_half"].append(f"{case.label} {TITLES[name]}")
