"""Errors in ULP, their histogram and the figures of a comparison, compared with Python's own arithmetic."""

import json
import math
import struct
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import output_statistics

SINGLE, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


def neighbours(value: float, count: int) -> float:
    """Return the float32 that is `count` numbers above."""
    return struct.unpack("<f", struct.pack("<i", struct.unpack("<i", struct.pack("<f", value))[0] + count))[0]


@pytest.mark.parametrize("value", [1.0, 1.5, 0.1, 3.0e38, 1.2e-38, 1e-45, 65504.0])
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_ulps_count_the_numbers_between(value: float, count: int) -> None:
    exact = torch.tensor([value], dtype=SINGLE)
    got = torch.tensor([neighbours(float(exact), count)], dtype=SINGLE)
    if float(got) < 2 * float(exact) and math.frexp(float(got))[1] == math.frexp(float(exact))[1]:
        assert output_statistics.ulps(got, exact.double()).tolist() == [count]


@pytest.mark.parametrize(
    ("dtype", "value", "ulp"),
    [
        (HALF, 1.0, 2.0**-10), (HALF, 0.0, 2.0**-24), (HALF, 2.0**-15, 2.0**-24), (HALF, 65504.0, 32.0),
        (BRAIN, 1.0, 2.0**-7), (BRAIN, 255.0, 1.0), (SINGLE, 0.0, 2.0**-149),
    ],
)  # fmt: skip
def test_the_unit_is_the_distance_of_the_dtypes_own_numbers(dtype: torch.dtype, value: float, ulp: float) -> None:
    got = torch.tensor([value - 3 * ulp], dtype=torch.float64).to(dtype)
    assert output_statistics.ulps(got, torch.tensor([value], dtype=torch.float64)).tolist() == [-3.0]


def test_the_reference_is_rounded_before_it_counts() -> None:
    exact = torch.tensor([1 + 2.0**-12], dtype=torch.float64)
    assert output_statistics.ulps(torch.ones(1, dtype=HALF), exact).tolist() == [0.0]


def test_the_histogram_has_a_bin_for_each_power_of_two() -> None:
    values = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.9, 2.0, -2.0, -3.9, 4.0, 1024.0, float("nan"), float("inf")])
    found = output_statistics.histogram(values.double())
    assert found == {"0": 2, "1": 3, "2": 1, "-2": 2, "3": 1, "11": 1}
    assert output_statistics.histogram(torch.zeros(0)) == {}


def judged(got: list[float], exact: list[float], bound: float = 0.5, dtype: torch.dtype = SINGLE) -> Any:
    limit = torch.full((len(exact),), bound, dtype=torch.float64)
    return output_statistics.judged(torch.tensor(got, dtype=dtype), 0, torch.tensor(exact, dtype=torch.float64), limit)


def test_the_worst_element_is_reported_with_its_bound() -> None:
    found = judged([1.0, 2.25, 3.0, 5.0], [1.0, 2.0, 3.0, 4.0])["against"]
    assert (found["where"], found["got"], found["expected"]) == ([3], 5.0, 4.0)
    assert (found["error"], found["bound"], found["ratio"], found["wrong"], found["count"]) == (1.0, 0.5, 2.0, 1, 4)
    assert found["median"] == 0.0
    assert found["relative"] == pytest.approx(math.sqrt((0.25**2 + 1) / 30), rel=1e-5)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_wrong_and_stay_strict_json(wrong: float) -> None:
    seen = judged([1.0, wrong], [1.0, 2.0])
    assert (seen["nonfinite"], seen["against"]["wrong"], seen["against"]["where"]) == (1, 1, [1])
    assert seen["against"]["got"] == str(wrong) == seen["samples"][1]
    assert sum(seen["against"]["ulps"].values()) == 1
    json.dumps(seen, allow_nan=False)


def test_nothing_is_promised_where_the_exact_result_is_not_finite() -> None:
    seen = judged([1.0, float("nan"), 7.0], [1.0, float("nan"), float("inf")])
    assert (seen["against"]["wrong"], seen["against"]["ratio"]) == (0, 0.0)


def test_another_shape_cannot_be_judged_and_is_a_fault() -> None:
    seen = output_statistics.judged(torch.zeros(2, 3), 0, torch.zeros(3, 2).double(), torch.zeros(3, 2).double())
    op = {"id": "x", "dtype": "float32", "shape": [3, 2], "exact": False, "teacher": seen, "free": None}
    assert seen["against"] is None
    found = output_statistics.first_fault([op])
    assert found is not None and (found["kind"], found["pass"]) == ("mismatch", "teacher")


@pytest.mark.parametrize("shape", [(), (1,), (0,), (7,), (3, 5, 9)])
def test_samples_lie_evenly_from_the_first_to_the_last(shape: tuple[int, ...]) -> None:
    values = torch.arange(math.prod(shape), dtype=SINGLE).reshape(shape)
    samples = output_statistics.observe(values, 0)["samples"]
    assert len(samples) == min(8, values.numel())
    if samples:
        assert (samples[0], samples[-1]) == (0.0, values.numel() - 1)


def test_tensors_are_found_in_nested_results() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    found = dict(output_statistics.tensors({"a": [one, (two, None)], "b": 5, "c": {"d": three}}))
    assert {name: tensor.numel() for name, tensor in found.items()} == {":a:0": 1, ":a:1:0": 2, ":c:d": 3}


def test_masks_of_minus_infinity_are_not_a_fault_of_the_inputs() -> None:
    bad = torch.tensor([float("nan"), float("inf"), float("-inf"), 1.0])
    assert output_statistics.not_finite([bad, {"mask": bad}], torch.tensor([1, 2])) == 4
