"""The real probes over wrong kernels: each seed patches torch in the probe's own process, then the probe runs."""

import ctypes
import dataclasses
import importlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.catalogue import PROBES as REAL
from envbuild.selftest.context import Context
from envbuild.selftest.own import Own, Shape
from envbuild.selftest.probes import alloc
from envbuild.selftest.registry import Probe

from . import gradients

Kernel = Callable[..., torch.Tensor]
Wrong = Callable[[Kernel], Kernel]


def wrong_element(kernel: Kernel, dtype: torch.dtype, where: tuple[int, ...], by: float = 1.0) -> Kernel:
    """The kernel, with one element off where the result has this dtype and is large enough to hold it."""

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        fits = result.dim() == len(where) and all(i < n for i, n in zip(where, result.shape, strict=True))
        if fits and result.dtype == dtype:
            offset = torch.zeros_like(result)
            offset[where] = by
            result = result + offset
        return result

    return seeded


def half_accumulation(kernel: Kernel, block: int = 16) -> Kernel:
    """float16 products summed in float16, 16 at a time as a tensor core does."""

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.float16:
            return kernel(a, b)
        total = torch.zeros(a.shape[0], b.shape[1])
        for k in range(0, a.shape[1], block):
            total = (total + a[:, k : k + block].float() @ b[k : k + block].float()).half().float()
        return total.half()

    return seeded


