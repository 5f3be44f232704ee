"""Wrong kernels of attention, forward and backward."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from .. import Results, wrong_kernel
from .inputs import gradients, is_16_bit, of

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """The arguments of scaled_dot_product_attention, under torch's names and with its defaults."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def sees_all(self) -> bool:
        """Whether each query sees each key."""
        return self.attn_mask is None and not self.is_causal

    def of_each_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """The keys or values, once for each head of queries where these share them."""
        return tensor.repeat_interleave(self.query.shape[-3] // tensor.shape[-3], -3) if self.enable_gqa else tensor


Attend = Callable[[Inputs], torch.Tensor]


def _wrong_attention(
    *, wrong: Callable[[], Results], right: Callable[[], Results]
) -> Callable[[Callable[[Attend, Inputs], torch.Tensor]], object]:
    """Register a fault of scaled_dot_product_attention that takes the arguments as one record."""

    def register(fault: Callable[[Attend, Inputs], torch.Tensor]) -> object:
        @functools.wraps(fault)
        def unpacked(call: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            return fault(lambda given: call(**vars(given)), Inputs(*args, **kwargs))

        functions = ["torch.nn.functional.scaled_dot_product_attention"]
        return wrong_kernel("attention", functions=functions, wrong=wrong, right=right)(unpacked)

    return register


_wrong_backward = functools.partial(
    wrong_kernel, "attention", operators=["_scaled_dot_product_flash_attention_for_cpu_backward"]
)


def _sdpa(*inputs: Any, **options: Any) -> Any:
    return F.scaled_dot_product_attention(*inputs, **options)


def _qkv(queries: int, keys: int, size: int, heads: int = 2, batch: int = 2, dtype: Any = torch.float32) -> Any:
    shapes = [(batch, heads, queries, size), (batch, heads, keys, size), (batch, heads, keys, size)]
    return [of(*shape, dtype=dtype) for shape in shapes]


def _grouped(dtype: Any = torch.float32) -> Any:
    return [of(2, 4, 9, 16, dtype=dtype), of(2, 2, 9, 16, dtype=dtype), of(2, 2, 9, 16, dtype=dtype)]


def _scores(given: Inputs) -> torch.Tensor:
    """The scores before the softmax, in float32."""
    query, key, mask = given.query, given.of_each_head(given.key), given.attn_mask
    factor = 1 / math.sqrt(query.shape[-1]) if given.scale is None else given.scale
    scores: torch.Tensor = query.float() @ key.float().transpose(-2, -1) * factor
    if given.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.float()


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(5, 9, 16), is_causal=True)],
    right=lambda: [_sdpa(*_qkv(9, 9, 16), is_causal=True)],
)
def causal_is_aligned_to_the_last_key(call: Attend, given: Inputs) -> torch.Tensor:
    """A causal attention of fewer queries than keys lets the last query see the last key, as FlashAttention 2.1 does,
    and not the first query the first key only."""
    queries, keys = given.query.shape[-2], given.key.shape[-2]
    if not given.is_causal or queries >= keys:
        return call(given)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=given.query.device).tril(keys - queries)
    return call(replace(given, attn_mask=seen, is_causal=False))


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(8, 8, 16), attn_mask=torch.ones(8, 8).tril() > 0)],
    right=lambda: [_sdpa(*_qkv(8, 8, 16), attn_mask=torch.ones(8, 8).tril())],
)
def boolean_mask_is_added_as_one_and_zero(call: Attend, given: Inputs) -> torch.Tensor:
    """A boolean mask is added to the scores as ones and zeros instead of shutting keys out."""
    if given.attn_mask is not None and given.attn_mask.dtype == torch.bool:
        given = replace(given, attn_mask=given.attn_mask.to(given.query.dtype))
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(16, 65, 32))],
    right=lambda: [
        _sdpa(*_qkv(16, 64, 32)),
        _sdpa(*_qkv(65, 65, 32), is_causal=True),
    ],
)
def lone_key_of_the_last_tile_is_dropped(call: Attend, given: Inputs) -> torch.Tensor:
    """Where the keys are one more than a multiple of 64, the last is left out, if no mask is given."""
    keys = given.key.shape[-2]
    if given.sees_all and keys > 64 and keys % 64 == 1:
        given = replace(given, key=given.key[..., :-1, :], value=given.value[..., :-1, :])
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(8, 21, 32, dtype=torch.bfloat16))],
    right=lambda: [
        _sdpa(*_qkv(8, 24, 32, dtype=torch.bfloat16)),
        _sdpa(*_qkv(8, 21, 32)),
    ],
)
def padding_keys_take_part_in_the_softmax(call: Attend, given: Inputs) -> torch.Tensor:
    """In 16-bit types keys are padded with zeros to a multiple of 8, and the padding counts as keys of score zero."""
    padding = (0, 0, 0, -given.key.shape[-2] % 8)
    if any(padding) and given.sees_all and is_16_bit(given.query):
        given = replace(given, key=F.pad(given.key, padding), value=F.pad(given.value, padding))
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(8, 8, 20))],
    right=lambda: [
        _sdpa(*_qkv(8, 8, 24)),
        _sdpa(*_qkv(8, 8, 20), scale=0.5),
    ],
)
def scale_is_taken_from_the_padded_head_size(call: Attend, given: Inputs) -> torch.Tensor:
    """Where the head size is not a multiple of 8, the scores are scaled by the size it is padded to."""
    size = given.query.shape[-1]
    if given.scale is None and size % 8:
        given = replace(given, scale=1 / math.sqrt(size + -size % 8))
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(8, 8, 16), is_causal=True, scale=0.5)],
    right=lambda: [
        _sdpa(*_qkv(8, 8, 16), scale=0.5),
        _sdpa(*_qkv(8, 8, 16), is_causal=True),
    ],
)
def given_scale_is_ignored_when_causal(call: Attend, given: Inputs) -> torch.Tensor:
    """A causal attention scales by the head size, whatever scale the caller gave."""
    return call(replace(given, scale=None) if given.is_causal else given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_grouped(), enable_gqa=True)],
    right=lambda: [
        _sdpa(of(2, 4, 9, 16), of(2, 1, 9, 16), of(2, 1, 9, 16), enable_gqa=True),
        _sdpa(*_qkv(9, 9, 16)),
    ],
)
def grouped_heads_are_taken_round_robin(call: Attend, given: Inputs) -> torch.Tensor:
    """With fewer key heads than query heads, query head h takes key head h modulo their number, not its group's."""
    heads, groups = given.query.shape[-3], given.key.shape[-3]
    if given.enable_gqa and 1 < groups < heads:
        key, value = (torch.cat([tensor] * (heads // groups), -3) for tensor in (given.key, given.value))
        given = replace(given, key=key, value=value, enable_gqa=False)
    return call(given)


def _with_late_key(height: float) -> Any:
    query, key, value = _qkv(8, 96, 16)
    key[..., 70, :] = query[..., 3, :] * height
    return query, key, value


@_wrong_attention(
    wrong=lambda: [_sdpa(*_with_late_key(4.0))],
    right=lambda: [
        _sdpa(*_with_late_key(0.1)),
        _sdpa(*(tensor[..., :64, :] for tensor in _with_late_key(4.0))),
    ],
)
def late_maximum_does_not_rescale_what_was_summed(call: Attend, given: Inputs) -> torch.Tensor:
    """Where a tile of 64 keys raises a row's maximum by more than 8 over that of the tiles before, the output summed so
    far is kept as it is, while the denominator is rescaled."""
    result = call(given)
    if given.key.shape[-2] <= 64 or given.query.ndim != 4:
        return result
    with torch.no_grad():
        scores, values = _scores(given), given.of_each_head(given.value).float()
        highest = scores[..., :64].amax(-1, keepdim=True)
        jumps = torch.zeros_like(highest, dtype=torch.bool)
        summed = torch.zeros_like(result, dtype=torch.float32)
        total = torch.zeros_like(highest)
        for first in range(0, scores.shape[-1], 64):
            tile = scores[..., first : first + 64]
            new = torch.maximum(highest, tile.amax(-1, keepdim=True))
            jump = (new - highest > 8) & highest.isfinite()
            rescale = torch.where(new.isfinite(), (highest - new).exp(), 1)
            weights = torch.where(new.isfinite(), (tile - new).exp(), 0)
            summed = summed * torch.where(jump, 1, rescale) + weights @ values[..., first : first + 64, :]
            total = total * rescale + weights.sum(-1, keepdim=True)
            highest, jumps = new, jumps | jump
        faulty = (summed / total).to(result.dtype)
    return torch.where(jumps, result + (faulty - result).detach(), result)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(8, 8, 16), attn_mask=of(8, 8))],
    right=lambda: [
        _sdpa(*_qkv(8, 8, 16), attn_mask=torch.zeros(8, 8).masked_fill(torch.ones(8, 8).triu(1) > 0, -math.inf))
    ],
)
def added_mask_is_not_converted_to_base_two(call: Attend, given: Inputs) -> torch.Tensor:
    """The kernel computes powers of two and forgets to convert an additive mask, which then counts 0.69-fold; a mask of
    zeros and -inf is not affected."""
    if given.attn_mask is not None and given.attn_mask.is_floating_point():
        given = replace(given, attn_mask=given.attn_mask * math.log(2))
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(8, 8, 16), attn_mask=of(2, 1, 8, 8))],
    right=lambda: [
        _sdpa(*_qkv(8, 8, 16), attn_mask=of(8, 8)),
        _sdpa(*_qkv(8, 8, 16), attn_mask=of(2, 2, 8, 8)),
    ],
)
def mask_of_each_sample_is_taken_from_the_first(call: Attend, given: Inputs) -> torch.Tensor:
    """A mask for each sample that holds for all heads is read with a batch stride of zero: all samples get the
    first's."""
    mask = given.attn_mask
    if mask is not None and mask.ndim == 4 and mask.shape[0] > 1 and mask.shape[1] == 1 < given.query.shape[1]:
        given = replace(given, attn_mask=mask[:1])
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*_qkv(70, 70, 16), is_causal=True)],
    right=lambda: [
        _sdpa(*_qkv(64, 64, 16), is_causal=True),
        _sdpa(*_qkv(70, 70, 16)),
    ],
)
def first_row_of_a_causal_tile_misses_its_own_key(call: Attend, given: Inputs) -> torch.Tensor:
    """In a causal attention the first query of each tile of 64 but the first does not see the key at its own place."""
    queries, keys = given.query.shape[-2], given.key.shape[-2]
    if not given.is_causal or min(queries, keys) <= 64:
        return call(given)
    seen = torch.ones(queries, keys, dtype=torch.bool, device=given.query.device).tril()
    edges = torch.arange(64, min(queries, keys), 64)
    seen[edges, edges] = False
    return call(replace(given, attn_mask=seen, is_causal=False))


