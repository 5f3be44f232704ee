"""gemm.accumulator, tf32.mode and gemm.fp8: the precision of sums of products, and of their factors."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, is_unsupported
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.element_comparison import compare
from envbuild.selftest.numerics.reference_products import product

# A float16 sum that has reached 2048 does not grow if 1 is added. Tensor cores add at most 16 fp16 products at a time
# (Hopper, Blackwell; older ones 4 or 8), and the accumulator is rounded after each block. float16 represents 2048 + 16.
# In the second case, any 16 neighbouring products therefore contain at most one 1.
START, LENGTH, APART = 2048, 4096, 16
SUMS = {
    f"{START} + {LENGTH - 1} x 1": slice(1, None),
    f"{START} + {LENGTH // APART - 1} x 1, {APART} apart": slice(APART, None, APART),
}
SIDE = 128  # rows and columns of the results, whose elements are all equal

STEP = 2.0**-12  # float32 represents 1 + STEP; TF32, which has 10 fraction bits, rounds it to 1
TF32_SIDE = 512
TF32_CAPABILITY = (8, 0)
# read by NVIDIA's libraries: 0 forbids TF32 and 1 forces it, regardless of torch's settings
OVERRIDE = "NVIDIA_TF32_OVERRIDE"

# Multiples of 16, as _scaled_mm requires. On a CPU torch multiplies fp8 element by element, about 16 million products a
# second.
FP8_SIZE = {"cuda": (272, 1040, 304), "cpu": (48, 1040, 80)}
FP8_SCALE = 2.0
# In float16, 64 * 64 + 1 is rounded to 64 * 64. Tensor cores add at most 32 products at a time, so the ones are 32
# apart. The 13 fraction bits of Hopper's fp8 sums represent every sum up to 2^14 exactly.
FP8_LARGE, FP8_APART = 64, 32


def gemm_accumulator(context: Context) -> None:
    """gemm.accumulator: sums of float16 products keep growing beyond 2048, where a float16 sum stops.

    The results with torch's own default flags, which may allow float16 sums, are reported and do not fail the probe.
    """
    for case, places in SUMS.items():
        row = torch.zeros(LENGTH)
        row[0], row[places] = START, 1
        total = float(row.sum())
        factors = row.repeat(SIDE, 1), torch.ones((LENGTH, SIDE))
        left, right = (factor.to(context.device, torch.float16) for factor in factors)
        for name, multiply, expected in (
            (case, torch.mm, float(torch.tensor(total).to(torch.float16))),
            (f"{case}, out float32", _mm_float32, total),
        ):
            with context.step(f"mm fp16 {name}", _has_none) as step:
                got = multiply(left, right)
            if step.refused:
                continue
            worst = compare(got, torch.full((SIDE, SIDE), expected))
            context.compared(name, got.dtype, (SIDE, LENGTH, SIDE), worst, step.seconds)
            if worst.wrong:
                lost = worst.wrong == worst.count and worst.got < worst.expected
                context.fail("mismatch", f"{name}: {worst}" + (": the sum is kept in half precision" if lost else ""))
        if case in (figure.case for figure in context.figures):
            context.traits.setdefault("default flags", {})[case] = _with_default_flags(context, left, right)
    if not context.figures:
        raise Skip("this torch has no float16 products on this device")


def _mm_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    multiply: Any = torch.mm
    got: torch.Tensor = multiply(a, b, out_dtype=torch.float32)
    return got


def _has_none(error: Exception) -> bool:
    """Return whether the error means that this torch lacks the product. A TypeError means that it lacks an argument."""
    return isinstance(error, TypeError) or is_unsupported(error) or "only supported" in str(error)


def _with_default_flags(context: Context, left: torch.Tensor, right: torch.Tensor) -> list[float]:
    """Return the smallest and the largest element with torch's default flags, which may allow float16 reductions."""
    with context.with_default_flags():
        got = torch.mm(left, right)
    return [float(got.min()), float(got.max())]


