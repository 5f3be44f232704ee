"""scaled_dot_product_attention on the simulated GPU: which kernel is chosen or refused, and what it computes.

The conditions are those of check_* in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp (read at 001f694a).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from . import tensors
from .arithmetic import HALVES, TF32_CAPABILITY, cut_to_tf32
from .tensors import DEVICE, GpuTensor, simulated

BACKENDS = ("math", "flash", "efficient", "cudnn")  # by number, as torch._fused_sdp_choice has them
_FUSED_FROM = (8, 0)
_HOST = F.scaled_dot_product_attention


def enabled() -> Iterator[str]:
    """Return the backends that torch's flags allow, in the order in which torch tries them."""
    flags = torch.backends.cuda
    prefers_cudnn = tensors.here.gpu.capability[0] in (9, 10) and (torch.backends.cudnn.version() or 0) > 91500
    allowed = {
        "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled(),
        "math": flags.math_sdp_enabled(),
        "cudnn": flags.cudnn_sdp_enabled(),
    }
    return (name for name in sorted(allowed, key=lambda name: prefers_cudnn and name != "cudnn") if allowed[name])


def takes(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, causal: bool) -> bool:
    """Whether this backend has a kernel for the shape (batch, heads, length, depth) on the simulated GPU."""
    capability, depth, half = tensors.here.gpu.capability, q.shape[-1], q.dtype in HALVES
    if backend == "math":
        return True
    if q.dim() != 4:
        return False
    if backend == "efficient":
        if (q.dtype == torch.bfloat16 and capability < _FUSED_FROM) or not (half or q.dtype == torch.float32):
            return False
        aligned = 8 if half else 4 if capability >= _FUSED_FROM else 1
        return depth % aligned == v.shape[-1] % aligned == 0
    if capability < _FUSED_FROM or not half or v.shape[-1] != depth:
        return False
    if backend == "cudnn":
        deterministic = torch.are_deterministic_algorithms_enabled()
        wide = capability[0] in (9, 10) and (torch.backends.cudnn.version() or 0) > 92200
        return depth % 8 == 0 and depth <= (256 if wide else 128) and k.shape[-2] != 1 and not deterministic
    trained = any(x.requires_grad for x in (q, k, v))
    narrow = trained and capability in ((8, 6), (8, 9), (12, 0), (12, 1)) and 192 < depth <= 224
    return mask is None and depth <= 256 and not narrow and (not causal or q.shape[-2] == k.shape[-2])


@simulated
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replaces torch.nn.functional's scaled_dot_product_attention, and calls the original function for host tensors.
    Without dropout."""
    q, k, v = query, key, value
    if not any(isinstance(x, GpuTensor) for x in (q, k, v)):
        with tensors.here.clock.stopped():
            return _HOST(q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    assert dropout_p == 0.0
    if torch.is_autocast_enabled("cpu"):
        q, k, v = (x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise RuntimeError(f"Expected query, key, and value to have the same dtype, but got {q.dtype}, {k.dtype}, ...")
    if is_causal and attn_mask is not None:
        raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    backend = next((name for name in enabled() if takes(name, q, k, v, attn_mask, is_causal)), None)
    if backend is None:
        raise RuntimeError("No available kernel. Aborting execution.")
    mask = _masked(q, k, attn_mask, is_causal)
    factor = scale or 1 / math.sqrt(q.shape[-1])
    with torch.autocast("cpu", enabled=False):
        if backend == "math":
            return _math(q, k, v, mask, factor)
        return _Fused.apply(q, k, v, mask, factor)  # type: ignore[no-any-return]


def choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> int:
    """Replaces torch._fused_sdp_choice: the number of the backend that would be called."""
    return BACKENDS.index(next(name for name in enabled() if takes(name, q, k, v, None, False)))


def _masked(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Any:
    """Return the float32 values that are added to the scores on the GPU; None if no values are added."""
    if causal:
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=DEVICE).tril()
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.float()
    return torch.zeros(mask.shape, device=DEVICE).masked_fill(~mask, -math.inf)


def _math(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Compute operation by operation, half types in float32, and give 0 for a query that sees nothing, as torch's math
    path does since 2.5."""
    wide = [x.float() if x.dtype in HALVES else x for x in (q, k, v)]
    scores = (wide[0] * scale) @ wide[1].mT
    if mask is None:
        return (torch.softmax(scores, dim=-1) @ wide[2]).to(q.dtype)
    scores = scores.add_(mask)
    sees_nothing = (mask == -math.inf).all(-1, keepdim=True)
    if not sees_nothing.any():
        return (torch.softmax(scores, dim=-1) @ wide[2]).to(q.dtype)
    weights = torch.softmax(scores.masked_fill(sees_nothing, 0.0), dim=-1).masked_fill(sees_nothing, 0.0)
    return (weights @ wide[2]).to(q.dtype)


class _Fused(torch.autograd.Function):
    """A fused kernel for each direction: scores stay inside in float32, and factors are rounded to the inputs'
    dtype. The result of a query that sees nothing is 0."""

    @staticmethod
    @simulated
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
        dtype, (wq, wk, wv) = q.dtype, (x.held.float() for x in (q, k, v))
        held = None if mask is None else mask.held  # type: ignore[attr-defined]
        scores = _scores(wq, wk, held, scale, dtype)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -math.inf, 0.0)
        powers = torch.exp(scores - top)
        total = powers.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0.0, 1.0)
        out = GpuTensor((_product(powers.to(dtype).float(), wv, dtype) / total).to(dtype))
        ctx.save_for_backward(q, k, v, out, GpuTensor(top + torch.log(total)))
        ctx.mask, ctx.scale = held, scale
        return out

    @staticmethod
    @simulated
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        dtype, (wq, wk, wv, grad) = q.dtype, (x.held.float() for x in (q, k, v, grads[0]))
        weights = torch.exp(_scores(wq, wk, ctx.mask, ctx.scale, dtype) - sums.held)
        slope = _product(grad, wv.mT, dtype)
        row = (grad * out.held.float()).sum(-1, keepdim=True)
        change = weights * (slope - row)
        learned = None
        if ctx.needs_input_grad[3]:
            learned = GpuTensor(change.sum_to_size(ctx.mask.shape))
        change = change.to(dtype).float()
        found = (
            _product(change, wk, dtype) * ctx.scale,
            _product(change.mT, wq, dtype) * ctx.scale,
            _product(weights.to(dtype).float().mT, grad, dtype),
        )
        return (*(GpuTensor(x.to(dtype)) for x in found), learned, None)


def _scores(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, scale: float, dtype: torch.dtype) -> Any:
    scores = _product(q, k.mT, dtype) * scale
    return scores if mask is None else scores + mask


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiply in float32. Inputs in float32 are multiplied by three TF32 products if the GPU has TF32 (CUTLASS' fast
    float32)."""
    if dtype != torch.float32 or tensors.here.gpu.capability < TF32_CAPABILITY:
        return a @ b
    high_a, high_b = cut_to_tf32(a), cut_to_tf32(b)
    low_a, low_b = cut_to_tf32(a - high_a), cut_to_tf32(b - high_b)
    return high_a @ high_b + (high_a @ low_b + low_a @ high_b)
