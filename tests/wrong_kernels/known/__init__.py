"""Wrong kernels that the probes' cases are developed against."""

from __future__ import annotations

from . import (
    attention,
    collectives,
    conv,
    copies,
    elementwise,
    embeddings,
    gemm,
    late,
    linalg,
    norms,
    optimizers,
    reductions,
    softmax,
)

__all__ = [
    "attention",
    "collectives",
    "conv",
    "copies",
    "elementwise",
    "embeddings",
    "gemm",
    "late",
    "linalg",
    "norms",
    "optimizers",
    "reductions",
    "softmax",
]
