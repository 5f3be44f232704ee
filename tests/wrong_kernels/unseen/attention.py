"""Wrong attention."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from ._common import gradients, rand, randn

SDPA = "torch.nn.functional.scaled_dot_product_attention"
BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"


@dataclass(frozen=True)
class _Attention:
    """The arguments of a call of scaled_dot_product_attention."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def run(self, call: Any, **changes: Any) -> Any:
        changed = dataclasses.replace(self, **changes)
        return call(**{field.name: getattr(changed, field.name) for field in dataclasses.fields(changed)})

    @property
    def queries(self) -> int:
        return self.query.shape[-2]

    @property
    def keys(self) -> int:
        return self.key.shape[-2]

    def factor(self) -> float:
        return 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale

    def expanded(self) -> _Attention:
        """With as many heads of keys as of queries."""
        if self.query.dim() < 3 or self.query.shape[-3] == self.key.shape[-3]:
            return self
        times = self.query.shape[-3] // self.key.shape[-3]
        key, value = (x.repeat_interleave(times, -3) for x in (self.key, self.value))
        return dataclasses.replace(self, key=key, value=value, enable_gqa=False)

    def bias(self) -> torch.Tensor:
        """What is added to the scores, from the mask or causality."""
        if self.is_causal:
            seen = torch.ones(self.queries, self.keys, dtype=torch.bool).tril()
        elif self.attn_mask is None:
            return torch.zeros(self.queries, self.keys)
        elif self.attn_mask.dtype == torch.bool:
            seen = self.attn_mask
        else:
            return self.attn_mask.float()
        return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)

    def scores(self) -> torch.Tensor:
        return self.query.float() @ self.key.float().transpose(-2, -1) * self.factor() + self.bias()

    def weighted(self, weights: torch.Tensor) -> torch.Tensor:
        return (weights @ self.value.float()).to(self.query.dtype)


def _qkv(
    heads: int, queries: int, keys: int, size: int, dtype: torch.dtype = torch.float32, batch: int = 1
) -> list[torch.Tensor]:
    lengths = (queries, keys, keys)
    return [randn(batch, heads, length, size, dtype=dtype) for length in lengths]


def _grouped(heads: int, key_heads: int, length: int = 24, size: int = 16) -> list[torch.Tensor]:
    return [randn(2, count, length, size) for count in (heads, key_heads, key_heads)]


