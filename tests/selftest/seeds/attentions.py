"""Attention with a wrong forward pass. gradients.py has those with a wrong backward pass."""

import dataclasses
import itertools
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.attention import (
    attention_backend_probes,
    attention_gradient_cases,
    attention_needle_cases,
)

from .making import HALF, Kernel, named, seeded, wrong_dtype

SDPA = "scaled_dot_product_attention"


def stale(kernel: Kernel) -> Kernel:
    """Return the output of the previous call whose result had the same shape and dtype."""
    last: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        before = last.get((result.shape, result.dtype), result)
        last[result.shape, result.dtype] = result
        return before

    return seeded


def attention_nan(kernel: Kernel) -> Kernel:
    """Write one NaN, only for the long sequence length, head dimension 128 and bfloat16."""
    lengths = (attention_backend_probes.LONG, attention_backend_probes.LONG_CPU)

    def seeded(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = kernel(q, *args, **options)
        if q.shape[-2] in lengths and q.shape[-1] == 128 and q.dtype == torch.bfloat16:
            result[0, 0, -1, -1] = float("nan")
        return result

    return seeded


def attention_own(kernel: Kernel, first: bool = True, causal: bool = True, dtype: torch.dtype | None = None) -> Kernel:
    """Attention as separate operations. `first`: whether queries are scaled before the product, which is right;
    `causal`: whether the causal mask is applied; `dtype`: inputs of this dtype are also summed in this dtype."""

    def seeded(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        is_causal: bool = False,
        enable_gqa: bool = False,
        **rest: Any,
    ) -> torch.Tensor:
        times = q.shape[1] // k.shape[1] if enable_gqa else 1
        wide = [q.float(), *(values.float().repeat_interleave(times, dim=1) for values in (k, v))]
        scale = q.shape[-1] ** -0.5
        logits = (wide[0] * scale if first else wide[0]) @ wide[1].transpose(-1, -2)
        logits = logits.to(q.dtype).float()
        if is_causal and causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
        if attn_mask is not None:
            is_boolean = attn_mask.dtype == torch.bool
            logits = logits.masked_fill(~attn_mask, float("-inf")) if is_boolean else logits + attn_mask
        weights = torch.softmax(logits if first else logits * scale, dim=-1)
        if dtype is not None and q.dtype == dtype:
            total = torch.zeros_like(wide[0])
            for j in range(0, k.shape[-2], 16):
                total = (total + weights[..., j : j + 16] @ wide[2][..., j : j + 16, :]).to(dtype).float()
            return total.to(q.dtype)
        return (weights @ wide[2]).to(q.dtype)

    return seeded


def wrong_row(kernel: Kernel) -> Kernel:
    """One row of the output is a copy of its neighbour, as if a tile were written to the wrong place."""

    def seeded(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = kernel(q, *args, **options).clone()
        result[..., 20:21, :] = result[..., 19:20, :] if q.shape[-2] > 20 else 0
        return result

    return seeded


def reduced(probe: Probe, *, shapes: bool = False, gradients: bool = False, needles: bool = False) -> Probe:
    """Return the probe of a seed that, on a CPU, runs only these parts of its cases, in which the fault shows. Of the
    shapes, the first one always runs: without results a probe is skipped."""
    backend: Any = attention_backend_probes
    gradient: Any = attention_gradient_cases
    needle: Any = attention_needle_cases

    def function(context: Context) -> None:
        if context.on_cpu:
            every, most = backend.attention_shapes, None if shapes else 1
            backend.attention_shapes = lambda context: itertools.islice(every(context), most)
            gradient.gradient_cases = gradient.gradient_cases if gradients else lambda on_cpu: ()
            needle.needle_cases = needle.needle_cases if needles else lambda context, backend: ()
        probe.function(context)

    return dataclasses.replace(probe, function=function)


PROBES = (
    reduced(seeded("attention.flash", F, SDPA, attention_nan), shapes=True),
    reduced(seeded("attention.flash", F, SDPA, stale), shapes=True),
    reduced(seeded("attention.math", F, SDPA, named("overflow", lambda k: attention_own(k, first=False))), shapes=True),
    reduced(
        seeded("attention.math", F, SDPA, named("unmasked", lambda k: attention_own(k, causal=False))), shapes=True
    ),
    reduced(seeded("attention.math", F, SDPA, named("half", lambda k: attention_own(k, dtype=HALF))), shapes=True),
    seeded("attention.math", F, SDPA, named("right", lambda k: attention_own(k))),
    reduced(seeded("attention.math", F, SDPA, wrong_row), shapes=True),
    reduced(seeded("attention.flash", F, SDPA, wrong_dtype), shapes=True),
)
