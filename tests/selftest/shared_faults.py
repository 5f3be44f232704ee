"""Faults of a function in every dtype, so that they would also be in a float64 reference that calls the function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch

from envbuild.selftest.numerics import pairwise_case_sampling
from envbuild.selftest.numerics.operation_case import Case, worst
from envbuild.selftest.numerics.pairwise_case_sampling import Operation

Kernel = Callable[..., Any]
POINTS, SEED = 12, 4


def sampled(operation: Operation, count: int = POINTS, **values: Any) -> Iterator[Case]:
    """Cases of an operation, in which these dimensions have only this value each."""
    space = {**operation.space, **{name: (value,) for name, value in values.items()}}
    narrowed = dataclasses.replace(operation, space=space)
    taken = pairwise_case_sampling.sample(narrowed, count, SEED)
    return pairwise_case_sampling.cases(narrowed, taken.points, SEED)


def wrong_results(cases: Iterable[Case]) -> set[str]:
    """The names of the results of these cases that are out of tolerance."""
    found = ((name, one) for case in cases for name, one in worst(case.run(*case.given), case.expected()).items())
    return {name for name, one in found if one.wrong}


@contextlib.contextmanager
def forbidden(owners: Iterable[Any], names: Iterable[str]) -> Iterator[None]:
    """Fail a test that calls one of these functions."""

    def refuse(name: str) -> Kernel:
        def called(*_: Any, **__: Any) -> None:
            pytest.fail(f"the reference calls {name}")

        return called

    with pytest.MonkeyPatch.context() as patch:
        for owner in owners:
            for name in names:
                if hasattr(owner, name):
                    patch.setattr(owner, name, refuse(name))
        yield


def half_gradient(kernel: Kernel) -> Kernel:
    """A right result whose gradient is half as large."""
    return lambda x, *rest, **options: kernel((x + x.detach()) / 2, *rest, **options)


def in_float32(kernel: Kernel) -> Kernel:
    """A float64 input and result are rounded to float32, and so are their gradients."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.complex64 if x.is_complex() else torch.float32).to(x.dtype)

    return lambda x, *rest, **options: rounded(kernel(rounded(x), *rest, **options))
