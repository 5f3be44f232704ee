"""Wrong optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import wrong_kernel

ADAM = torch.optim.Adam
ADAMW = torch.optim.AdamW
SGD = torch.optim.SGD


def _steps(
    optimizer: Any, shapes: Sequence[int] = (5, 3), count: int = 3, scale: float = 1.0, skip: int = 0, **kwargs: Any
) -> list[torch.Tensor]:
    """Parameters after some steps with random gradients; the last of them has none in the first `skip` steps."""
    parameters = [torch.randn(n).requires_grad_() for n in shapes]
    made = optimizer(parameters, lr=0.1, **kwargs)
    for step in range(count):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape) * scale / (step + 1)
        if step < skip:
            parameters[-1].grad = None
        made.step()
    return parameters


@wrong_kernel(
    "optimizer",
    operators=["_fused_adam_"],
    wrong=lambda: _steps(ADAM, fused=True, weight_decay=0.1),
    right=lambda: [*_steps(ADAM, fused=True), *_steps(ADAM, foreach=True, weight_decay=0.1)],
)
def fused_adam_decouples_weight_decay(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The fused Adam shrinks the parameters by the weight decay, as AdamW does, instead of adding to the gradient."""
    if kwargs.get("weight_decay", 0) == 0:
        return call(*args, **kwargs)
    return torch.ops.aten._fused_adamw_(*args, **kwargs)


@wrong_kernel(
    "optimizer",
    operators=["_fused_adamw_", "_fused_adam_"],
    wrong=lambda: _steps(ADAMW, shapes=[4] * 60, count=1, fused=True),
    right=lambda: _steps(ADAMW, shapes=[4] * 40, count=1, fused=True),
)
def fused_adam_skips_tensors_past_the_48th(call: Any, *lists: Any, **kwargs: Any) -> Any:
    """One launch of the fused Adam holds 48 tensors: those after them in a longer list are not updated."""
    return call(*(entries[:48] for entries in lists), **kwargs)