def tf32_mode(context: Context) -> None:
    """tf32.mode: float32 products use TF32 where the profile allows it, and only there."""
    allowed = context.job.allow_tf32
    context.traits.update({"allow_tf32": allowed, OVERRIDE: os.environ.get(OVERRIDE)})
    if allowed and (context.on_cpu or torch.cuda.get_device_capability() < TF32_CAPABILITY):
        raise Skip("the profile allows TF32, which this device does not have")
    identity = torch.eye(TF32_SIDE, device=context.device)
    image = torch.ones((1, TF32_SIDE, 8, 8), device=context.device)
    with context.step(f"mm fp32 {TF32_SIDE}x{TF32_SIDE}x{TF32_SIDE} (1 + 2^-12) I") as step:
        got = torch.mm((1 + STEP) * identity, identity)
    judge_tf32(context, "mm", got.diagonal(), allowed, step.seconds)
    around = compare(got.masked_fill(identity == 1, 0.0), torch.zeros(TF32_SIDE, TF32_SIDE))
    if around.wrong:
        context.fail(around.kind, f"mm (1 + 2^-12) I, outside the diagonal: {around}")
    with context.step(f"conv2d fp32 {TF32_SIDE}x{TF32_SIDE}x1x1 (1 + 2^-12) I") as step:
        got = F.conv2d(image, (1 + STEP) * identity[:, :, None, None])
    judge_tf32(context, "conv2d", got, allowed, step.seconds)


def judge_tf32(context: Context, case: str, got: torch.Tensor, allowed: bool, seconds: float) -> None:
    """Check which precision was used: TF32 computes 1 + 2^-12 as 1. cuDNN may use float32 for a convolution even if
    TF32 is allowed."""
    wanted = {"float32": 1 + STEP, "TF32": 1.0} if allowed else {"float32": 1 + STEP}
    if allowed and case == "mm":
        del wanted["float32"]
    values = sorted(set(got.detach().flatten().tolist()), key=lambda value: (math.isfinite(value), value))
    finite = math.isfinite(values[0])
    error = max(min(abs(value - right) for right in wanted.values()) for value in values) if finite else math.nan
    context.figure(f"{case} (1 + 2^-12) I", torch.float32, got.shape, error, 0.0, seconds)
    found = {(1.0,): "TF32", (1 + STEP,): "float32"}.get(tuple(values), "neither")
    context.traits[case] = found
    if found in wanted:
        return
    said = f" ({OVERRIDE}={os.environ[OVERRIDE]} is set)" if OVERRIDE in os.environ else ""
    what = {"TF32": "TF32 is used, and not allowed", "float32": "TF32 is allowed, and not used"}
    reason = what.get(found, f"1 + 2^-12 comes out as {values[:4]}") + f": {case}{said}"
    context.fail("mismatch" if finite else "nonfinite", reason)


def gemm_fp8(context: Context) -> None:
    """gemm.fp8: products of float8 (e4m3) are exact on integers, also above 4096, and within tolerance on fractions."""
    multiply: Any = getattr(torch, "_scaled_mm", None)
    dtype = getattr(torch, "float8_e4m3fn", None)
    if multiply is None or dtype is None:
        raise Skip(f"torch {torch.__version__} has no fp8 products")
    m, k, n = size = FP8_SIZE[context.device.type]
    scale = torch.tensor(FP8_SCALE, device=context.device)
    one = torch.ones_like(scale)
    for case, make in (
        ("integer", hashed_inputs.ternary),
        ("large integer", _large_sums),
        ("uniform", hashed_inputs.uniform),
    ):
        left, right = make((m, k), seed=51).to(dtype), make((n, k), seed=52).to(dtype)
        wide = left.to(torch.float64), right.to(torch.float64).t()
        exact, magnitude = (FP8_SCALE * product(*pair) for pair in (wide, (wide[0].abs(), wide[1].abs())))
        limit = tolerances.fp8(exact, magnitude, k, torch.bfloat16) if case == "uniform" else None
        for fast in (False, True):
            name = f"{case}{' fast accumulation' if fast else ''}"
            a, b = left.to(context.device), right.to(context.device).t()
            with context.step(f"scaled_mm fp8 {m}x{k}x{n} {name}", _has_none) as step:
                got = multiply(a, b, scale_a=scale, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=fast)
            if step.refused:
                continue
            # until torch 2.4, _scaled_mm returned a tuple of the result and its largest value
            got = got[0] if isinstance(got, tuple) else got
            worst = compare(got, exact, limit)
            context.compared(name, dtype, size, worst, step.seconds)
            if worst.wrong:
                context.fail(worst.kind, f"{name} fp8: {worst}")
    if not context.figures:
        raise Skip(f"no fp8 products on this device: {next(iter(context.traits['unsupported'].values()))}")


def _large_sums(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Return equal rows. The product of two such rows sums to 4096 + 32, where a float16 sum would stay at 4096."""
    row = torch.zeros(shape[1])
    row[FP8_APART::FP8_APART] = 1
    row[0] = FP8_LARGE
    return row.repeat(shape[0], 1)
