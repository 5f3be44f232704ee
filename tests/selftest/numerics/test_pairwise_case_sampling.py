"""The points of an operation's space that a run samples."""

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import pairwise_case_sampling
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, without_rounding
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Point

SEED = 5
SPACE: Mapping[str, tuple[Any, ...]] = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (10, 20, 30, 40)}


def added(point: Point, seed: int) -> Case:
    x = torch.full((3,), float(point["a"]))

    def run(x: torch.Tensor) -> Mapping[str, torch.Tensor]:
        return {"sum": x + seed}

    def exact(x: torch.Tensor) -> Mapping[str, Any]:
        return {"sum": without_rounding(x + seed)}

    return Case(f"a {point['a']} + {seed}", torch.float32, (x,), run, exact)


def operation(**changes: Any) -> Operation:
    return Operation(
        **{"name": "add", "space": SPACE, "make": added, "counts": {"quick": 2, "standard": 12}, **changes}
    )


def test_few_points_cover_every_pair_and_each_pair_counted_is_possible() -> None:
    taken = pairwise_case_sampling.sample(operation(), 16, seed=1)
    assert taken.covered == taken.of == 3 * 2 + 3 * 2 + 3 * 4 + 2 * 2 + 2 * 4 + 2 * 4
    assert len(taken.points) == 16 < 3 * 2 * 2 * 4


def test_points_that_are_not_possible_are_never_taken() -> None:
    even = operation(possible=lambda point: point["a"] != 2 or point["c"])
    taken = pairwise_case_sampling.sample(even, 40, seed=1)
    assert all(even.possible(point) for point in taken.points)
    assert taken.covered == taken.of == 43, "of the 44 pairs, 2 with False is the one that is not possible"


def test_nothing_possible_is_an_error() -> None:
    with pytest.raises(ValueError, match="none is possible"):
        pairwise_case_sampling.sample(operation(possible=lambda point: False), 1, seed=1)


def test_the_seed_decides_which_points_and_nothing_else_does() -> None:
    first, again, other = (pairwise_case_sampling.sample(operation(), 8, seed) for seed in (7, 7, 8))
    assert first == again != other
    assert first.points[0] == {"a": 2, "b": "y", "c": False, "d": 10}, "also on other machines and Pythons"


def test_a_run_tries_as_many_cases_as_its_level_has_and_says_what_they_cover() -> None:
    context = Context(JobDocument("0" * 32, level="standard", seed=5))
    pairwise_case_sampling.check(context, [operation(), operation(name="never", counts={"full": 9})])
    assert not context.faults
    covered = context.traits["coverage"]
    assert covered["add"] == {"cases": 12, "pairs": covered["add"]["pairs"], "of": 44}
    assert 30 < covered["add"]["pairs"] <= 44
    assert covered["never"] == {"cases": 0, "pairs": 0, "of": 44}
    (figure,) = context.figures
    assert figure.checks == 12


def test_the_worst_figure_of_each_operation_and_dtype_is_kept_with_its_case() -> None:
    def off(point: Point, seed: int) -> Case:
        dtype = torch.float32 if point["b"] == "x" else torch.float64
        x = torch.zeros(3, dtype=dtype)
        error = 0.0 if seed == SEED else seed / 100
        return Case(f"{error:g}", dtype, (x,), lambda x: {"x": x + error}, lambda x: {"x": Exact(x, torch.ones(3))})

    context = Context(JobDocument("0" * 32, level="standard", seed=SEED))
    pairwise_case_sampling.check(
        context, [operation(make=off), operation(name="other", make=off, counts={"standard": 1})]
    )
    last = SEED + 11
    figures = {(figure.dtype, figure.case, figure.checks) for figure in context.figures}
    assert len(context.figures) == 3 and sum(figure.checks for figure in context.figures) == 13
    assert max(figure.error for figure in context.figures) == pytest.approx(last / 100, abs=1e-6)
    assert any(case == f"{last / 100:g}: x" for _, case, _ in figures)
    assert all(figure.beyond_rounding == pytest.approx(figure.ratio, abs=1e-5) for figure in context.figures)
