"""Divides the probes of level standard into units: parts that can be run separately and repeatedly.

A unit runs the probe's own code, restricted to one of its cases. Inputs and references are computed only once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from envbuild.selftest.harness.forked_work import ForkEnding
from envbuild.selftest.harness.probe_context import Context, Refusal, is_unsupported, short_name
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import operation_case, pairwise_case_sampling
from envbuild.selftest.numerics.pairwise_case_sampling import Operation
from envbuild.selftest.probes.attention import (
    attention_backend_probes,
    attention_gradient_cases,
    attention_needle_cases,
    attention_sampled_cases,
)
from envbuild.selftest.probes.convolution import conv, conv_sampled_cases
from envbuild.selftest.probes.gemm import gemm_crash, gemm_exact_and_accuracy, gemm_precision, gemm_sampled_cases
from envbuild.selftest.probes.hardware import transfer
from envbuild.selftest.probes.linear_algebra import fft_and_linalg
from envbuild.selftest.probes.normalization import norm_fixed_cases, norm_sampled_cases, norm_torch
from envbuild.selftest.probes.operations import operations
from envbuild.selftest.probes.training import optim_torch, small_gpt, train_repeat, train_step

Run = Callable[[Context], object]


@dataclass(frozen=True)
class Unit:
    """A part of a probe. `results`: operators whose outputs count as results, even if the probe compares only a part of
    them, or does not use reference.compare."""

    name: str
    run: Run
    results: tuple[str, ...] = ()


@contextlib.contextmanager
def narrowed(module: Any, **values: Any) -> Iterator[None]:
    """Replace these names in a module."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def _narrow(probe: Run, module: Any, **values: Any) -> Run:
    def run(context: Context) -> None:
        with narrowed(module, **values):
            probe(context)

    return run


def _nothing(*_: object) -> None:
    pass


def _cases(found: Iterable[operation_case.Case], may_refuse: Refusal = is_unsupported) -> Iterator[Unit]:
    for case in found:
        name = f"{short_name(case.dtype)} {case.name}"
        yield Unit(name, functools.partial(operation_case.check, case=case, may_refuse=may_refuse))


def _sampled(context: Context, found: Iterable[Operation]) -> Iterator[Unit]:
    """Return the cases that a run of the context's level and seed samples."""
    level, seed = context.job.level, context.job.seed
    for operation in found:
        points = pairwise_case_sampling.sample(operation, operation.counts.get(level, 0), seed).points
        yield from _cases(pairwise_case_sampling.cases(operation, points, seed))


def _operations(context: Context) -> Iterator[Unit]:
    yield from _cases(operations.cases(rounded_sums=True))
    yield from _sampled(context, operations.sampled_operations(rounded_sums=True))


def _of_dtypes(probe: Run, module: Any, name: str) -> Iterator[Unit]:
    for dtype in getattr(module, name):
        yield Unit(short_name(dtype), _narrow(probe, module, **{name: (dtype,)}))


def _crash(context: Context) -> Iterator[Unit]:
    for shape in gemm_crash.crash_cases(context):
        run = _narrow(gemm_crash.gemm_crash, gemm_crash, crash_cases=lambda context, shape=shape: (shape,))
        yield Unit(shape.name, run)


def _accumulator(context: Context) -> Iterator[Unit]:
    for name, places in gemm_precision.SUMS.items():
        yield Unit(name, _narrow(gemm_precision.gemm_accumulator, gemm_precision, SUMS={name: places}))


def _attention(context: Context, backend: str) -> Iterator[Unit]:
    def forward(context: Context, case: attention_backend_probes.AttentionCase) -> None:
        with (
            narrowed(attention_backend_probes, attention_shapes=lambda context: (case,), _tell=_nothing),
            narrowed(attention_gradient_cases, check_gradients=_nothing),
            narrowed(attention_needle_cases, check_needles=_nothing),
        ):
            attention_backend_probes.check_backend(context, backend)

    def backward(context: Context, case: attention_gradient_cases.GradientCase) -> None:
        with narrowed(attention_gradient_cases, gradient_cases=lambda on_cpu: (case,)):
            attention_gradient_cases.check_gradients(context, backend)

    def needle(context: Context, case: attention_needle_cases.NeedleCase, dtype: torch.dtype) -> None:
        with narrowed(attention_needle_cases, needle_cases=lambda context, backend: ((case, dtype),)):
            attention_needle_cases.check_needles(context, backend)

    for one in attention_backend_probes.attention_shapes(context):
        yield Unit(one.name, functools.partial(forward, case=one))
    if context.at_least("standard"):
        for two in attention_gradient_cases.gradient_cases(context.on_cpu):
            yield Unit(f"backward {two.name}", functools.partial(backward, case=two))
    for three, dtype in attention_needle_cases.needle_cases(context, backend):
        yield Unit(f"needle {short_name(dtype)} {three.name}", functools.partial(needle, case=three, dtype=dtype))


