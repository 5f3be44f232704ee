"""The wrong kernels that measure the self-test: each is wrong for its stated call, and right for the other."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.numerics import hashed_inputs, operation_case
from envbuild.selftest.numerics.operation_case import Case, without_rounding

from . import KERNELS, check, example, installed
from .score import asks_for_threads, right_references

HALVES = ("known", "unseen")


@pytest.mark.parametrize("half", HALVES)
def test_each_is_wrong_for_its_stated_call_and_right_for_the_other(half: str) -> None:
    """In a process with one thread: some fork, which hangs once torch has threads."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-m", "wrong_kernels.check", f"wrong_kernels.{half}"]
    done = subprocess.run(
        argv, cwd=Path(__file__).parents[1], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if not line.endswith(": ok"))


def test_there_are_enough_of_them_and_most_can_be_asked_for() -> None:
    for half in HALVES:
        importlib.import_module(f"wrong_kernels.{half}")
        count = sum(name.startswith(half) for name in KERNELS)
        beyond = sum(bool(kernel.beyond) for name, kernel in KERNELS.items() if name.startswith(half))
        assert count >= 80 and beyond <= 0.2 * count
    assert len({kernel.operation for kernel in KERNELS.values()}) >= 10


def test_one_that_is_never_wrong_or_always_wrong_is_refused() -> None:
    kernel = KERNELS["example/last-row-of-a-new-tile-is-not-written"]
    assert check.fault(kernel) is None
    assert "should be wrong is right" in str(check.fault(changed(kernel, wrong=kernel.right)))
    assert "should stay right" in str(check.fault(changed(kernel, right=kernel.wrong)))


def changed(kernel: check.WrongKernel, **changes: object) -> check.WrongKernel:
    return check.WrongKernel(**{**vars(kernel), **changes})


def test_nothing_stays_installed() -> None:
    kernel = KERNELS["example/last-row-of-a-new-tile-is-not-written"]
    assert kernel.fault is example.last_row_of_a_new_tile_is_not_written
    with installed(kernel):
        assert float(torch.ones(65, 2).mm(torch.ones(2, 2))[-1, 0]) == 0
    assert float(torch.ones(65, 2).mm(torch.ones(2, 2))[-1, 0]) == 2


def test_references_stay_right_and_what_is_tested_does_not() -> None:
    factors = hashed_inputs.whole((65, 4), 1, 3), hashed_inputs.whole((4, 2), 2, 3)
    case = Case(
        "product",
        torch.float32,
        factors,
        lambda a, b: {"output": torch.mm(a, b)},
        lambda a, b: {"output": without_rounding(torch.mm(a.float(), b.float()))},
    )
    (right,) = operation_case.worst(case.run(*factors), case.expected()).values()
    assert not right.wrong
    with installed(KERNELS["example/last-row-of-a-new-tile-is-not-written"]):
        with right_references():
            (found,) = operation_case.worst(case.run(*factors), case.expected()).values()
        (hidden,) = operation_case.worst(case.run(*factors), case.expected()).values()
    assert found.wrong and not hidden.wrong


def test_a_replaced_function_is_right_in_references_too() -> None:
    q = torch.rand(1, 2, 65, 40)
    case = Case(
        "attention",
        torch.float32,
        (q,),
        lambda x: {"output": attention(x)},
        lambda x: {"output": without_rounding(attention(x.float()).double())},
    )
    with installed(KERNELS["example/causal-sees-one-key-too-many"]), right_references():
        (found,) = operation_case.worst(case.run(q), case.expected()).values()
    assert found.wrong


def attention(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_faults_that_ask_for_the_number_of_threads_get_two() -> None:
    importlib.import_module("wrong_kernels.known")
    asking = [name for name, kernel in KERNELS.items() if name.startswith("known/") and asks_for_threads(kernel)]
    assert asking == ["known/remainder-between-threads-is-not-summed"]
