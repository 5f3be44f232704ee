"""Summarises an operation's output in numbers that two machines can compare without the tensor, for fingerprints.

Errors are counted in ULP: the distance between neighbouring numbers of the dtype at the reference, which is the float64
result rounded to that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from envbuild.selftest.harness.probe_context import dtype_name
from envbuild.selftest.harness.probe_outcome_and_figures import json_number
from envbuild.selftest.numerics.element_comparison import compare
from envbuild.selftest.numerics.tensor_digests import raw_digest
from envbuild.selftest.numerics.tolerances import unit_roundoff

SAMPLES = 8


def observe(got: torch.Tensor, fed: int, samples: int = SAMPLES) -> dict[str, Any]:
    """Statistics of an output that need no reference. `fed`: number of NaN or +inf elements in the inputs.

    `samples` values are taken at evenly spaced positions that depend only on the number of elements.
    """
    got = got.detach().to("cpu")
    wide = got.to(torch.float64).reshape(-1)
    finite = wide[torch.isfinite(wide)]
    last = max(wide.numel() - 1, 0)
    positions = sorted({index * last // max(samples - 1, 1) for index in range(samples)}) if wide.numel() else []
    return {
        "dtype": dtype_name(got.dtype),
        "shape": list(got.shape),
        "sha256": raw_digest(got),
        "fed": fed,
        "nonfinite": wide.numel() - finite.numel(),
        "rms": short(finite.square().mean().sqrt()) if finite.numel() else 0.0,
        "peak": short(finite.abs().max()) if finite.numel() else 0.0,
        "samples": [json_number(value) for value in wide[positions].tolist()],
        "against": None,
    }


def judged(
    got: torch.Tensor, fed: int, exact: torch.Tensor, bound: torch.Tensor, samples: int = SAMPLES, masks: bool = True
) -> dict[str, Any]:
    """The result of `observe`, plus the error against the float64 result and its bound, unless the shapes differ.

    Elements whose exact result is not finite have no required value; `nonfinite` counts those that are not finite here
    either. With `masks`, minus infinity does not count where the exact result is minus infinity too.
    """
    seen = observe(got, fed, samples)
    if got.shape == exact.shape:
        got = got.detach().to("cpu")
        both = ~torch.isfinite(got) & ~torch.isfinite(exact)
        masked = (got == -math.inf) & (exact == -math.inf) & masks
        against = _against(got, exact, bound.expand_as(exact))
        seen["against"] = dict(against, nonfinite=int((both & ~masked).sum()))
    return seen


def _against(got: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> dict[str, Any]:
    promised = torch.isfinite(exact)
    exact = torch.where(promised, exact, torch.zeros_like(exact))
    bound = torch.where(promised, bound, torch.zeros_like(bound))
    values = torch.where(promised, got, torch.zeros_like(got))
    if not exact.numel():
        return {"ulps": {}, "error": 0.0, "bound": 0.0, "ratio": 0.0, "median": 0.0, "where": [], "got": 0.0,
                "expected": 0.0, "wrong": 0, "count": 0, "relative": 0.0}  # fmt: skip
    worst = compare(values, exact, bound)
    ratios = _ratios((values.to(torch.float64) - exact).abs(), bound)
    return {
        "ulps": histogram(ulps(values, exact)),
        "error": short(worst.error),
        "bound": short(worst.bound),
        "ratio": short(ratios.max()),
        "median": short(ratios.median()),
        "where": list(worst.where),
        "got": short(worst.got),
        "expected": short(worst.expected),
        "wrong": worst.wrong,
        "count": worst.count,
        "relative": relative_error(values, exact),
    }


def _ratios(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Error divided by bound for each element; infinite for NaN, and for any error where the bound is 0."""
    ratio = torch.where(error == 0, torch.zeros_like(error), error / bound)
    return torch.where(torch.isnan(ratio), torch.full_like(ratio, math.inf), ratio)


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """(got - rounded) / spacing for each element, float64; `rounded` is `exact` in the dtype of `got`.

    An integer dtype has a spacing of 1.
    """
    rounded = exact.to(got.dtype).to(torch.float64)
    difference = got.to(torch.float64) - rounded
    if not got.dtype.is_floating_point:
        return difference
    u = unit_roundoff(got.dtype)
    mantissa = torch.frexp(rounded.abs())[0]  # in [0.5, 1), or 0
    spacing = torch.nan_to_num(rounded.abs() / mantissa * u, nan=0.0)
    return difference / spacing.clamp(min=float(torch.finfo(got.dtype).tiny) * 2 * u)