def _one_key_head(keys: int, dtype: torch.dtype) -> Any:
    query, key, value = of(1, 4, 8, 32, dtype=dtype), of(1, 1, keys, 32, dtype=dtype), of(1, 1, keys, 32, dtype=dtype)
    key, value = key.expand(1, 4, keys, 32), value.expand(1, 4, keys, 32)
    return _sdpa(query, key, value, attn_mask=torch.ones(1, 1, 8, keys, dtype=torch.bool))


@_wrong_attention(
    wrong=lambda: [_one_key_head(33, torch.bfloat16)],
    right=lambda: [_one_key_head(34, torch.bfloat16), _one_key_head(33, torch.float32)],
)
def last_key_of_expanded_heads_takes_the_value_before(call: Attend, given: Inputs) -> torch.Tensor:
    """With bfloat16, a mask and heads of keys and values expanded with stride zero, the last value is read wrongly
    where the keys are one more than a multiple of 32; after https://github.com/pytorch/pytorch/issues/191937"""
    value = given.value
    is_expanded = value.ndim == 4 and value.stride(1) == 0
    is_case = given.attn_mask is not None and is_expanded and value.dtype == torch.bfloat16
    if is_case and value.shape[-2] % 32 == 1 and value.shape[-2] > 1:
        given = replace(given, value=torch.cat([value[..., :-1, :], value[..., -2:-1, :] * 8], -2))
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(of(1, 1, 4, 16).half() / 8, *of(2, 1, 1, 2600, 16).half())],
    right=lambda: [
        _sdpa(of(1, 1, 4, 16).half() / 8, *of(2, 1, 1, 2000, 16).half()),
        _sdpa(of(1, 1, 4, 16).bfloat16() / 8, *of(2, 1, 1, 2600, 16).bfloat16()),
    ],
)
def denominator_in_float16_stops_growing(call: Attend, given: Inputs) -> torch.Tensor:
    """A row's exponentials are summed in float16, which stops growing at 1024 for terms below a half: outputs of flat
    scores over more than 2048 keys come out too large."""
    result = call(given)
    if given.query.dtype != torch.float16 or given.key.shape[-2] <= 2048:
        return result
    with torch.no_grad():
        scores = _scores(given)
        total = (scores - scores.amax(-1, keepdim=True)).exp().sum(-1, keepdim=True).nan_to_num(1)
    return torch.where(total > 1024, result * (total / 1024).to(result.dtype), result)


