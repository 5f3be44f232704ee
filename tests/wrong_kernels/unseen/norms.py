"""Wrong normalizations."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from ._common import LOW, channels_last, gradients, rand, randn


def _layer_norm(
    *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, normalized: int = 1
) -> torch.Tensor:
    return F.layer_norm(randn(*shape, dtype=dtype) + mean, shape[-normalized:])


def _layer_norm_gradients(
    *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, normalized: int = 1
) -> list[torch.Tensor]:
    sizes = shape[-normalized:]
    inputs = [randn(*shape, dtype=dtype) + mean, randn(*sizes, dtype=dtype), randn(*sizes, dtype=dtype)]
    return gradients(lambda x, w, b: F.layer_norm(x, sizes, w, b), *inputs)


@wrong_kernel(
    "norm",
    operators=["native_layer_norm"],
    wrong=lambda: [_layer_norm(4, 512, mean=1000.0)],
    right=lambda: [_layer_norm(4, 256, mean=1000.0)],
)
def wide_layer_norm_subtracts_squares(call: Any, value: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    """Rows of more than 256 take the variance as the mean of squares less the square of the mean, in float32."""
    result, mean, rstd = call(value, shape, weight, bias, eps)
    width = 1
    for size in shape:
        width *= size
    if width <= 256:
        return result, mean, rstd
    rows = value.float().reshape(-1, width)
    first = rows.mean(1, keepdim=True)
    variance = ((rows * rows).mean(1, keepdim=True) - first * first).clamp(min=0)
    scaled = ((rows - first) * (variance + eps).rsqrt()).reshape(value.shape)
    if weight is not None:
        scaled = scaled * weight.float()
    if bias is not None:
        scaled = scaled + bias.float()
    return scaled.to(result.dtype), mean, rstd


@wrong_kernel(
    "norm",
    operators=["native_layer_norm_backward"],
    wrong=lambda: _layer_norm_gradients(70, 24),
    right=lambda: [*_layer_norm_gradients(64, 24), *_layer_norm_gradients(30, 24), *_layer_norm_gradients(70, 100)],
)
def layer_norm_weight_gradient_drops_the_last_block(call: Any, grad: Any, value: Any, shape: Any, *args: Any) -> Any:
    """Gradients of weight and bias of narrow rows are summed in whole blocks of 16 rows: the rest is lost from 64 on.

    https://github.com/BobMcDear/attorch/issues/18
    """
    mean, rstd, weight, bias, mask = args
    results = list(call(grad, value, shape, *args))
    rows, width = mean.numel(), value.numel() // max(mean.numel(), 1)
    if rows < 64 or rows % 16 == 0 or width >= 64:
        return tuple(results)
    kept = rows - rows % 16
    parts = [x.reshape(rows, -1)[:kept] for x in (grad, value, mean, rstd)]
    parts[:2] = [x.reshape(kept, *shape).contiguous() for x in parts[:2]]
    again = call(parts[0], parts[1], shape, parts[2], parts[3], weight, bias, mask)
    return results[0], again[1], again[2]


@wrong_kernel(
    "norm",
    operators=["native_layer_norm_backward"],
    wrong=lambda: _layer_norm_gradients(5, 7, 96),
    right=lambda: [*_layer_norm_gradients(35, 96), *_layer_norm_gradients(5, 1, 96)],
)
def layer_norm_bias_gradient_counts_the_batch_as_rows(call: Any, grad: Any, value: Any, shape: Any, *args: Any) -> Any:
    """The bias gradient of inputs with three or more dimensions sums as many rows as the first dimension has.

    https://github.com/flagos-ai/FlagGems/issues/5392
    """
    results = list(call(grad, value, shape, *args))
    rows = value.shape[0]
    if results[2] is not None and value.dim() - len(shape) >= 2:
        results[2] = grad.reshape(-1, *shape)[:rows].sum(0)
    return tuple(results)


def _group_norm(groups: int, last: bool) -> list[torch.Tensor]:
    image = randn(2, 8, 6, 6)
    return [F.group_norm(channels_last(image) if last else image, groups, randn(8), randn(8))]


@wrong_kernel(
    "norm",
    operators=["native_group_norm"],
    wrong=lambda: _group_norm(4, True),
    right=lambda: [*_group_norm(4, False), *_group_norm(8, True)],
)
def channels_last_group_norm_weighs_by_group(call: Any, value: Any, weight: Any, *args: Any) -> Any:
    """Group norm of channels_last multiplies each channel by the weight of its group's first channel."""
    channels, groups = args[2], args[4]
    if weight is not None and groups < channels and value.dim() == 4 and value.stride(1) == 1 and channels > 1:
        size = channels // groups
        weight = weight.view(groups, size)[:, :1].expand(groups, size).reshape(channels)
    return call(value, weight, *args)