def histogram(values: torch.Tensor) -> dict[str, int]:
    """Number of values in each bin: "0" for zero; "3" and "-3" for 4 <= |value| < 8, and so on; below 1 counts as "1".

    Non-finite values are in no bin.
    """
    values = values.reshape(-1)
    values = values[torch.isfinite(values)]
    bins = torch.frexp(values.abs())[1].clamp(min=1) * torch.sign(values).to(torch.int32)
    found, counts = torch.unique(bins, return_counts=True)
    return {str(place): count for place, count in zip(found.tolist(), counts.tolist())}


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float | str:
    """Root mean square of the error divided by that of the exact values; "nan" if a value is not finite."""
    exact = exact.to(torch.float64)
    error, size = float((got.to(torch.float64) - exact).norm()), float(exact.norm())
    return short(error / size if size else math.inf if error else 0.0)


def short(value: torch.Tensor | float) -> float | str:
    """Round to six digits, more than an error measure needs."""
    return json_number(float(f"{float(value):.6g}"))


def tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside tuples, lists, mappings and objects with fields, with its path: "", ":0", ":logits"."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors(item, f"{name}:{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors(item, f"{name}:{index}")
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from tensors(getattr(value, key), f"{name}:{key}")


def not_finite(*values: object) -> int:
    """Number of NaN and infinite values; minus infinity does not count, because masks contain it."""
    found = 0
    for value in values:
        for _, tensor in tensors(value):
            if tensor.dtype.is_floating_point:
                found += int((torch.isnan(tensor) | (tensor == math.inf)).sum())
    return found


def first_fault(ops: list[Mapping[str, Any]]) -> dict[str, str] | None:
    """The first operation whose output exceeds its bound, or is not finite although its inputs are; None if all are
    right.

    The result is {"op", "pass", "kind", "reason"} with a kind of probe_outcome_and_figures.FAILURES.
    """
    for op in ops:
        for name in ("teacher", "free"):
            found = output_fault(op, op[name]) if op[name] else None
            if found:
                return {"op": op["id"], "pass": name, "kind": found[0], "reason": found[1]}
    return None


def output_fault(op: Mapping[str, Any], seen: Mapping[str, Any]) -> tuple[str, str] | None:
    """The fault of one output: a kind of probe_outcome_and_figures.FAILURES and a sentence; None if it is right."""
    if (seen["dtype"], seen["shape"]) != (op["dtype"], op["shape"]):
        return "mismatch", "output is {dtype} {shape}, ".format(**seen) + "should be {dtype} {shape}".format(**op)
    against = seen["against"]
    if against is None:
        if not seen["nonfinite"] or seen["fed"]:
            return None
        return "nonfinite", "{} values are not finite, its inputs are".format(seen["nonfinite"])
    if not against["wrong"]:
        if not against["nonfinite"] or seen["fed"]:
            return None
        words = "{} values are not finite, nor are they in float64; the inputs are: look at the weights"
        return "nonfinite", words.format(against["nonfinite"])
    text = "element {where} is {got}, should be {expected} within {bound} ({wrong} of {count} wrong)".format(**against)
    if isinstance(against["got"], str):
        return "nonfinite", text
    return ("mismatch" if op["exact"] else "bound"), text
