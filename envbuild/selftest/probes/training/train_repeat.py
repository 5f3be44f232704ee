"""train.repeat: repeated training steps give the same bits, also in another process."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from envbuild.selftest.harness import forked_work
from envbuild.selftest.harness.forked_work import ForkEnding, Tell, Work
from envbuild.selftest.harness.probe_context import Context, missing_gpu, short_name
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics.tensor_digests import raw_digest
from envbuild.selftest.probes.training.small_gpt import be_deterministic, loss, parameters, tokens

STEPS, RATE = 3, 0.5
PROCESSES = 2
SECONDS = 60.0  # time limit for each process


def train_repeat(context: Context) -> None:
    """train.repeat: steps of a small GPT give the same bits when repeated in one process and in another process."""
    for precision in (None, torch.bfloat16 if context.on_cpu else torch.float16):
        name = f"{STEPS} steps fp32" + (f" with autocast to {short_name(precision)}" if precision else "")
        context.step(f"{name}, in {PROCESSES} processes")
        work = _trained(context.job.device, max(1, context.job.thread_count // PROCESSES), precision)
        endings = [group[0] for group in forked_work.run_groups([[work]] * PROCESSES, SECONDS, math.inf)]
        _compare(context, name, endings)


def _trained(device: str, threads: int, precision: torch.dtype | None) -> Work:
    def work(tell: Tell) -> None:
        torch.set_num_threads(threads)
        missing = missing_gpu() if device == "cuda" else None
        if missing:
            tell("skip", missing)
            return
        be_deterministic()
        tell("runs", [digests(torch.device(device), precision) for _ in range(2)])

    return work


def digests(device: torch.device, precision: torch.dtype | None) -> dict[str, str]:
    """Return the sha256 of the losses and of each parameter after some steps of gradient descent."""
    weights = parameters(device)
    losses = []
    for number in range(STEPS):
        with torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
            value = loss(weights, tokens(number).to(device))
        gradients = torch.autograd.grad(value, list(weights.values()))
        with torch.no_grad():  # gradient descent without torch.optim, whose import takes longer than all steps
            for leaf, gradient in zip(weights.values(), gradients):
                leaf -= RATE * gradient
        losses.append(value.detach())
    if not bool(torch.isfinite(torch.stack(losses)).all()):
        raise ArithmeticError(f"the loss is not finite: {[float(value) for value in losses]}")
    return {"loss": raw_digest(*losses), **{name: raw_digest(values) for name, values in weights.items()}}


def _compare(context: Context, name: str, endings: Sequence[ForkEnding]) -> None:
    """Compare every other run with the first run of the first process."""
    for number, ending in enumerate(endings):
        if "skip" in ending.reported:
            raise Skip(str(ending.reported["skip"]))
        if ending.failure:
            context.fail("exception", f"{name}: process {number}: {ending.failure}", ending.signal)
            return
    runs: list[tuple[str, Mapping[str, Any]]] = [
        (f"run {turn} of process {number}", run)
        for number, ending in enumerate(endings)
        for turn, run in enumerate(ending.reported["runs"])
    ]
    (_, first), *others = runs
    for where, run in others:
        different = [part for part in first if run[part] != first[part]]
        context.figure(f"{name}: parts of {where} that differ", torch.float32, (len(first),), len(different), 0.0, 0.0)
        if different:
            context.fail(
                "mismatch",
                f"{name}: {where} differs from run 0 of process 0 in {len(different)} of {len(first)} parts, first in "
                f"{different[0]}",
            )
