"""Summarises an operation's output for a fingerprint, in numbers that can be compared with those of another machine
without the tensor.

The histogram counts errors in ULP (units in the last place). One ULP is the distance between neighbouring numbers of
the dtype, at the float64 result rounded to the dtype.
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
    """Return statistics of an output that need no reference.

    `fed`: the number of NaN or +inf elements in the inputs. The result contains up to `samples` values of the output,
    at evenly spaced positions that depend only on `samples` and the number of elements. "rms" and "peak" are those of
    the finite elements.
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
    """Return the result of `observe`, and under "against" the comparison with the float64 result and its tolerance.

    "against" is None if the shapes differ. If an exact element is not finite, every value is accepted for this element;
    "nonfinite" in "against" counts those of these elements whose value is not finite either. With `masks`, elements
    that are minus infinity in both tensors are not counted.
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
    """Return error / bound of each element. It is infinite for a NaN error, and if only the bound is 0."""
    ratio = torch.where(error == 0, torch.zeros_like(error), error / bound)
    return torch.where(torch.isnan(ratio), torch.full_like(ratio, math.inf), ratio)


def ulps(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return (got - rounded) / spacing of each element, in float64.

    `rounded` is `exact` rounded to the dtype of `got`. The spacing is the distance of neighbouring numbers of this
    dtype at `rounded`; for integer dtypes it is 1.
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
    """Count the values in bins by magnitude.

    Zeros are in bin "0". Positive values of 2^(n-1) to below 2^n are in bin "n", and negative ones in bin "-n": 4 to
    below 8 is bin "3". Nonzero values below 1 in magnitude are in bin "1" or "-1". Non-finite values are not counted.
    """
    values = values.reshape(-1)
    values = values[torch.isfinite(values)]
    bins = torch.frexp(values.abs())[1].clamp(min=1) * torch.sign(values).to(torch.int32)
    found, counts = torch.unique(bins, return_counts=True)
    return {str(place): count for place, count in zip(found.tolist(), counts.tolist())}


def relative_error(got: torch.Tensor, exact: torch.Tensor) -> float | str:
    """Return the root mean square of the error divided by the root mean square of the exact values.

    The result is "nan" if an exact value is not finite. A computed NaN also gives "nan", or "inf" if all exact values
    are 0.
    """
    exact = exact.to(torch.float64)
    error, size = float((got.to(torch.float64) - exact).norm()), float(exact.norm())
    return short(error / size if size else math.inf if error else 0.0)


def short(value: torch.Tensor | float) -> float | str:
    """Round to six significant digits, which are more than an error measure needs."""
    return json_number(float(f"{float(value):.6g}"))


def tensors(value: object, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for every tensor inside tuples, lists, mappings and dataclasses.

    A path is "" for `value` itself, ":0" for its first item, and ":logits" for a key or field.
    """
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
    """Count the NaN and +inf elements. Minus infinity does not count, because attention masks contain it."""
    found = 0
    for value in values:
        for _, tensor in tensors(value):
            if tensor.dtype.is_floating_point:
                found += int((torch.isnan(tensor) | (tensor == math.inf)).sum())
    return found


def first_fault(ops: list[Mapping[str, Any]]) -> dict[str, str] | None:
    """Return the first operation with a fault (see `output_fault`); None if no operation has one.

    The result is {"op": its id, "pass": "teacher" or "free", "kind", "reason"}. The kind is one of
    probe_outcome_and_figures.FAILURES.
    """
    for op in ops:
        for name in ("teacher", "free"):
            found = output_fault(op, op[name]) if op[name] else None
            if found:
                return {"op": op["id"], "pass": name, "kind": found[0], "reason": found[1]}
    return None


def output_fault(op: Mapping[str, Any], seen: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the fault of one output: its kind, one of probe_outcome_and_figures.FAILURES, and a sentence.

    An output has a fault if its dtype or shape is wrong, if an element exceeds its tolerance, or if an element is not
    finite although the inputs are. The result is None without a fault.
    """
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
