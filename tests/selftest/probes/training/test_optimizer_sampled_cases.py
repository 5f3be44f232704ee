"""Sampled cases of optim.torch detect each changed element of parameters and gradients, and ignored options."""

from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import pairwise_case_sampling
from envbuild.selftest.numerics.operation_case import worst
from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.probes.training import other_optimizer_cases
from envbuild.selftest.probes.training.optimizer_sampled_cases import OPERATIONS, SPACE
from selftest.numerics.test_operation_case import (
    test_a_right_kernel_is_within_tolerance_and_each_element_of_its_inputs_matters as sensitive,
)

OPERATION = OPERATIONS[0]
PLAIN = {name: values[0] for name, values in SPACE.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "operation", (*OPERATIONS, *other_optimizer_cases.OPERATIONS), ids=lambda operation: operation.name
)
def test_sampled_cases_see_each_changed_element(operation: Operation) -> None:
    for case in pairwise_case_sampling.cases(
        operation, pairwise_case_sampling.sample(operation, 14, seed=2).points, seed=2
    ):
        sensitive(case)


@pytest.mark.parametrize("kind", SPACE["kind"])
@pytest.mark.parametrize(
    ("option", "value", "others"),
    [
        ("maximize", True, {}),
        ("weight_decay", 2.0**-4, {"decay": 2.0**-4}),
        ("amsgrad", True, {"amsgrad": True, "fading": True, "betas": (0.9, 0.5)}),
        ("nesterov", True, {"momentum": 0.9, "damping": "nesterov"}),
        ("dampening", 0.25, {"momentum": 0.9, "damping": "dampening"}),
        ("eps", 2.0**-6, {"epsilon": 2.0**-6}),
    ],
)
def test_an_option_that_is_ignored_is_found(
    monkeypatch: pytest.MonkeyPatch, kind: str, option: str, value: Any, others: dict[str, Any]
) -> None:
    case = OPERATION.make({**PLAIN, "kind": kind, option: value, **others}, 7)
    optimizer: Any = getattr(torch.optim, kind)
    before = optimizer.__init__

    def without(self: Any, parameters: Any, **options: Any) -> None:
        before(
            self, parameters, **{**options, **({option: 1e-8 if option == "eps" else 0.0} if option in options else {})}
        )

    assert not any(found.wrong for found in worst(case.run(*case.given), case.expected()).values())
    monkeypatch.setattr(optimizer, "__init__", without)
    wrong = any(found.wrong for found in worst(case.run(*case.given), case.expected()).values())
    assert wrong == ((option in ("nesterov", "dampening")) == (kind == "SGD") or option in ("maximize", "weight_decay"))
