"""Wrong kernels of convolutions, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from .inputs import gradients, is_16_bit, of

LAST = torch.channels_last

Gradients = tuple[Any, Any, Any]


class Forward(NamedTuple):
    """The arguments of the operator convolution."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


class Backward(NamedTuple):
    """The arguments of the operator convolution_backward."""

    grad: torch.Tensor
    x: torch.Tensor
    weight: torch.Tensor
    bias_sizes: list[int] | None
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int
    mask: list[bool]


def _conv2d(**options: Any) -> Callable[..., Any]:
    def convolution(*inputs: Any) -> Any:
        return F.conv2d(*inputs, **options)

    return convolution


def _case(channels: int, outputs: int, size: int, kernel: int, groups: int = 1, batch: int = 2) -> Any:
    return [of(batch, channels, size, size), of(outputs, channels // groups, kernel, kernel)]


def _depthwise(channels: int, size: int = 6) -> Any:
    return _case(channels, channels, size, 3, groups=channels)


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 4 and tensor.is_contiguous(memory_format=LAST) and not tensor.is_contiguous()


def _unused_rows(given: Backward) -> int:
    """How many rows at the end of the padded input no window covers."""
    rows = given.x.shape[2] + 2 * given.padding[0]
    return (rows - given.dilation[0] * (given.weight.shape[2] - 1) - 1) % given.stride[0]


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: gradients(_conv2d(stride=2, padding=1, groups=24), *_depthwise(24)),
    right=lambda: [
        *gradients(_conv2d(stride=2, padding=1, groups=32), *_depthwise(32)),
        *gradients(_conv2d(padding=1, groups=24), *_depthwise(24)),
    ],
)
def last_row_of_a_depthwise_weight_gradient_repeats_the_first(call: Any, *args: Any) -> Gradients:
    """The last kernel row of a depthwise convolution's weight gradient repeats the first, with stride 2, padding and
    channels that are a multiple of 8 but not of 16; after https://github.com/pytorch/pytorch/issues/50042"""
    given = Backward(*args)
    dx, dw, db = call(*given)
    is_depthwise = given.groups > 1 and given.weight.shape[1] == 1
    if dw is not None and is_depthwise and given.groups % 16 == 8 and given.stride[0] == 2 and given.padding[0]:
        dw[:, :, -1] = dw[:, :, 0]
    return dx, dw, db


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv2d(of(2, 8, 5, 5), of(16, 4, 1, 1), groups=2)],
    right=lambda: [F.conv2d(of(2, 8, 5, 5), of(16, 4, 3, 3), groups=2), F.conv2d(of(2, 8, 5, 5), of(16, 8, 1, 1))],
)
def pointwise_groups_read_half_of_their_channels(call: Any, *args: Any) -> torch.Tensor:
    """A grouped 1x1 convolution leaves out the upper half of each group's input channels; after
    https://github.com/pytorch/pytorch/issues/19912"""
    given = Forward(*args)
    weight = given.weight
    if given.groups > 1 and not given.transposed and weight.shape[1] > 1 and max(weight.shape[2:]) == 1:
        weight = weight.clone()
        weight[:, (weight.shape[1] + 1) // 2 :] = 0
    return call(*given._replace(weight=weight))  # type: ignore[no-any-return]


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: gradients(_conv2d(), *_case(4, 4, 5, 1)),
    right=lambda: gradients(_conv2d(), *_case(4, 4, 5, 3)),
)
def pointwise_data_gradient_holds_the_first_channel_only(call: Any, *args: Any) -> Gradients:
    """Of a 1x1 convolution's data gradient only the first channel is written, the others are zero; after
    https://github.com/soumith/cudnn.torch/issues/28"""
    dx, dw, db = call(*args)
    if dx is not None and max(Backward(*args).weight.shape[2:]) == 1:
        dx[:, 1:] = 0
    return dx, dw, db


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: gradients(_conv2d(dilation=2), *_case(4, 4, 9, 3)),
    right=lambda: gradients(_conv2d(), *_case(4, 4, 9, 3)),
)
def dilated_weight_gradient_reads_one_column_off(call: Any, *args: Any) -> Gradients:
    """The weight gradient of a dilated convolution takes its input from one column to the left."""
    given = Backward(*args)
    dx, dw, db = call(*given)
    if dw is not None and max(given.dilation) > 1:
        _, dw, _ = call(*given._replace(x=given.x.roll(1, -1)))
    return dx, dw, db


