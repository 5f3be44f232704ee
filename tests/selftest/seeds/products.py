"""Matrix products that are wrong, hang, leak memory, or end the process."""

import ctypes
import dataclasses
import os
import time
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe import Probe
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.project_test_spec_reader import ProjectTestSpec, ShapeSpec

from .making import BRAIN, HALF, SINGLE, Kernel, named, seeded, tf32, wrong_element


def half_accumulation(kernel: Kernel, block: int = 16) -> Kernel:
    """Add up float16 products in float16, `block` products at a time, as a tensor core does."""

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.float16:
            return kernel(a, b)
        total = torch.zeros(a.shape[0], b.shape[1], device=a.device)
        for k in range(0, a.shape[1], block):
            total = (total + a[:, k : k + block].float() @ b[k : k + block].float()).half().float()
        return total.half()

    return seeded


def half_by_default(kernel: Kernel) -> Kernel:
    """Add up float16 products in float16 if torch's flag allows this, as it does by default."""
    half = half_accumulation(kernel)
    flags = torch.backends.cuda.matmul
    return lambda a, b: half(a, b) if flags.allow_fp16_reduced_precision_reduction else kernel(a, b)


def unscaled(kernel: Kernel) -> Kernel:
    """A product of scaled factors that forgets the scale."""

    def seeded(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any) -> Any:
        return kernel(a, b, scale_a=torch.ones_like(scale_a), scale_b=scale_b, **options)

    return seeded


def wrong_gradient(kernel: Kernel) -> Kernel:
    """Linear whose weight gradient has one wrong element."""

    def seeded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.requires_grad and weight.shape[0] > 7 and weight.shape[1] > 9:
            register: Any = weight.register_hook
            register(lambda grad: wrong_element(lambda: grad, grad.dtype, (7, 9))())
        return kernel(x, weight, bias)

    return seeded


def divides(kernel: Kernel) -> Kernel:
    """A library that divides by zero before the library calls a kernel."""
    return lambda *args, **options: ctypes.CDLL(os.environ["ENVBUILD_TEST_LIBRARY"]).divide(1, 0)


def segfaults(kernel: Kernel) -> Kernel:
    return lambda *args, **options: ctypes.string_at(0)


def hangs(kernel: Kernel) -> Kernel:
    return lambda *args, **options: time.sleep(600)


def leaks(kernel: Kernel) -> Kernel:
    """Keeps 2 GiB at every call; on a GPU, a third of the GPU's memory."""
    kept: list[torch.Tensor] = []

    def seeded(a: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        size = torch.cuda.mem_get_info()[1] // 3 if a.is_cuda else 2 << 30
        kept.append(torch.empty(size, dtype=torch.uint8, device=a.device))
        return kernel(a, *args, **options)

    return seeded


def refused(kernel: Kernel) -> Kernel:
    """Fail with torch's message for a device without a kernel for the dtype."""

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    return seeded


def own_shape(context: Context) -> None:
    """gemm.crash with a shape from the profile that this torch cannot run."""
    shape = ShapeSpec(2, 3, 4, "float16", "nn", False)
    context.job = dataclasses.replace(context.job, own=ProjectTestSpec(shapes=(shape,)))
    seeded("gemm.crash", torch, "matmul", refused).function(context)


PROBES = (
    seeded("gemm.exact", F, "linear", named("linear", lambda k: wrong_element(k, HALF, (12, 34)))),
    seeded("gemm.exact", torch, "bmm", named("bmm", lambda k: wrong_element(k, BRAIN, (2, 66, 52), -1.0))),
    seeded("gemm.exact", torch, "bmm", named("nan", lambda k: wrong_element(k, SINGLE, (1, 2, 3), float("nan")))),
    seeded("gemm.exact", F, "linear", wrong_gradient),
    seeded("gemm.exact", torch.Tensor, "addcmul_", named("host", lambda k: lambda t, a, b: k(t, a, b).add_(1))),
    seeded("gemm.exact", torch, "bmm", hangs),
    seeded("gemm.exact", torch, "bmm", leaks),
    seeded("gemm.crash", F, "linear", divides),
    seeded("gemm.crash", F, "linear", segfaults),
    seeded("gemm.crash", torch, "matmul", named("matmul", lambda k: wrong_element(k, HALF, (63, 95)))),
    seeded("gemm.crash", F, "linear", named("linear", lambda k: wrong_element(k, BRAIN, (1, 18431)))),
    Probe("gemm.crash:own_shape", "quick", "cpu", 60, own_shape),
    seeded("gemm.accuracy", torch, "mm", half_accumulation),
    seeded("gemm.accuracy", torch, "mm", tf32),
    seeded("gemm.accuracy", torch, "mm", named("inf", lambda k: wrong_element(k, HALF, (5, 6), float("inf")))),
    seeded("gemm.accumulator", torch, "mm", half_accumulation),
    seeded("gemm.accumulator", torch, "mm", named("ones", lambda k: half_accumulation(k, block=1))),
    seeded("gemm.accumulator", torch, "mm", named("element", lambda k: wrong_element(k, HALF, (127, 0), 4.0))),
    seeded("tf32.mode", torch, "mm", tf32),
    seeded("tf32.mode", F, "conv2d", named("conv", tf32)),
    seeded("tf32.mode", torch, "mm", named("lost", lambda k: wrong_element(k, SINGLE, (500, 500), -1.0))),
    seeded("tf32.mode", torch, "mm", named("nan", lambda k: wrong_element(k, SINGLE, (500, 500), float("nan")))),
    seeded("tf32.mode", torch, "mm", named("outside", lambda k: wrong_element(k, SINGLE, (3, 500), float("nan")))),
    seeded("gemm.fp8", torch, "_scaled_mm", unscaled),
    seeded("gemm.fp8", torch, "_scaled_mm", named("edge", lambda k: wrong_element(k, BRAIN, (47, 79)))),
    seeded("gemm.fp8", torch, "_scaled_mm", named("nan", lambda k: wrong_element(k, BRAIN, (0, 0), float("nan")))),
    seeded("gemm.accuracy", torch, "mm", half_by_default),
)