def _norms(context: Context) -> Iterator[Unit]:
    def check(context: Context, case: norm_fixed_cases.NormCase) -> None:
        context.traits.update(needs_upcast=[], accumulates_in_half=[])
        try:
            norm_torch._check(context, case)
        except RuntimeError as error:
            if case.is_declared or not any(words in str(error) for words in norm_torch._REFUSED):
                raise
            raise Skip("a pair of dtypes that this norm does not take") from error

    for group in norm_fixed_cases.norm_case_groups(norm_fixed_cases.torch_norms(context.on_cpu)):
        for case in group:
            how = " autocast" if case.autocast else ""
            yield Unit(case.name + how, functools.partial(check, case=case))


def _conv(context: Context) -> Iterator[Unit]:
    for dtype in conv.DTYPES:
        for case in conv.SMALL:
            run = _narrow(conv.conv, conv, SMALL=(case,), TRAINED=(), DTYPES=(dtype,))
            yield Unit(f"{short_name(dtype)} {case.name}", run)
        for case in conv.TRAINED:
            run = _narrow(conv.conv, conv, SMALL=(), TRAINED=(case,), DTYPES=(dtype,))
            yield Unit(f"{short_name(dtype)} {case.name} gradients", run)


def _transfer(context: Context) -> Iterator[Unit]:
    blocks = _narrow(transfer.transfer, transfer, _pieces=_nothing)
    yield Unit("blocks", blocks, ("copy_",))
    for piece in transfer.PIECES:
        run = _narrow(transfer.transfer, transfer, _there_and_back=_nothing, PIECES=(piece,))
        yield Unit(f"{piece[0]} bytes", run, ("zeros", "copy_"))


def _repeat(context: Context) -> Iterator[Unit]:
    """Compute only one of the probe's four runs. The others, which contain no fault, were computed before, for each
    number of threads."""
    known: dict[tuple[torch.dtype | None, int], dict[str, str]] = {}

    def run(context: Context, dtype: torch.dtype | None) -> None:
        small_gpt.be_deterministic()
        key = dtype, torch.get_num_threads()
        if key not in known:
            known[key] = train_repeat.digests(context.device, dtype)
        with context.step(f"steps {dtype}"):
            first = train_repeat.digests(context.device, dtype)
        processes = [first, known[key]], [known[key]] * 2
        train_repeat._compare(context, "steps", [ForkEnding(reported={"runs": runs}) for runs in processes])

    for dtype in (None, torch.bfloat16):
        yield Unit(f"steps {dtype}", functools.partial(run, dtype=dtype))


# Probe -> a function that gives its units, at the level of the context's job, on the CPU. Probes that are missing here
# compute nothing with aten operators in this process, or are skipped on the CPU.
PROBES: dict[str, Callable[[Context], Iterable[Unit]]] = {
    "transfer": _transfer,
    "gemm.crash": _crash,
    "gemm.exact": lambda context: _of_dtypes(gemm_exact_and_accuracy.gemm_exact, gemm_exact_and_accuracy, "DTYPES"),
    "gemm.accuracy": lambda context: _of_dtypes(
        gemm_exact_and_accuracy.gemm_accuracy, gemm_exact_and_accuracy, "ACCURACY_DTYPES"
    ),
    "gemm.accumulator": _accumulator,
    "gemm.fp8": lambda context: [Unit("all", gemm_precision.gemm_fp8)],
    "tf32.mode": lambda context: [Unit("all", gemm_precision.tf32_mode, ("mm", "convolution"))],
    "attention.math": lambda context: _attention(context, "math"),
    "attention.flash": lambda context: _attention(context, "flash"),
    "gemm.cases": lambda context: _sampled(context, gemm_sampled_cases.OPERATIONS),
    "attention.cases": lambda context: _sampled(context, attention_sampled_cases.OPERATIONS),
    "norm.cases": lambda context: _sampled(context, norm_sampled_cases.OPERATIONS),
    "conv.cases": lambda context: _sampled(context, conv_sampled_cases.OPERATIONS),
    "operations": _operations,
    "fft": lambda context: _cases(fft_and_linalg.transforms()),
    "linalg": lambda context: _cases(fft_and_linalg.factorizations()),
    "optim.torch": lambda context: _cases(optim_torch.cases(), optim_torch._may_refuse),
    "norm.torch": _norms,
    "conv": _conv,
    "train.step": lambda context: [Unit("all", train_step.train_step, ("mse_loss",))],
    "train.repeat": _repeat,
}