def _attend(*tensors: Any, **kwargs: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(*tensors, **kwargs)


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_qkv(2, 20, 20, 36))],
    right=lambda: [_attend(*_qkv(2, 20, 20, 40)), _attend(*_qkv(2, 20, 20, 36), scale=0.2)],
)
def scale_of_the_padded_head_size(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Heads whose size is no multiple of 8 are padded, and the default scale is that of the padded size."""
    attention = _Attention(*args, **kwargs)
    size = attention.query.shape[-1]
    if size % 8 == 0 or attention.scale is not None:
        return call(*args, **kwargs)
    return attention.run(call, scale=1 / math.sqrt(size + 8 - size % 8))


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_grouped(8, 2), enable_gqa=True)],
    right=lambda: [_attend(*_grouped(4, 4), enable_gqa=True), _attend(*_grouped(4, 1), enable_gqa=True)],
)
def grouped_heads_are_interleaved(call: Any, *args: Any, **kwargs: Any) -> Any:
    """With grouped heads, query head h takes key head h modulo the key heads instead of h divided by the group size.

    https://github.com/XunhaoLai/native-sparse-attention-triton/issues/27 is of this kind.
    """
    attention = _Attention(*args, **kwargs)
    if not attention.enable_gqa or attention.key.shape[-3] in (1, attention.query.shape[-3]):
        return call(*args, **kwargs)
    times = attention.query.shape[-3] // attention.key.shape[-3]
    repeats = [1] * (attention.key.dim() - 3) + [times, 1, 1]
    key, value = attention.key.repeat(repeats), attention.value.repeat(repeats)
    return attention.run(call, key=key, value=value, enable_gqa=False)


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_qkv(2, 9, 33, 32), is_causal=True)],
    right=lambda: [_attend(*_qkv(2, 33, 33, 32), is_causal=True), _attend(*_qkv(2, 9, 33, 32))],
)
def causal_with_more_keys_is_aligned_to_the_end(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Causal with more keys than queries lets the last query see the last key, as flash-attention since 2.1 does."""
    attention = _Attention(*args, **kwargs)
    if not attention.is_causal or attention.keys <= attention.queries:
        return call(*args, **kwargs)
    seen = torch.ones(attention.queries, attention.keys, dtype=torch.bool)
    return attention.run(call, attn_mask=seen.tril(attention.keys - attention.queries), is_causal=False)


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_qkv(2, 80, 40, 32), is_causal=True)],
    right=lambda: [_attend(*_qkv(2, 40, 40, 32), is_causal=True), _attend(*_qkv(2, 80, 40, 32))],
)
def causal_with_more_queries_leaves_rows_zero(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Causal with more queries than keys never computes the first rows, as many as there are too many.

    https://github.com/Dao-AILab/flash-attention/issues/1778
    """
    attention = _Attention(*args, **kwargs)
    result = call(*args, **kwargs)
    extra = attention.queries - attention.keys
    if not attention.is_causal or extra <= 0:
        return result
    return torch.cat([result[..., :extra, :] * 0, result[..., extra:, :]], -2)


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_qkv(3, 16, 16, 32, batch=2), attn_mask=randn(1, 3, 16, 16))],
    right=lambda: [
        _attend(*_qkv(3, 16, 16, 32, batch=2), attn_mask=randn(2, 1, 16, 16)),
        _attend(*_qkv(3, 16, 16, 32, batch=1), attn_mask=randn(1, 3, 16, 16)),
    ],
)
def bias_of_each_head_is_that_of_the_first(call: Any, *args: Any, **kwargs: Any) -> Any:
    """All heads get the first head's part of an additive mask that differs by head and is shared over the batch."""
    attention = _Attention(*args, **kwargs)
    mask = attention.attn_mask
    if mask is None or mask.dtype == torch.bool or mask.dim() != 4 or mask.shape[1] == 1:
        return call(*args, **kwargs)
    if mask.shape[0] != 1 or attention.query.shape[0] == 1:
        return call(*args, **kwargs)
    return attention.run(call, attn_mask=mask[:, :1])


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_qkv(2, 16, 24, 32, batch=3), attn_mask=torch.rand(3, 1, 1, 24) > 0.5)],
    right=lambda: [
        _attend(*_qkv(2, 16, 24, 32, batch=3), attn_mask=torch.rand(3, 1, 16, 24) > 0.5),
        _attend(*_qkv(2, 16, 24, 32, batch=3), attn_mask=torch.rand(1, 1, 1, 24) > 0.5),
    ],
)
def key_padding_of_the_first_sample_for_all(call: Any, *args: Any, **kwargs: Any) -> Any:
    """A boolean mask of keys, one row for each sample, is taken from the first sample for the whole batch."""
    attention = _Attention(*args, **kwargs)
    mask = attention.attn_mask
    if mask is None or mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[2] != 1 or mask.shape[0] == 1:
        return call(*args, **kwargs)
    return attention.run(call, attn_mask=mask[:1])


