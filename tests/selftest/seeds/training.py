"""Training with wrong results, and a wrong compiler."""

import importlib
from typing import Any

import torch
import torch.nn.functional as F

from .making import SINGLE, Kernel, Wrong, named, seeded, wrong_element


def noisy(kernel: Kernel) -> Kernel:
    """The last bits differ from call to call, as if sums were computed in a different order each time."""
    count = iter(range(1 << 30))

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        return kernel(*args, **options) * (1 + 2.0**-22 * (next(count) % 3))

    return seeded


def nan_late(kernel: Kernel) -> Kernel:
    """Results in float32 are NaN after 16 calls."""
    count = iter(range(1 << 30))

    def seeded(*args: Any, **options: Any) -> torch.Tensor:
        result = kernel(*args, **options)
        return result * float("nan") if result.dtype == torch.float32 and next(count) > 15 else result

    return seeded


def flat(kernel: Kernel) -> Kernel:
    """A loss with the gradient 0 in every dtype, as from a broken backward pass: nothing is learned."""
    return lambda *args, **options: kernel(*args, **options).detach() + kernel(*args, **options) * 0


def miscompiled(kernel: Any) -> Any:
    """torch.compile whose code is wrong in element 96 of the result."""
    return lambda function: wrong_element(function, SINGLE, (96,))


def right(kernel: Any) -> Any:
    """torch.compile itself. torch._inductor reads its environment variables when it is imported: here, with
    torch._dynamo, before the probe sets them."""
    config: Any = importlib.import_module("torch._inductor.config")
    config.cpp.vec_isa_ok = False
    return kernel


def not_compiled(kernel: Any) -> Any:
    """torch.compile that compiles nothing, as if an environment variable disabled it."""
    return lambda function: function


# The message of Triton 3.4.0 when it compiles for compute capability 12.1.
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


PROBES = (
    seeded("compile.triton", torch, "compile", miscompiled),
    seeded("compile.triton", torch, "compile", not_compiled),
    seeded("compile.triton", torch, "compile", named("ptxas", compiler_says(PTXAS))),
    seeded("compile.triton", torch, "compile", named("bf16", compiler_says(BF16))),
    seeded("compile.triton", torch, "compile", right),
    seeded("train.step", F, "mse_loss", noisy),
    seeded("train.step", F, "mse_loss", nan_late),
    seeded("train.step", F, "mse_loss", flat),
    seeded("train.step", F, "gelu", named("right", lambda k: k)),
)
