"""Functions of two tensors, and functions of complex numbers: the tolerances of their cases, and the wrong kernels that
the cases detect."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import operation_case, pairwise_case_sampling
from envbuild.selftest.numerics.operation_case import Case
from envbuild.selftest.numerics.pairwise_case_sampling import Point
from envbuild.selftest.probes.operations import broadcast_and_complex_cases

OPERATIONS = {operation.name: operation for operation in broadcast_and_complex_cases.OPERATIONS}
COMPOSED = [name for name, function in broadcast_and_complex_cases.FUNCTIONS.items() if not function.whole]


def cases(operation: str, is_wanted: Callable[[Point], bool], count: int = 200) -> Iterator[Case]:
    points = pairwise_case_sampling.sample(OPERATIONS[operation], count, seed=2).points
    return (OPERATIONS[operation].make(point, number) for number, point in enumerate(points) if is_wanted(point))


def is_wrong(case: Case) -> bool:
    return any(found.wrong for found in operation_case.worst(case.run(*case.given), case.expected()).values())


@pytest.mark.parametrize("name", ["pow", "atan2", "hypot", "logaddexp"])
def test_a_relative_error_of_a_10000th_is_found_in_float32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def is_float32(point: Point) -> bool:
        return point["function"] == name and point["dtype"] == torch.float32 and point["other dtype"] == "same"

    found = list(cases("broadcast functions", is_float32, 400))
    assert len(found) > 2 and not any(map(is_wrong, found))
    right = getattr(torch, name)
    monkeypatch.setattr(torch, name, lambda x, y: right(x, y) * (1 + 1e-4))
    assert all(map(is_wrong, found))


@pytest.mark.parametrize("name", COMPOSED)
def test_right_results_in_half_precision_use_at_most_their_tolerance(name: str) -> None:
    found = list(cases("broadcast functions", lambda point: point["function"] == name))
    assert len(found) > 2 and not any(map(is_wrong, found))


@pytest.mark.parametrize("function", ["product with the conjugate", "product of a turned conjugate"])
def test_a_conjugate_that_a_product_does_not_see_is_found(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    found = list(cases("complex numbers", lambda point: point["function"] == function))
    assert len(found) > 2 and not any(map(is_wrong, found))
    right: Any = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: right(a.conj() if a.is_conj() else a, b))
    assert any(map(is_wrong, found))
    assert all(is_wrong(case) for case in found if " conjugated " not in case.name)


def test_a_conjugated_view_whose_elements_are_read_as_they_are_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_view(point: Point) -> bool:
        return point["function"] == "mul" and point["layout"] == broadcast_and_complex_cases.CONJUGATED

    found = list(cases("complex numbers", is_view))
    assert found and not any(map(is_wrong, found))
    right: Any = torch.Tensor.__mul__
    monkeypatch.setattr(torch.Tensor, "__mul__", lambda a, b: right(a.conj() if a.is_conj() else a, b))
    assert all(map(is_wrong, found))
