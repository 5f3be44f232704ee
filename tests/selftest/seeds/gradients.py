"""Attention with a wrong backward pass, and a cuDNN that is simulated on the CPU."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.attention import (
    attention_backend_probes,
    attention_gradient_cases,
    attention_needle_cases,
)
from envbuild.selftest.probes.probe_catalogue import PROBES as REAL

from .attentions import reduced

Kernel = Callable[..., torch.Tensor]
Wrong = Callable[[Kernel], Kernel]
Change = Callable[[torch.Tensor], torch.Tensor]


def changed(which: int, change: Change, where: Callable[..., bool] = lambda *args, **options: True) -> Wrong:
    """Attention whose gradient of q, k or v (0, 1 or 2) is replaced, for some calls."""

    def wrong(kernel: Kernel) -> Kernel:
        def seeded(*args: torch.Tensor, **options: Any) -> torch.Tensor:
            if args[which].requires_grad and where(*args, **options):
                register: Any = args[which].register_hook
                register(change)
            return kernel(*args, **options)

        return seeded

    return wrong


def neighbour(grad: torch.Tensor) -> torch.Tensor:
    """Replace row 20 by row 19, or by zeros if there are fewer than 21 rows."""
    grad = grad.clone()
    grad[..., 20:21, :] = grad[..., 19:20, :] if grad.shape[-2] > 20 else 0
    return grad


def nan(*where: int) -> Change:
    """Put NaN at this position, in tensors that have the position."""

    def change(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        if all(place < length for place, length in zip(where, grad.shape, strict=False)):
            grad[where] = float("nan")
        return grad

    return change


def narrow(grad: torch.Tensor) -> torch.Tensor:
    """Set all columns after the 64th to zero."""
    return torch.cat((grad[..., :64], 0 * grad[..., 64:]), dim=-1)


def before() -> Change:
    """Return the previous gradient of the same shape and dtype instead."""
    last: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def change(grad: torch.Tensor) -> torch.Tensor:
        found = last.get((grad.shape, grad.dtype), grad)
        last[grad.shape, grad.dtype] = grad
        return found

    return change


def one_of_group(kernel: Kernel) -> Kernel:
    """The gradient of a key comes from the first query head of its group alone."""

    def seeded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, enable_gqa: bool = False, **rest: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        keys = torch.stack([k] + [k.detach()] * (times - 1), dim=2).flatten(1, 2)
        return kernel(q, keys, v.repeat_interleave(times, dim=1), **rest)

    return seeded


def no_plan(kernel: Kernel) -> Kernel:
    """Fail with the message of cuDNN for a call for which cuDNN has no kernel."""

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No valid execution plans built.")

    return seeded


def is_of_64_modulo_128(q: torch.Tensor, *args: Any, attn_mask: Any = None, **options: Any) -> bool:
    return attn_mask is not None and q.shape[-2] % 128 == 64


def is_of_72(q: torch.Tensor, *args: Any, **options: Any) -> bool:
    return q.shape[-1] == 72


def is_one_query(q: torch.Tensor, *args: Any, **options: Any) -> bool:
    return q.shape[-2] == 1


def seeded(backend: str, name: str, wrong: Wrong, torch_: str | None = None, cudnn: int | None = None) -> Probe:
    """Return the attention probe of a backend at level standard, with wrong attention and with fewer needle cases. For
    "cudnn", torch and cuDNN report these versions, and on a CPU the flash kernel replaces cuDNN's."""
    (real,) = (item for item in REAL if item.name == f"attention.{backend}")

    def function(context: Context) -> None:
        modules: list[Any] = [attention_backend_probes, attention_gradient_cases, attention_needle_cases]
        if backend == "cudnn":
            only = attention_backend_probes.only
            for module in modules if context.on_cpu else ():
                module.only = lambda name: only("flash" if name == "cudnn" else name)
            torch.backends.cudnn.version = lambda: cudnn  # type: ignore[assignment]
            torch.__version__ = torch_ or torch.__version__  # type: ignore[assignment]
        modules[2].LONG, modules[2].CASES = attention_needle_cases.LONG_CPU_QUICK, attention_needle_cases.CASES_QUICK
        setattr(F, SDPA, wrong(getattr(F, SDPA)))
        context.job = dataclasses.replace(context.job, level="standard")
        real.function(context)

    return Probe(f"{real.name}:{name}", "quick", "cpu", real.timeout, function)


SDPA = "scaled_dot_product_attention"
NEGATIVE = attention_gradient_cases.PROBLEMS.index("scores -120")
LONG = (attention_gradient_cases.LONG, attention_gradient_cases.LONG_CPU)

PROBES = (
    reduced(seeded("math", "grad_k_row", changed(1, neighbour)), gradients=True),
    reduced(
        seeded("flash", "grad_v_nan", changed(2, nan(0, 0, 7, 9), lambda q, *args, **rest: q.shape[-2] in LONG)),
        gradients=True,
    ),
    reduced(seeded("flash", "stale_gradient", changed(0, before())), gradients=True),
    reduced(seeded("math", "one_of_group", one_of_group), needles=True),
    reduced(seeded("math", "grad_q_narrow", changed(0, narrow, is_of_72)), needles=True),
    reduced(
        seeded("cudnn", "masked", changed(0, nan(NEGATIVE), is_of_64_modulo_128), "2.13.0+cu130", 92000), gradients=True
    ),
    reduced(
        seeded("cudnn", "one_query", changed(1, nan(NEGATIVE), is_one_query), "2.15.0+cu130", 92600), gradients=True
    ),
    reduced(seeded("cudnn", "exploding", changed(1, lambda grad: grad * 1000), "2.5.0+cu124", 90100), gradients=True),
    reduced(seeded("cudnn", "no_plan", no_plan, "2.11.0+cu128", 91900), gradients=True),
    seeded("cudnn", "right", lambda kernel: kernel, "2.13.0+cu130", 92000),
)