def tf32(kernel: Kernel) -> Kernel:
    """float32 factors cut to TF32's 10 bits of fraction, though the job does not allow it."""

    def cut(values: torch.Tensor) -> torch.Tensor:
        return (values.view(torch.int32) & ~0x1FFF).view(torch.float32)

    def seeded(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
        return kernel(cut(a), cut(b), *rest) if a.dtype == torch.float32 else kernel(a, b, *rest)

    return seeded


def unscaled(kernel: Kernel) -> Kernel:
    """A product of scaled factors that forgets the scale."""

    def seeded(a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any) -> Any:
        return kernel(a, b, scale_a=torch.ones_like(scale_a), scale_b=scale_b, **options)

    return seeded


def half_convolution(kernel: Kernel) -> Kernel:
    """float16 convolutions summed in float16, four channels at a time."""

    def seeded(x: torch.Tensor, w: torch.Tensor, bias: None, *rest: Any) -> torch.Tensor:
        if x.dtype != torch.float16 or rest[-1] != 1:
            return kernel(x, w, bias, *rest)
        parts = [kernel(x[:, c : c + 4].float(), w[:, c : c + 4].float(), bias, *rest) for c in range(0, x.shape[1], 4)]
        total = torch.zeros_like(parts[0])
        for part in parts:
            total = (total + part).half().float()
        return total.half()

    return seeded


def fourier(kernel: Kernel) -> Kernel:
    """A right convolution of one dimension by way of float32 Fourier transforms: not exact on integers."""

    def seeded(
        x: torch.Tensor, w: torch.Tensor, bias: None, stride: int, padding: int, dilation: int, groups: int
    ) -> Any:
        length = x.shape[2] + 2 * padding
        spread = torch.zeros((*w.shape[:2], (w.shape[2] - 1) * dilation + 1))
        spread[..., ::dilation] = w.float()
        images = torch.fft.rfft(F.pad(x.float(), (padding, padding)), length)
        filters = torch.fft.rfft(spread, length).conj()
        whole = torch.fft.irfft(torch.einsum("nif,oif->nof", images, filters), length)
        return whole[..., : length - spread.shape[2] + 1].to(x.dtype)

    return seeded


def library_says(status: str) -> Kernel:
    """A convolution that cuDNN refuses in these words."""

    def seeded(*args: Any) -> torch.Tensor:
        raise RuntimeError(f"cuDNN error: CUDNN_STATUS_{status}")

    return seeded


def now_and_then(kernel: Kernel) -> Kernel:
    """Right four times, then one element is off."""
    count = iter(range(1 << 30))
    wrong = wrong_element(kernel, SINGLE, (700, 3))
    return lambda a, b: kernel(a, b) if next(count) < 4 else wrong(a, b)


def stuck_bit(kernel: Any) -> Any:
    """Memory with a bit of the word 77 that stays 1."""

    def fill(self: torch.Tensor, value: int) -> torch.Tensor:
        kernel(self, value)
        self[77] |= 1 << 20
        return self

    return fill


def aliases(kernel: Any) -> Any:
    """Memory whose cells answer to several addresses: every allocation is the same."""
    first: list[torch.Tensor] = []

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        first.append(first[0] if first else kernel(*args, **options))
        return first[0]

    return empty


def miscompiled(kernel: Any) -> Any:
    """torch.compile whose code is wrong for the last row."""
    return lambda function: wrong_element(function, SINGLE, (96,))


def not_compiled(kernel: Any) -> Any:
    """torch.compile as a variable switches it off: the function runs as it is."""
    return lambda function: function


# As Triton 3.4.0 says it where it compiles for compute capability 12.1.
PTXAS = """PTXAS error: Internal Triton PTX codegen error
`ptxas` stderr:
ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'

Repro command: /x/triton/backends/nvidia/bin/ptxas -lineinfo -v --gpu-name=sm_121a /tmp/x.ptx -o /tmp/x.ptx.o
"""
BF16 = """PTXAS error: Internal Triton PTX codegen error
ptxas /tmp/x.ptx, line 63; error   : Feature '.bf16' requires .target sm_80 or higher
"""


def compiler_says(words: str) -> Wrong:
    def compiler(kernel: Any) -> Any:
        def compile(function: Any) -> Any:
            raise RuntimeError(words)

        return compile

    return compiler


def wrong_gradient(kernel: Kernel) -> Kernel:
    """Linear whose weight gradient has one wrong element."""

    def seeded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.requires_grad and weight.shape[0] > 7 and weight.shape[1] > 9:
            register: Any = weight.register_hook
            register(lambda grad: wrong_element(lambda: grad, grad.dtype, (7, 9))())
        return kernel(x, weight, bias)

    return seeded


def stale(kernel: Kernel) -> Kernel:
    """Returns the output of the call before of the same shape and dtype."""
    last: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        before = last.get((result.shape, result.dtype), result)
        last[result.shape, result.dtype] = result
        return before

    return seeded


def attention_nan(kernel: Kernel) -> Kernel:
    """One NaN, for one length, depth and dtype only."""

    def seeded(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = kernel(q, *args, **options)
        if q.shape[-2:] == (365, 128) and q.dtype == torch.bfloat16:
            result[0, 0, 364, 127] = float("nan")
        return result

    return seeded


def attention_own(kernel: Kernel, first: bool = True, causal: bool = True, dtype: torch.dtype | None = None) -> Kernel:
    """Attention written out: scaled late where not `first`, unmasked where not `causal`, summed in `dtype`."""

    def seeded(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool = False) -> torch.Tensor:
        wide = [values.to(torch.float32) for values in (q, k, v)]
        scale = q.shape[-1] ** -0.5
        logits = (wide[0] * scale if first else wide[0]) @ wide[1].transpose(-1, -2)
        logits = logits.to(q.dtype).float()
        if is_causal and causal:
            logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), float("-inf"))
        weights = torch.softmax(logits if first else logits * scale, dim=-1)
        if dtype is not None and q.dtype == dtype:
            total = torch.zeros_like(wide[0])
            for j in range(0, k.shape[-2], 16):
                total = (total + weights[..., j : j + 16] @ wide[2][..., j : j + 16, :]).to(dtype).float()
            return total.to(q.dtype)
        return (weights @ wide[2]).to(q.dtype)

    return seeded


