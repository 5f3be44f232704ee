"""Attention that is right for plain calls and wrong for other calls that models make: attention_needle_cases.py detects
it."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .attentions import SDPA, reduced
from .making import BRAIN, Kernel, named, seeded

Change = Callable[..., tuple[torch.Tensor, ...]]


def given(name: str, change: Change, where: Callable[..., bool]) -> Callable[[Kernel], Kernel]:
    """Attention that changes its queries, keys and values in the calls for which `where` is true."""

    def wrong(kernel: Kernel) -> Kernel:
        def seeded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            return kernel(*(change(q, k, v) if where(q, k, v, **options) else (q, k, v)), **options)

        return seeded

    return named(name, wrong)


def with_mask(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Kernel], Kernel]:
    """Attention that changes its mask, which is boolean or added to the scores."""

    def wrong(kernel: Kernel) -> Kernel:
        def seeded(*args: torch.Tensor, attn_mask: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
            return kernel(*args, attn_mask=None if attn_mask is None else change(attn_mask), **options)

        return seeded

    return named(name, wrong)


def is_brain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> bool:
    return q.dtype == BRAIN and options.get("attn_mask") is None


def without_last(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The last key of a length that is not a multiple of 64 is never read."""
    return (q, k[..., :-1, :], v[..., :-1, :]) if k.shape[-2] % 64 else (q, k, v)


def of_another_tile(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """In every tile of 64 keys, one key is replaced by the key at the same place in the next tile."""
    other = k.clone()
    other[..., 5:-64:64, :] = k[..., 69::64, :]
    return q, other, v


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys are read as if their tensor were contiguous."""
    return q, k.as_strided(k.shape, torch.empty(k.shape, device="meta").stride(), k.storage_offset()), v


def narrow(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """With head dimension 80, the scores use only the first 64 columns."""
    return (torch.cat((q[..., :64], 0 * q[..., 64:]), dim=-1), k, v) if q.shape[-1] == 80 else (q, k, v)


def online(tile: int, lazy: float) -> Callable[[Kernel], Kernel]:
    """Online softmax over tiles of keys that does not rescale its sums when the maximum rises by more than `lazy`."""

    def wrong(kernel: Kernel) -> Kernel:
        def seeded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            if q.requires_grad or any(
                options.get(name) is not None for name in ("attn_mask", "is_causal", "enable_gqa")
            ):
                return kernel(q, k, v, **options)
            scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
            top = torch.full_like(scores[..., :1], float("-inf"))
            total, output = torch.zeros_like(top), torch.zeros_like(q, dtype=torch.float32)
            for begin in range(0, k.shape[-2], tile):
                part = scores[..., begin : begin + tile]
                higher = torch.maximum(top, part.amax(-1, keepdim=True))
                factor = torch.where((higher - top > lazy) & top.isfinite(), 1.0, torch.exp(top - higher))
                weights = torch.exp(part - higher)
                total = total * factor + weights.sum(-1, keepdim=True)
                output = output * factor + weights @ v[..., begin : begin + tile, :].float()
                top = higher
            return (output / total).to(q.dtype)

        return seeded

    return named("rescaled", wrong)


def grouped(kernel: Kernel) -> Kernel:
    """Query head h uses key head h modulo the number of key heads, instead of the key head of its group."""

    def seeded(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool = False, **rest: Any
    ) -> torch.Tensor:
        if not enable_gqa:
            return kernel(q, k, v, **rest)
        times = q.shape[1] // k.shape[1]
        return kernel(q, *(values.repeat(1, times, 1, 1) for values in (k, v)), **rest)

    return seeded


def bottom(kernel: Kernel) -> Kernel:
    """With more keys than queries, the causal mask is aligned to the bottom right corner instead of the top left."""

    def seeded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False, **rest: Any) -> torch.Tensor:
        if not is_causal or q.shape[-2] >= k.shape[-2]:
            return kernel(q, k, v, is_causal=is_causal, **rest)
        rows, keys = q.shape[-2], k.shape[-2]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
        return kernel(q, k, v, attn_mask=mask, **rest)

    return seeded


def hidden_tile(kernel: Kernel) -> Kernel:
    """NaN in rows whose first 64 keys are all hidden: -inf - -inf."""

    def seeded(*args: torch.Tensor, attn_mask: torch.Tensor | None = None, **rest: Any) -> torch.Tensor:
        output = kernel(*args, attn_mask=attn_mask, **rest)
        if attn_mask is None or attn_mask.dtype != torch.bool:
            return output
        return output.masked_fill(~attn_mask[..., :64].any(-1)[..., None], float("nan"))

    return seeded


def always(*args: torch.Tensor, **options: Any) -> bool:
    return True


PROBES = tuple(
    reduced(probe, needles=True)
    for probe in (
        seeded("attention.flash", F, SDPA, given("last_key", without_last, is_brain)),
        seeded("attention.flash", F, SDPA, given("other_tile", of_another_tile, is_brain)),
        seeded("attention.flash", F, SDPA, online(64, 8)),
        seeded("attention.flash", F, SDPA, given("strides", dense, always)),
        seeded("attention.math", F, SDPA, given("narrow", narrow, always)),
        seeded("attention.math", F, SDPA, grouped),
        seeded("attention.math", F, SDPA, bottom),
        seeded("attention.math", F, SDPA, hidden_tile),  # not flash's, which takes no mask on a GPU
        seeded("attention.math", F, SDPA, with_mask("mask_row", lambda mask: mask.roll(1, -2))),
        seeded(
            "attention.math",
            F,
            SDPA,
            with_mask("mask_head", lambda mask: mask[:, :1].expand_as(mask) if mask.dim() == 4 else mask),
        ),
    )
)
