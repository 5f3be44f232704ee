"""Computes float64 reference results of a model's operations, each with its tolerance.

The references are computed on the host, without the kernels under test. All tensors are float64, in the shapes that the
tested operation uses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.numerics.reference_products import patches, product


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that the tested operation may use.

    `dtype`: the dtype of its inputs and output. `tf32`: whether float32 products may use TF32. `half_sums`: whether a
    float16 convolution may keep partial sums in float16, as cuDNN does (tolerances.half_sums).
    """

    dtype: torch.dtype
    tf32: bool = False
    half_sums: bool = False


@dataclass(frozen=True)
class Exact:
    """An exact result: `value` is the float64 result, and `bound` is the tolerance of each element.

    `bound` has the shape of `value` or can be broadcast to it.
    """

    value: torch.Tensor
    bound: torch.Tensor


def matmul(how: Arithmetic, x: torch.Tensor, w: torch.Tensor) -> Exact:
    """Multiply x (..., k) by w (k, n)."""
    flat, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], w.shape[1])
    value, magnitude = product(flat, w), product(flat.abs(), w.abs())
    return Exact(value.reshape(shape), tolerances.gemm(value, magnitude, len(w), how.dtype, how.tf32).reshape(shape))


def linear(how: Arithmetic, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Exact:
    """Compute x w^T + b for w (n, k)."""
    return _biased(how, matmul(how, x, w.t()), b)


def _biased(how: Arithmetic, before: Exact, bias: torch.Tensor) -> Exact:
    """Add a bias to the result `before`. The tolerance allows that the kernel rounds both the product and the sum."""
    value = before.value + bias
    rounded = tolerances.rounding(value, how.dtype) + tolerances.gamma(1, tolerances.ACCUMULATOR) * bias.abs()
    return Exact(value, before.bound + rounded)


def convolution(
    how: Arithmetic, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, stride: int = 1, padding: int = 1
) -> Exact:
    """Convolve x (batch, in, ...) with w (out, in, ...), in any number of dimensions, as one product with patches of x.

    Winograd and Fourier transforms mix neighbouring elements. Therefore the tolerance of each element uses the largest
    element of |A| |B|, where A and B are the factors of the product.
    """
    rank = w.dim() - 2
    gathered, places = patches(x, w.shape[2:], [stride] * rank, [padding] * rank)
    value, magnitude = product(w.flatten(1), gathered), product(w.flatten(1).abs(), gathered.abs()).max()
    value = value.reshape(len(w), len(x), *places).transpose(0, 1)
    if how.half_sums and how.dtype == torch.float16:
        found = Exact(value, tolerances.half_sums(value, magnitude, len(gathered), how.dtype))
    else:
        found = Exact(value, tolerances.gemm(value, magnitude, len(gathered), how.dtype, how.tf32))
    return found if b is None else _biased(how, found, b.reshape(-1, *[1] * rank))


def silu(how: Arithmetic, x: torch.Tensor) -> Exact:
    value = x / (1 + torch.exp(-x))
    return Exact(value, tolerances.rounding(value, how.dtype) + tolerances.activation(x))


def gelu(how: Arithmetic, x: torch.Tensor) -> Exact:
    value = x * torch.special.erfc(-x / math.sqrt(2)) / 2
    return Exact(value, tolerances.rounding(value, how.dtype) + tolerances.activation(x))


def gelu_tanh(how: Arithmetic, x: torch.Tensor) -> Exact:
    value = x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return Exact(value, tolerances.rounding(value, how.dtype) + tolerances.activation(x))


def layer_norm(how: Arithmetic, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, epsilon: float) -> Exact:
    """Compute LayerNorm over the last dimension."""
    centred = x - x.mean(dim=-1, keepdim=True)
    sigma = (centred.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
    value = centred / sigma * w + b
    magnitude = w.abs() * (x.abs() + x.abs().mean(dim=-1, keepdim=True)) / sigma + b.abs()
    return Exact(
        value, tolerances.rounding(value, how.dtype) + tolerances.norm(magnitude, x.shape[-1], 1, how.dtype, 0)
    )


def rms_norm(how: Arithmetic, x: torch.Tensor, w: torch.Tensor, epsilon: float) -> Exact:
    """Compute RMSNorm over the last dimension."""
    value = x / (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt() * w
    return Exact(
        value, tolerances.rounding(value, how.dtype) + tolerances.norm(value.abs(), x.shape[-1], 1, how.dtype, 0)
    )


def softmax(how: Arithmetic, x: torch.Tensor) -> Exact:
    """Compute softmax over the last dimension, with its tolerance."""
    value = probabilities(x)
    return Exact(value, tolerances.rounding(value, how.dtype) + tolerances.softmax(value, x))


def probabilities(x: torch.Tensor) -> torch.Tensor:
    """Return the softmax over the last dimension, without a tolerance."""
    powers = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return powers / powers.sum(dim=-1, keepdim=True)


def attention(how: Arithmetic, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exact:
    """Compute softmax(q k^T / sqrt(d)) v for q, k and v of shape (batch, heads, length, d)."""
    shape = (*q.shape[:-1], v.shape[-1])
    heads = zip(*(part.reshape(-1, *part.shape[-2:]) for part in (q, k, v)))
    found = [_one_head(how, *head) for head in heads]
    value, bound = (torch.stack([getattr(one, name) for one in found]).reshape(shape) for name in ("value", "bound"))
    return Exact(value, bound)


def _one_head(how: Arithmetic, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exact:
    """Compute attention of one head. The tolerance allows an implementation that keeps all intermediate results in the
    dtype.

    Such an implementation rounds four times before it has a logit: q, k, their product, and the scaled product. These
    roundings change the exponential of the logit and the sum of all exponentials. It rounds three more times (u each)
    before the product with v.
    """
    (length, depth), u = k.shape, tolerances.factor_roundoff(how.dtype, how.tf32)
    scale = 1 / math.sqrt(depth)
    weights = probabilities(product(q, k.t()) * scale)
    moved = (4 * u + tolerances.gamma(depth + 2, tolerances.ACCUMULATOR)) * product(q.abs(), k.abs().t()) * scale
    change = torch.exp(moved) * (weights * torch.exp(moved)).sum(dim=-1, keepdim=True) - 1
    change = change + 3 * u + 2 * tolerances.gamma(length + 4, tolerances.ACCUMULATOR)
    value = product(weights, v)
    return Exact(value, tolerances.rounding(value, how.dtype) + product(weights * change, v.abs()))


def mean(how: Arithmetic, x: torch.Tensor, dim: int) -> Exact:
    return _reduced(how, x / x.shape[dim], dim)


def total(how: Arithmetic, x: torch.Tensor, dim: int) -> Exact:
    return _reduced(how, x, dim)


def _reduced(how: Arithmetic, x: torch.Tensor, dim: int) -> Exact:
    value = x.sum(dim=dim)
    return Exact(
        value, tolerances.rounding(value, how.dtype) + tolerances.summation(x.shape[dim]) * x.abs().sum(dim=dim)
    )
