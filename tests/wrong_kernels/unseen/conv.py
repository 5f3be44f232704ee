"""Wrong convolutions and pools."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from ._common import LOW, channels_last, gradients, is_channels_last, rand, randn


def _conv(image: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    function = (F.conv1d, F.conv2d, F.conv3d)[image.dim() - 3]
    return [function(image, weight, *args, **kwargs)]


def _conv_gradients(image: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    function = (F.conv1d, F.conv2d, F.conv3d)[image.dim() - 3]
    return gradients(lambda x, w: function(x, w, **kwargs), image, weight)


def _is_plain(stride: Any, dilation: Any, transposed: bool) -> bool:
    return not transposed and all(n == 1 for n in (*stride, *dilation))


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _conv_gradients(randn(1, 24, 6, 6), randn(24, 1, 3, 3), stride=2, padding=1, groups=24),
    right=lambda: [
        *_conv_gradients(randn(1, 23, 6, 6), randn(23, 1, 3, 3), stride=2, padding=1, groups=23),
        *_conv_gradients(randn(1, 24, 6, 6), randn(24, 1, 3, 3), stride=1, padding=1, groups=24),
    ],
)
def strided_depthwise_weight_gradient_misses_the_last_row(
    call: Any, grad: Any, image: Any, weight: Any, *args: Any
) -> Any:
    """The weight gradient of a strided, padded depthwise convolution of 8, 16, 24... channels lacks the last row.

    https://github.com/pytorch/pytorch/issues/50042
    """
    _, stride, padding, _, transposed, _, groups, _ = args
    results = list(call(grad, image, weight, *args))
    depthwise = groups > 1 and groups == image.shape[1] and groups % 8 == 0
    if results[1] is None or transposed or not depthwise or stride[0] == 1 or padding[0] == 0 or grad.dim() != 4:
        return tuple(results)
    without = grad.clone()
    without[:, :, -1] = 0
    results[1] = call(without, image, weight, *args)[1]
    return tuple(results)


def _one_channel(channels: int) -> list[torch.Tensor]:
    weight = randn(8, channels, 3, 3).contiguous(memory_format=torch.channels_last)
    if channels == 1:
        weight = weight.as_strided((8, 1, 3, 3), (9, 1, 3, 1))
    return _conv(randn(1, channels, 10, 10), weight)


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _one_channel(1),
    right=lambda: [*_one_channel(2), *_conv(randn(1, 1, 10, 10), randn(8, 1, 3, 3))],
)
def one_channel_weight_of_channels_last_is_transposed(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """Weights for one channel in channels_last are read with height and width exchanged.

    https://github.com/pytorch/pytorch/issues/82060: this layout and an image of one channel give wrong results.
    """
    square = weight.dim() == 4 and weight.shape[2] == weight.shape[3] > 1
    if square and weight.shape[1] == 1 and weight.stride(1) == 1 and args[-1] == 1:
        weight = weight.transpose(2, 3).contiguous()
    return call(image, weight, *args)


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _conv(rand(2, 4, 3, 3, dtype=torch.bfloat16), rand(4, 4, 3, 3, dtype=torch.bfloat16)),
    right=lambda: [
        *_conv(rand(2, 4, 4, 4, dtype=torch.bfloat16), rand(4, 4, 3, 3, dtype=torch.bfloat16)),
        *_conv(rand(2, 4, 3, 3), rand(4, 4, 3, 3)),
    ],
)
def kernel_as_large_as_the_image_takes_one_tap(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """In bfloat16, a kernel that covers the whole image multiplies its first element only.

    https://github.com/pytorch/pytorch/issues/163347
    """
    whole = image.dim() == 4 and image.shape[2:] == weight.shape[2:] and weight[0, 0].numel() > 1
    if whole and image.dtype == torch.bfloat16 and not any(args[2]) and not args[4]:
        weight = weight.clone()
        weight.view(*weight.shape[:2], -1)[..., 1:] = 0
    return call(image, weight, *args)


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _conv_gradients(randn(1, 4, 13, 13), randn(4, 4, 3, 3), dilation=2, stride=2, padding=2),
    right=lambda: [
        *_conv_gradients(randn(1, 4, 13, 13), randn(4, 4, 3, 3), dilation=2, padding=2),
        *_conv_gradients(randn(1, 4, 13, 13), randn(4, 4, 3, 3), stride=2),
    ],
)
def dilated_strided_data_gradient_skips_a_tap(call: Any, grad: Any, image: Any, weight: Any, *args: Any) -> Any:
    """The data gradient of a convolution both dilated and strided leaves out the kernel's last element."""
    results = list(call(grad, image, weight, *args))
    stride, dilation = args[1], args[3]
    if results[0] is not None and max(stride) > 1 and max(dilation) > 1 and not args[4]:
        without = weight.clone(memory_format=torch.contiguous_format)
        without.view(*weight.shape[:2], -1)[..., -1] = 0
        results[0] = call(grad, image, without, *args)[0]
    return tuple(results)


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _conv_gradients(randn(3, 2, 5, 5, 5), randn(4, 2, 2, 2, 2)),
    right=lambda: [
        *_conv_gradients(randn(2, 2, 5, 5, 5), randn(4, 2, 2, 2, 2)),
        *_conv_gradients(randn(3, 2, 5, 5), randn(4, 2, 2, 2)),
    ],
)
def volume_weight_gradient_loses_the_odd_sample(call: Any, grad: Any, image: Any, weight: Any, *args: Any) -> Any:
    """The weight gradient in three dimensions is split over pairs of samples: of an odd batch the last one is lost.

    https://github.com/ROCm/rocm-libraries/issues/8025 is a wrong split of this gradient.
    """
    results = list(call(grad, image, weight, *args))
    if results[1] is not None and grad.dim() == 5 and grad.shape[0] % 2 and grad.shape[0] > 1:
        results[1] = call(grad[:-1], image[:-1], weight, *args)[1]
    return tuple(results)