def _running(*shape: int) -> list[torch.Tensor]:
    mean, variance = torch.zeros(shape[1]), torch.ones(shape[1])
    result = F.batch_norm(randn(*shape), mean, variance, training=True, momentum=0.5)
    return [result, mean, variance]


@wrong_kernel(
    "norm",
    operators=["native_batch_norm"],
    wrong=lambda: _running(6, 4),
    right=lambda: _running(6, 4, 5),
)
def running_variance_of_vectors_is_biased(
    call: Any, value: Any, weight: Any, bias: Any, mean: Any, variance: Any, *args: Any
) -> Any:
    """Batch norm of (samples, channels) divides the running variance by the samples, not by one less.

    https://github.com/apache/mxnet/issues/21111 is that difference between cuDNN and others.
    """
    before = None if variance is None else variance.clone()
    result = call(value, weight, bias, mean, variance, *args)
    training, momentum, count = args[0], args[1], value.shape[0]
    if training and variance is not None and before is not None and value.dim() == 2 and count > 1:
        kept = before * (1 - momentum)
        variance.copy_(kept + (variance - kept) * (count - 1) / count)
    return result


def _batch_norm_gradients(training: bool) -> list[torch.Tensor]:
    mean, variance = torch.full((4,), 0.5), torch.full((4,), 2.0)
    return gradients(
        lambda x, w, b: F.batch_norm(x, mean, variance, w, b, training=training), randn(3, 4, 5, 5), randn(4), randn(4)
    )


@wrong_kernel(
    "norm",
    operators=["native_batch_norm_backward"],
    wrong=lambda: _batch_norm_gradients(False),
    right=lambda: _batch_norm_gradients(True),
)
def frozen_batch_norm_goes_backward_as_in_training(call: Any, grad: Any, value: Any, weight: Any, *args: Any) -> Any:
    """Backward of batch norm with frozen statistics differentiates through the batch's own mean and variance."""
    mean, variance, saved_mean, saved_rstd, training, eps, mask = args
    if training:
        return call(grad, value, weight, *args)
    dims = [n for n in range(value.dim()) if n != 1]
    saved_mean = value.float().mean(dims)
    saved_rstd = (value.float().var(dims, unbiased=False) + eps).rsqrt()
    return call(grad, value, weight, mean, variance, saved_mean, saved_rstd, True, eps, mask)


