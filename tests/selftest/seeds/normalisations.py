"""Wrong norms."""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.normalization import norm_torch

from .making import Kernel, Wrong, named, seeded, wrong_dtype, wrong_element


def stale_norm(kernel: Kernel) -> Kernel:
    """Return the values of the previous call of the same shape and dtype, with the gradients of this call."""
    last: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        before = last.get((result.shape, result.dtype), result)
        last[result.shape, result.dtype] = result.detach().clone()
        return result + (before - result).detach()

    return seeded


def norm_nan(kernel: Kernel) -> Kernel:
    """One NaN, for one width and dtype only."""

    def seeded(x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = kernel(x, *args, **options)
        if x.shape[-1] == 1023 and x.dtype == torch.bfloat16:
            result = wrong_element(lambda: result, result.dtype, (7, 1022), float("nan"))()
        return result

    return seeded


def norm_own(kernel: Kernel, rounds: bool = False, upcasts: bool = True) -> Kernel:
    """LayerNorm as separate operations. `rounds`: x / sigma is rounded to the input's dtype; `upcasts`: computes in
    float32, otherwise in the input's dtype."""

    def seeded(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        wide, w, b = (values.float() if upcasts else values.to(x.dtype) for values in (x, weight, bias))
        centred = wide - wide.mean(-1, keepdim=True)
        unit = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
        return ((unit.to(x.dtype) if rounds else unit) * w + b).to(x.dtype)

    return seeded


def norm_gradient(kernel: Kernel) -> Kernel:
    """The gradient of the weight lacks one row."""

    def seeded(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        first = torch.arange(len(x), device=x.device)[:, None] == 0
        return torch.where(first, kernel(x, shape, weight.detach(), bias, eps), kernel(x, shape, weight, bias, eps))

    return seeded


def norm_refuses(kernel: Kernel) -> Kernel:
    """Fail for float32, which is supported, with the message of torch and apex for mixed dtypes."""

    def seeded(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype == weight.dtype == torch.float32:
            raise RuntimeError("expected scalar type Float but found Half")
        return kernel(x, shape, weight, bias, eps)

    return seeded


def wrong_norm(name: str, wrong: Wrong) -> Probe:
    """Return the probe norm.torch with a wrong function of torch, and with only the cases of this function: a wrong
    layer_norm cannot change the results of group_norm."""
    probe = seeded("norm.torch", F, name, wrong)

    def function(context: Context) -> None:
        module: Any = norm_torch
        groups = module.norm_case_groups
        module.norm_case_groups = lambda norms: (group for group in groups(norms) if group[0].norm.name == name)
        probe.function(context)

    return dataclasses.replace(probe, function=function)


PROBES = (
    wrong_norm("layer_norm", named("rounded", lambda k: norm_own(k, rounds=True))),
    wrong_norm("layer_norm", named("squares", lambda k: norm_own(k, upcasts=False))),
    wrong_norm("layer_norm", norm_nan),
    wrong_norm("group_norm", wrong_dtype),
    wrong_norm("layer_norm", stale_norm),
    wrong_norm("layer_norm", norm_gradient),
    wrong_norm("layer_norm", norm_refuses),
    wrong_norm("layer_norm", named("right", norm_own)),
)
