"""The tolerance of every product, compared with emulated tensor cores of every generation, healthy and wrong.

The error of a healthy core is measured before its sum is rounded to the result's dtype, and divided by the tolerance
minus the error of this one rounding, which every right result has. The error of a wrong core is the one that a probe
would see: after the rounding, divided by the whole tolerance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from selftest.tensor_cores import CORES, Core, multiply

from envbuild.selftest.numerics import hashed_inputs, tolerances
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.probes.gemm.gemm_precision import FP8_SIZE, _large_sums

from .arithmetic import cut_to_tf32

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
if hasattr(torch, "float8_e4m3fn"):
    DTYPES["fp8"] = torch.float8_e4m3fn
LENGTHS = (64, 256, 1040, 4096, 16384)
SHAPES = ((24, 24), (1, 40), (64, 8))  # m and n
SLICES = (2, 4, 8, 16)  # of split-K
# Fraction bits of a wrong accumulator: the 10 of float16; for bfloat16 its own 7, as rounding its results hides more.
WRONG_BITS = {"fp16": 10, "bf16": 7, "tf32": 10, "fp8": 10}


def cases() -> Iterator[tuple[str, str]]:
    """Yield each generation of tensor cores, with the dtypes that it multiplies."""
    for generation, kinds in CORES.items():
        yield from ((generation, kind) for kind in kinds if kind in DTYPES)


def wrong(generation: str, kind: str) -> Core:
    """Return the generation's core with an accumulator of half precision. The accumulator truncates the sums; for fp8,
    also each product.

    Healthy cores add up fp8 products with 13 fraction bits. The tolerance must let them pass, so it also lets a core
    pass that cuts only the sums, to 10 bits. Only large integers detect such a core (`misses_large_integers`).
    """
    bits, core = WRONG_BITS[kind], CORES[generation][kind]
    return dataclasses.replace(core, aligned=bits if kind == "fp8" else core.aligned, kept=bits)


def misses_large_integers(core: Core) -> bool:
    """Whether the large integers of gemm.fp8, which are exact on every healthy core, are wrong on this core."""
    rows = _large_sums((2, FP8_SIZE["cpu"][1]), 0).to(torch.float8_e4m3fn)
    return not torch.equal(multiply(rows, rows.t(), core), rows.double() @ rows.double().t())


def healthy_ratio(
    generation: str, kind: str, k: int, shape: tuple[int, int] = SHAPES[0], promoted_every: int | None = None
) -> float:
    """Return the ratio of error to tolerance, both without the rounding of the result."""
    a, b, exact = _factors(kind, k, shape)
    error = (multiply(*_taken(kind, a, b), CORES[generation][kind], promoted_every) - exact).abs()
    return _beyond(error, exact, _tolerance(kind, exact, k), kind)


def wrong_ratio(generation: str, kind: str, k: int, shape: tuple[int, int] = SHAPES[0]) -> float:
    """Return the ratio of error to tolerance as a probe computes it."""
    a, b, exact = _factors(kind, k, shape)
    got = multiply(*_taken(kind, a, b), wrong(generation, kind)).to(_result(kind)).double()
    return float(((got - exact).abs() / _tolerance(kind, exact, k)).max())


def float32_ratio(k: int, shape: tuple[int, int] = SHAPES[0], tf32: bool = False) -> float:
    """Return the ratio of `healthy_ratio` for float32 products without tensor cores; `tf32`: wrongly with TF32."""
    a, b, exact = _factors("fp32", k, shape)
    got = product(cut_to_tf32(a), cut_to_tf32(b)) if tf32 else product(a, b)
    return _beyond((got.double() - exact).abs(), exact, tolerances.gemm(exact, exact, k, torch.float32), "fp32")


def split_ratio(generation: str, slices: int, k: int) -> float:
    """Return the ratio of error to tolerance of a float16 convolution's sum by split-K: each slice is rounded to
    float16, and so is each partial sum of the slices. The tolerance is tolerances.half_sums without the last
    rounding."""
    a, b, exact = _factors("fp16", k, SHAPES[0])
    core = CORES[generation]["fp16"]
    parts = zip(a.chunk(slices, 1), b.chunk(slices, 0), strict=True)
    total, *others = (multiply(*part, core).half() for part in parts)
    for other in others:
        total = (total.float() + other.float()).half()
    return _beyond((total.double() - exact).abs(), exact, tolerances.half_sums(exact, exact, k, torch.float16), "fp16")


def attention_ratio(generation: str, kind: str, length: int, depth: int, sums: Core | None = None) -> float:
    """Return the ratio of a fused attention kernel's error to tolerances.attention_floor. Both include the roundings
    inside the kernel and of its result. `sums`: a wrong core that computes the second product."""
    dtype, core = DTYPES[kind], CORES[generation][kind]
    q, k = (hashed_inputs.signed((length, depth), seed).to(dtype) for seed in (31, 32))
    v = hashed_inputs.uniform((length, depth), seed=33).to(dtype)
    scale = 1 / math.sqrt(depth)
    exact = torch.softmax(q.double() @ k.double().t() * scale, dim=-1) @ v.double()
    scores = (multiply(q, k.t(), core) * scale).float()
    powers = torch.exp(scores - scores.amax(-1, keepdim=True))
    got = multiply(powers.to(dtype), v, sums or core).float() / powers.sum(-1, keepdim=True)
    logit = float(q.double().norm(dim=-1).max() * k.double().norm(dim=-1).max()) * scale
    floor = tolerances.attention_floor(dtype, logit, depth, length)
    return float((got.to(dtype).double() - exact).abs().max()) / floor


def _factors(kind: str, k: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a (m, k) and b (k, n), uniform in [0, 1) as in the probes, and their exact product in float64."""
    m, n = shape
    a, b = hashed_inputs.uniform((m, k), 51).to(DTYPES[kind]), hashed_inputs.uniform((n, k), 52).to(DTYPES[kind]).t()
    return a, b, a.double() @ b.double()


def _taken(kind: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the factors to the precision that a tensor core uses."""
    return (cut_to_tf32(a), cut_to_tf32(b)) if kind == "tf32" else (a, b)


def _result(kind: str) -> torch.dtype:
    return torch.bfloat16 if kind == "fp8" else DTYPES[kind]


def _tolerance(kind: str, exact: torch.Tensor, k: int) -> torch.Tensor:
    """Return the tolerance of gemm.accuracy or gemm.fp8. No factor is negative, so |A||B| is the product itself."""
    form: Callable[..., torch.Tensor] = tolerances.fp8 if kind == "fp8" else tolerances.gemm
    return form(exact, exact, k, _result(kind), *([True] if kind == "tf32" else []))


def _beyond(error: torch.Tensor, exact: torch.Tensor, tolerance: torch.Tensor, kind: str) -> float:
    rounding = 0 if kind in ("tf32", "fp32") else tolerances.unit_roundoff(_result(kind)) * exact.abs()
    return float((error / (tolerance - rounding)).max())