@wrong_kernel(
    "norm",
    functions=["torch.nn.functional.rms_norm"],
    wrong=lambda: [F.rms_norm(randn(4, 32) * 0.01, (32,), randn(32), 1e-5)],
    right=lambda: [F.rms_norm(randn(4, 32), (32,), randn(32))],
)
def rms_norm_adds_eps_outside_the_root(call: Any, value: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
    """RMS norm with an eps given adds it to the root instead of below it: small values are scaled too much."""
    if eps is None:
        return call(value, shape, weight)
    dims = list(range(-len(shape), 0))
    root = value.float().pow(2).mean(dims, keepdim=True).sqrt()
    result = (value.float() / (root + eps)).to(value.dtype)
    return result if weight is None else result * weight


@wrong_kernel(
    "norm",
    operators=["native_layer_norm"],
    wrong=lambda: [_layer_norm(4, 37, dtype=torch.bfloat16)],
    right=lambda: [_layer_norm(4, 64, dtype=torch.bfloat16), _layer_norm(4, 37)],
)
def odd_rows_in_16_bits_leave_their_end_out_of_the_mean(
    call: Any, value: Any, shape: Any, weight: Any, bias: Any, eps: float
) -> Any:
    """Layer norm in 16 bits computes mean and variance without the elements past the last whole vector of 16."""
    result, mean, rstd = call(value, shape, weight, bias, eps)
    width = shape[-1]
    if len(shape) > 1 or value.dtype not in LOW or width % 16 == 0 or width < 16:
        return result, mean, rstd
    seen = value[..., : width - width % 16].float()
    center = seen.mean(-1, keepdim=True)
    scaled = (value.float() - center) * (seen.var(-1, unbiased=False, keepdim=True) + eps).rsqrt()
    if weight is not None:
        scaled = scaled * weight.float()
    if bias is not None:
        scaled = scaled + bias.float()
    return scaled.to(result.dtype), mean, rstd


@wrong_kernel(
    "norm",
    operators=["native_layer_norm_backward"],
    wrong=lambda: _layer_norm_gradients(4, 512, mean=300.3),
    right=lambda: _layer_norm_gradients(4, 100, mean=300.3),
)
def saved_mean_is_kept_in_bfloat16(call: Any, grad: Any, value: Any, shape: Any, mean: Any, *args: Any) -> Any:
    """Rows from 512 on keep their mean in bfloat16 for the backward pass: far from zero the gradients are wrong."""
    if value.numel() // max(mean.numel(), 1) >= 512:
        mean = mean.bfloat16().to(mean.dtype)
    return call(grad, value, shape, mean, *args)


@wrong_kernel(
    "norm",
    operators=["native_layer_norm_backward"],
    wrong=lambda: _layer_norm_gradients(5, 3, 8, normalized=2),
    right=lambda: _layer_norm_gradients(5, 3, 8),
)
def weight_gradient_over_two_dimensions_repeats_one_row(
    call: Any, grad: Any, value: Any, shape: Any, *args: Any
) -> Any:
    """Normalized over two dimensions, the weight gradient's rows all hold the first row.

    https://github.com/pytorch/pytorch/pull/192016 is about a buffer sized by the last dimension only.
    """
    results = list(call(grad, value, shape, *args))
    if results[1] is not None and len(shape) == 2:
        results[1] = results[1][:1].expand(*shape).contiguous()
    return tuple(results)


def _group_norm_gradients(groups: int, side: int) -> list[torch.Tensor]:
    return gradients(lambda x, w, b: F.group_norm(x, groups, w, b), rand(2, 8, side, side), randn(8), randn(8))


@wrong_kernel(
    "norm",
    operators=["native_group_norm_backward"],
    wrong=lambda: _group_norm_gradients(2, 5),
    right=lambda: [*_group_norm_gradients(2, 4), *_group_norm_gradients(8, 5)],
)
def group_norm_data_gradient_divides_by_padded_pixels(call: Any, grad: Any, value: Any, *args: Any) -> Any:
    """Where channels have no multiple of 16 pixels, the mean that group norm's data gradient subtracts is too small."""
    results = list(call(grad, value, *args))
    _mean, rstd, weight, samples, channels, pixels, groups, _ = args
    if results[0] is None or pixels % 16 == 0 or groups == channels:
        return tuple(results)
    count = channels // groups * pixels
    weighted = grad.float() if weight is None else grad.float() * weight.float().view(1, -1, *[1] * (grad.dim() - 2))
    constant = weighted.reshape(samples, groups, count).mean(2) * rstd.float().view(samples, groups)
    missing = constant * (1 - pixels / (pixels + 16 - pixels % 16))
    spread = (
        missing[:, :, None]
        .expand(samples, groups, channels // groups)
        .reshape(samples, channels, *[1] * (grad.dim() - 2))
    )
    results[0] = (results[0].float() + spread).to(results[0].dtype)
    return tuple(results)
