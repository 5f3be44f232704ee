"""Test cases: a call of an operation with its inputs and exact results. `check` runs a case on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

import torch

from envbuild.selftest.harness.probe_context import Context, Refusal, is_unsupported, short_name
from envbuild.selftest.numerics.element_comparison import Worst, compare
from envbuild.selftest.numerics.float64_reference_operations import Exact

_NO_ERROR = torch.zeros((), dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A test case: for each result of `exact(*given)`, the result of `run(*given)` with the same name must be within
    its tolerance.

    `given` is on the host. `run` receives it on the device. `exact` receives it on the host, with all floating-point
    numbers converted to float64. For the fixed cases, tests/selftest/numerics/test_operation_case.py checks that a
    change of one input element changes a result beyond its tolerance.
    """

    name: str
    dtype: torch.dtype
    given: tuple[torch.Tensor, ...]
    run: Callable[..., Mapping[str, torch.Tensor]]
    exact: Callable[..., Mapping[str, Exact]]

    def expected(self) -> Mapping[str, Exact]:
        """The exact results."""
        return self.exact(*(x.to(torch.float64) if x.is_floating_point() else x for x in self.given))


def without_rounding(value: torch.Tensor) -> Exact:
    """Return a result with a tolerance of 0. It must not depend on the device, the dtype or the order of summation."""
    return Exact(value, _NO_ERROR)


def worst(got: Mapping[str, torch.Tensor], expected: Mapping[str, Exact]) -> dict[str, Worst]:
    """Return the worst element of each result. Raises KeyError for a missing result, ValueError for a wrong shape."""
    return {name: compare(got[name], exact.value, exact.bound) for name, exact in expected.items()}


def check(context: Context, case: Case, may_refuse: Refusal = is_unsupported) -> None:
    """Run a case on the context's device, record a figure for each result, and record a fault for each result that
    exceeds its tolerance. If `may_refuse` recognises an error as a missing kernel, no result is recorded."""
    label = f"{short_name(case.dtype)} {case.name}"
    given = [values.to(context.device) for values in case.given]
    with context.step(label, may_refuse) as step:
        got = case.run(*given)
    if step.refused:
        return
    for name, found in worst(got, case.expected()).items():
        context.compared(f"{case.name}: {name}", case.dtype, got[name].shape, found, step.seconds)
        if found.wrong:
            context.fail(found.kind if found.bound else "mismatch", f"{label}: {name}: {found}")
