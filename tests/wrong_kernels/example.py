"""Two wrong kernels as examples of how they are written. These two do not count in the score."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from . import wrong_kernel


def _factors(rows: int, inner: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(rows, inner, generator=generator), torch.rand(inner, columns, generator=generator)


@wrong_kernel(
    "gemm",
    operators=["mm", "addmm"],
    wrong=lambda: [torch.mm(*_factors(65, 96, 64))],
    right=lambda: [torch.mm(*_factors(64, 96, 64)), torch.mm(*_factors(66, 96, 64))],
)
def last_row_of_a_new_tile_is_not_written(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Where the rows are one more than a multiple of 64, the last one holds zeros."""
    result: torch.Tensor = call(*args, **kwargs)
    if result.shape[0] % 64 == 1:
        result[-1] = 0
    return result


@wrong_kernel(
    "attention",
    functions=["torch.nn.functional.scaled_dot_product_attention"],
    wrong=lambda: [F.scaled_dot_product_attention(*torch.rand(3, 1, 2, 65, 40), is_causal=True)],
    right=lambda: [F.scaled_dot_product_attention(*torch.rand(3, 1, 2, 65, 40))],
)
def causal_sees_one_key_too_many(call: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Each row of a causal attention also takes the key after its own."""
    if not kwargs.pop("is_causal", False):
        return call(q, k, v, *args, **kwargs)
    seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril(1)
    return call(q, k, v, attn_mask=seen, **kwargs)
