"""train.step: training is finite, repeatable bit for bit in deterministic mode, and matches float64 on the host."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.tensor_digests import raw_digest

STEPS = 20
WIDTH, DEPTH, HEADS, HIDDEN = 64, 2, 4, 128
BATCH, LENGTH = 4, 37
RATE, MOMENTUM = 0.05, 0.9

# The largest allowed difference between a loss and that of the float64 run, relative to the latter. Measured on a CPU,
# float32 reaches 1.3e-7 and bfloat16 9e-3. The tolerance allows other orders of summation. TF32 keeps 3 more bits of
# each factor than bfloat16, so it is 8 times finer.
LOSS_BOUND, LOSS_BOUND_TF32 = 1e-5, 3e-3


@dataclass(frozen=True)
class Training:
    """The loss before each step, and the sha256 of all weights after the last step."""

    losses: tuple[float, ...]
    weights: str


def model(device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    """Return two transformer blocks. Their matrices are hashes of counters, so that they are the same everywhere."""
    blocks = [
        torch.nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=True)
        for _ in range(DEPTH)
    ]
    network = torch.nn.Sequential(*blocks)
    with torch.no_grad():
        for seed, (name, weights) in enumerate(network.named_parameters(), start=100):
            if weights.dim() > 1:
                weights.copy_(hashed_inputs.signed(weights.shape, seed) / math.sqrt(weights.shape[1]))
            elif name.endswith("bias"):
                # the other one-dimensional parameters are the weights of norms, which torch initialises to 1
                weights.zero_()
    return network.to(device, dtype)


def train(device: torch.device, dtype: torch.dtype) -> Training:
    """Train on fixed inputs and targets. The gradients of each step depend on all previous steps."""
    network = model(device, dtype)
    x, target = (hashed_inputs.signed((BATCH, LENGTH, WIDTH), seed).to(device, dtype) for seed in (41, 42))
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE, momentum=MOMENTUM)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(network(x), target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(loss.detach()))
    return Training(tuple(losses), raw_digest(*network.parameters()))


def train_step(context: Context) -> None:
    """train.step: 20 steps of a two-layer transformer, run twice: finite, falling, equal, and matching float64."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when cuBLAS starts; required for determinism
    torch.use_deterministic_algorithms(True)
    with context.step(f"{STEPS} steps fp64 on the host"):
        reference = train(torch.device("cpu"), torch.float64)
    runs = []
    for count in ("first", "second"):
        with context.step(f"{STEPS} steps fp32, {count} time") as timed:
            runs.append(train(context.device, torch.float32))
    first, second = runs
    bound = LOSS_BOUND_TF32 if context.job.allow_tf32 else LOSS_BOUND
    distance = max(_relative(got, wanted) for got, wanted in zip(first.losses, reference.losses))
    shape = (BATCH, LENGTH, WIDTH)
    context.figure("loss", torch.float32, shape, distance, bound, timed.seconds)
    context.traits.update(losses=[first.losses[0], first.losses[-1]], weights=first.weights)
    if not all(map(math.isfinite, first.losses + second.losses)):
        context.fail("nonfinite", f"the loss is not finite: {first.losses}")
        context.traits["losses"] = None
    elif distance > bound:
        context.fail("bound", f"relative error of the loss against float64: {distance:g}, tolerance {bound:g}")
    elif first.losses[-1] >= first.losses[0]:
        context.fail("bound", f"the loss does not fall: {first.losses[0]:g} to {first.losses[-1]:g}")
    if first != second:
        differ = [i for i, (a, b) in enumerate(zip(first.losses, second.losses)) if a != b]
        where = f"from step {differ[0]}" if differ else "in the last step's weights"
        context.fail("mismatch", f"two runs in deterministic mode differ {where}")


def _relative(got: float, wanted: float) -> float:
    """Return the relative distance. It is infinite for NaN and infinity, so that they count as the largest."""
    return abs(got - wanted) / abs(wanted) if math.isfinite(got) else math.inf