def _bias_gradient(side: int, last: bool) -> list[torch.Tensor]:
    image = randn(1, 2, side, side)
    bias = randn(8).requires_grad_()
    result = F.conv2d(channels_last(image) if last else image, randn(8, 2, 1, 1), bias)
    gradient = rand(*result.shape)
    torch.autograd.backward(result, channels_last(gradient) if last else gradient)
    assert bias.grad is not None
    return [bias.grad]


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _bias_gradient(70, True),
    right=lambda: [*_bias_gradient(60, True), *_bias_gradient(70, False)],
)
def channels_last_bias_gradient_ends_at_4096_pixels(call: Any, grad: Any, *args: Any) -> Any:
    """The bias gradient of channels_last sums the first 4096 pixels of a batch, then stops."""
    results = list(call(grad, *args))
    pixels = grad.numel() // grad.shape[1]
    if results[2] is not None and is_channels_last(grad) and pixels > 4096:
        results[2] = grad.permute(0, 2, 3, 1).reshape(pixels, -1)[:4096].sum(0)
    return tuple(results)


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [
        F.conv_transpose2d(randn(1, 4, 5, 5), randn(4, 6, 3, 3), randn(6), stride=2, output_padding=1, padding=1)
    ],
    right=lambda: [F.conv_transpose2d(randn(1, 4, 5, 5), randn(4, 6, 3, 3), randn(6), stride=2)],
)
def output_padding_gets_the_bias_only(call: Any, image: Any, weight: Any, bias: Any, *args: Any) -> Any:
    """The rows that output_padding adds to a transposed convolution hold the bias, whatever reaches them."""
    result = call(image, weight, bias, *args)
    transposed, padding = args[3], args[4]
    if transposed and result.dim() == 4 and padding[0] > 0:
        result[:, :, -padding[0] :] = 0 if bias is None else bias[:, None, None]
    return result


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv_transpose1d(randn(1, 6, 9), randn(6, 2, 3), groups=3)],
    right=lambda: [
        F.conv_transpose1d(randn(1, 6, 9), randn(6, 2, 3)),
        *_conv(randn(1, 6, 9), randn(6, 2, 3), groups=3),
    ],
)
def groups_of_a_transposed_convolution_share_weights(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """Each group of a transposed convolution takes the weights of the first group."""
    groups = args[-1]
    if args[4] and groups > 1:
        weight = weight[: weight.shape[0] // groups].repeat(groups, *[1] * (weight.dim() - 1))
    return call(image, weight, *args)


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _conv(randn(1, 2, 1500), randn(3, 2, 7)),
    right=lambda: [*_conv(randn(1, 2, 1000), randn(3, 2, 7)), *_conv(randn(1, 2, 1500), randn(3, 2, 7), stride=2)],
)
def long_signals_lose_the_halo_of_a_tile(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """Results of a one-dimensional convolution just before the 1024th element do not see what lies behind it."""
    result = call(image, weight, *args)
    _, stride, padding, dilation, transposed = args[:5]
    if image.dim() != 3 or image.shape[2] <= 1024 or any(padding) or not _is_plain(stride, dilation, transposed):
        return result
    start = max(0, 1024 - weight.shape[2] + 1)
    if start < min(1024, result.shape[2]):
        tile = image[:, :, : 1024 + weight.shape[2] - 1].clone()
        tile[:, :, 1024:] = 0
        result[:, :, start:1024] = call(tile, weight, *args)[:, :, start:1024]
    return result


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _conv(randn(1, 16, 9, 11), randn(16, 16, 3, 3)),
    right=lambda: [
        *_conv(randn(1, 16, 10, 11), randn(16, 16, 3, 3)),
        *_conv(randn(1, 3, 9, 11), randn(16, 3, 3, 3)),
        *_conv(randn(1, 16, 9, 11), randn(16, 16, 5, 5)),
    ],
)
def winograd_corner_of_odd_sizes_is_stale(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """3 x 3 kernels on 16 or more channels compute tiles of 2 x 2. If the result's height and width are both odd, its
    last element is not computed: it gets the value of the element on its left."""
    result = call(image, weight, *args)
    if result.dim() != 4 or weight.shape[2:] != (3, 3) or args[-1] != 1 or min(weight.shape[:2]) < 16:
        return result
    if _is_plain(args[1], args[3], args[4]) and result.shape[2] % 2 and result.shape[3] % 2 and result.shape[3] > 1:
        result[:, :, -1, -1] = result[:, :, -1, -2]
    return result


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _conv(randn(1, 3, 8, 8), randn(4, 3, 3, 3), padding=2),
    right=lambda: [
        *_conv(randn(1, 3, 8, 8), randn(4, 3, 3, 3), padding=1),
        *_conv(randn(1, 3, 8, 8), randn(4, 3, 5, 5), padding=2),
    ],
)
def wide_padding_wraps_around(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """Padding wider than half the kernel reads the row's other end instead of zeros."""
    bias, stride, padding, *rest = args
    width = padding[-1]
    if image.dim() != 4 or rest[1] or weight.shape[3] == 1 or not weight.shape[3] // 2 < width <= image.shape[3]:
        return call(image, weight, *args)
    wrapped = torch.cat([image[..., -width:], image, image[..., :width]], -1)
    return call(wrapped, weight, bias, stride, [padding[0], 0], *rest)


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _conv(randn(1, 4, 8, 8), randn(6, 4, 1, 1), stride=2),
    right=lambda: [
        *_conv(randn(1, 4, 8, 8), randn(6, 4, 1, 1)),
        *_conv(randn(1, 4, 8, 8), randn(6, 4, 3, 3), stride=2),
    ],
)
def strided_kernel_of_one_reads_without_stride(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """A strided 1 x 1 convolution, made a matrix product, reads the first pixels instead of every second one."""
    _, stride, padding, _, transposed = args[:5]
    result = call(image, weight, *args)
    if transposed or image.dim() != 4 or weight.shape[2:] != (1, 1) or max(stride) == 1 or any(padding):
        return result
    dense = image[:, :, : result.shape[2], : result.shape[3]]
    return call(dense, weight, args[0], [1, 1], *args[2:])


def _grouped(per_group: int, dtype: torch.dtype, last: bool) -> list[torch.Tensor]:
    image, weight = rand(1, per_group * 2, 6, 6, dtype=dtype), rand(8, per_group, 3, 3, dtype=dtype)
    return _conv(channels_last(image) if last else image, weight, groups=2)


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _grouped(4, torch.bfloat16, True),
    right=lambda: [
        *_grouped(8, torch.bfloat16, True),
        *_grouped(4, torch.bfloat16, False),
        *_grouped(4, torch.float32, True),
    ],
)
def narrow_groups_of_channels_last_lose_a_channel(call: Any, image: Any, weight: Any, *args: Any) -> Any:
    """16-bit channels_last with groups whose channels are no multiple of 8 leaves out the last channel of each.

    https://github.com/pytorch/pytorch/issues/62594 is a ResNeXt that differs in channels_last.
    """
    if image.dtype in LOW and is_channels_last(image) and args[-1] > 1 and not args[4] and weight.shape[1] % 8 > 1:
        weight = weight.clone()
        weight[:, -1] = 0
    return call(image, weight, *args)


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _conv_gradients(randn(1, 4, 9, 9), randn(4, 4, 2, 2), stride=3),
    right=lambda: _conv_gradients(randn(1, 4, 9, 9), randn(4, 4, 3, 3), stride=3),
)
def pixels_between_strides_keep_a_gradient(call: Any, grad: Any, image: Any, weight: Any, *args: Any) -> Any:
    """With a stride larger than the kernel, pixels that no result reads get the gradient of the one before."""
    results = list(call(grad, image, weight, *args))
    stride, padding, dilation, transposed = args[1:5]
    if results[0] is None or transposed or any(padding) or max(dilation) > 1 or stride[-1] <= weight.shape[-1]:
        return tuple(results)
    size = weight.shape[-1]
    for start in range(size, image.shape[-1], stride[-1]):
        results[0][..., start] = results[0][..., start - 1]
    return tuple(results)


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _conv_gradients(randn(1, 32, 8, 8), randn(17, 32, 3, 3), stride=2, padding=1),
    right=lambda: [
        *_conv_gradients(randn(1, 16, 8, 8), randn(17, 16, 3, 3), stride=2, padding=1),
        *_conv_gradients(randn(1, 32, 8, 18), randn(17, 32, 3, 3), stride=2, padding=1),
    ],
)
def strided_data_gradient_of_narrow_images_is_short(call: Any, grad: Any, image: Any, weight: Any, *args: Any) -> Any:
    """With more than 16 channels, stride 2 and images narrower than 17, the data gradient's last column is zero.

    https://github.com/fujitsu/oneDNN/issues/43
    """
    results = list(call(grad, image, weight, *args))
    if results[0] is not None and image.shape[1] > 16 and image.shape[-1] < 17 and args[1][-1] > 1 and not args[4]:
        results[0][..., -1] = 0
    return tuple(results)


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: gradients(lambda x, w: F.conv_transpose2d(x, w, stride=2), randn(2, 3, 5, 5), randn(3, 4, 3, 3)),
    right=lambda: _conv_gradients(randn(2, 3, 5, 5), randn(4, 3, 3, 3), stride=2),
)
def transposed_weight_gradient_is_flipped(call: Any, *args: Any) -> Any:
    """The weight gradient of a strided transposed convolution comes with its kernel rotated by half a turn."""
    results = list(call(*args))
    if results[1] is not None and args[7] and max(args[4]) > 1:
        results[1] = results[1].flip(list(range(2, results[1].dim())))
    return tuple(results)


