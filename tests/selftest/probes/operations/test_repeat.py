"""The probe repeat finds faults that occur late, rarely or only in one mode, and passes correct operations."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.job_document import JobDocument
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.operations import repeat, repeat_cases

pytestmark = pytest.mark.slow

Kernel = Callable[..., torch.Tensor]


def late(kernel: Kernel) -> Kernel:
    """Flip one bit of one element in the 101st call with a large float32 result."""
    count = iter(range(1 << 30))

    def wrong(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        if result.dtype == torch.float32 and result.numel() > 8000 and next(count) == 100:
            result.flatten()[-1:].view(torch.int32).bitwise_xor_(1)
        return result

    return wrong


def stale(kernel: Kernel) -> Kernel:
    """Cache the weight by its address in memory, and never read the weight again."""
    kept: dict[int, torch.Tensor] = {}
    return lambda x, w, b: kernel(x, kept.setdefault(w.data_ptr(), w.clone()), b)


def in_threads(kernel: Kernel) -> Kernel:
    def wrong(*args: Any) -> torch.Tensor:
        result = kernel(*args)
        return result if threading.current_thread() is threading.main_thread() else result * 2

    return wrong


def inferred(kernel: Kernel) -> Kernel:
    return lambda x, w, b, **options: kernel(x, w, None if torch.is_inference_mode_enabled() else b, **options)


def first_epsilon(kernel: Kernel) -> Kernel:
    kept: list[float] = []

    def wrong(x: torch.Tensor, sizes: Any, w: torch.Tensor, b: torch.Tensor, epsilon: float) -> torch.Tensor:
        kept.append(epsilon)
        return kernel(x, sizes, w, b, kept[0])

    return wrong


def cast_bias(kernel: Kernel) -> Kernel:
    return lambda x, w, b: kernel(x, w, 2 * b if torch.is_autocast_enabled("cpu") else b)


def one_of_a_million(kernel: Kernel) -> Kernel:
    def wrong(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = kernel(x, y)
        if result.numel() > 1_000_000:
            result.view(-1)[999_999] += 1
        return result

    return wrong


WRONG = [
    (torch, "mm", late, "inference mode: 1 of 8643 elements, the first [128, 66], differ"),
    (F, "linear", stale, "fp32 linear 45x67x95, input 1, the same memory: "),
    (
        torch,
        "bmm",
        in_threads,
        "in the second thread: fp32 bmm 5x17x33x65, input 0, first call, separate tensors: element",
    ),
    (F, "conv2d", inferred, "fp32 conv2d, input 0, first call, inference mode: element ["),
    (F, "layer_norm", first_epsilon, "fp32 layer_norm 33x96 eps 0.5, first call, separate tensors: element ["),
    (F, "linear", cast_bias, "fp32 linear 45x67x95, input 0, first call, autocast: element ["),
    (
        repeat_cases,
        "_mixed",
        one_of_a_million,
        "fp32 x y + x 1031x1021, input 0, first call, separate tensors: element [979, 440]",
    ),
]

# `late` fails in the 101st call, and the second thread needs time to start. The other faults show in any round.
NEEDS_ALL_ROUNDS, FEW_ROUNDS = (late, in_threads), 3


def found(level: str = "quick") -> list[str]:
    context = Context(JobDocument("0" * 32, level=level, threads=1))
    repeat.repeat(context)
    assert context.traits["calls"] > 3000 or repeat.ROUNDS[level] == FEW_ROUNDS
    return [fault.reason for fault in context.faults]


@pytest.mark.parametrize(
    ("module", "name", "wrong", "words"), WRONG, ids=lambda value: getattr(value, "__name__", None)
)
def test_occasional_wrong_results_are_found(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, wrong: Any, words: str
) -> None:
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    repeat_cases.repeated_operations.cache_clear()
    if wrong not in NEEDS_ALL_ROUNDS:
        monkeypatch.setattr(repeat, "ROUNDS", {"quick": FEW_ROUNDS})
    reasons = found()
    repeat_cases.repeated_operations.cache_clear()
    assert reasons and words in reasons[0], reasons[:3]


def test_right_operations_pass() -> None:
    assert found() == []


@pytest.mark.parametrize(("level", "calls"), [("quick", 7_652), ("standard", 63_720), ("full", 572_380)])
def test_the_documents_state_the_calls_without_the_second_thread(
    level: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are six modes on a CPU. One of the six is autocast, which only some operations have."""
    made = {True: 0, False: 0}
    for autocast in made:
        counted = repeat.Calls(torch.device("cpu"), repeat_cases.repeated_operations())
        monkeypatch.setattr(counted, "_call", lambda *_, counted=counted: setattr(counted, "calls", counted.calls + 1))
        for number in range(repeat.ROUNDS[level]):
            counted.round(number, repeat.AUTOCAST if autocast else repeat.SEPARATE)
        made[autocast] = counted.calls
    assert made[True] + 5 * made[False] == calls
    assert f"{calls:,} at {level}" in documented() or f"{calls:,} calls at {level}" in documented()


def documented() -> str:
    return " ".join((Path(__file__).parents[4] / "docs" / "selftest.md").read_text(encoding="utf-8").split())
