"""Float64 reference results of a model's operations, each with its tolerance.

They are computed on the host without the kernels under test. All tensors are float64; shapes are those of the
operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from envbuild.selftest.numerics import tolerances
from envbuild.selftest.numerics.reference_products import patches, product


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of an operation.

    `dtype`: its dtype. `tf32`: whether float32 products may use TF32. `half_sums`: whether a convolution in float16 may
    keep partial sums in float16, as cuDNN does (tolerances.half_sums).
    """

    dtype: torch.dtype
    tf32: bool = False
    half_sums: bool = False


@dataclass(frozen=True)
class Exact:
    """The float64 result and the tolerance of each element; the bound has the result's shape or broadcasts to it."""

    value: torch.Tensor
    bound: torch.Tensor


def matmul(how: Arithmetic, x: torch.Tensor, w: torch.Tensor) -> Exact:
    """(..., k) times (k, n)."""
    flat, shape = x.reshape(-1, x.shape[-1]), (*x.shape[:-1], w.shape[1])
    value, magnitude = product(flat, w), product(flat.abs(), w.abs())
    return Exact(value.reshape(shape), tolerances.gemm(value, magnitude, len(w), how.dtype, how.tf32).reshape(shape))


def linear(how: Arithmetic, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Exact:
    """x w^T + b with w (n, k)."""
    return _biased(how, matmul(how, x, w.t()), b)


def _biased(how: Arithmetic, before: Exact, bias: torch.Tensor) -> Exact:
    """Add a bias. The product may be rounded before the addition, and the sum is rounded again."""
    value = before.value + bias
    rounded = tolerances.rounding(value, how.dtype) + tolerances.gamma(1, tolerances.ACCUMULATOR) * bias.abs()
    return Exact(value, before.bound + rounded)


def convolution(
    how: Arithmetic, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None, stride: int = 1, padding: int = 1
) -> Exact:
    """Convolution of any dimension, x (batch, in, ...) and w (out, in, ...), as one product with gathered patches.

    Winograd and Fourier transforms mix neighbouring elements, so each element's bound uses the largest |A||B|.
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
    """Over the last dimension."""
    centred = x - x.mean(dim=-1, keepdim=True)
    sigma = (centred.square().mean(dim=-1, keepdim=True) + epsilon).sqrt()
    value = centred / sigma * w + b
    magnitude = w.abs() * (x.abs() + x.abs().mean(dim=-1, keepdim=True)) / sigma + b.abs()
    return Exact(
        value, tolerances.rounding(value, how.dtype) + tolerances.norm(magnitude, x.shape[-1], 1, how.dtype, 0)
    )


def rms_norm(how: Arithmetic, x: torch.Tensor, w: torch.Tensor, epsilon: float) -> Exact:
    """Over the last dimension."""
    value = x / (x.square().mean(dim=-1, keepdim=True) + epsilon).sqrt() * w
    return Exact(
        value, tolerances.rounding(value, how.dtype) + tolerances.norm(value.abs(), x.shape[-1], 1, how.dtype, 0)
    )


def softmax(how: Arithmetic, x: torch.Tensor) -> Exact:
    """Over the last dimension."""
    value = probabilities(x)
    return Exact(value, tolerances.rounding(value, how.dtype) + tolerances.softmax(value, x))


def probabilities(x: torch.Tensor) -> torch.Tensor:
    """The softmax over the last dimension."""
    powers = torch.exp(x - x.amax(dim=-1, keepdim=True))
    return powers / powers.sum(dim=-1, keepdim=True)


def attention(how: Arithmetic, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exact:
    """softmax(q k^T / sqrt(d)) v, all (batch, heads, length, d)."""
    shape = (*q.shape[:-1], v.shape[-1])
    heads = zip(*(part.reshape(-1, *part.shape[-2:]) for part in (q, k, v)))
    found = [_one_head(how, *head) for head in heads]
    value, bound = (torch.stack([getattr(one, name) for one in found]).reshape(shape) for name in ("value", "bound"))
    return Exact(value, bound)


def _one_head(how: Arithmetic, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Exact:
    """Attention of one head. The bound allows an implementation that keeps everything in the dtype.

    Such an implementation rounds a logit four times (q, k, their product, its scaling), which changes its exponential
    and the sum of all exponentials, and rounds three more times (u) before the product with v.
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
