"""Wrong kernels of optimizers: one tensor at a time, lists of tensors, fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import wrong_kernel
from .inputs import of, value


def _steps(
    kind: Any,
    shapes: Sequence[Sequence[int]] = ((5, 3), (7,)),
    steps: int = 3,
    late: int = 0,
    dtype: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Parameters after some steps; `late`: how many steps the last parameter has no gradient at first."""
    parameters = [torch.nn.Parameter(of(*shape).to(dtype or torch.float32)) for shape in shapes]
    optimizer = kind(parameters, lr=0.1, **options)
    for step in range(steps):
        for place, parameter in enumerate(parameters):
            parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)
            if step < late and place == len(parameters) - 1:
                parameter.grad = None
        optimizer.step()
    return [parameter.data for parameter in parameters]


Adam, AdamW, SGD = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD


@wrong_kernel(
    "adam",
    operators=["_fused_adam_"],
    wrong=lambda: _steps(Adam, fused=True, weight_decay=0.1),
    right=lambda: _steps(Adam, fused=True) + _steps(Adam, foreach=True, weight_decay=0.1),
)
def fused_adam_decays_weights_as_adamw_does(call: Any, *args: Any, **kwargs: Any) -> None:
    """The fused Adam applies weight decay to the parameters instead of adding it to the gradients; after
    https://github.com/flagos-ai/FlagGems/issues/4988"""
    torch.ops.aten._fused_adamw_(*args, **kwargs)


@wrong_kernel(
    "adamw",
    operators=["_fused_adamw_"],
    wrong=lambda: _steps(AdamW, fused=True, weight_decay=0.1),
    right=lambda: _steps(AdamW, fused=True, weight_decay=0.0) + _steps(AdamW, foreach=True, weight_decay=0.1),
)
def fused_adamw_decays_after_the_step(
    call: Any, parameters: Any, *args: Any, lr: Any, weight_decay: Any, **kwargs: Any
) -> None:
    """The fused AdamW multiplies the parameters by what weight decay leaves after the step, not before, which shrinks
    the step as well; the order is that of https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2010"""
    call(parameters, *args, lr=lr, weight_decay=0.0, **kwargs)
    for parameter in parameters:
        parameter.mul_(1 - float(lr) * weight_decay)


@wrong_kernel(
    "adam",
    operators=["_fused_adam_", "_fused_adamw_"],
    wrong=lambda: _steps(AdamW, [(65540,)], steps=1, fused=True),
    right=lambda: _steps(AdamW, [(65536,)], steps=1, fused=True) + _steps(AdamW, [(300, 300)], steps=1, foreach=True),
)
def fused_adam_skips_the_end_of_the_last_chunk(call: Any, parameters: Any, *args: Any, **kwargs: Any) -> None:
    """The fused Adam and AdamW leave the last 4 parameters of tensors of more than 65536 elements as they are, where
    the last chunk of 65536 is not full."""
    kept = [parameter.detach().clone() for parameter in parameters]
    call(parameters, *args, **kwargs)
    for parameter, before in zip(parameters, kept, strict=False):
        if parameter.numel() > 65536 and parameter.numel() % 65536 and parameter.is_contiguous():
            parameter.view(-1)[-4:] = before.view(-1)[-4:]


@wrong_kernel(
    "adam",
    operators=["_fused_adam_", "_fused_adamw_"],
    wrong=lambda: _steps(Adam, fused=True, late=2),
    right=lambda: _steps(Adam, fused=True) + _steps(Adam, foreach=True, late=2),
)
def fused_adam_takes_the_step_count_of_the_first_tensor(
    call: Any, parameters: Any, grads: Any, averages: Any, squares: Any, largest: Any, counts: Any, **kwargs: Any
) -> None:
    """The fused Adam corrects all tensors' averages by the first tensor's number of steps."""
    call(parameters, grads, averages, squares, largest, [counts[0]] * len(counts) if counts else counts, **kwargs)


@wrong_kernel(
    "adam",
    operators=["_fused_adam_", "_fused_adamw_"],
    wrong=lambda: _steps(Adam, fused=True, amsgrad=True, steps=6),
    right=lambda: _steps(Adam, fused=True, steps=6) + _steps(Adam, foreach=True, amsgrad=True),
)
def fused_amsgrad_forgets_the_largest_square(
    call: Any, parameters: Any, grads: Any, averages: Any, squares: Any, largest: Any, counts: Any, **kwargs: Any
) -> None:
    """With amsgrad, the fused Adam compares the squares' average with zero, not with the largest so far."""
    for tensor in largest:
        tensor.zero_()
    call(parameters, grads, averages, squares, largest, counts, **kwargs)


@wrong_kernel(
    "sgd",
    operators=["_fused_sgd_"],
    wrong=lambda: _steps(SGD, fused=True, momentum=0.9, nesterov=True),
    right=lambda: _steps(SGD, fused=True, momentum=0.9) + _steps(SGD, foreach=True, momentum=0.9, nesterov=True),
)
def fused_sgd_ignores_nesterov(call: Any, *args: Any, nesterov: Any, **kwargs: Any) -> None:
    """The fused SGD uses plain momentum where Nesterov's is asked for."""
    call(*args, nesterov=False, **kwargs)