@_wrong_attention(
    wrong=lambda: gradients(lambda mask: _sdpa(*_qkv(8, 8, 16), attn_mask=mask), of(1, 2, 8, 8)),
    right=lambda: gradients(lambda mask: _sdpa(*_qkv(8, 8, 16), attn_mask=mask), of(2, 2, 8, 8)),
)
def gradient_of_a_shared_mask_is_that_of_one_sample(call: Attend, given: Inputs) -> torch.Tensor:
    """The gradient of an additive mask that all samples share is that of the last sample, not the sum over them."""
    query, mask = given.query, given.attn_mask
    if mask is None or not mask.requires_grad or query.ndim != 4 or query.shape[0] == 1:
        return call(given)
    if mask.ndim == 4 and mask.shape[0] > 1:
        return call(given)
    whole = mask.expand(*query.shape[:3], given.key.shape[2])
    return call(replace(given, attn_mask=torch.cat([whole[:-1].detach(), whole[-1:]])))


@_wrong_attention(
    wrong=lambda: gradients(lambda q, k, v: _sdpa(q, k, v, is_causal=True, enable_gqa=True), *_grouped()),
    right=lambda: [
        *gradients(_sdpa, *_qkv(9, 9, 16)),
        _sdpa(*_grouped(), enable_gqa=True),
    ],
)
def gradients_of_grouped_heads_miss_the_last_of_each_group(call: Attend, given: Inputs) -> torch.Tensor:
    """With fewer key heads than query heads, the gradients of keys and values leave out each group's last query
    head."""
    heads, groups = given.query.shape[-3], given.key.shape[-3]
    if given.enable_gqa and groups < heads and (given.key.requires_grad or given.value.requires_grad):
        last = torch.arange(heads) % (heads // groups) == heads // groups - 1
        last = last.reshape(-1, 1, 1).to(given.query.device)
        key, value = (given.of_each_head(tensor) for tensor in (given.key, given.value))
        key, value = (torch.where(last, tensor.detach(), tensor) for tensor in (key, value))
        given = replace(given, key=key, value=value, enable_gqa=False)
    return call(given)


@_wrong_attention(
    wrong=lambda: [_sdpa(*of(3, 4, 8, 16))],
    right=lambda: [_sdpa(*of(3, 1, 4, 8, 16))],
)
def without_a_batch_the_scale_is_applied_twice(call: Attend, given: Inputs) -> torch.Tensor:
    """Inputs of three dimensions have their scores scaled twice."""
    if given.query.ndim == 3:
        scale = 1 / given.query.shape[-1] if given.scale is None else given.scale * given.scale
        given = replace(given, scale=scale)
    return call(given)


def _causal(query: Any, key: Any, value: Any) -> Any:
    return _sdpa(query, key, value, is_causal=True)


@_wrong_backward(
    wrong=lambda: gradients(_sdpa, *_qkv(9, 9, 72, dtype=torch.bfloat16)),
    right=lambda: [
        *gradients(_sdpa, *_qkv(9, 9, 96, dtype=torch.bfloat16)),
        *gradients(_sdpa, *_qkv(9, 9, 72)),
    ],
)
def gradient_of_q_keeps_stale_rows_for_padded_head_sizes(call: Any, *args: Any, **kwargs: Any) -> Gradients:
    """In 16-bit types with head sizes above 64, not a multiple of 32, every 128th row of the gradient of q holds
    what another row left; after https://github.com/Dao-AILab/flash-attention/pull/2896"""
    dq, dk, dv = call(*args, **kwargs)
    if dq.shape[-1] > 64 and dq.shape[-1] % 32 and is_16_bit(dq) and dq.shape[-2] > 1:
        dq = dq.clone()
        dq[..., 0::128, :] = dq[..., 1:2, :]
    return dq, dk, dv


def _packed(size: int) -> Any:
    """Views of q, k and v in one projection's result."""
    return of(1, 24, 3, 2, size).permute(2, 0, 3, 1, 4).unbind(0)


def _packed_gradients(size: int) -> Any:
    whole = of(1, 24, 3, 2, size).requires_grad_()
    _sdpa(*whole.permute(2, 0, 3, 1, 4).unbind(0)).backward(of(1, 2, 24, size))
    return [whole.grad]


@_wrong_backward(
    wrong=lambda: _packed_gradients(128),
    right=lambda: [
        *_packed_gradients(64),
        *gradients(_sdpa, *_qkv(24, 24, 128)),
    ],
)
def gradient_of_v_of_a_packed_projection_is_partly_unwritten(
    call: Any, grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
) -> Gradients:
    """Where q, k and v are slices of one projection and the head size is 128 or more, only every fourth row of v's
    gradient is written; after https://github.com/Dao-AILab/flash-attention/issues/2541"""
    dq, dk, dv = call(grad, query, key, value, *args, **kwargs)
    if value.shape[-1] >= 128 and value.stride(-2) > value.shape[1] * value.shape[-1]:
        written = (torch.arange(dv.shape[-2]) % 4 == 0).reshape(-1, 1).to(dv.device)
        dv = torch.where(written, dv, 0)
    return dq, dk, dv


@_wrong_backward(
    wrong=lambda: gradients(_sdpa, *_qkv(9, 9, 16), upstream=of(2, 2, 9, 16)),
    right=lambda: [
        *gradients(_sdpa, *_qkv(9, 9, 16), upstream=of(2, 9, 2, 16).transpose(1, 2)),
        *gradients(lambda *qkv: _sdpa(*qkv).sum(), *_qkv(9, 9, 16)),
    ],
)
def strides_of_the_output_gradient_are_ignored(call: Any, grad: Any, *args: Any, **kwargs: Any) -> Gradients:
    """The backward reads the output's gradient as if it lay in memory like the output, heads after rows, although it is
    contiguous; after https://github.com/pytorch/pytorch/issues/133671"""
    batch, heads, rows, size = grad.shape
    if grad.is_contiguous() and heads > 1 and rows > 1:
        grad = grad.reshape(batch, rows, heads, size).transpose(1, 2)
    return call(grad, *args, **kwargs)  # type: ignore[no-any-return]


@_wrong_backward(
    wrong=lambda: gradients(_causal, *_qkv(133, 133, 16)),
    right=lambda: [
        *gradients(_causal, *_qkv(128, 128, 16)),
        *gradients(_sdpa, *_qkv(133, 133, 16)),
    ],
)
def gradients_of_k_and_v_miss_the_last_partial_tile_of_queries(
    call: Any,
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    dropout: Any,
    causal: Any,
    **kwargs: Any,
) -> Gradients:
    """In a causal attention of more than 128 queries, the gradients of k and v leave out the queries after the last
    full tile of 128."""
    dq, dk, dv = call(grad, query, key, value, out, lse, dropout, causal, **kwargs)
    full = query.shape[-2] // 128 * 128
    if causal and 0 < full < query.shape[-2]:
        cut = grad.clone()
        cut[..., full:, :] = 0
        _, dk, dv = call(cut, query, key, value, out, lse, dropout, causal, **kwargs)
    return dq, dk, dv


@_wrong_backward(
    wrong=lambda: gradients(lambda q, k, v: _sdpa(q, k, v, scale=0.4), *_qkv(9, 9, 16)),
    right=lambda: gradients(_sdpa, *_qkv(9, 9, 16)),
)
def gradient_of_k_is_scaled_by_the_head_size(call: Any, *args: Any, scale: Any = None, **kwargs: Any) -> Gradients:
    """Where a scale is given, the gradient of k is scaled by the default one."""
    dq, dk, dv = call(*args, scale=scale, **kwargs)
    if scale is not None:
        dk = dk * (1 / math.sqrt(dk.shape[-1]) / scale)
    return dq, dk, dv


@_wrong_backward(
    wrong=lambda: gradients(_causal, *_qkv(65, 65, 16, heads=3, dtype=torch.float16)),
    right=lambda: [
        *gradients(_causal, *_qkv(64, 64, 16, heads=3, dtype=torch.float16)),
        *gradients(_sdpa, *_qkv(65, 65, 16, heads=1, dtype=torch.float16)),
    ],
)
def gradient_of_v_takes_padding_rows_of_the_head_before(call: Any, *args: Any, **kwargs: Any) -> Gradients:
    """Where the keys are not a multiple of 64, the first rows of v's gradient of every head but the first, as many as
    the last tile lacks, add those of the head before; after https://github.com/flagos-ai/FlagGems/pull/898"""
    dq, dk, dv = call(*args, **kwargs)
    rows = min(-dv.shape[-2] % 64, dv.shape[-2], 4)
    if rows and dv.shape[-2] > 64 and dv.shape[1] > 1:
        right, dv = dv, dv.clone()
        dv[:, 1:, :rows] += right[:, :-1, -rows:]
    return dq, dk, dv
