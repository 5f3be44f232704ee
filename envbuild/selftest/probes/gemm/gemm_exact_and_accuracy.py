"""gemm.exact and gemm.accuracy: matrix products against references that use no GEMM."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import Context, is_unsupported, short_name
from envbuild.selftest.harness.probe_outcome_and_figures import json_number, ratio
from envbuild.selftest.numerics import backward_pass, hashed_inputs, tolerances
from envbuild.selftest.numerics.element_comparison import compare
from envbuild.selftest.numerics.reference_products import product
from envbuild.selftest.numerics.tensor_digests import digest

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
ACCURACY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# More than 500 in each dimension, so that tiled kernels are used; not multiples of 16, so that the edges of tiles are
# tested.
ROWS, INNER, COLUMNS = 509, 521, 503
BATCH = (3, 67, 131, 53)
ACCURACY = (256, 4096, 256)

# sha256 of the integer results (tensor_digests.digest). A test recomputes them with Python's integers. They are valid
# for every device, dtype, order of summation and version of torch.
GOLDEN = {
    "Linear forward": "b57a6d8b5f71116fa096031503119453dfa4402a1f88014b186da638bc3db229",
    "Linear grad input": "a39368139ad72c196b9d5ec26184a7a05ae25e02440842b282335f9237ccf599",
    "Linear grad weight": "327291cb9dc5238dff65e73d9d4a1aa1538dc4b216de324c9b5b42c7f4d37150",
    "Linear grad bias": "243ecb68dc98626967299c21bf7a7947da2354343c6115668ecab3c1e9c966b7",
    "bmm": "e5b56775ec6d961b88b1752c3e3f56a860f7b0810259c00d9c6241db0d921a96",
}

Result = tuple[str, torch.Tensor, float]


@dataclass(frozen=True)
class Integers:
    """Inputs of {-1, 0, 1} for y = x w^T + b and for a bmm. The shapes are x (m, k), w (n, k) and b (n). `grad` is the
    gradient of y (m, n); `left` and `right` are the factors of the bmm."""

    x: torch.Tensor
    w: torch.Tensor
    b: torch.Tensor
    grad: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Integers:
        return Integers(*(getattr(self, name).to(device, dtype) for name in self.__dataclass_fields__))


def integers() -> Integers:
    batch, m, k, n = BATCH
    return Integers(
        x=hashed_inputs.ternary((ROWS, INNER), seed=1),
        w=hashed_inputs.ternary((COLUMNS, INNER), seed=2),
        b=hashed_inputs.ternary((COLUMNS,), seed=3),
        grad=hashed_inputs.ternary((ROWS, COLUMNS), seed=4),
        left=hashed_inputs.ternary((batch, m, k), seed=5),
        right=hashed_inputs.ternary((batch, k, n), seed=6),
    )


def references(data: Integers) -> dict[str, torch.Tensor]:
    """Return every case's result in int16. |result| is far below 2^8, so each result is exact in every dtype."""
    i = data.to(torch.device("cpu"), torch.int16)
    return {
        "Linear forward": product(i.x, i.w.t()) + i.b,
        "Linear grad input": product(i.grad, i.w),
        "Linear grad weight": product(i.grad.t(), i.x),
        "Linear grad bias": i.grad.sum(dim=0, dtype=torch.int16),
        "bmm": torch.stack([product(left, right) for left, right in zip(i.left, i.right)]),
    }


def gemm_exact(context: Context) -> None:
    """gemm.exact: integer products in every dtype equal the integer reference, element by element."""
    data = integers()
    context.step("integer reference on the host")
    expected = references(data)
    for case, values in expected.items():
        if digest(values) != GOLDEN[case]:
            context.fail("mismatch", f"{case}: the host's own integers are wrong")
    for dtype in DTYPES:
        for case, got, seconds in _exact_results(context, data.to(context.device, dtype), dtype):
            worst = compare(got, expected[case])
            context.compared(case, dtype, got.shape, worst, seconds)
            if worst.wrong:
                context.fail("mismatch", f"{case} {short_name(dtype)}: {worst}")
    context.traits["sha256"] = GOLDEN


def _exact_results(context: Context, data: Integers, dtype: torch.dtype) -> Iterator[Result]:
    label = f"{short_name(dtype)} {ROWS}x{INNER}x{COLUMNS}"
    x, w, b = (values.detach().requires_grad_() for values in (data.x, data.w, data.b))
    with context.step("Linear forward " + label, is_unsupported) as step:
        y = F.linear(x, w, b)
    if step.refused:
        return
    yield "Linear forward", y, step.seconds
    with context.step("Linear backward " + label, is_unsupported) as step:
        backward_pass.accumulate(y, data.grad)
    if step.refused:
        return
    for case, leaf in (("Linear grad input", x), ("Linear grad weight", w), ("Linear grad bias", b)):
        assert leaf.grad is not None
        yield case, leaf.grad, step.seconds
    with context.step("bmm {} {}x{}x{}x{}".format(short_name(dtype), *BATCH), is_unsupported) as step:
        batched = torch.bmm(data.left, data.right)
    if not step.refused:
        yield "bmm", batched, step.seconds


def gemm_accuracy(context: Context) -> None:
    """gemm.accuracy: products of inputs uniform in [0, 1) stay within the bound of float32 accumulation.

    Zero-mean inputs would not detect float16 accumulation, because its rounding errors show only in growing sums. A
    second product uses torch's own default flags, which may allow float16 accumulation. Its error is reported as a
    ratio to the same bound, and does not fail the probe.
    """
    m, k, n = ACCURACY
    a, b = hashed_inputs.uniform((m, k), seed=11), hashed_inputs.uniform((k, n), seed=12)
    default_results: dict[str, dict[str, Any]] = {}
    context.traits.update({"default flags": default_results, "flags": dict(context.default_flags)})
    for dtype in ACCURACY_DTYPES:
        left, right = a.to(dtype), b.to(dtype)
        factors = left.to(context.device), right.to(context.device)
        with context.step(f"mm {short_name(dtype)} {m}x{k}x{n} uniform", is_unsupported) as step:
            got = torch.mm(*factors)
        if step.refused:
            continue
        reference = product(left.to(torch.float64), right.to(torch.float64))
        tf32 = context.job.allow_tf32
        # No input is negative, so |A| |B| is the product itself.
        limit = tolerances.gemm(reference, reference, k, dtype, tf32)
        worst = compare(got, reference, limit)
        context.compared("mm uniform", dtype, ACCURACY, worst, step.seconds)
        if worst.wrong:
            context.fail(worst.kind, f"mm uniform {short_name(dtype)}: {worst}")
        context.step(f"mm {short_name(dtype)} {m}x{k}x{n} uniform, default flags")
        with context.with_default_flags():
            loose = compare(torch.mm(*factors), reference, limit)
        default_results[short_name(dtype)] = {
            "ratio": json_number(ratio(loose.error, loose.bound)),
            "within": not loose.wrong,
        }