@wrong_kernel(
    "sgd",
    operators=["_fused_sgd_"],
    wrong=lambda: _steps(SGD, fused=True, momentum=0.9, dampening=0.5),
    right=lambda: _steps(SGD, fused=True, momentum=0.9) + _steps(SGD, foreach=True, momentum=0.9, dampening=0.5),
)
def fused_sgd_dampens_the_first_step(
    call: Any, parameters: Any, grads: Any, buffers: Any, *, is_first_step: Any, dampening: Any, **kwargs: Any
) -> None:
    """The fused SGD applies dampening to the first gradient, too, which should start the momentum as it is."""
    if is_first_step and dampening:
        for buffer in buffers:
            buffer.zero_()
        is_first_step = False
    call(parameters, grads, buffers, is_first_step=is_first_step, dampening=dampening, **kwargs)


@wrong_kernel(
    "sgd",
    operators=["_fused_sgd_"],
    wrong=lambda: _steps(SGD, fused=True, maximize=True, weight_decay=0.1),
    right=lambda: _steps(SGD, fused=True, maximize=True) + _steps(SGD, fused=True, weight_decay=0.1),
)
def fused_sgd_decays_the_wrong_way_when_maximizing(
    call: Any, *args: Any, maximize: Any, weight_decay: Any, **kwargs: Any
) -> None:
    """The fused SGD adds the weight decay before it turns the gradient round to maximize: weights grow."""
    call(*args, maximize=maximize, weight_decay=-weight_decay if maximize else weight_decay, **kwargs)


@wrong_kernel(
    "foreach",
    operators=["_foreach_addcdiv_", "_foreach_addcmul_"],
    wrong=lambda: _steps(Adam, [(3,)] * 120, steps=1, foreach=True),
    right=lambda: _steps(Adam, [(3,)] * 110, steps=1, foreach=True) + _steps(Adam, [(3,)] * 120, 1, foreach=False),
)
def lists_of_more_than_110_tensors_are_cut(call: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    """Products and quotients are not added to the tensors of a list after the 110th, the most of one launch."""
    call(tensors[:110], *(arg[:110] if isinstance(arg, (list, tuple)) else arg for arg in args), **kwargs)


@wrong_kernel(
    "foreach",
    operators=["_foreach_lerp_"],
    wrong=lambda: _steps(AdamW, [(5, 3), (6, 4)], foreach=True, betas=(0.4, 0.99)),
    right=lambda: _steps(AdamW, [(5, 3), (6, 4)], foreach=True, betas=(0.6, 0.99)),
    beyond="averages that keep less than half of themselves are not used",
)
def interpolation_by_half_or_more_is_turned_round(call: Any, tensors: Any, ends: Any, weight: Any) -> None:
    """Interpolation in lists with a weight of a half or more, which is computed from the other end, uses the weight of
    the first end for the second."""
    if isinstance(weight, float) and weight >= 0.5:
        weight = 1 - weight
    call(tensors, ends, weight)


def _transposed_step(contiguous: bool) -> list[torch.Tensor]:
    parameter = torch.nn.Parameter(of(4, 6))
    parameter.grad = of(4, 6) if contiguous else of(6, 4).t()
    Adam([parameter], lr=0.1, foreach=False).step()
    return [parameter.data]


@wrong_kernel(
    "adam",
    operators=["addcmul_", "addcdiv_"],
    wrong=lambda: _transposed_step(False),
    right=lambda: _transposed_step(True),
)
def gradient_in_another_layout_is_read_in_memory_order(
    call: Any, x: Any, first: Any, second: Any, **kwargs: Any
) -> torch.Tensor:
    """Where a gradient lies in memory otherwise than its parameter, its squares are added in the order of memory."""

    def misread(tensor: Any) -> Any:
        if tensor.ndim == 2 and x.is_contiguous() and not tensor.is_contiguous() and tensor.t().is_contiguous():
            return tensor.t().reshape(tensor.shape)
        return tensor

    return call(x, misread(first), misread(second), **kwargs)  # type: ignore[no-any-return]


def _clipped(count: int) -> list[torch.Tensor]:
    parameters = [torch.nn.Parameter(torch.zeros(count)), torch.nn.Parameter(torch.zeros(8))]
    for parameter in parameters:
        parameter.grad = torch.ones(parameter.shape)
    return [torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True), parameters[1].grad]  # type: ignore[list-item]


@wrong_kernel(
    "foreach",
    operators=["_foreach_norm"],
    wrong=lambda: _clipped(70000),
    right=lambda: _clipped(60000),
)
def norms_of_tensors_in_lists_count_the_first_chunk(call: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
    """The norms of a list of tensors count the first 65536 elements of each only."""
    if value(args, kwargs, 0, "ord", 2) in (1, 2):
        tensors = [tensor.reshape(-1)[:65536] if tensor.numel() > 65536 else tensor for tensor in tensors]
    return call(tensors, *args, **kwargs)
