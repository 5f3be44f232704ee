"""graph.replay and train.repeat: the same work twice has the same bits: as a CUDA graph, and in another process.

Both use a small GPT written out in operations that have deterministic kernels on every device. Its parameters and
tokens come from counters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.harness import forking
from envbuild.selftest.harness.forking import ForkEnding, Tell, Work
from envbuild.selftest.harness.probe_context import Context, missing_gpu, short_name
from envbuild.selftest.harness.probe_outcome import Skip
from envbuild.selftest.numerics import inputs
from envbuild.selftest.numerics.reference import raw_digest

WIDTH, HEADS, LAYERS, VOCABULARY = 96, 4, 2, 263
BATCH, LENGTH = 4, 61
STEPS, RATE = 3, 0.5
BATCHES = 3  # that a graph is replayed with
WARM_UP = 3  # calls before a graph is captured, as torch's manual has it
PROCESSES = 2
SECONDS = 60.0  # of a process

Parameters = dict[str, torch.Tensor]
Model = Callable[
    [torch.Tensor], torch.Tensor
]  # from tokens (BATCH, LENGTH + 1) to a loss and all gradients, one vector


def parameters(device: torch.device) -> Parameters:
    """float32 leaves by name, of the size that keeps activations near 1."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH), "position": (LENGTH, WIDTH)}
    for layer in range(LAYERS):
        shapes[f"{layer} attention"] = (3 * WIDTH, WIDTH)
        shapes[f"{layer} projection"] = (WIDTH, WIDTH)
        shapes[f"{layer} up"] = (4 * WIDTH, WIDTH)
        shapes[f"{layer} down"] = (WIDTH, 4 * WIDTH)
        shapes[f"{layer} norm"] = (2, WIDTH)
    found = {}
    for seed, (name, shape) in enumerate(shapes.items(), start=700):
        values = inputs.signed(shape, seed) / (1 if len(shape) == 1 else math.sqrt(shape[1] / 3))
        found[name] = (1 + values / 8 if name.endswith("norm") else values).to(device).requires_grad_()
    return found


def tokens(number: int) -> torch.Tensor:
    """A batch (BATCH, LENGTH + 1) of int64, on the host."""
    return (inputs.hashes(BATCH * (LENGTH + 1), 720 + number) % VOCABULARY).reshape(BATCH, LENGTH + 1)


def loss(weights: Parameters, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each next token; attention is written out, as its fused kernels need not be deterministic."""
    x = F.embedding(batch[:, :-1], weights["embedding"]) + weights["position"]
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=batch.device).triu(1)
    for layer in range(LAYERS):
        first, second = weights[f"{layer} norm"]
        mixed = F.linear(F.layer_norm(x, (WIDTH,), first), weights[f"{layer} attention"])
        q, k, v = (part.reshape(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for part in torch.split(mixed, WIDTH, dim=2))
        logits = (q @ k.transpose(2, 3) / math.sqrt(WIDTH // HEADS)).masked_fill(future, -math.inf)
        heads = (torch.softmax(logits, dim=-1) @ v).transpose(1, 2).flatten(2)
        x = x + F.linear(heads, weights[f"{layer} projection"])
        up = F.linear(F.layer_norm(x, (WIDTH,), second), weights[f"{layer} up"])
        x = x + F.linear(F.gelu(up), weights[f"{layer} down"])
    return F.cross_entropy(F.linear(x, weights["embedding"]).flatten(0, 1), batch[:, 1:].flatten())


def be_deterministic() -> None:
    """For this process; before cuBLAS starts, which reads the variable then."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_deterministic_debug_mode("error")


def graph_replay(context: Context) -> None:
    """graph.replay: a CUDA graph of a GPT's forward and backward pass gives, replayed, the bits of the eager calls."""
    be_deterministic()
    weights = parameters(context.device)
    leaves = list(weights.values())

    def gradients(batch: torch.Tensor) -> torch.Tensor:
        value = loss(weights, batch)
        return torch.cat([part.flatten() for part in (value.detach(), *torch.autograd.grad(value, leaves))])

    context.step("capture")
    replayed = captured(gradients, tokens(0).to(context.device))
    for number in range(BATCHES):
        if number == BATCHES - 1:  # a graph reads parameters where they lie: new values must be seen
            with torch.no_grad():
                for leaf in leaves:
                    leaf.mul_(0.75)
        batch = tokens(number).to(context.device)
        with context.step(f"replay {number}") as step:
            got = replayed(batch).cpu()
        eager = gradients(batch).cpu()
        different = int((got.view(torch.int32) != eager.view(torch.int32)).sum())
        context.figure(f"elements of replay {number} that differ", got.dtype, got.shape, different, 0.0, step.seconds)
        if not bool(torch.isfinite(eager).all()):
            context.fail("nonfinite", f"batch {number}: the loss or a gradient is not finite")
        elif different:
            context.fail(
                "mismatch", f"replay {number}: {different} of {len(got)} elements differ from the eager call's"
            )


def captured(model: Model, batch: torch.Tensor) -> Model:
    """The model as a CUDA graph: called, it copies its batch into the captured one's place and replays."""
    fixed = batch.clone()
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(WARM_UP):
            model(fixed)
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(fixed)

    def replayed(values: torch.Tensor) -> torch.Tensor:
        fixed.copy_(values)
        graph.replay()
        return result.clone()

    return replayed


def train_repeat(context: Context) -> None:
    """train.repeat: steps of a small GPT have the same bits twice in a process and in another process."""
    for precision in (None, torch.bfloat16 if context.on_cpu else torch.float16):
        name = f"{STEPS} steps fp32" + (f" with autocast to {short_name(precision)}" if precision else "")
        context.step(f"{name}, in {PROCESSES} processes")
        work = _trained(context.job.device, max(1, context.job.thread_count // PROCESSES), precision)
        endings = [group[0] for group in forking.run_groups([[work]] * PROCESSES, SECONDS, math.inf)]
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
    """sha256 of the losses and of each parameter after some steps of gradient descent."""
    weights = parameters(device)
    losses = []
    for number in range(STEPS):
        with torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
            value = loss(weights, tokens(number).to(device))
        gradients = torch.autograd.grad(value, list(weights.values()))
        with torch.no_grad():  # by hand: importing torch.optim's compiler takes longer than all steps
            for leaf, gradient in zip(weights.values(), gradients):
                leaf -= RATE * gradient
        losses.append(value.detach())
    if not bool(torch.isfinite(torch.stack(losses)).all()):
        raise ArithmeticError(f"the loss is not finite: {[float(value) for value in losses]}")
    return {"loss": raw_digest(*losses), **{name: raw_digest(values) for name, values in weights.items()}}


def _compare(context: Context, name: str, endings: Sequence[ForkEnding]) -> None:
    """Every run with the first one of the first process."""
    for number, ending in enumerate(endings):
        if "skip" in ending.told:
            raise Skip(str(ending.told["skip"]))
        if ending.failure:
            context.fail("exception", f"{name}: process {number}: {ending.failure}", ending.signal)
            return
    runs: list[tuple[str, Mapping[str, Any]]] = [
        (f"run {turn} of process {number}", run)
        for number, ending in enumerate(endings)
        for turn, run in enumerate(ending.told["runs"])
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
