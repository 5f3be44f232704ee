"""optim.torch: torch's SGD, Adam and AdamW, as a loop, with multi-tensor kernels (foreach) and fused, step by step.

Each optimizer takes three steps over a list of parameters that is too long for a single kernel launch. After each step,
the parameters are compared with the same steps in float64 on the host. optimizer_sampled_cases.py adds sampled options,
sizes and layouts. other_optimizer_cases.py adds further optimizers, half precision and scaled gradients.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from envbuild.selftest.harness.probe_context import Context, is_unsupported
from envbuild.selftest.numerics import hashed_inputs, pairwise_case_sampling, tolerances
from envbuild.selftest.numerics.float64_reference_operations import Exact
from envbuild.selftest.numerics.operation_case import Case, check
from envbuild.selftest.probes.training import optimizer_sampled_cases, other_optimizer_cases
from envbuild.selftest.probes.training.optimizer_sampled_cases import CHUNK

# More tensors than one launch takes (at most 110); some lengths are near that of a chunk.
SIZES = [CHUNK + 1, *range(1, 121), CHUNK, CHUNK - 1]
STEPS = 3
RATE, DECAY, EPSILON = 2.0**-3, 2.0**-4, 1e-8
MOMENTUM = 0.9
BETAS = (0.9, 0.999)

SGD: dict[str, Any] = {"momentum": MOMENTUM, "nesterov": True}
ADAM: dict[str, Any] = {"betas": BETAS, "eps": EPSILON}
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": SGD, "Adam": ADAM, "AdamW": ADAM}
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def optim_torch(context: Context) -> None:
    """optim.torch: SGD, Adam and AdamW, as a loop, foreach and fused, give the steps of float64 on the host."""
    for case in cases():
        check(context, case, _may_refuse)
    pairwise_case_sampling.check(context, optimizer_sampled_cases.sampled_operations(not context.on_cpu), _may_refuse)
    pairwise_case_sampling.check(context, other_optimizer_cases.sampled_operations(), _may_refuse)


def cases() -> Iterator[Case]:
    """Yield the cases that are not sampled: each optimizer in each implementation, with inputs on the host."""
    count = sum(SIZES)
    given = (_parameters(count), *(_gradient(count, step) for step in range(STEPS)))
    for kind, (name, options) in itertools.product(OPTIMIZERS, IMPLEMENTATIONS.items()):
        run = functools.partial(_run, kind=kind, options={**OPTIMIZERS[kind], **options})
        yield Case(
            f"{kind} {name}, {len(SIZES)} tensors", torch.float32, given, run, functools.partial(_exact, kind=kind)
        )


def _may_refuse(error: Exception) -> bool:
    """Return whether the error means that this torch lacks a fused optimizer. torch added the fused optimizers one by
    one, first for GPUs."""
    return is_unsupported(error) or "unexpected keyword argument 'fused'" in str(error) or "`fused=True`" in str(error)


def _parameters(count: int) -> torch.Tensor:
    """Parameters in +-[1, 2)."""
    return hashed_inputs.signs(count, 501) * (1 + hashed_inputs.uniform((count,), 502))


def _gradient(count: int, step: int) -> torch.Tensor:
    """Return gradients in +-[1/4, 1) with the signs of the parameters, so that nothing cancels when Adam adds the
    decay."""
    return hashed_inputs.signs(count, 501) * (0.25 + 0.75 * hashed_inputs.uniform((count,), 510 + step))


def _run(
    start: torch.Tensor, *gradients: torch.Tensor, kind: str, options: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    parameters = [torch.nn.Parameter(part.clone()) for part in torch.split(start, SIZES)]
    optimizer = getattr(torch.optim, kind)(parameters, lr=RATE, weight_decay=DECAY, **options)
    found = {}
    for number, gradient in enumerate(gradients, start=1):
        for parameter, part in zip(parameters, torch.split(gradient, SIZES)):
            parameter.grad = part.clone()
        optimizer.step()
        found[f"step {number}"] = torch.cat([parameter.detach() for parameter in parameters])
    return found


def _exact(start: torch.Tensor, *gradients: torch.Tensor, kind: str) -> dict[str, Exact]:
    """Return the steps in float64 with their tolerances.

    The tolerance of a step is added to twice the tolerance of the previous step. The factor of two accounts for the
    decay: an error of a parameter also changes its next update, by less than the error itself.
    """
    p, limit = start, torch.zeros_like(start)
    first, second = torch.zeros_like(start), torch.zeros_like(start)
    found = {}
    for number, gradient in enumerate(gradients, start=1):
        decayed = gradient if kind == "AdamW" else gradient + DECAY * p
        if kind == "SGD":
            first = MOMENTUM * first + decayed
            update = decayed + MOMENTUM * first
        else:
            first = BETAS[0] * first + (1 - BETAS[0]) * decayed
            second = BETAS[1] * second + (1 - BETAS[1]) * decayed**2
            update = first / (1 - BETAS[0] ** number) / ((second / (1 - BETAS[1] ** number)).sqrt() + EPSILON)
        if kind == "AdamW":
            update = update + DECAY * p
        p = p - RATE * update
        # All terms of an update have the same sign, so |update| is the sum of the magnitudes of its terms. Adam's
        # tolerance serves SGD too, which has fewer roundings.
        limit = 2 * limit + tolerances.rounding(p, torch.float32) + tolerances.adam(RATE, update.abs(), number, 0.0)
        found[f"step {number}"] = Exact(p, limit)
    return found