def wrong_row(kernel: Kernel) -> Kernel:
    """One row of the output is that of its neighbour, as where a tile is written to the wrong place."""

    def seeded(q: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        result = kernel(q, *args, **options).clone()
        result[..., 20, :] = result[..., 19, :]
        return result

    return seeded


def wrong_dtype(kernel: Kernel) -> Kernel:
    """float32 comes out, whatever came in."""
    return lambda x, *args, **options: kernel(
        x.float(), *(value.float() if isinstance(value, torch.Tensor) else value for value in args), **options
    )


def stale_norm(kernel: Kernel) -> Kernel:
    """The values of the call before of the same shape and dtype, with the gradients of this one."""
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
    """LayerNorm written out. `rounds`: x / sigma to the input's dtype; not `upcasts`: all is computed in it."""

    def seeded(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        wide, w, b = (values.float() if upcasts else values.to(x.dtype) for values in (x, weight, bias))
        centred = wide - wide.mean(-1, keepdim=True)
        unit = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
        return ((unit.to(x.dtype) if rounds else unit) * w + b).to(x.dtype)

    return seeded


def norm_gradient(kernel: Kernel) -> Kernel:
    """The gradient of the weight lacks one row."""

    def seeded(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        first = torch.arange(len(x))[:, None] == 0
        return torch.where(first, kernel(x, shape, weight.detach(), bias, eps), kernel(x, shape, weight, bias, eps))

    return seeded


def norm_refuses(kernel: Kernel) -> Kernel:
    """As torch and apex word it, but for a pair that is none."""

    def seeded(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype == weight.dtype == torch.float32:
            raise RuntimeError("expected scalar type Float but found Half")
        return kernel(x, shape, weight, bias, eps)

    return seeded


def noisy(kernel: Kernel) -> Kernel:
    """Sums in another order each time, so to say: the last bits differ."""
    count = iter(range(1 << 30))

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        return kernel(*args, **options) * (1 + 2.0**-22 * (next(count) % 3))

    return seeded


def nan_late(kernel: Kernel) -> Kernel:
    """float32 turns to NaN after some calls."""
    count = iter(range(1 << 30))

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        return result * float("nan") if result.dtype == torch.float32 and next(count) > 15 else result

    return seeded


def flat(kernel: Kernel) -> Kernel:
    """A loss without gradient in every dtype, as a broken backward would give: nothing is learnt."""
    return lambda *args, **options: kernel(*args, **options).detach() + kernel(*args, **options) * 0


def greedy(kernel: Kernel) -> Kernel:
    """A product that needs twice the memory there is, as a library's handle may where little is left."""

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        del b
        torch.empty(2 * alloc.CPU_MEMORY, dtype=torch.uint8)
        return kernel(a, a)

    return seeded


def no_handle(kernel: Kernel) -> Kernel:
    """A cuBLAS that is broken, by torch's words."""

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")

    return seeded


def crowded(kernel: Kernel) -> Kernel:
    """No handle for the second of the processes, whichever that is; nobody else is kept from one."""
    turn, come = os.pipe()
    for _ in range(2):  # one goes alone before the eight
        os.write(come, b"+")
    os.write(come, b"-")
    os.write(come, b"+" * 20)

    def seeded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kernel(a, b) if os.read(turn, 1) == b"+" else no_handle(kernel)(a, b)

    return seeded


def dies(kernel: Kernel) -> Kernel:
    """The library crashes where it makes its handle."""
    return lambda a, b: torch.tensor(ctypes.string_at(0))


def seeded(probe: str, module: Any, name: str, wrong: Wrong, level: str = "quick") -> Probe:
    """The probe, named after the seed, with `module.name` made wrong, as a job of this level runs it."""
    (real,) = (item for item in REAL if item.name == probe)

    def function(context: Context) -> None:
        setattr(module, name, wrong(getattr(module, name)))
        context.job = dataclasses.replace(context.job, level=level)
        real.function(context)

    return Probe(f"{probe}:{wrong.__name__}", "quick", real.needs, real.timeout, function, real.untouched)


def named(name: str, wrong: Wrong) -> Wrong:
    def renamed(kernel: Kernel) -> Kernel:
        return wrong(kernel)

    renamed.__name__ = name
    return renamed


def foreign_library(context: Context) -> None:
    """env.libs with a library mapped from a site-packages folder whose RECORD has other bytes."""
    sys.path.append(os.environ["ENVBUILD_TEST_SITE"])
    ctypes.CDLL(os.environ["ENVBUILD_TEST_LIBRARY"])
    importlib.invalidate_caches()
    next(item for item in REAL if item.name == "env.libs").function(context)


def divides(kernel: Kernel) -> Kernel:
    """A library that divides by zero on its way to a kernel."""
    return lambda *args, **options: ctypes.CDLL(os.environ["ENVBUILD_TEST_LIBRARY"]).divide(1, 0)


def segfaults(kernel: Kernel) -> Kernel:
    return lambda *args, **options: ctypes.string_at(0)


def hangs(kernel: Kernel) -> Kernel:
    return lambda *args, **options: time.sleep(600)


def leaks(kernel: Kernel) -> Kernel:
    """Keeps two gigabytes of every call."""
    kept: list[torch.Tensor] = []

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        kept.append(torch.empty(2 << 30, dtype=torch.uint8))
        return kernel(*args, **options)

    return seeded


def refused(kernel: Kernel) -> Kernel:
    """As torch words it where a device has no kernel of a dtype."""

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    return seeded


def own_shape(context: Context) -> None:
    """gemm.crash with a shape of the profile's own that this torch cannot run."""
    shape = Shape(2, 3, 4, "float16", "nn", False)
    context.job = dataclasses.replace(context.job, own=Own(shapes=(shape,)))
    seeded("gemm.crash", torch, "matmul", refused).function(context)


HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
SDPA = "scaled_dot_product_attention"

PROBES = (
    seeded("init.alloc", torch, "mm", greedy),
    seeded("init.alloc", torch, "mm", no_handle),
    seeded("init.alloc", torch, "mm", crowded, "standard"),
    seeded("init.alloc", torch, "mm", dies),
    seeded("init.alloc", torch, "mm", named("wrong", lambda k: wrong_element(k, SINGLE, (3, 4)))),
    seeded("init.alloc", torch, "mm", named("right", lambda k: k)),
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
    seeded("gemm.fp8", torch, "_scaled_mm", unscaled),
    seeded("gemm.fp8", torch, "_scaled_mm", named("edge", lambda k: wrong_element(k, BRAIN, (271, 303)))),
    seeded("gemm.fp8", torch, "_scaled_mm", named("nan", lambda k: wrong_element(k, BRAIN, (0, 0), float("nan")))),
    seeded("attention.flash", F, SDPA, attention_nan),
    seeded("attention.flash", F, SDPA, stale),
    seeded("attention.math", F, SDPA, named("overflow", lambda k: attention_own(k, first=False))),
    seeded("attention.math", F, SDPA, named("unmasked", lambda k: attention_own(k, causal=False))),
    seeded("attention.math", F, SDPA, named("half", lambda k: attention_own(k, dtype=HALF))),
    seeded("attention.math", F, SDPA, named("right", lambda k: attention_own(k))),
    seeded("attention.math", F, SDPA, wrong_row),
    seeded("attention.flash", F, SDPA, wrong_dtype),
    *gradients.PROBES,
    seeded("norm.torch", F, "layer_norm", named("rounded", lambda k: norm_own(k, rounds=True))),
    seeded("norm.torch", F, "layer_norm", named("squares", lambda k: norm_own(k, upcasts=False))),
    seeded("norm.torch", F, "layer_norm", norm_nan),
    seeded("norm.torch", F, "group_norm", wrong_dtype),
    seeded("norm.torch", F, "layer_norm", stale_norm),
    seeded("norm.torch", F, "layer_norm", norm_gradient),
    seeded("norm.torch", F, "layer_norm", norm_refuses),
    seeded("norm.torch", F, "layer_norm", named("right", norm_own)),
    seeded("conv", F, "conv3d", named("element", lambda k: wrong_element(k, BRAIN, (0, 47, 4, 17, 19)))),
    seeded("conv", F, "conv2d", half_convolution),
    seeded("conv", F, "conv2d", named("nan", lambda k: wrong_element(k, HALF, (0, 63, 17, 18), float("nan")))),
    seeded("conv", F, "conv2d", named("edge", lambda k: lambda x, w, b, s, p, *r: k(x.roll(1, 2), w, b, s, p, *r))),
    seeded("conv", F, "conv1d", named("tf32", lambda k: tf32(k))),
    seeded("conv", F, "conv1d", named("without_library", lambda k: library_says("NOT_SUPPORTED_ARCH_MISMATCH"))),
    seeded("conv", F, "conv1d", named("sublibrary", lambda k: library_says("SUBLIBRARY_VERSION_MISMATCH"))),
    seeded("conv", F, "conv1d", fourier),
    seeded("compile.triton", torch, "compile", miscompiled),
    seeded("compile.triton", torch, "compile", not_compiled),
    seeded("compile.triton", torch, "compile", named("ptxas", compiler_says(PTXAS))),
    seeded("compile.triton", torch, "compile", named("bf16", compiler_says(BF16))),
    seeded("compile.triton", torch, "compile", named("right", lambda k: k)),
    seeded("burn", torch, "mm", now_and_then),
    seeded("burn", torch, "mm", named("nan", lambda k: wrong_element(k, SINGLE, (0, 767), float("nan")))),
    seeded("burn", torch, "mm", named("right", lambda k: k)),
    seeded("memory", torch.Tensor, "fill_", stuck_bit),
    seeded("memory", torch, "empty", aliases),
    seeded("memory", torch.Tensor, "fill_", named("right", lambda k: k)),
    seeded("train.step", F, "mse_loss", noisy),
    seeded("train.step", F, "mse_loss", nan_late),
    seeded("train.step", F, "mse_loss", flat),
    seeded("train.step", F, "gelu", named("right", lambda k: k)),
    Probe("env.libs:foreign", "quick", "cpu", 60, foreign_library),
)
