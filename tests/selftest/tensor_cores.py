"""Matrix products as NVIDIA's tensor cores add them up, computed on the CPU.

One fused addition takes the running sum and a block of products, aligns them all to the largest exponent among them,
cuts each toward zero, adds the cut terms, and cuts the sum. The numbers per generation are those of MMA-Sim, which its
authors compared with the hardware bit for bit (arXiv 2511.10909).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NO_EXPONENT = -126  # the exponent of zero: below every relevant exponent


@dataclass(frozen=True)
class Core:
    """`aligned`: fraction bits that each term keeps; `block`: products per addition; `kept`: fraction bits of a sum."""

    aligned: int
    block: int
    kept: int


# By generation and input type. Ampere and Ada add the products of one instruction in two halves.
CORES: dict[str, dict[str, Core]] = {
    "Volta": {"fp16": Core(aligned=23, block=4, kept=23)},
    "Turing": {"fp16": Core(aligned=24, block=8, kept=23)},
    "Ampere": {
        **dict.fromkeys(("fp16", "bf16"), Core(aligned=24, block=8, kept=23)),
        "tf32": Core(aligned=24, block=4, kept=23),
    },
    "Ada": {
        **dict.fromkeys(("fp16", "bf16"), Core(aligned=24, block=8, kept=23)),
        "tf32": Core(aligned=24, block=4, kept=23),
        "fp8": Core(aligned=13, block=16, kept=13),
    },
    "Hopper": {
        **dict.fromkeys(("fp16", "bf16"), Core(aligned=25, block=16, kept=23)),
        "tf32": Core(aligned=25, block=8, kept=23),
        "fp8": Core(aligned=13, block=32, kept=13),
    },
    "Blackwell": {  # of datacentre and workstation GPUs
        **dict.fromkeys(("fp16", "bf16"), Core(aligned=25, block=16, kept=23)),
        "tf32": Core(aligned=25, block=8, kept=23),
        "fp8": Core(aligned=25, block=32, kept=23),
    },
}
FP8_CORES = {name: kinds["fp8"] for name, kinds in CORES.items() if "fp8" in kinds}
HALF_ACCUMULATOR = Core(aligned=10, block=32, kept=10)  # wrong on purpose: no GPU adds fp8 products like this

_LEAST_EXPONENT = {torch.float16: -14, torch.bfloat16: -126, torch.float32: -126}
if hasattr(torch, "float8_e4m3fn"):
    _LEAST_EXPONENT[torch.float8_e4m3fn] = -6


def multiply(a: torch.Tensor, b: torch.Tensor, core: Core, promoted_every: int | None = None) -> torch.Tensor:
    """Multiply a (m, k) by b (k, n); return float64 (m, n). The factors have a half type, fp8, or float32 with values
    that TF32 can represent.

    `promoted_every`: after this many products, the running sum is added to a separate float32 sum, and begins again.
    """
    least = _LEAST_EXPONENT[a.dtype]
    a, b = a.to(torch.float64), b.to(torch.float64)
    rows, columns = _exponent(a, least), _exponent(b, least)
    running = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
    promoted = torch.zeros_like(running)
    for start in range(0, a.shape[1], core.block):
        part = slice(start, start + core.block)
        largest = torch.maximum(_exponent(running), (rows[:, part, None] + columns[None, part, :]).amax(dim=1))
        unit = torch.exp2(largest - core.aligned)
        products = a[:, part, None] * b[None, part, :]
        total = _cut(running, unit) + _cut(products, unit[:, None, :]).sum(dim=1)
        running = _cut(total, torch.exp2(_exponent(total) - core.kept))
        if promoted_every and (start + core.block) % promoted_every == 0:
            promoted = (promoted + running).to(torch.float32).to(torch.float64)
            running = torch.zeros_like(running)
    return promoted + running


def _exponent(x: torch.Tensor, least: int = _NO_EXPONENT) -> torch.Tensor:
    """Return floor(log2 |x|) as float64; `least` where that is smaller, and _NO_EXPONENT for zero."""
    exponent = (torch.frexp(x).exponent - 1).clamp(min=least).to(torch.float64)
    return torch.where(x == 0, float(_NO_EXPONENT), exponent)


def _cut(x: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return torch.trunc(x / unit) * unit
