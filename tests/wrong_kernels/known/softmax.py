"""Wrong kernels of softmax, log_softmax and cross-entropy, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from .inputs import gradients, of, value


def _targets(count: int, classes: int) -> torch.Tensor:
    return torch.arange(count) * 7 % classes


def _peaked(width: int) -> torch.Tensor:
    rows = of(3, width)
    rows[:, -width // 4] += 6
    return rows


@wrong_kernel(
    "softmax",
    operators=["_softmax", "_log_softmax"],
    wrong=lambda: [F.softmax(of(3, 781), -1)],
    right=lambda: [
        F.softmax(of(3, 780), -1),
        F.softmax(of(3, 799), -1),
        F.softmax(of(1, 781), -1),
        F.softmax(of(3, 511), -1),
    ],
)
def odd_rows_between_512_and_1024_count_the_last_warp_twice(call: Any, x: Any, dim: Any, wide: Any) -> torch.Tensor:
    """Rows of an odd width between 512 and 1024, but 31 more than a multiple of 32, count their last value 32-fold, if
    there are two rows or more; after https://github.com/pytorch/pytorch/issues/147284"""
    width = x.shape[dim] if x.ndim else 1
    if not 512 < width < 1024 or width % 2 == 0 or width % 32 == 31 or x.numel() == width or dim % x.ndim != x.ndim - 1:
        return call(x, dim, wide)  # type: ignore[no-any-return]
    padded = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], 31)], -1)
    return call(padded, dim, wide)[..., :width].contiguous()  # type: ignore[no-any-return]


@wrong_kernel(
    "softmax",
    operators=["_softmax"],
    wrong=lambda: [F.softmax(of(3, 5, 8), 1)],
    right=lambda: [F.softmax(of(3, 5, 8), 2), F.softmax(of(3, 5), 0)],
)
def middle_dimension_is_normalised_over_the_last_too(call: Any, x: Any, dim: Any, wide: Any) -> torch.Tensor:
    """A softmax over a middle dimension of three or more subtracts and sums as if the last column held for all."""
    result: torch.Tensor = call(x, dim, wide)
    if x.ndim < 3 or not 0 < dim % x.ndim < x.ndim - 1:
        return result
    shifted = x.float() - x.float().amax(dim, keepdim=True)
    total = shifted.exp().sum(dim, keepdim=True)[..., -1:]
    output: torch.Tensor = shifted.exp() / total
    return output.to(result.dtype)


@wrong_kernel(
    "softmax",
    operators=["_softmax", "_log_softmax"],
    wrong=lambda: [F.softmax(of(3, 8) + 100, -1), F.log_softmax(of(3, 8) - 200, -1)],
    right=lambda: [F.softmax(of(3, 8), -1), F.log_softmax(of(3, 8) * 5, -1)],
)
def maximum_is_not_subtracted_so_large_values_overflow(call: Any, x: Any, dim: Any, wide: Any) -> torch.Tensor:
    """The maximum is not subtracted before the exponential is taken: rows whose sum overflows or vanishes give nan or
    infinite values."""
    result: torch.Tensor = call(x, dim, wide)
    if x.numel() == 0:
        return result
    total = x.float().exp().sum(dim, keepdim=True)
    return torch.where(total.isfinite() & (total > 0), result, torch.nan)


@wrong_kernel(
    "softmax",
    operators=["_softmax_backward_data"],
    wrong=lambda: gradients(lambda x: F.softmax(x, -1), _peaked(2000).half()),
    right=lambda: [
        *gradients(lambda x: F.softmax(x, -1), of(3, 1024).half()),
        *gradients(lambda x: F.softmax(x, -1), of(3, 1030)),
    ],
)
def gradient_of_wide_float16_rows_sums_the_first_1024_only(
    call: Any, grad: Any, output: Any, dim: Any, dtype: Any
) -> torch.Tensor:
    """In float16 the softmax gradient of rows wider than 1024 subtracts the sum over the first 1024 columns only."""
    result: torch.Tensor = call(grad, output, dim, dtype)
    if output.dtype != torch.float16 or not output.ndim or output.shape[dim] <= 1024:
        return result
    rest = (grad.float() * output.float()).narrow(dim, 1024, output.shape[dim] - 1024).sum(dim, keepdim=True)
    whole: torch.Tensor = result.float() + output.float() * rest
    return whole.to(result.dtype)


@wrong_kernel(
    "softmax",
    operators=["_log_softmax_backward_data"],
    wrong=lambda: gradients(lambda x: F.log_softmax(x, 0), of(5, 6)),
    right=lambda: gradients(lambda x: F.log_softmax(x, -1), of(5, 6)),
)
def log_softmax_gradient_of_outer_dimensions_sums_the_last(
    call: Any, grad: Any, output: Any, dim: Any, dtype: Any
) -> torch.Tensor:
    """The gradient of a log_softmax over another dimension than the last sums the gradients over the last."""
    if output.ndim > 1 and dim % output.ndim != output.ndim - 1:
        return (grad - output.exp() * grad.sum(-1, keepdim=True)).to(dtype)  # type: ignore[no-any-return]
    return call(grad, output, dim, dtype)  # type: ignore[no-any-return]


