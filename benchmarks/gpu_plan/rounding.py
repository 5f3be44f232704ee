"""Probes that also measure how far results are from the exact ones beyond the one correct rounding of the result.

The trait BEYOND_ROUNDING has by dtype the largest (error - rounding) / (tolerance - rounding) over the comparisons
that the probe judges. The variable INPUTS_VARIABLE chooses the inputs.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import torch

from envbuild.selftest import bounds, inputs, reference
from envbuild.selftest.catalogue import PROBES as REAL
from envbuild.selftest.context import Context, dtype_name
from envbuild.selftest.registry import Probe
from gpu_plan.selftests import BEYOND_ROUNDING, INPUTS_VARIABLE

_STRIDE = 7919  # between the seeds of inputs; a prime, so that no two of the probes' own coincide


def beyond(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest part of the tolerance that is taken by more than rounding the exact result to got's dtype."""
    exact = expected.to(torch.float64)
    error = (got.detach().to("cpu").to(torch.float64) - exact).abs()
    once = bounds.rounding(exact, got.dtype)
    rest, more = (bound.expand_as(error) - once).clamp(min=0), (error - once).clamp(min=0)
    share = torch.where(rest > 0, more / rest, torch.where(more > 0, torch.inf, 0.0))
    return float(share.max())


def measured(probe: Probe) -> Probe:
    """The probe with the trait."""

    def function(context: Context) -> None:
        compare, figure = reference.compare, context.figure
        seen: dict[tuple[float, float], tuple[str, float]] = {}
        worst: dict[str, float] = {}
        context.traits[BEYOND_ROUNDING] = worst

        def comparing(got: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor | None = None) -> reference.Worst:
            found = compare(got, expected, bound)
            if bound is not None:
                seen[found.error, found.bound] = dtype_name(got.dtype), beyond(got, expected, bound)
            return found

        def noting(case: str, dtype: torch.dtype, shape: Any, error: float, bound: float, seconds: float) -> Any:
            if (error, bound) in seen:  # of the comparisons only those that are judged become figures
                name, share = seen[error, bound]
                worst[name] = max(worst.get(name, 0.0), share)
            return figure(case, dtype, shape, error, bound, seconds)

        context.figure = noting  # type: ignore[method-assign]
        for name, module in list(sys.modules.items()):
            if name.startswith("envbuild.selftest.probes.") and getattr(module, "compare", None) is compare:
                module.compare = comparing  # type: ignore[attr-defined]
        probe.function(context)

    return dataclasses.replace(probe, function=function)


def _shift_inputs(seed: int) -> None:
    hashes = inputs.hashes

    def shifted(count: int, given: int) -> torch.Tensor:
        return hashes(count, given + _STRIDE * seed)

    module: Any = inputs
    module.hashes = shifted


PROBES = tuple(map(measured, REAL))
_shift_inputs(int(os.environ.get(INPUTS_VARIABLE, "0")))