def _with_bias(batch: int, layout: torch.memory_format) -> list[torch.Tensor]:
    x, weight = _case(4, 4, 6, 3, batch=batch)
    return gradients(_conv2d(), x.to(memory_format=layout), weight.to(memory_format=layout), of(4))


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _with_bias(3, LAST),
    right=lambda: _with_bias(4, LAST) + _with_bias(3, torch.contiguous_format),
)
def bias_gradient_misses_the_last_sample_of_an_odd_batch(call: Any, grad: Any, x: Any, *args: Any) -> Gradients:
    """The bias gradient leaves out the last sample where the batch is odd and the input is channels_last."""
    dx, dw, db = call(grad, x, *args)
    if db is not None and x.shape[0] % 2 and x.shape[0] > 1 and _is_channels_last(x):
        db = db - grad[-1:].sum((0, 2, 3))
    return dx, dw, db


def _half_last(channels: int, dtype: torch.dtype = torch.bfloat16, layout: Any = LAST) -> torch.Tensor:
    x, weight = _case(channels, 8, 6, 3)
    return F.conv2d(x.to(dtype, memory_format=layout), weight.to(dtype, memory_format=layout))


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [_half_last(13)],
    right=lambda: [_half_last(16), _half_last(13, torch.float32), _half_last(13, layout=torch.contiguous_format)],
)
def channels_after_the_last_eight_are_dropped(call: Any, *args: Any) -> torch.Tensor:
    """With 16-bit channels_last inputs, the input channels after the last multiple of 8 do not count, if more than
    8."""
    given = Forward(*args)
    x, kept = given.x, given.x.shape[1] // 8 * 8
    is_plain = given.groups == 1 and not given.transposed
    if is_plain and _is_channels_last(x) and is_16_bit(x) and 0 < kept < x.shape[1]:
        x = x.clone()
        x[:, kept:] = 0
    return call(*given._replace(x=x))  # type: ignore[no-any-return]


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: gradients(_conv2d(stride=2), *_case(4, 4, 8, 3)),
    right=lambda: gradients(_conv2d(stride=2), *_case(4, 4, 9, 3)),
)
def data_gradient_of_rows_no_window_covers_is_stale(call: Any, *args: Any) -> Gradients:
    """Where the stride leaves the last row of the input unused, its gradient repeats the row before instead of
    zeros."""
    given = Backward(*args)
    dx, dw, db = call(*given)
    if dx is None or given.transposed or len(given.stride) != 2:
        return dx, dw, db
    if _unused_rows(given) > given.padding[0]:
        dx[:, :, -1] = dx[:, :, -2]
    return dx, dw, db


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv_transpose2d(of(2, 4, 5, 5), of(4, 3, 3, 3), of(3), stride=2, output_padding=1)],
    right=lambda: [F.conv_transpose2d(of(2, 4, 5, 5), of(4, 3, 3, 3), of(3), stride=2)],
)
def output_padding_of_a_transposed_convolution_holds_zeros(call: Any, *args: Any) -> torch.Tensor:
    """The rows that output_padding adds to a transposed convolution hold zeros."""
    given = Forward(*args)
    result: torch.Tensor = call(*given)
    if given.transposed and given.output_padding[0]:
        result[:, :, -given.output_padding[0] :] = 0
    return result


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv_transpose2d(of(2, 4, 5, 5), of(4, 3, 3, 3), groups=2)],
    right=lambda: [
        F.conv_transpose2d(of(2, 4, 5, 5), of(4, 3, 3, 3)),
        F.conv2d(of(2, 4, 5, 5), of(4, 2, 3, 3), groups=2),
    ],
)
def transposed_groups_use_weights_in_reverse_order(call: Any, *args: Any) -> torch.Tensor:
    """In a transposed convolution with groups, the first group takes the last group's weights and so on."""
    given = Forward(*args)
    if given.transposed and given.groups > 1:
        given = given._replace(weight=torch.cat(given.weight.chunk(given.groups)[::-1]))
    return call(*given)  # type: ignore[no-any-return]


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv1d(of(1, 3, 1100), of(4, 3, 5))],
    right=lambda: [F.conv1d(of(1, 3, 1000), of(4, 3, 5)), F.conv1d(of(1, 3, 1100), of(4, 3, 1))],
)
def long_1d_rows_lose_the_overlap_of_their_tiles(call: Any, *args: Any) -> torch.Tensor:
    """A 1-D convolution works in tiles of 1024 inputs, and the windows that begin in one and end in the next miss what
    the next holds: the last output before each tile counts only its first input."""
    given = Forward(*args)
    weight = given.weight
    result: torch.Tensor = call(*given)
    if weight.ndim != 3 and not (weight.ndim == 4 and weight.shape[2] == 1):
        return result
    if given.transposed or given.groups != 1 or max(given.stride) != 1:
        return result
    if weight.shape[-1] == 1 or result.shape[-1] <= 1024:
        return result
    first = weight.clone()
    first[..., 1:] = 0
    alone = call(*given._replace(weight=first))
    result[..., 1023::1024] = alone[..., 1023::1024]
    return result


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv3d(of(1, 2, 5, 5, 5), of(3, 2, 3, 3, 3), padding=1)],
    right=lambda: [F.conv3d(of(1, 2, 5, 5, 5), of(3, 2, 3, 3, 3)), F.conv2d(of(1, 2, 5, 5), of(3, 2, 3, 3), padding=1)],
)
def padding_in_depth_repeats_the_border(call: Any, *args: Any) -> torch.Tensor:
    """A 3-D convolution pads in depth with the outermost slices instead of zeros."""
    given = Forward(*args)
    depth, *others = given.padding
    if given.weight.ndim == 5 and depth and not given.transposed:
        x = F.pad(given.x, (0, 0, 0, 0, depth, depth), mode="replicate")
        given = given._replace(x=x, padding=[0, *others])
    return call(*given)  # type: ignore[no-any-return]


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: gradients(_conv2d(stride=2, padding=1, groups=40), *(t.bfloat16() for t in _depthwise(40))),
    right=lambda: [
        *gradients(_conv2d(stride=2, padding=1, groups=32), *(t.bfloat16() for t in _depthwise(32))),
        *gradients(_conv2d(stride=2, padding=1, groups=40), *_depthwise(40)),
    ],
)
def data_gradient_of_depthwise_channels_past_32_is_the_block_before(call: Any, *args: Any) -> Gradients:
    """In 16-bit types the data gradient of a strided depthwise convolution repeats, for the channels after the last
    multiple of 32, those of the block before."""
    given = Backward(*args)
    dx, dw, db = call(*given)
    groups, kept = given.groups, given.groups // 32 * 32
    is_strided = given.weight.shape[1] == 1 and max(given.stride) > 1
    if dx is not None and is_strided and is_16_bit(given.weight) and 0 < kept < groups:
        dx[:, kept:] = dx[:, kept - 32 : groups - 32]
    return dx, dw, db


