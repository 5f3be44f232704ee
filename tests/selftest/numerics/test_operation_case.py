"""Cases of operations: their expected results, and that each element of their inputs matters."""

import math
from collections.abc import Iterator, Mapping

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.probe_context import short_name
from envbuild.selftest.numerics import tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, worst
from envbuild.selftest.probes.linear_algebra import fft_and_linalg
from envbuild.selftest.probes.operations import exact_fixed_cases, operations
from envbuild.selftest.probes.training import optim_torch

POSITIONS = 7  # number of changed elements of each input, including the first and the last
CASES = [
    *operations.cases(rounded_sums=True),
    *fft_and_linalg.transforms(),
    *fft_and_linalg.factorizations(),
    *optim_torch.cases(),
]
# These have the inputs and the expected results of the loop, so one check of their inputs is enough.
LIKE_THE_LOOP = tuple(f" {name}, {len(optim_torch.SIZES)} tensors" for name in ("foreach", "fused"))
ROUNDED_TO = {short_name(dtype): dtype for dtype in (*exact_fixed_cases.FORMATS, torch.float64)}


def named(case: Case) -> str:
    return f"{case.dtype} {case.name}".removeprefix("torch.")


def changed(case: Case, values: torch.Tensor, position: int) -> torch.Tensor:
    """Return the values with one element changed: by an eighth of their standard deviation, or by 16 roundings if that
    is more; by 1 if all values are whole numbers.

    For the cases of maxima and minima, the element becomes the largest one, because others do not affect the result. In
    a conversion to a smaller dtype, the element moves toward 0 by more than the conversion's rounding: away from 0, an
    element that is converted to infinity would stay infinite.
    """
    flat = values.flatten().clone()
    value = float(flat[position])
    rounded_to = ROUNDED_TO.get(case.name.rpartition(" to ")[2]) if " to " in case.name else None
    if case.name.startswith("max and min"):
        flat[position] = 2 * flat.abs().max() + 1
    elif rounded_to and values.dtype in (torch.float32, torch.int32, torch.int64):
        limits = torch.finfo(rounded_to)
        by = math.copysign(2 * limits.eps * max(abs(value), limits.smallest_normal), value)
        flat[position] -= by if values.dtype.is_floating_point else int(by)
    elif values.dtype.is_floating_point and not torch.equal(flat, flat.round()):
        spread = float(flat.to(torch.float64).std())
        flat[position] += max(spread / 8, 16 * tolerances.unit_roundoff(values.dtype) * abs(value))
    else:
        flat[position] += 1 if value < flat.max() else -1
    return flat.reshape(values.shape)


def changes(case: Case) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for index, values in enumerate(case.given):
        last = values.numel() - 1
        for position in sorted({step * last // (POSITIONS - 1) for step in range(POSITIONS)}):
            given = list(case.given)
            given[index] = changed(case, values, position)
            yield f"element {position} of input {index}", given


def any_wrong(got: Mapping[str, torch.Tensor], expected: Mapping[str, Exact]) -> bool:
    """Return whether a result is wrong. Stop at the first wrong one, because the description of wrong elements takes
    most of the time of a comparison."""
    return any(worst(got, {name: exact})[name].wrong for name, exact in expected.items())


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_right_kernel_is_within_tolerance_and_each_element_of_its_inputs_matters(case: Case) -> None:
    expected = case.expected()
    right = worst(case.run(*case.given), expected)
    assert not any(found.wrong for found in right.values()), {name: str(found) for name, found in right.items()}
    for what, given in () if case.name.endswith(LIKE_THE_LOOP) else changes(case):
        assert any_wrong(case.run(*given), expected), (
            f"{what} makes no difference: choose inputs so that moving it (see `changed`) changes a result, "
            "for example values equal to limits"
        )


def test_cases_have_names_of_their_own() -> None:
    names = [named(case) for case in CASES]
    assert len(names) == len(set(names)) > 250


def test_exact_results_are_numbers_of_their_dtype() -> None:
    """Otherwise a kernel that sums in a different order, or rounds in between, could not be exact."""
    for case in exact_fixed_cases.cases():
        if "cumsum" in case.name or "bmm" in case.name or "addmm" in case.name or "embedding" in case.name:
            for exact in case.expected().values():
                assert torch.equal(exact.value.to(case.dtype).to(torch.float64), exact.value.to(torch.float64)), case


@pytest.mark.parametrize("small", [torch.float16, torch.bfloat16])
def test_rounding_by_arithmetic_is_that_of_ieee_754(small: torch.dtype) -> None:
    tiny = torch.finfo(small).smallest_normal * 2 * tolerances.unit_roundoff(small)  # the smallest subnormal number
    cases = {
        1 + tolerances.unit_roundoff(small): 1.0,  # halfway: rounded to even
        1 + 3 * tolerances.unit_roundoff(small): 1 + 4 * tolerances.unit_roundoff(small),
        tiny / 2: 0.0,
        tiny * 0.75: tiny,
        tiny * 1.5: 2 * tiny,
        -torch.finfo(small).max * (1 + 2.0**-20): -torch.finfo(small).max,
        -torch.finfo(small).max * (1 + tolerances.unit_roundoff(small)): -math.inf,
    }
    given = torch.tensor(list(cases), dtype=torch.float64)
    assert exact_fixed_cases.nearest(given, small).tolist() == list(cases.values())


def test_every_pattern_is_decoded_and_none_is_infinite() -> None:
    counts = {"float16": 2 * 31 * 1024, "bfloat16": 2 * 255 * 128, "float8_e4m3fn": 254, "float8_e5m2": 248}
    for name, count in counts.items():
        dtype = getattr(torch, name)
        values = exact_fixed_cases.decode(exact_fixed_cases.finite_patterns(dtype), dtype)
        assert len(values) == count and float(values.max()) == torch.finfo(dtype).max
        assert len(values.unique()) == len(values) - 1, "only 0 and -0 are the same number"
