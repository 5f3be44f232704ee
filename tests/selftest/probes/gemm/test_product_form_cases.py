"""Forms of products: their float64 cases contain values that float32 cannot represent, and the sums of a dtype's cases
are integers that the dtype represents exactly."""

import math
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import operation_case, pairwise_case_sampling, tolerances
from envbuild.selftest.numerics.pairwise_case_sampling import Point
from envbuild.selftest.probes.gemm import product_form_cases

OPERATION = product_form_cases.product_form_operation()
SAMPLED = [*pairwise_case_sampling.sample(OPERATION, 400, seed=1).points]
DOUBLES = [point for point in SAMPLED if point["dtype"] == torch.float64]


def is_wrong(point: Point, seed: int) -> bool:
    case = OPERATION.make(point, seed)
    return any(found.wrong for found in operation_case.worst(case.run(*case.given), case.expected()).values())


def in_float32(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(torch.complex64 if x.is_complex() else torch.float32)


def test_float64_products_that_are_computed_in_float32_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.matmul

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return right(in_float32(a), in_float32(b)).to(a.dtype)

    points = [point for point in DOUBLES if point["form"].startswith("matmul")]
    assert len(points) > 4 and not any(is_wrong(point, number) for number, point in enumerate(points))
    monkeypatch.setattr(torch, "matmul", wrong)
    assert all(is_wrong(point, number) for number, point in enumerate(points))


def test_a_view_that_is_conjugated_when_it_is_read_is_not_read_without(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.bmm

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return right(a.conj() if a.is_conj() else a, b)

    points = [point for point in SAMPLED if point["form"] == "bmm" and point["complex"] and point["conjugate view"]]
    point = {**points[0], "m": 5, "n": 3}
    assert not is_wrong(point, 1)
    monkeypatch.setattr(torch, "bmm", wrong)
    assert is_wrong(point, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_results_are_integers_of_the_dtype(dtype: torch.dtype) -> None:
    """A sum beyond 1 / u would depend on the order of its terms. In float64 most results need more than float32."""
    largest = 0.0
    for number, point in enumerate(point for point in SAMPLED if point["dtype"] == dtype):
        case = OPERATION.make(point, number)
        values = [float(exact.value.abs().max()) for exact in case.expected().values()]
        largest = max(largest, *(value / max(1.0, abs(point["weights"][0])) for value in values))
    bits = -math.log2(tolerances.unit_roundoff(dtype))
    assert bits - 12 < math.log2(largest) < bits + 2