@wrong_kernel(
    "cross-entropy",
    operators=["nll_loss_forward"],
    wrong=lambda: [F.cross_entropy(of(6, 5), torch.tensor([0, 1, -100, 2, -100, 3]))],
    right=lambda: [
        F.cross_entropy(of(6, 5), torch.tensor([0, 1, 4, 2, 4, 3])),
        F.cross_entropy(of(6, 5), torch.tensor([0, 1, -100, 2, -100, 3]), reduction="sum"),
    ],
)
def mean_loss_divides_by_ignored_samples_too(
    call: Any, x: Any, target: Any, weight: Any, reduction: Any, ignored: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the losses is over all samples, those ignored as well."""
    loss, total = call(x, target, weight, reduction, ignored)
    skipped = int((target == ignored).sum())
    if reduction == 1 and weight is None and skipped:
        loss = loss * (1 - skipped / target.numel())
    return loss, total


@wrong_kernel(
    "cross-entropy",
    functions=["torch.nn.functional.cross_entropy"],
    wrong=lambda: [F.cross_entropy(of(6, 5), torch.tensor([0, 1, -100, 2, -100, 3]), label_smoothing=0.2)],
    right=lambda: [
        F.cross_entropy(of(6, 5), _targets(6, 5), label_smoothing=0.2),
        F.cross_entropy(of(6, 5), torch.tensor([0, 1, -100, 2, -100, 3])),
    ],
)
def smoothing_takes_ignored_samples_into_account(call: Any, x: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """With label smoothing, the uniform part of the loss counts ignored samples, too; after
    https://github.com/pytorch/pytorch/issues/73205"""
    smoothing = kwargs.get("label_smoothing", 0.0)
    loss = call(x, target, *args, **kwargs)
    ignored = value(args, kwargs, 2, "ignore_index", -100)
    if not smoothing or target.is_floating_point() or args or kwargs.get("reduction", "mean") != "mean" or x.ndim != 2:
        return loss
    skipped = target == ignored
    if kwargs.get("weight") is not None or not skipped.any() or skipped.all():
        return loss
    uniform = -F.log_softmax(x[skipped], -1).mean(-1).sum()
    return loss + smoothing * uniform / (~skipped).sum()


@wrong_kernel(
    "cross-entropy",
    operators=["nll_loss_backward"],
    wrong=lambda: gradients(
        lambda x, weight: F.cross_entropy(x, _targets(6, 5), weight.detach()), of(6, 5), torch.rand(5) + 0.5
    ),
    right=lambda: [
        *gradients(lambda x: F.cross_entropy(x, _targets(6, 5)), of(6, 5)),
        *gradients(lambda x: F.cross_entropy(x, _targets(6, 5), torch.ones(5) * 2, reduction="sum"), of(6, 5)),
    ],
)
def weighted_mean_gradient_divides_by_the_count(
    call: Any, grad: Any, x: Any, target: Any, weight: Any, reduction: Any, ignored: Any, total: Any
) -> torch.Tensor:
    """With class weights, the gradient of the mean loss is divided by the number of samples, not by their weights'
    sum."""
    if weight is not None and reduction == 1:
        total = (target != ignored).sum().to(total.dtype)
    return call(grad, x, target, weight, reduction, ignored, total)  # type: ignore[no-any-return]


@wrong_kernel(
    "cross-entropy",
    operators=["_log_softmax"],
    wrong=lambda: [F.cross_entropy(of(2, 32003).bfloat16(), _targets(2, 32003))],
    right=lambda: [
        F.cross_entropy(of(2, 32000).bfloat16(), _targets(2, 32000)),
        F.cross_entropy(of(2, 32003), _targets(2, 32003)),
        F.cross_entropy(of(2, 1003).bfloat16(), _targets(2, 1003)),
    ],
)
def wide_bfloat16_vocabularies_are_summed_in_bfloat16(call: Any, x: Any, dim: Any, wide: Any) -> torch.Tensor:
    """A log_softmax of bfloat16 over more than 16384 columns that are not a multiple of 8 adds the exponentials of its
    2048 threads in bfloat16 one after the other."""
    result: torch.Tensor = call(x, dim, wide)
    columns = x.shape[dim] if x.ndim else 1
    if x.dtype != torch.bfloat16 or columns <= 16384 or columns % 8 == 0 or dim % x.ndim != x.ndim - 1:
        return result
    shifted = x.float() - x.float().amax(-1, keepdim=True)
    parts = F.pad(shifted.exp(), (0, -columns % 2048)).reshape(*shifted.shape[:-1], 2048, -1).sum(-1)
    total = torch.zeros_like(parts[..., :1])
    for place in range(2048):
        total = (total + parts[..., place : place + 1]).bfloat16().float()
    output: torch.Tensor = shifted - total.log()
    return output.to(result.dtype)


@wrong_kernel(
    "cross-entropy",
    operators=["nll_loss2d_forward", "nll_loss2d_backward"],
    wrong=lambda: [F.cross_entropy(of(2, 5, 3, 4), _targets(24, 5).reshape(2, 3, 4), reduction="none")],
    right=lambda: [
        F.cross_entropy(of(2, 5, 3, 4), _targets(24, 5).reshape(2, 3, 4)),
        F.cross_entropy(of(6, 5), _targets(6, 5)),
    ],
)
def unreduced_pixel_losses_take_the_first_sample_targets(call: Any, *args: Any) -> Any:
    """Losses for each pixel without a reduction are taken with the first sample's targets for all samples."""
    place = 1 if args[0].ndim == 4 and args[1].ndim == 3 and not args[1].is_floating_point() else 2
    if args[place + 2] == 0:
        args = (*args[:place], args[place][:1].expand(args[place].shape).contiguous(), *args[place + 1 :])
    return call(*args)
