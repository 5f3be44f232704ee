"""graph.replay: eager calls and replays of a CUDA graph give the same bits."""

from __future__ import annotations

from typing import Callable

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.training.small_gpt import be_deterministic, loss, parameters, tokens

BATCHES = 3  # number of batches for which the graph is replayed
WARM_UP = 3  # calls before the graph is captured, as in torch's documentation

# Takes tokens (BATCH, LENGTH + 1). Returns one vector, which contains the loss and then all gradients.
Model = Callable[[torch.Tensor], torch.Tensor]


def graph_replay(context: Context) -> None:
    """graph.replay: replays of a CUDA graph of a GPT's forward and backward pass have the same bits as eager calls."""
    be_deterministic()
    weights = parameters(context.device)
    leaves = list(weights.values())

    def gradients(batch: torch.Tensor) -> torch.Tensor:
        value = loss(weights, batch)
        return torch.cat([part.flatten() for part in (value.detach(), *torch.autograd.grad(value, leaves))])

    context.step("capture")
    replayed = captured(gradients, tokens(0).to(context.device))
    for number in range(BATCHES):
        # a graph reads parameters from fixed addresses, so changed values must take effect in the next replay
        if number == BATCHES - 1:
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
    """Capture the model as a CUDA graph and return a function. The function copies its batch into the captured input
    and replays the graph."""
    fixed = batch.clone()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            model(fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(fixed)

    def replayed(values: torch.Tensor) -> torch.Tensor:
        fixed.copy_(values)
        graph.replay()
        return result.clone()

    return replayed
