"""A small GPT that consists of operations with deterministic kernels on every device.

Its parameters and tokens are hashes of counters.
"""

from __future__ import annotations

import math
import os

import torch
import torch.nn.functional as F

from envbuild.selftest.numerics import hashed_inputs

WIDTH, HEADS, LAYERS, VOCABULARY = 96, 4, 2, 263
BATCH, LENGTH = 4, 61

Parameters = dict[str, torch.Tensor]


def parameters(device: torch.device) -> Parameters:
    """Return float32 leaf tensors by name, scaled to keep activations near 1."""
    shapes: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, WIDTH), "position": (LENGTH, WIDTH)}
    for layer in range(LAYERS):
        shapes[f"{layer} attention"] = (3 * WIDTH, WIDTH)
        shapes[f"{layer} projection"] = (WIDTH, WIDTH)
        shapes[f"{layer} up"] = (4 * WIDTH, WIDTH)
        shapes[f"{layer} down"] = (WIDTH, 4 * WIDTH)
        shapes[f"{layer} norm"] = (2, WIDTH)
    found = {}
    for seed, (name, shape) in enumerate(shapes.items(), start=700):
        values = hashed_inputs.signed(shape, seed) / (1 if len(shape) == 1 else math.sqrt(shape[1] / 3))
        found[name] = (1 + values / 8 if name.endswith("norm") else values).to(device).requires_grad_()
    return found


def tokens(number: int) -> torch.Tensor:
    """Return a batch of tokens (BATCH, LENGTH + 1), int64, on the host."""
    return (hashed_inputs.hashes(BATCH * (LENGTH + 1), 720 + number) % VOCABULARY).reshape(BATCH, LENGTH + 1)


def loss(weights: Parameters, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next tokens. Attention is written out in single operations, because fused
    kernels may not be deterministic."""
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
    """Make this process deterministic. Call this before cuBLAS starts, because cuBLAS reads the environment variable
    when it starts."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.set_deterministic_debug_mode("error")
