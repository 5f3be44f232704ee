"""Wrong kernels of normalisations, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from .inputs import gradients, is_16_bit, of

Three = tuple[Any, Any, Any]


def _layer(width: int, eps: float = 1e-5) -> Callable[..., Any]:
    return lambda x, weight=None, bias=None: F.layer_norm(x, (width,), weight, bias, eps)


def _layer_inputs(*shape: int) -> list[torch.Tensor]:
    return [of(*shape), of(shape[-1]), of(shape[-1])]


def _replaced_output(results: Three, x: Any, weight: Any, bias: Any, normalised: Any) -> Three:
    """A layer norm's results with other normalised values."""
    if weight is not None:
        normalised = normalised * weight.float()
    if bias is not None:
        normalised = normalised + bias.float()
    return normalised.to(x.dtype), results[1], results[2]


@wrong_kernel(
    "norms",
    operators=["native_layer_norm"],
    wrong=lambda: [F.layer_norm(of(4, 256) + 1000, (256,))],
    right=lambda: [F.layer_norm(of(4, 64) + 1000, (64,))],
)
def variance_is_the_difference_of_large_squares(
    call: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: Any
) -> Three:
    """A layer norm of 256 or more takes the variance as the mean of squares less the square of the mean, in float32:
    far from zero little of it is left."""
    results: Three = call(x, shape, weight, bias, eps)
    if x.dtype != torch.float32 or len(shape) != 1 or shape[0] < 256:
        return results
    mean = x.mean(-1, keepdim=True)
    variance = (x.square().mean(-1, keepdim=True) - mean.square()).clamp(min=0)
    return _replaced_output(results, x, weight, bias, (x - mean) * (variance + eps).rsqrt())


@wrong_kernel(
    "norms",
    operators=["native_layer_norm_backward"],
    wrong=lambda: gradients(_layer(8), *_layer_inputs(3, 5, 8)),
    right=lambda: gradients(_layer(8), *_layer_inputs(15, 8)),
)
def weight_gradient_of_three_dimensions_takes_one_sample(
    call: Any, grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, *args: Any
) -> Three:
    """The gradients of a layer norm's weight and bias count only the last sample where the input has three dimensions
    or more; after https://github.com/flagos-ai/FlagGems/issues/5392"""
    dx, dw, db = call(grad, x, shape, mean, rstd, *args)
    if x.ndim - len(shape) >= 2 and x.shape[0] > 1:
        _, dw, db = call(grad[-1:], x[-1:], shape, mean[-1:], rstd[-1:], *args)
    return dx, dw, db


@wrong_kernel(
    "norms",
    operators=["native_layer_norm_backward"],
    wrong=lambda: gradients(_layer(8), of(5, 8)),
    right=lambda: gradients(_layer(8), *_layer_inputs(5, 8)),
)
def data_gradient_without_weight_keeps_its_mean(
    call: Any, grad: Any, x: Any, shape: Any, mean: Any, rstd: Any, weight: Any, *args: Any
) -> Three:
    """The data gradient of a layer norm without a weight does not have its mean subtracted."""
    dx, dw, db = call(grad, x, shape, mean, rstd, weight, *args)
    if weight is None and dx is not None:
        inner = tuple(range(x.ndim - len(shape), x.ndim))
        dx = dx + (grad.float().mean(inner, keepdim=True) * rstd).to(dx.dtype)
    return dx, dw, db