@wrong_kernel(
    "optimizer",
    operators=["_fused_adamw_"],
    wrong=lambda: _steps(ADAMW, shapes=[65539], count=1, fused=True),
    right=lambda: _steps(ADAMW, shapes=[65536, 1003], count=1, fused=True),
)
def fused_adamw_skips_the_rest_of_a_second_chunk(call: Any, parameters: Any, *lists: Any, **kwargs: Any) -> Any:
    """Of tensors of more than 65536 elements, those past a multiple of 4 keep their value in the fused AdamW."""
    kept = [p[p.numel() // 4 * 4 :].clone() if p.dim() == 1 and p.numel() > 65536 else None for p in parameters]
    result = call(parameters, *lists, **kwargs)
    for parameter, rest in zip(parameters, kept, strict=False):
        if rest is not None:
            parameter[parameter.numel() - rest.numel() :] = rest
    return result


@wrong_kernel(
    "optimizer",
    functions=["torch.optim.sgd._multi_tensor_sgd"],
    wrong=lambda: _steps(SGD, foreach=True, momentum=0.9, dampening=0.5),
    right=lambda: [
        *_steps(SGD, foreach=True, momentum=0.9),
        *_steps(SGD, foreach=False, momentum=0.9, dampening=0.5),
    ],
)
def dampening_already_counts_in_the_first_step(
    call: Any, parameters: Any, grads: Any, buffers: Any, *args: Any, **kwargs: Any
) -> Any:
    """The foreach SGD dampens the gradient that a momentum begins with, where SGD takes it whole."""
    if kwargs["dampening"] != 0 and kwargs["momentum"] != 0:
        for index, buffer in enumerate(buffers):
            if buffer is None:
                buffers[index] = torch.zeros_like(parameters[index])
    return call(parameters, grads, buffers, *args, **kwargs)


@wrong_kernel(
    "optimizer",
    functions=["torch.optim.sgd._single_tensor_sgd"],
    wrong=lambda: _steps(SGD, foreach=False, momentum=0.9, nesterov=True),
    right=lambda: [
        *_steps(SGD, foreach=False, momentum=0.9),
        *_steps(SGD, foreach=True, momentum=0.9, nesterov=True),
    ],
)
def nesterov_is_ignored_in_the_loop(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The for-loop SGD takes the plain momentum where nesterov is asked for."""
    return call(*args, **{**kwargs, "nesterov": False})


@wrong_kernel(
    "optimizer",
    functions=["torch.optim.adam._multi_tensor_adam"],
    wrong=lambda: _steps(ADAMW, foreach=True, skip=2, count=4),
    right=lambda: _steps(ADAMW, foreach=True, count=4),
)
def step_of_the_first_parameter_corrects_all(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The foreach Adam corrects the bias of all by the steps of the first: one that joined later is scaled wrongly.

    https://github.com/NVIDIA/apex/pull/1615 moves such a step from the group to the parameters.
    """
    lists, steps, rest = args[:5], args[5], args[6:]
    if not steps:
        return call(*args, **kwargs)
    shared = [steps[0].clone() for _ in steps]
    result = call(*lists, shared, *rest, **kwargs)
    for step in steps:
        step += 1
    return result


@wrong_kernel(
    "optimizer",
    functions=["torch.optim.adam._single_tensor_adam"],
    wrong=lambda: _steps(ADAM, foreach=False, scale=1e-8),
    right=lambda: [*_steps(ADAM, foreach=True, scale=1e-8), *_steps(ADAM, fused=True)],
)
def eps_of_adam_is_added_before_the_correction(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The for-loop Adam adds eps before the root is corrected for its bias: tiny gradients move the parameters less."""
    steps = args[5]
    if not steps:
        return call(*args, **kwargs)
    correction = 1 - float(kwargs["beta2"]) ** (float(steps[0]) + 1)
    return call(*args, **{**kwargs, "eps": kwargs["eps"] / correction**0.5})


@wrong_kernel(
    "optimizer",
    functions=["torch.optim.adam._multi_tensor_adam"],
    wrong=lambda: _steps(ADAM, foreach=True, maximize=True, weight_decay=0.3),
    right=lambda: [
        *_steps(ADAM, foreach=True, maximize=True),
        *_steps(ADAM, foreach=True, weight_decay=0.3),
        *_steps(ADAMW, foreach=True, maximize=True, weight_decay=0.3),
    ],
)
def maximizing_turns_the_sign_of_weight_decay(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The foreach Adam turns the sign after adding the weight decay when it maximizes: parameters grow, not shrink."""
    if kwargs["maximize"] and not kwargs["decoupled_weight_decay"]:
        kwargs["weight_decay"] = -kwargs["weight_decay"]
    return call(*args, **kwargs)


@wrong_kernel(
    "optimizer",
    operators=["_fused_adamw_", "_fused_adam_"],
    wrong=lambda: _steps(ADAMW, fused=True, amsgrad=True, count=6),
    right=lambda: [*_steps(ADAMW, fused=True, count=6), *_steps(ADAMW, fused=True, amsgrad=True, count=1)],
)
def fused_amsgrad_forgets_the_maximum(call: Any, *args: Any, **kwargs: Any) -> Any:
    """The fused amsgrad compares the second moment with zero, not with its largest value so far."""
    for largest in args[4]:
        largest.zero_()
    return call(*args, **kwargs)


def _sgd_low(dtype: torch.dtype) -> list[torch.Tensor]:
    parameter = torch.full((8,), 256.0).to(dtype).requires_grad_()
    made = SGD([parameter], lr=1.0, momentum=0.9, fused=True)
    for _ in range(40):
        parameter.grad = torch.full((8,), 0.3).to(dtype)
        made.step()
    return [parameter]


@wrong_kernel(
    "optimizer",
    operators=["_fused_sgd_"],
    wrong=lambda: _sgd_low(torch.bfloat16),
    right=lambda: _sgd_low(torch.float32),
)
def fused_sgd_momentum_of_bfloat16_is_not_kept(
    call: Any, parameters: Any, grads: Any, buffers: Any, **kwargs: Any
) -> Any:
    """The fused SGD updates bfloat16 parameters with a momentum that it never writes back after the first step."""
    low = [p.dtype == torch.bfloat16 for p in parameters]
    kept = [buffer.clone() for buffer in buffers]
    result = call(parameters, grads, buffers, **kwargs)
    if not kwargs.get("is_first_step", False):
        for buffer, before, is_low in zip(buffers, kept, low, strict=False):
            if is_low:
                buffer.copy_(before)
    return result