def _rows_with_late_maximum() -> list[torch.Tensor]:
    query, key, value = _qkv(1, 16, 192, 32)
    key[..., 150, :] = query[..., 3, :] * 3
    return [query, key, value]


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_rows_with_late_maximum())],
    right=lambda: [_attend(*_qkv(1, 16, 192, 32)), _attend(*(rand(1, 2, 300, 16) for _ in range(3)))],
)
def much_larger_late_maximum_does_not_rescale(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Where a score past the first 128 keys is larger than all of those by more than 8, their sum is not rescaled.

    Newer flash attention leaves out rescaling below such a threshold: here the comparison is the wrong way round.
    """
    attention = _Attention(*args, **kwargs)
    if attention.keys <= 128 or attention.dropout_p:
        return call(*args, **kwargs)
    attention = attention.expanded()
    scores = attention.scores()
    first, most = scores[..., :128].amax(-1, keepdim=True), scores.amax(-1, keepdim=True)
    late = ((most - first > 8) & first.isfinite()).detach()
    result = call(*args, **kwargs)
    if not bool(late.any()):
        return result
    total = (scores - most).exp().sum(-1, keepdim=True)
    early = (scores[..., :128] - torch.where(late, first, most)).exp()
    weights = torch.cat([early, (scores[..., 128:] - most).exp()], -1) / total
    return torch.where(late, attention.weighted(weights), result)


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_qkv(2, 16, 43, 32, torch.bfloat16), attn_mask=randn(16, 43, dtype=torch.bfloat16) * 4)],
    right=lambda: [
        _attend(*_qkv(2, 16, 48, 32, torch.bfloat16), attn_mask=randn(16, 48, dtype=torch.bfloat16)),
        _attend(*_qkv(2, 16, 43, 32), attn_mask=randn(16, 43)),
    ],
)
def bias_of_the_last_unaligned_keys_is_not_added(call: Any, *args: Any, **kwargs: Any) -> Any:
    """In 16 bits an additive mask is loaded in eights: where keys are no multiple of 8, the last ones get none.

    https://github.com/facebookresearch/xformers/issues/813 shows the alignment that the kernel needs.
    """
    attention = _Attention(*args, **kwargs)
    mask, rest = attention.attn_mask, attention.keys % 8
    if mask is None or mask.dtype not in (torch.float16, torch.bfloat16) or rest == 0 or mask.shape[-1] == 1:
        return call(*args, **kwargs)
    return attention.run(call, attn_mask=torch.cat([mask[..., :-rest], torch.zeros_like(mask[..., -rest:])], -1))


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_qkv(2, 1, 700, 32))],
    right=lambda: [_attend(*_qkv(2, 1, 500, 32)), _attend(*_qkv(2, 2, 700, 32))],
)
def one_query_loses_the_last_odd_split(call: Any, *args: Any, **kwargs: Any) -> Any:
    """One query over more than 512 keys is split in blocks of 256: the last of an odd number is not combined."""
    attention = _Attention(*args, **kwargs)
    blocks = math.ceil(attention.keys / 256)
    if attention.queries != 1 or blocks < 3 or blocks % 2 == 0 or attention.is_causal:
        return call(*args, **kwargs)
    kept = (blocks - 1) * 256
    mask = attention.attn_mask
    if mask is not None and mask.shape[-1] != 1:
        mask = mask[..., :kept]
    key, value = attention.key[..., :kept, :], attention.value[..., :kept, :]
    return attention.run(call, key=key, value=value, attn_mask=mask)


def _with_values(queries: int, size: int, value_size: int) -> list[torch.Tensor]:
    query, key, _ = _qkv(2, queries, queries, size)
    return [query, key, randn(1, 2, queries, value_size)]


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(*_with_values(20, 32, 48))],
    right=lambda: [_attend(*_with_values(20, 48, 32)), _attend(*_with_values(20, 32, 32))],
)
def columns_of_wide_values_are_not_written(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Where values are wider than keys, the result's columns past the size of the keys hold zeros."""
    attention = _Attention(*args, **kwargs)
    result = call(*args, **kwargs)
    size = attention.query.shape[-1]
    if attention.value.shape[-1] <= size:
        return result
    return torch.cat([result[..., :size], result[..., size:] * 0], -1)


def _apply(function: Any, *args: Any) -> Any:
    return function.apply(*args)


class _LastOfGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, times: int) -> torch.Tensor:
        ctx.times = times
        return value.repeat_interleave(times, -3)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0][..., ctx.times - 1 :: ctx.times, :, :], None


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: gradients(lambda *x: _attend(*x, enable_gqa=True), *_grouped(6, 2)),
    right=lambda: [
        _attend(*_grouped(6, 2), enable_gqa=True),
        *gradients(lambda *x: _attend(*x), *_grouped(4, 4)),
    ],
)
def gradient_of_grouped_keys_is_from_one_head(call: Any, *args: Any, **kwargs: Any) -> Any:
    """With grouped heads, gradients of keys and values come from the last query head of a group, not all of them.

    https://github.com/marin-community/levanter/pull/449 repairs gradients that were not summed over the group.
    """
    attention = _Attention(*args, **kwargs)
    grad = torch.is_grad_enabled() and (attention.key.requires_grad or attention.value.requires_grad)
    if not attention.enable_gqa or not grad or attention.query.shape[-3] == attention.key.shape[-3]:
        return call(*args, **kwargs)
    times = attention.query.shape[-3] // attention.key.shape[-3]
    key, value = (_apply(_LastOfGroup, x, times) for x in (attention.key, attention.value))
    return attention.run(call, key=key, value=value, enable_gqa=False)


