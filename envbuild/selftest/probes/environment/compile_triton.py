"""compile.triton: code compiled at run time: a Triton kernel, and a training step with torch.compile.

Both need the compiler in the image. A GPU image contains a compiler, so the probe fails if the compiler is missing. A
CPU image contains one only if its profile adds it (apt: [g++]). Without a compiler, the probe is skipped on the CPU. If
the profile requires this probe, skipped does not count as passed.

All values are small integers, so every result is exact.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import ProbeFailure, Skip
from envbuild.selftest.numerics.element_comparison import compare

SHAPE = (97, 61)
FACTOR, LESS = 3, 4

# Triton reads the source of a kernel from a file, and the self-test may be inside a zip archive.
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x, y, count, FACTOR: tl.constexpr, LESS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(y + at, tl.load(x + at, mask=inside) * FACTOR - LESS, mask=inside)
"""
BLOCK = 128

# Environment variables. They set the folders for compiled code and limit compilation to one process. They also disable
# vector instructions, because torch would call the compiler to test for each instruction set.
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
_VARIABLES = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
_BUILT = (".so", ".cubin")
_NOT_YET = re.compile(r"Python 3\.[0-9]+\+? (is )?not (yet )?supported|not supported on Python")
_TELLING = re.compile(r"\bfatal\b|No such file|not found|requires \.target|Failed to find")


def compile_triton(context: Context) -> None:
    """compile.triton: a jitted Triton kernel (on a GPU) and a step of torch.compile run and give correct results."""
    _need_compiler(context)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(_VARIABLES, **dict.fromkeys(_CACHES, folder))
        x = (torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int64) % 17 - 8).reshape(SHAPE)
        try:
            if not context.on_cpu:
                _jitted(context, Path(folder), x)
            # at this point the folder contains only files of the Triton kernel, not of torch.compile
            before = _built(folder)
            _compiled(context, x)
        except (ProbeFailure, Skip):
            raise
        # compiler drivers raise many types of exceptions, and their first line seldom names the cause
        except Exception as error:
            if _NOT_YET.search(str(error)):
                raise Skip(error_line(error)) from None
            raise ProbeFailure("exception", error_line(error)) from error
        if not _built(folder) - before:
            context.fail(
                "mismatch", "torch.compile has compiled nothing: is TORCH_COMPILE_DISABLE or a similar variable set?"
            )


def _built(folder: str) -> set[Path]:
    return {path for path in Path(folder).rglob("*") if path.suffix in _BUILT}


def _need_compiler(context: Context) -> None:
    """Require the compilers: for torch.compile the one that CXX names, by default g++; for Triton, on a GPU, the one
    that CC names, by default gcc. Raises ProbeFailure if one is missing, or Skip on the CPU."""
    wanted = [os.environ.get("CXX", "g++"), *([] if context.on_cpu else [os.environ.get("CC", "gcc")])]
    missing = [name for name in wanted if not shutil.which(name)]
    if missing and context.on_cpu:
        raise Skip(f"torch.compile needs a compiler, and the image has no {missing[0]} (apt: [g++])")
    if missing:
        raise ProbeFailure("mismatch", f"the image has no {' and no '.join(missing)}: Triton and torch.compile need it")


def _jitted(context: Context, folder: Path, x: torch.Tensor) -> None:
    if importlib.util.find_spec("triton") is None:
        raise Skip("Triton is not installed")
    dtypes = [torch.float32, torch.float16]
    if torch.cuda.get_device_capability() >= (8, 0):  # older GPUs have no such instructions
        dtypes.append(torch.bfloat16)
    kernel = load_kernel(folder).scale
    for dtype in dtypes:
        given = x.to(context.device, dtype)
        got = torch.zeros_like(given)
        with context.step(f"Triton kernel {dtype}") as step:
            kernel[((x.numel() + BLOCK - 1) // BLOCK,)](given, got, x.numel(), FACTOR, LESS, BLOCK)
        _judge(context, f"Triton kernel {dtype}", got, x * FACTOR - LESS, step.seconds)


def load_kernel(folder: Path) -> Any:
    """Import the kernel's module from a file in this folder."""
    file = folder / "envbuild_kernel.py"
    file.write_text(KERNEL, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _step(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return torch.relu(x * factor - LESS).sum(dim=-1)


def _compiled(context: Context, x: torch.Tensor) -> None:
    """Run a compiled function forward, and on a GPU also backward. On the CPU each compilation takes seconds."""
    if context.on_cpu:
        context.traits["step"] = "forward only"
        _without_precompiled_headers()
    given = x.to(context.device, torch.float32).requires_grad_(not context.on_cpu)
    factor = torch.full((SHAPE[1],), float(FACTOR), device=context.device)
    with context.step("torch.compile forward") as step:
        got = torch.compile(_step)(given, factor)
    inner = x * FACTOR - LESS
    _judge(context, "torch.compile forward", got, inner.clamp(min=0).sum(dim=-1), step.seconds)
    if given.requires_grad:
        with context.step("torch.compile backward") as step:
            got.sum().backward()  # type: ignore[no-untyped-call]
        assert given.grad is not None
        _judge(context, "torch.compile backward", given.grad, FACTOR * (inner > 0).to(torch.int64), step.seconds)


def _without_precompiled_headers() -> None:
    """Disable precompiled headers in torch's compiler, which pay off only for many kernels."""
    config: Any = importlib.import_module("torch._inductor.config")
    if hasattr(config, "cpp_cache_precompile_headers"):
        config.cpp_cache_precompile_headers = False


def _judge(context: Context, case: str, got: torch.Tensor, expected: torch.Tensor, seconds: float) -> None:
    worst = compare(got, expected)
    context.compared(case, got.dtype, got.shape, worst, seconds)
    if worst.wrong:
        context.fail("mismatch", f"{case}: {worst}")


def error_line(error: Exception) -> str:
    """Return the line that names the cause in a compiler's long error message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    line = next((line for line in lines if _TELLING.search(line)), lines[0])
    return f"{type(error).__name__}: {line[:1000]}"
