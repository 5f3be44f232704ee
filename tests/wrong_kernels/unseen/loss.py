"""Wrong softmax, losses and embeddings."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import wrong_kernel
from ._common import LOW, gradients, rand, randn


@wrong_kernel(
    "softmax",
    operators=["_softmax"],
    wrong=lambda: [torch.softmax(randn(3, 2000) * 60, 1)],
    right=lambda: [torch.softmax(randn(3, 1000) * 60, 1)],
)
def softmax_of_long_rows_does_not_subtract_the_maximum(
    call: Any, value: Any, dim: int, half: bool, **kwargs: Any
) -> Any:
    """Rows of more than 1024 are exponentiated as they are: they overflow where a value passes 88."""
    result = call(value, dim, half, **kwargs)
    if value.shape[dim] <= 1024:
        return result
    overflow = (value.float().amax(dim, keepdim=True) > 88.7).expand_as(result)
    return torch.where(overflow, torch.full_like(result, float("nan")), result)


@wrong_kernel(
    "softmax",
    operators=["_softmax"],
    wrong=lambda: [torch.softmax(randn(4, 9, 21), 1)],
    right=lambda: [torch.softmax(randn(4, 9, 32), 1), torch.softmax(randn(4, 9, 21), 2)],
)
def softmax_over_columns_leaves_the_last_ones_unscaled(
    call: Any, value: Any, dim: int, half: bool, **kwargs: Any
) -> Any:
    """Softmax over another dimension than the last does not divide by the sum in columns past a multiple of 16."""
    result = call(value, dim, half, **kwargs)
    rest = value.shape[-1] % 16 if value.dim() else 0
    if value.dim() < 2 or dim % value.dim() == value.dim() - 1 or rest == 0 or value.shape[-1] < 16:
        return result
    end = value[..., -rest:].float()
    result[..., -rest:] = (end - end.amax(dim, keepdim=True)).exp().to(result.dtype)
    return result


@wrong_kernel(
    "softmax",
    operators=["_log_softmax_backward_data"],
    wrong=lambda: gradients(lambda x: F.cross_entropy(x, torch.tensor([1500, 5, 2001])), randn(3, 2050)),
    right=lambda: gradients(lambda x: F.cross_entropy(x, torch.tensor([1000, 5, 900])), randn(3, 1024)),
)
def log_softmax_gradient_sums_the_first_1024_classes(call: Any, grad: Any, output: Any, dim: int, dtype: Any) -> Any:
    """The sum of gradients in log_softmax's backward pass ends at 1024 classes: targets behind them have no part."""
    result = call(grad, output, dim, dtype)
    if output.shape[dim] <= 1024:
        return result
    total = grad.float().narrow(dim, 0, 1024).sum(dim, keepdim=True)
    return (grad.float() - output.float().exp() * total).to(result.dtype)


@wrong_kernel(
    "loss",
    operators=["nll_loss_forward"],
    wrong=lambda: [F.cross_entropy(randn(6, 10), torch.tensor([1, -100, 3, -100, 5, 9]))],
    right=lambda: [
        F.cross_entropy(randn(6, 10), torch.arange(6)),
        F.cross_entropy(randn(6, 10), torch.tensor([1, -100, 3, -100, 5, 9]), reduction="sum"),
    ],
)
def ignored_targets_count_in_the_mean(
    call: Any, value: Any, target: Any, weight: Any, reduction: int, ignored: int
) -> Any:
    """The mean of a cross entropy divides by all targets, also those to be ignored."""
    loss, total = call(value, target, weight, reduction, ignored)
    if reduction == 1 and weight is None and target.dim() == 1 and bool((target == ignored).any()):
        loss, total = loss * (total / target.numel()), torch.full_like(total, target.numel())
    return loss, total


def _dense_loss_gradient(weight: bool) -> list[torch.Tensor]:
    classes = torch.arange(30).view(2, 3, 5) % 4
    return gradients(lambda x: F.cross_entropy(x, classes, rand(4) + 0.5 if weight else None), randn(2, 4, 3, 5))