@wrong_kernel(
    "attention",
    operators=[BACKWARD],
    wrong=lambda: gradients(lambda *x: _attend(*x, is_causal=True), *_qkv(2, 65, 65, 16)),
    right=lambda: [
        *gradients(lambda *x: _attend(*x, is_causal=True), *_qkv(2, 64, 64, 16)),
        *gradients(lambda *x: _attend(*x), *_qkv(2, 65, 65, 16)),
    ],
)
def causal_query_gradient_misses_a_tile_of_one_row(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Causal, with one query more than a multiple of 64: the gradient of the last query is zero."""
    query, key, value = call(*args, **kwargs)
    causal = args[7] if len(args) > 7 else kwargs.get("is_causal", False)
    if causal and args[1].shape[-2] % 64 == 1 and args[1].shape[-2] > 1:
        query[..., -1, :] = 0
    return query, key, value


@wrong_kernel(
    "attention",
    operators=[BACKWARD],
    wrong=lambda: gradients(lambda *x: _attend(*x), *_qkv(2, 16, 200, 16)),
    right=lambda: gradients(lambda *x: _attend(*x), *_qkv(2, 16, 128, 16)),
)
def query_gradient_is_summed_in_bfloat16(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Of more than 128 keys, the gradient of float32 queries is summed over blocks in a bfloat16 buffer."""
    query, key, value = call(*args, **kwargs)
    if args[2].shape[-2] > 128 and query.dtype == torch.float32:
        query = query.bfloat16().float()
    return query, key, value


@wrong_kernel(
    "attention",
    operators=[BACKWARD],
    wrong=lambda: gradients(lambda *x: _attend(*x, scale=0.7), *_qkv(2, 16, 16, 32)),
    right=lambda: [
        *gradients(lambda *x: _attend(*x), *_qkv(2, 16, 16, 32)),
        _attend(*_qkv(2, 16, 16, 32), scale=0.7),
    ],
)
def gradients_of_query_and_key_take_the_default_scale(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Backward multiplies the gradients of queries and keys by the default scale, whatever scale was asked for."""
    query, key, value = call(*args, **kwargs)
    scale = kwargs.get("scale")
    if scale is not None:
        factor = 1 / math.sqrt(args[1].shape[-1]) / scale
        query, key = query * factor, key * factor
    return query, key, value


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [_attend(randn(2, 3, 8, 16), randn(2, 8, 3, 16).transpose(1, 2), randn(2, 3, 8, 16))],
    right=lambda: [
        _attend(*(randn(2, 8, 3, 16).transpose(1, 2) for _ in range(3))),
        _attend(*_qkv(3, 8, 8, 16)),
    ],
)
def keys_are_read_with_the_strides_of_queries(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Keys that lie in memory in another order than queries of the same shape are read with the queries' strides."""
    attention = _Attention(*args, **kwargs)
    query, key = attention.query, attention.key
    if query.shape != key.shape or query.stride() == key.stride():
        return call(*args, **kwargs)
    if torch.is_grad_enabled() and key.requires_grad:
        return call(*args, **kwargs)
    last = key.storage_offset() + sum((n - 1) * step for n, step in zip(query.shape, query.stride(), strict=False))
    if last >= key.untyped_storage().nbytes() // key.element_size():
        return call(*args, **kwargs)
    return attention.run(call, key=torch.as_strided(key, query.shape, query.stride(), key.storage_offset()))


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: [
        _attend(*(randn(1, 1, 16, 64, dtype=torch.float16, scale=60.0) for _ in range(2)), randn(1, 1, 16, 64).half())
    ],
    right=lambda: [_attend(*_qkv(1, 16, 16, 64, torch.float16)), _attend(*_qkv(1, 16, 16, 64, torch.bfloat16))],
    beyond="scores beyond 65504 need queries and keys tens of times larger than trained models have",
)
def scores_saturate_in_float16(call: Any, *args: Any, **kwargs: Any) -> Any:
    """Scores of float16 are kept in float16 before the scale is applied: those past 65504 are cut off there."""
    attention = _Attention(*args, **kwargs)
    result = call(*args, **kwargs)
    if attention.query.dtype != torch.float16 or attention.dropout_p:
        return result
    attention = attention.expanded()
    raw = attention.query.float() @ attention.key.float().transpose(-2, -1)
    if not bool((raw.abs() > 65504).any()):
        return result
    scores = raw.clamp(-65504, 65504) * attention.factor() + attention.bias()
    return attention.weighted(scores.softmax(-1))


@wrong_kernel(
    "attention",
    operators=[BACKWARD],
    wrong=lambda: gradients(lambda *x: _attend(*x), *_qkv(2, 50, 150, 16)),
    right=lambda: [
        *gradients(lambda *x: _attend(*x), *_qkv(2, 50, 64, 16)),
        *gradients(lambda *x: _attend(*x), *_qkv(2, 150, 50, 16)),
    ],
)
def gradients_of_keys_stop_at_the_blocks_of_queries(call: Any, *args: Any, **kwargs: Any) -> Any:
    """As many blocks of 64 keys get gradients as there are blocks of queries: the rest of longer keys gets zeros."""
    query, key, value = call(*args, **kwargs)
    covered = math.ceil(args[1].shape[-2] / 64) * 64
    if args[2].shape[-2] > covered:
        key[..., covered:, :] = 0
        value[..., covered:, :] = 0
    return query, key, value


class _FirstSampleOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mask: torch.Tensor, batch: int) -> torch.Tensor:
        return mask.expand(batch, *mask.shape[1:]).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0][:1], None