@wrong_kernel(
    "norms",
    operators=["native_layer_norm_backward"],
    wrong=lambda: gradients(_layer(515), *_layer_inputs(4, 515)),
    right=lambda: gradients(_layer(516), *_layer_inputs(4, 516)) + gradients(_layer(67), *_layer_inputs(4, 67)),
)
def weight_gradient_of_odd_widths_misses_the_end(call: Any, *args: Any) -> Three:
    """In a layer norm wider than 512 that is not a multiple of 4, the weight's gradient is zero after the last
    multiple."""
    dx, dw, db = call(*args)
    if dw is not None and dw.shape[-1] > 512 and dw.shape[-1] % 4:
        dw[..., dw.shape[-1] // 4 * 4 :] = 0
    return dx, dw, db


def _group_inputs(batch: int) -> list[torch.Tensor]:
    return [of(batch, 4, 3), of(4), of(4)]


@wrong_kernel(
    "norms",
    operators=["native_group_norm_backward"],
    wrong=lambda: gradients(lambda x, w, b: F.group_norm(x, 2, w, b), *_group_inputs(130)),
    right=lambda: gradients(lambda x, w, b: F.group_norm(x, 2, w, b), *_group_inputs(128)),
)
def weight_gradient_sums_two_channels_of_large_batches(call: Any, *args: Any) -> Three:
    """In a group norm of more than 128 samples, the gradients of weight and bias sum each pair of channels, as on wider
    wavefronts in https://github.com/pytorch/pytorch/pull/178872"""
    dx, dw, db = call(*args)
    if args[0].shape[0] > 128 and dw is not None and dw.shape[0] % 2 == 0:
        dw, db = (None if part is None else part + part.view(-1, 2).flip(1).reshape(-1) for part in (dw, db))
    return dx, dw, db


@wrong_kernel(
    "norms",
    operators=["native_group_norm"],
    wrong=lambda: [F.group_norm(of(2, 8, 3, 3).to(memory_format=torch.channels_last), 2)],
    right=lambda: [
        F.group_norm(of(2, 8, 3, 3), 2),
        F.group_norm(of(2, 8, 3, 3).to(memory_format=torch.channels_last), 1),
    ],
)
def channels_last_groups_are_interleaved(
    call: Any, x: Any, weight: Any, bias: Any, batch: Any, channels: Any, pixels: Any, groups: Any, eps: Any
) -> Three:
    """A group norm of channels_last inputs puts channels into groups in turns instead of blocks."""
    results: Three = call(x, weight, bias, batch, channels, pixels, groups, eps)
    if x.ndim != 4 or x.is_contiguous() or not x.is_contiguous(memory_format=torch.channels_last):
        return results
    if groups == 1 or groups == channels:
        return results
    order = torch.arange(channels, device=x.device).view(-1, groups).t().reshape(-1)
    mixed = call(x[:, order].contiguous(), None, None, batch, channels, pixels, groups, eps)
    out = torch.empty_like(x)
    out[:, order] = mixed[0]
    if weight is not None:
        out = out * weight.view(-1, 1, 1)
    if bias is not None:
        out = out + bias.view(-1, 1, 1)
    return out.to(x.dtype), mixed[1], mixed[2]


def _running(samples: int, training: bool) -> list[torch.Tensor]:
    mean, variance = torch.zeros(4), torch.ones(4)
    return [F.batch_norm(of(samples, 4), mean, variance, training=training), mean, variance]


@wrong_kernel(
    "norms",
    operators=["native_batch_norm"],
    wrong=lambda: _running(8, True),
    right=lambda: _running(8, False),
)
def running_variance_is_the_biased_one(
    call: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: Any, momentum: Any, eps: Any
) -> Three:
    """A batch norm's running variance takes the batch's divided by n, not by n - 1."""
    before = None if variance is None else variance.clone()
    results: Three = call(x, weight, bias, mean, variance, training, momentum, eps)
    count = x.numel() // x.shape[1]
    if training and before is not None and count > 1:
        kept = (1 - momentum) * before
        variance.copy_(kept + (variance - kept) * ((count - 1) / count))
    return results


@wrong_kernel(
    "norms",
    operators=["native_batch_norm_backward"],
    wrong=lambda: gradients(lambda x: F.batch_norm(x, torch.zeros(4), torch.full((4,), 4.0)), of(8, 4)),
    right=lambda: gradients(lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True), of(8, 4)),
)
def data_gradient_in_evaluation_ignores_the_running_variance(
    call: Any,
    grad: Any,
    x: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    save_mean: Any,
    save_invstd: Any,
    train: Any,
    *args: Any,
) -> Three:
    """The data gradient of a batch norm in evaluation is computed as if the running variance were one."""
    if not train and variance is not None:
        variance = torch.ones_like(variance)
    return call(  # type: ignore[no-any-return]
        grad, x, weight, mean, variance, save_mean, save_invstd, train, *args
    )


@wrong_kernel(
    "norms",
    operators=["native_layer_norm"],
    wrong=lambda: [F.layer_norm((of(4, 64) + 40).half(), (64,))],
    right=lambda: [F.layer_norm(of(4, 64) + 40, (64,)), F.layer_norm((of(4, 64) + 40).bfloat16(), (64,))],
)
def mean_of_float16_is_rounded_to_float16(call: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> Three:
    """A layer norm of float16 rounds the squares' mean and the mean to float16 before it takes the variance."""
    results: Three = call(x, shape, weight, bias, eps)
    if x.dtype != torch.float16:
        return results
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.float()
    mean = wide.mean(inner, keepdim=True).half().float()
    square = wide.square().mean(inner, keepdim=True).half().float()
    return _replaced_output(
        results, x, weight, bias, (wide - mean) * ((square - mean.square()).clamp(min=0) + eps).rsqrt()
    )


@wrong_kernel(
    "norms",
    functions=["torch.nn.functional.rms_norm"],
    wrong=lambda: [F.rms_norm(of(4, 32) / 100, (32,))],
    right=lambda: [F.rms_norm(of(4, 32), (32,), eps=1e-6)],
)
def default_eps_of_rms_norm_is_that_of_layer_norm(
    call: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    """Without an eps, rms_norm takes 1e-5 instead of the type's rounding unit."""
    return call(x, normalized_shape, weight, 1e-5 if eps is None else eps)


@wrong_kernel(
    "norms",
    functions=["torch.nn.functional.rms_norm"],
    wrong=lambda: [F.rms_norm(of(4, 33).bfloat16(), (33,), of(33).bfloat16())],
    right=lambda: [F.rms_norm(of(4, 40).bfloat16(), (40,)), F.rms_norm(of(4, 33), (33,))],
)
def rms_norm_divides_by_the_padded_width(
    call: Any, x: Any, normalized_shape: Any, weight: Any = None, eps: Any = None
) -> Any:
    """In 16-bit types rms_norm divides the sum of squares by the width rounded up to a multiple of 8."""
    result = call(x, normalized_shape, weight, eps)
    width = normalized_shape[-1]
    if is_16_bit(x) and width % 8:
        result = result * ((width + -width % 8) / width) ** 0.5
    return result


@wrong_kernel(
    "norms",
    operators=["native_layer_norm"],
    wrong=lambda: [F.layer_norm(of(4, 32) / 100, (32,))],
    right=lambda: [F.layer_norm(of(4, 32), (32,), eps=0.0)],
)
def eps_is_added_to_the_deviation(call: Any, x: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> Three:
    """A layer norm adds eps to the standard deviation instead of the variance."""
    results: Three = call(x, shape, weight, bias, eps)
    if eps == 0:
        return results
    inner = tuple(range(x.ndim - len(shape), x.ndim))
    wide = x.float()
    deviation = wide.var(inner, keepdim=True, correction=0).sqrt() + eps
    return _replaced_output(results, x, weight, bias, (wide - wide.mean(inner, keepdim=True)) / deviation)
