"""gemm.crash: the profile's own shapes, shapes that crashed processes, and, from the level standard on, many similar
shapes.

On some Hopper GPUs, cuBLAS of CUDA 11.8 to 12.4.0 divides by zero while it chooses an algorithm on the host, before any
kernel runs. This depends on the shape, not on the values. So the probe mainly tests that the process survives; it
checks the results as well.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, is_unsupported, short_name
from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.element_comparison import compare

# approximate number of nonzero products in a sum; the sum is exact in bfloat16, which represents integers up to 256
_ONES = 96
_CPU_LIMIT = 1 << 25  # on the CPU, the maximum number of multiplications of a shape in the sweep


@dataclass(frozen=True)
class Gemm:
    """One product (m, k) x (k, n). `layout` contains a letter for each factor: "n" for normal or "t" for transposed.

    `linear`: call F.linear with a bias, as models do, which corresponds to the layout "nt". Otherwise torch.matmul is
    called.
    """

    m: int
    k: int
    n: int
    dtype: torch.dtype
    layout: str = "nn"
    linear: bool = False
    source: str = ""

    @property
    def name(self) -> str:
        how = "linear {} {}x{}x{} bias" if self.linear else "matmul {} {}x{}x{} " + self.layout
        name = how.format(short_name(self.dtype), self.m, self.k, self.n)
        return f"{self.source} {name}" if self.source else name


# Crashes on the NVIDIA H20, the best documented first.
PUBLISHED = (
    Gemm(2, 1024, 18432, torch.bfloat16, linear=True, source="pytorch#133548"),
    Gemm(64, 14688, 1536, torch.float16, source="pytorch#152017"),
    Gemm(8, 1024, 4096, torch.bfloat16, source="Paddle#66921"),
    Gemm(8, 1024, 4096, torch.bfloat16, layout="tn", source="Paddle#66921"),
)
# The second shape takes 2.5 s on two CPU cores, where fp16 has no fast GEMM. The quick level uses a narrower shape
# instead.
PUBLISHED_CPU_QUICK = (
    PUBLISHED[0],
    Gemm(64, 14688, 96, torch.float16, source="pytorch#152017 narrowed"),
    *PUBLISHED[2:],
)

OWN = "own"  # a shape from the profile: the probe fails if the device does not support it

_ROWS = (1, 2, 7, 64, 333)
_INNER_COLUMNS = ((1024, 1024), (1024, 4096), (1536, 8960), (4096, 1024), (14688, 1536))
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LAYOUTS = ("nn", "nt", "tn", "tt")


def sweep_shapes() -> Iterator[Gemm]:
    """Yield 375 combinations of shape, layout, bias and dtype. The sizes include those of models and of the published
    crashes."""
    for k, n in _INNER_COLUMNS:
        for m in _ROWS:
            for dtype in _DTYPES:
                yield Gemm(m, k, n, dtype, linear=True)
                for layout in _LAYOUTS:
                    yield Gemm(m, k, n, dtype, layout)


def crash_cases(context: Context) -> tuple[Gemm, ...]:
    """Return the shapes from the profile first, then the published ones, and from the standard level on the shapes of
    the sweep.

    On a CPU, the sweep contains only its small shapes.
    """
    own = tuple(
        Gemm(shape.m, shape.k, shape.n, getattr(torch, shape.dtype), shape.layout, shape.bias, OWN)
        for shape in context.job.own.shapes
    )
    deep = context.at_least("standard")
    published = PUBLISHED if deep or not context.on_cpu else PUBLISHED_CPU_QUICK
    more = tuple(sweep_shapes()) if deep else ()
    if context.on_cpu:
        more = tuple(gemm for gemm in more if gemm.m * gemm.k * gemm.n <= _CPU_LIMIT)
    return own + published + more


def gemm_crash(context: Context) -> None:
    """gemm.crash: the process survives every shape, and every element of each result is right."""
    chosen = crash_cases(context)
    context.traits["shapes"] = "cpu subset" if context.on_cpu else "all"
    context.traits["count"] = len(chosen)
    for gemm in chosen:
        _multiply(context, gemm)


def _multiply(context: Context, gemm: Gemm) -> None:
    """Multiply matrices of rank one, r x^T and x c^T, and check the result, which is r c^T (x . x). All vectors consist
    of {-1, 0, 1}. The check costs m n operations.

    All numbers are integers that each dtype represents exactly, so the device itself can compare. Only if it finds a
    difference does the host compare element by element in float64: for all 375 products, that would take most of the
    probe's time.
    """
    device, dtype = context.device, gemm.dtype
    r, x, c = _vectors(gemm.m, gemm.k, gemm.n)
    rows, inner, columns = (vector.to(device, dtype) for vector in (r, x, c))
    left = _factor(rows, inner, gemm.layout[0])
    with context.step(gemm.name, None if gemm.source == OWN else is_unsupported) as step:
        if gemm.linear:
            got = F.linear(left, columns[:, None] * inner, columns)
        else:
            got = torch.matmul(left, _factor(inner, columns, gemm.layout[1]))
    if step.refused:
        return
    shape = (gemm.m, gemm.k, gemm.n)
    if got.dtype == dtype and torch.equal(got, _product(gemm, rows, x, columns)):
        context.figure(gemm.name, dtype, shape, error=0.0, bound=0.0, seconds=step.seconds)
        return
    worst = compare(got, _product(gemm, r, x, c))
    context.compared(gemm.name, dtype, shape, worst, step.seconds)
    if worst.wrong:
        context.fail("mismatch", f"{gemm.name}: {worst}")


@functools.lru_cache(maxsize=1)
def _vectors(m: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return r (m), x (k) and c (n) on the host. Cached, as successive products differ only in dtype and layout."""
    inner = hashed_inputs.ternary((k,), seed=23, every=max(4, k // _ONES))
    inner[0] = 1  # so that the product is not zero, even for a short vector
    return hashed_inputs.signs(m, 21), inner, hashed_inputs.signs(n, 22)


def _product(gemm: Gemm, r: torch.Tensor, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """Return r c^T (x . x), for F.linear plus the bias c; on the device and in the dtype of r and c."""
    found = r[:, None] * (c * float(x.abs().sum()))
    return found + c if gemm.linear else found


def _factor(rows: torch.Tensor, columns: torch.Tensor, layout: str) -> torch.Tensor:
    """Return rows columns^T; with layout "t", as a transposed view."""
    return rows[:, None] * columns if layout == "n" else (columns[:, None] * rows).t()
