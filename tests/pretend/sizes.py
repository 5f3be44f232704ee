"""Sizes of the probes on the simulated GPU: sizes that would fill a GPU's memory are reduced to what a CPU can
compute, and results that torch computes wrongly on the CPU are left out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from envbuild.selftest.numerics import pairwise_case_sampling, torch_fault_exclusions
from envbuild.selftest.numerics.pairwise_case_sampling import Operation, Sample
from envbuild.selftest.probes.attention import (
    attention_backend_probes,
    attention_gradient_cases,
    attention_needle_cases,
)
from envbuild.selftest.probes.gemm import gemm_crash
from envbuild.selftest.probes.hardware import burn, large, memory, perf
from envbuild.selftest.probes.operations import repeat

# 0.9 GB. burn fills as much as it has time for; the plan for half an hour waits until burn has allocated memory.
BURN_CHUNKS = 192


def _chunks(count: int) -> Callable[..., int]:
    """Replaces the function that computes how many chunks of memory a probe fills."""
    return lambda *_: count


_uncomputed_results = torch_fault_exclusions.uncomputed_results


def _also_on_the_cpu(operation: str, device: str, at: Mapping[str, Any]) -> frozenset[str]:
    """The host computes the results of the simulated GPU, in some cases with another dtype. So the faults of torch on
    the CPU apply, with any of these dtypes. In some of them, oneDNN writes past the end of a buffer."""
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    on_host = (_uncomputed_results(operation, "cpu", {**at, "dtype": dtype}) for dtype in dtypes)
    return _uncomputed_results(operation, device, at).union(*on_host)


# Sizes of levels standard and full that depend on the GPU's memory: a CPU cannot multiply or fill that much.
SMALL: tuple[tuple[Any, str, Any], ...] = (
    (burn, "SIDE", burn.SIDE_CPU),
    (memory, "CHUNK", memory.CHUNK_CPU),
    (large, "ROWS", 67),
    (burn, "chunks_to_hold", _chunks(BURN_CHUNKS)),
    (memory, "chunks_to_write", _chunks(memory.CHUNKS_CPU)),
    (torch_fault_exclusions, "uncomputed_results", _also_on_the_cpu),
)
# With the variable SHORT, attention and other sizes are as small as on the CPU: for tests that do not depend on them.
SHORT = "PRETEND_SHORT"
SHORTER: tuple[tuple[Any, str, Any], ...] = (
    (attention_backend_probes, "LONG", attention_backend_probes.LONG_CPU),
    (attention_backend_probes, "HEADS", attention_backend_probes.HEADS_FEW),
    (attention_needle_cases, "LONG", attention_needle_cases.LONG_CPU_QUICK),
    (attention_needle_cases, "CASES", attention_needle_cases.CASES_QUICK),
    (attention_gradient_cases, "LONG", attention_gradient_cases.LONG_CPU),
    (attention_gradient_cases, "HEADS", attention_gradient_cases.HEADS_CPU),
    (gemm_crash, "_INNER_COLUMNS", gemm_crash._INNER_COLUMNS[:1]),
    (perf, "SIDE", perf.SIDE_CPU),
    (perf, "COPIED", perf.COPIED_CPU),
)
# With the variable FEW each operation has a twentieth of the level's sampled cases, and `repeat` a twentieth of its
# rounds: at least two, so that results are compared with the first ones.
FEW = "PRETEND_FEW"
_sample = pairwise_case_sampling.sample


def _a_twentieth(operation: Operation, count: int, seed: int) -> Sample:
    return _sample(operation, math.ceil(count / 20), seed)


FEWER: tuple[tuple[Any, str, Any], ...] = (
    (pairwise_case_sampling, "sample", _a_twentieth),
    (repeat, "ROUNDS", {level: max(2, rounds // 20) for level, rounds in repeat.ROUNDS.items()}),
)


def reduce() -> None:
    """Reduce the sizes for this process and all processes forked from it."""
    shorter, fewer = (SHORTER if os.environ.get(SHORT) else ()), (FEWER if os.environ.get(FEW) else ())
    for owner, name, value in (*SMALL, *shorter, *fewer):
        assert hasattr(owner, name), f"{owner.__name__} has no {name}: what bounds its size now?"
        setattr(owner, name, value)