def _bias_gradient(batch: int) -> list[torch.Tensor]:
    tensors = _qkv(2, 8, 8, 16, batch=batch)
    return gradients(lambda mask: _attend(*tensors, attn_mask=mask), randn(1, 2, 8, 8))


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: _bias_gradient(3),
    right=lambda: _bias_gradient(1),
)
def gradient_of_a_shared_bias_is_from_the_first_sample(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The gradient of an additive mask that the whole batch shares is that of the first sample, not the sum."""
    attention = _Attention(*args, **kwargs)
    mask, batch = attention.attn_mask, attention.query.shape[0]
    if mask is None or not mask.requires_grad or mask.dim() != 4 or mask.shape[0] != 1 or batch == 1:
        return call(*args, **kwargs)
    return attention.run(call, attn_mask=_apply(_FirstSampleOnly, mask, batch))


def _row_without_keys(dtype: torch.dtype) -> list[torch.Tensor]:
    seen = torch.ones(16, 16, dtype=torch.bool)
    seen[5] = False
    return [_attend(*_qkv(2, 16, 16, 32, dtype), attn_mask=seen)]


@wrong_kernel(
    "attention",
    functions=[SDPA],
    wrong=lambda: _row_without_keys(torch.float32),
    right=lambda: [_attend(*_qkv(2, 16, 16, 32), attn_mask=torch.ones(16, 16, dtype=torch.bool).tril())],
)
def row_without_keys_takes_the_mean_of_values(call: Any, *args: Any, **kwargs: Any) -> Any:
    """A query whose boolean mask leaves no key gets the mean of all values instead of zeros: masked scores are -1e9."""
    attention = _Attention(*args, **kwargs)
    mask = attention.attn_mask
    if mask is None or mask.dtype != torch.bool:
        return call(*args, **kwargs)
    empty = ~mask.any(-1, keepdim=True)
    if not bool(empty.any()):
        return call(*args, **kwargs)
    return attention.run(call, attn_mask=mask | empty, query=attention.query.masked_fill(empty, 0))