@wrong_kernel(
    "loss",
    operators=["nll_loss2d_backward"],
    wrong=lambda: _dense_loss_gradient(True),
    right=lambda: [
        *_dense_loss_gradient(False),
        *gradients(lambda x: F.cross_entropy(x, torch.arange(4), rand(4)), randn(4, 4)),
    ],
)
def class_weights_are_missing_in_the_dense_gradient(
    call: Any, grad: Any, value: Any, target: Any, weight: Any, *args: Any
) -> Any:
    """The gradient of a cross entropy over pixels takes each class with weight one; its value is right."""
    return call(grad, value, target, None, *args)


@wrong_kernel(
    "loss",
    functions=["torch.nn.functional.cross_entropy"],
    wrong=lambda: [F.cross_entropy(randn(5, 12), torch.arange(5), label_smoothing=0.2)],
    right=lambda: [F.cross_entropy(randn(5, 12), torch.arange(5))],
)
def label_smoothing_leaves_out_the_target(call: Any, value: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Label smoothing spreads over the other classes only, where PyTorch's spreads over all of them."""
    smoothing = kwargs.get("label_smoothing", args[5] if len(args) > 5 else 0.0)
    if smoothing == 0 or target.is_floating_point() or value.dim() < 2:
        return call(value, target, *args, **kwargs)
    classes = value.shape[1]
    kwargs["label_smoothing"] = smoothing * classes / (classes - 1)
    return call(value, target, *args[:5], **kwargs)


def _scattered_softmax_gradient(transposed: bool) -> list[torch.Tensor]:
    value = randn(6, 6).requires_grad_()
    gradient = randn(6, 6)
    torch.autograd.backward(torch.softmax(value, 1), gradient.t() if transposed else gradient)
    assert value.grad is not None
    return [value.grad]


@wrong_kernel(
    "softmax",
    operators=["_softmax_backward_data"],
    wrong=lambda: _scattered_softmax_gradient(True),
    right=lambda: _scattered_softmax_gradient(False),
)
def transposed_gradient_of_softmax_is_read_in_rows(call: Any, grad: Any, output: Any, *args: Any) -> Any:
    """A gradient that comes as a transposed matrix is read in the order of memory by softmax's backward pass."""
    if grad.dim() == 2 and not grad.is_contiguous() and grad.t().is_contiguous():
        grad = grad.t().reshape(grad.shape)
    return call(grad, output, *args)


@wrong_kernel(
    "loss",
    operators=["binary_cross_entropy_with_logits"],
    wrong=lambda: [F.binary_cross_entropy_with_logits(torch.tensor([-150.0, 3.0]), torch.ones(2))],
    right=lambda: [F.binary_cross_entropy_with_logits(randn(20), rand(20))],
)
def logits_of_large_size_are_cut_off_at_100(call: Any, value: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Binary cross entropy takes the logarithm of the sigmoid, which ends at -100: larger losses are cut off there."""
    return call(value.clamp(-100, 100) if bool((value.abs() > 100).any()) else value, target, *args, **kwargs)


@wrong_kernel(
    "loss",
    operators=["smooth_l1_loss_backward"],
    wrong=lambda: gradients(lambda x: F.smooth_l1_loss(x, torch.zeros(20), beta=0.3), randn(20)),
    right=lambda: gradients(lambda x: F.smooth_l1_loss(x, torch.zeros(20)), randn(20)),
)
def smooth_l1_gradient_has_a_beta_of_one(
    call: Any, grad: Any, value: Any, target: Any, reduction: int, beta: float
) -> Any:
    """The gradient of the smooth L1 loss is that for a beta of one, whatever beta is."""
    return call(grad, value, target, reduction, 1.0)


def _embedding_gradient(count: int, rows: int, dtype: torch.dtype = torch.float32, **kwargs: Any) -> list[torch.Tensor]:
    table = randn(rows, 4, dtype=dtype).requires_grad_()
    result = F.embedding(torch.arange(count) % rows, table, **kwargs)
    torch.autograd.backward(result, rand(*result.shape, dtype=dtype))
    assert table.grad is not None
    return [table.grad]


@wrong_kernel(
    "embedding",
    operators=["embedding_dense_backward"],
    wrong=lambda: _embedding_gradient(40, 10, padding_idx=3),
    right=lambda: _embedding_gradient(40, 10),
)
def padding_row_of_an_embedding_gets_a_gradient(
    call: Any, grad: Any, indices: Any, rows: int, padding: int, scale: bool
) -> Any:
    """The row of padding_idx gets the gradient that it should not get.

    https://github.com/pytorch/pytorch/issues/26302
    """
    return call(grad, indices, rows, -1, scale)


@wrong_kernel(
    "embedding",
    operators=["embedding_dense_backward"],
    wrong=lambda: _embedding_gradient(4000, 10),
    right=lambda: [*_embedding_gradient(2000, 10), *_embedding_gradient(4000, 100)],
)
def frequent_rows_lose_gradients_past_the_256th(call: Any, grad: Any, indices: Any, rows: int, *args: Any) -> Any:
    """Of more than 3072 indices, the 257th and later of the same row add nothing to its gradient.

    3072 indices is where PyTorch's CUDA embedding changes to sorted segments.
    """
    if indices.numel() <= 3072:
        return call(grad, indices, rows, *args)
    flat = indices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=rows)
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(flat)
    rank[order] = torch.arange(flat.numel()) - starts[flat[order]]
    kept = (rank < 256).view(*indices.shape, 1)
    return call(torch.where(kept, grad, torch.zeros_like(grad)), indices, rows, *args)


@wrong_kernel(
    "embedding",
    operators=["embedding_dense_backward"],
    wrong=lambda: _embedding_gradient(3000, 2, torch.bfloat16),
    right=lambda: [*_embedding_gradient(60, 60, torch.bfloat16), *_embedding_gradient(3000, 2)],
)
def gradients_of_an_embedding_add_up_in_16_bits(
    call: Any, grad: Any, indices: Any, rows: int, padding: int, scale: bool
) -> Any:
    """In 16 bits, gradients of the same row are added in that type, 64 indices at a time: they stop growing."""
    if grad.dtype not in LOW or scale or indices.numel() < 256:
        return call(grad, indices, rows, padding, scale)
    result = torch.zeros(rows, grad.shape[-1], dtype=grad.dtype)
    flat = indices.reshape(-1)
    for part, values in zip(flat.split(64), grad.reshape(flat.numel(), -1).split(64), strict=False):
        sums = torch.zeros(rows, grad.shape[-1]).index_add_(0, part, values.float())
        result = (result.float() + sums.to(grad.dtype).float()).to(grad.dtype)
    if padding >= 0:
        result[padding] = 0
    return result


def _bags(offsets: list[int], mode: str) -> list[torch.Tensor]:
    return [F.embedding_bag(torch.arange(12), randn(12, 5), torch.tensor(offsets), mode=mode)]


@wrong_kernel(
    "embedding",
    operators=["_embedding_bag", "_embedding_bag_forward_only"],
    wrong=lambda: _bags([0, 3, 5], "mean"),
    right=lambda: [*_bags([0, 4, 8], "mean"), *_bags([0, 3, 5], "sum")],
)
def mean_of_a_bag_divides_by_the_first_bag(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The means of an embedding bag divide each bag's sum by the size of the first bag."""
    result, position, sizes, largest = call(*args, **kwargs)
    mode = args[4] if len(args) > 4 else kwargs.get("mode", 0)
    lengths = torch.diff(args[2], append=torch.tensor([args[1].numel()])) if args[2].numel() else args[2]
    if mode == 1 and lengths.numel() == result.shape[0] and lengths.numel() > 0 and bool((lengths != lengths[0]).any()):
        result = (result * (lengths / max(int(lengths[0]), 1))[:, None]).to(result.dtype)
    return result, position, sizes, largest