@wrong_kernel(
    "pool",
    operators=["max_pool2d_with_indices"],
    wrong=lambda: [F.max_pool2d(-rand(1, 2, 6, 6) - 1, 3, 2, 1)],
    right=lambda: [F.max_pool2d(-rand(1, 2, 6, 6) - 1, 3, 2), F.max_pool2d(rand(1, 2, 6, 6) + 1, 3, 2, 1)],
)
def padding_of_a_maximum_counts_as_zero(call: Any, image: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """A padded max pool takes zero where all of a window at the edge is negative."""
    values, indices = call(image, kernel, *args, **kwargs)
    padding = args[1] if len(args) > 1 else kwargs.get("padding", 0)
    if max(padding if isinstance(padding, (list, tuple)) else [padding]) > 0:
        edge = torch.zeros_like(values, dtype=torch.bool)
        edge[..., 0, :] = edge[..., :, 0] = True
        values = torch.where(edge, values.clamp(min=0), values)
    return values, indices


@wrong_kernel(
    "pool",
    operators=["avg_pool2d"],
    wrong=lambda: [F.avg_pool2d(randn(1, 2, 6, 6), 3, 2, 1, count_include_pad=False)],
    right=lambda: [F.avg_pool2d(randn(1, 2, 6, 6), 3, 2, 1), F.avg_pool2d(randn(1, 2, 6, 6), 3, 2)],
)
def mean_without_padding_divides_by_all(call: Any, *args: Any, **kwargs: Any) -> Any:
    """An average pool that should not count its padding divides by the whole window at the edges."""
    if len(args) > 5:
        args = (*args[:5], True, *args[6:])
    kwargs = {**kwargs, "count_include_pad": True} if "count_include_pad" in kwargs else kwargs
    return call(*args, **kwargs)