def _wgrad(batch: int, layout: torch.memory_format) -> list[torch.Tensor]:
    x, weight = _case(4, 4, 6, 3, batch=batch)
    return gradients(_conv2d(padding=1), x.to(memory_format=layout), weight.to(memory_format=layout))


@wrong_kernel(
    "conv",
    operators=["convolution_backward"],
    wrong=lambda: _wgrad(5, LAST),
    right=lambda: _wgrad(3, LAST) + _wgrad(6, LAST) + _wgrad(5, torch.contiguous_format),
)
def weight_gradient_counts_a_sample_twice_when_split(
    call: Any, grad: Any, x: Any, weight: Any, *args: Any
) -> Gradients:
    """The channels_last weight gradient is computed by two blocks of samples; where a batch of 5 or more is odd, the
    sample in the middle is in both."""
    dx, dw, db = call(grad, x, weight, *args)
    batch = x.shape[0]
    if dw is not None and batch >= 5 and batch % 2 and _is_channels_last(x):
        middle = slice(batch // 2, batch // 2 + 1)
        dw = dw + call(grad[middle], x[middle], weight, *args)[1]
    return dx, dw, db


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv2d(of(2, 4, 5, 5), of(4, 2, 3, 3), of(4), groups=2)],
    right=lambda: [F.conv2d(of(2, 4, 5, 5), of(4, 2, 3, 3), groups=2), F.conv2d(of(2, 4, 5, 5), of(4, 4, 3, 3), of(4))],
)
def grouped_convolution_takes_the_first_group_bias_for_all(call: Any, *args: Any) -> torch.Tensor:
    """With groups, the output channels of every group get the biases of the first."""
    given = Forward(*args)
    if given.groups > 1 and given.bias is not None:
        first = given.bias[: given.bias.shape[0] // given.groups]
        given = given._replace(bias=first.repeat(given.groups))
    return call(*given)  # type: ignore[no-any-return]


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv2d(of(2, 4, 7, 7), of(4, 4, 3, 3).to(memory_format=LAST))],
    right=lambda: [
        F.conv2d(of(2, 4, 7, 7), of(4, 4, 3, 3)),
        F.conv2d(of(2, 4, 7, 7).to(memory_format=LAST), of(4, 4, 3, 3).to(memory_format=LAST)),
    ],
)
def weights_in_another_layout_than_the_input_are_read_transposed(
    call: Any, x: Any, weight: Any, *args: Any
) -> torch.Tensor:
    """Where the weight is channels_last and the input is not, rows and columns of the kernel are exchanged."""
    if weight.ndim == 4 and x.is_contiguous() and _is_channels_last(weight) and weight.shape[2] == weight.shape[3]:
        weight = weight.transpose(2, 3).contiguous()
    return call(x, weight, *args)  # type: ignore[no-any-return]


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: [F.conv2d(*_case(2, 2, 5, 3, batch=65))],
    right=lambda: [F.conv2d(*_case(2, 2, 5, 3, batch=64)), F.conv2d(*_case(2, 2, 5, 1, batch=65))],
)
def samples_past_the_64th_repeat_the_first(call: Any, x: Any, weight: Any, *args: Any) -> torch.Tensor:
    """A convolution of more than 64 samples, which runs in parts of 64, gives the first samples' results in every
    part."""
    result: torch.Tensor = call(x, weight, *args)
    if result.shape[0] > 64 and max(weight.shape[2:]) > 1:
        for first in range(64, result.shape[0], 64):
            part = result[first : first + 64]
            part.copy_(result[: part.shape[0]])
    return result


def _tall(rows: int, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    return [F.conv2d(of(1, 4, rows, 9, dtype=dtype), of(4, 4, 3, 3, dtype=dtype), padding=1)]


@wrong_kernel(
    "conv",
    operators=["convolution"],
    wrong=lambda: _tall(17, torch.float16),
    right=lambda: [*_tall(16, torch.float16), *_tall(17, torch.float32), *_tall(17, torch.bfloat16)],
)
def last_odd_row_of_winograd_tiles_misses_a_kernel_row(call: Any, *args: Any) -> torch.Tensor:
    """In float16, 3x3 convolutions of stride 1 compute rows in pairs; where the height is odd, the last row leaves out
    the middle kernel row."""
    given = Forward(*args)
    weight = given.weight
    result: torch.Tensor = call(*given)
    if weight.dtype != torch.float16 or list(weight.shape[2:]) != [3, 3]:
        return result
    if max(given.stride) > 1 or given.transposed:
        return result
    if result.shape[2] % 2 and result.shape[2] > 1:
        without = weight.clone()
        without[:, :, 1] = 0
        result[:, :, -1] = call(*given._replace(weight=without))[:, :, -1]
    return result
