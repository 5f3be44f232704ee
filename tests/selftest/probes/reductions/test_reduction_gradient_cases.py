"""gradient of a reduction and order along a dimension: faults that a function has in every dtype are found."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.probes.reductions import reduction_gradient_cases, row_order_and_counting_cases
from selftest.shared_faults import Kernel, forbidden, half_gradient, in_float32, sampled, wrong_results

(GRADIENTS,) = reduction_gradient_cases.OPERATIONS
(ORDER,) = (one for one in row_order_and_counting_cases.OPERATIONS if one.name == "order along a dimension")
TESTED = (
    *("logsumexp", "logcumsumexp", "cumsum", "prod", "cumprod", "cummax", "cummin", "sort", "argsort", "topk"),
    *("kthvalue", "median", "mode", "amax", "amin", "var", "std", "norm", "vector_norm"),
)
GROUP_OF = {name: group for group, names in reduction_gradient_cases.GROUPS.items() for name in names}


def of_sums(operand: str) -> dict[str, Any]:
    return {"group": GROUP_OF[operand], "over": "middle", "middle": 17}


def first_of_equals(kernel: Kernel) -> Kernel:
    """The gradient of a running maximum goes to the first of equal elements."""

    def wrong(x: torch.Tensor, dim: int) -> Any:
        values = kernel(x, dim)[0].detach()
        places = torch.zeros(x.movedim(dim, 0).shape, dtype=torch.int64)
        for place, row in enumerate(values.movedim(dim, 0)):
            is_new = row != values.movedim(dim, 0)[place - 1] if place else torch.zeros_like(row, dtype=torch.bool)
            places[place] = torch.where(is_new, place, places[place - 1] if place else 0)
        places = places.movedim(0, dim)
        return x.gather(dim, places), places

    return wrong


def zeros_forgotten(kernel: Kernel) -> Kernel:
    """The gradient of a product is computed as the product divided by the element, and is 0 where the element is 0."""

    def wrong(x: torch.Tensor, *rest: Any) -> Any:
        result = kernel(x.detach(), *rest)
        whole = result if result.dim() == x.dim() else result.unsqueeze(rest[0])
        factor = torch.where(x == 0, 0.0, whole / torch.where(x == 0, 1.0, x.detach()))
        added = (x - x.detach()) * factor
        return result + (added.sum(rest[0], *rest[1:]) if result.numel() < x.numel() else added)

    return wrong


WRONG: list[tuple[Any, str, Any, dict[str, Any]]] = [
    *((torch, name, half_gradient, of_sums(name)) for name in ("cumsum", "logsumexp", "logcumsumexp", "sort", "topk")),
    *((torch, name, half_gradient, of_sums(name)) for name in ("prod", "cumprod", "cummax", "cummin", "kthvalue")),
    (torch, "cummax", first_of_equals, of_sums("cummax")),
    (torch, "prod", zeros_forgotten, {**of_sums("prod"), "first": 3, "last": 3}),
    *((torch, name, in_float32, {**of_sums(name), "dtype": torch.float64}) for name in ("logsumexp", "logcumsumexp")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "values"), WRONG, ids=[f"{row[1]}-{row[2].__name__}" for row in WRONG]
)
def test_a_fault_in_every_dtype_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any, values: dict[str, Any]
) -> None:
    cases = list(sampled(GRADIENTS, **values))
    assert not wrong_results(cases)
    monkeypatch.setattr(owner, name, wrong(getattr(owner, name)))
    for case in cases:
        assert name in wrong_results([case]), case.name


def rounded_statistics(kernel: Kernel) -> Kernel:
    """A float64 statistic whose gradient has errors of float32."""
    return lambda x, *rest, **options: kernel(x + (x - x.detach()) * 2.0**-24, *rest, **options)


@pytest.mark.parametrize("name", ["var", "std", "vector_norm"])
def test_float64_has_a_tolerance_of_float64(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cases = list(sampled(GRADIENTS, group="sums", dtype=torch.float64, over="middle", middle=17))
    assert not wrong_results(cases)
    owner = torch.linalg if name == "vector_norm" else torch
    monkeypatch.setattr(owner, name, rounded_statistics(getattr(owner, name)))
    results = {"vector_norm": "norm 2"}.get(name, name)
    for case in cases:
        assert results in wrong_results([case]), case.name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "values"),
    [*((GRADIENTS, {"group": group}) for group in GRADIENTS.space["group"]), (ORDER, {})],
    ids=[*GRADIENTS.space["group"], ORDER.name],
)
def test_no_reference_calls_a_tested_function(operation: Operation, values: dict[str, Any]) -> None:
    cases = list(sampled(operation, **values))
    with forbidden((torch, torch.linalg, torch.Tensor), TESTED):
        for case in cases:
            assert case.expected()


def falling_by_reversal(kernel: Kernel) -> Kernel:
    """Falling order is rising order reversed, also of equal elements, whose order a stable sort keeps."""

    def wrong(x: torch.Tensor, dim: int = -1, descending: bool = False, **options: Any) -> Any:
        values, places = kernel(x, dim=dim, **options)
        return (values.flip(dim), places.flip(dim)) if descending else (values, places)

    return wrong


def test_a_sort_that_is_wrong_in_every_dtype_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = list(sampled(ORDER, values="equal", length=33, dtype=torch.float32))
    assert not wrong_results(cases)
    monkeypatch.setattr(torch, "sort", falling_by_reversal(torch.sort))
    for case in cases:
        assert "stable places descending" in wrong_results([case]), case.name
