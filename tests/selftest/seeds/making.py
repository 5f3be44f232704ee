"""Replace kernels by wrong ones in a probe's own process, for every family of seeds."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # optimizers import it; imported here, it is not imported again in each probe's process

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.probe_catalogue import PROBES as REAL

Kernel = Callable[..., torch.Tensor]


Wrong = Callable[[Kernel], Kernel]


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def wrong_element(kernel: Kernel, dtype: torch.dtype | None, where: tuple[int, ...], by: float = 1.0) -> Kernel:
    """Return the kernel with `by` added to one element of its result, if the result has this dtype (None: any dtype)
    and contains that element."""

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        fits = result.dim() == len(where) and all(i < n for i, n in zip(where, result.shape, strict=True))
        if fits and dtype in (None, result.dtype):
            offset = torch.zeros_like(result)
            offset[where] = by
            result = result + offset
        return result

    return seeded


def wrong_dtype(kernel: Kernel) -> Kernel:
    """The result is float32, whatever the dtype of the inputs."""
    return lambda *args, **options: kernel(*args, **options).float()


def tf32(kernel: Kernel) -> Kernel:
    """Cut float32 factors to TF32's 10 fraction bits, although the job does not allow TF32."""

    def cut(values: torch.Tensor) -> torch.Tensor:
        whole = values.detach()  # the subtracted value is exact, and has no gradient
        return values - (whole - (whole.view(torch.int32) & ~0x1FFF).view(torch.float32))

    def seeded(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        return kernel(cut(a), cut(b), *rest) if a.dtype == torch.float32 else kernel(a, b, *rest)

    return seeded


def seeded(probe: str, module: Any, name: str, wrong: Wrong, level: str = "quick") -> Probe:
    """Return the probe, named after the seed, with `module.name` replaced by a wrong function. `level`: the level at
    which it runs."""
    (real,) = (item for item in REAL if item.name == probe)

    def function(context: Context) -> None:
        setattr(module, name, wrong(getattr(module, name)))
        context.job = dataclasses.replace(context.job, level=level)
        real.function(context)

    return Probe(
        f"{probe}:{wrong.__name__}", "quick", real.needs, real.timeout, function, real.untouched, alone=real.alone
    )


def named(name: str, wrong: Wrong) -> Wrong:
    def renamed(kernel: Kernel) -> Kernel:
        return wrong(kernel)

    renamed.__name__ = name
    return renamed
