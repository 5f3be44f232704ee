"""How an attention kernel behaves in half precision. The results are recorded as traits; they never fail a probe.

One batch contains five problems, whose correct results are known without a reference:

- unscaled: q = k = 40 and V = 1. The scores exceed float16's range until they are scaled.
- scaled: q = k = 256 and V = 1. The scores exceed float16's range even after scaling. The result is correct only if
  the kernel keeps the scores in float32.
- output: all scores are equal. Each column of V is 1 except for one element, which is so large that adding up to 16
  ones to it in float16 does not change it. The large element is at a different key in each column, because the order
  in which the kernel processes keys is unknown.
- scores (two problems): every key has one such large element, in the first column or in the last column. Every second
  key also has ones in all other columns. These ones make its score higher, so that these keys have nearly all of the
  weight. V is 1 at these keys and 0 at the others.

For bfloat16 the large element is smaller. It is chosen so that the same number of ones is lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

import torch

from envbuild.selftest.harness.probe_context import Context, short_name
from envbuild.selftest.numerics import tolerances

DTYPES = (torch.float16, torch.bfloat16)
QUERIES, KEYS, DEPTH = 64, 4096, 64
# the most fp16 or bf16 products that a tensor core adds at a time (Hopper, Blackwell; older ones 4 or 8); the
# accumulator is rounded after each block
BLOCK = 16
PROBLEMS = ("unscaled", "scaled", "output", "scores", "scores")

# Takes q, k and v. Returns the output, or None if no kernel supports these inputs.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Optional[torch.Tensor]]


@dataclass(frozen=True)
class Problems:
    """q, k and v of (len(PROBLEMS), 1, QUERIES or KEYS, DEPTH), and the expected output of (len(PROBLEMS), DEPTH)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    expected: torch.Tensor


def problems(dtype: torch.dtype) -> Problems:
    """Return the problems for `dtype`, which represents all their values exactly. The expected output is in float64."""
    # at this size, adjacent numbers of the dtype are 2 BLOCK apart: adding BLOCK is lost
    large = 2 * BLOCK / torch.finfo(dtype).eps
    q, k, v = (torch.zeros(len(PROBLEMS), length, DEPTH) for length in (QUERIES, KEYS, KEYS))
    q[0] = k[0] = 40
    q[1] = k[1] = 256
    v[:3] = 1
    v[2, torch.arange(DEPTH) * (KEYS // DEPTH), torch.arange(DEPTH)] = large
    q[3:] = 1
    k[3:, ::2] = 1
    k[3, :, 0] = k[4, :, -1] = large
    v[3:, ::2] = 1
    expected = v.to(torch.float64).mean(dim=1)
    expected[3:] = 1 / (1 + torch.exp(torch.tensor(-(DEPTH - 1) / DEPTH**0.5, dtype=torch.float64)))
    q, k, v = (values[:, None].to(dtype) for values in (q, k, v))
    return Problems(q, k, v, expected)


def wrong(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> list[str]:
    """Return the names of the problems with a wrong output. `got` (len(PROBLEMS), 1, QUERIES, DEPTH) was computed in
    `dtype`.

    In the first three problems the scores are equal and every term is positive, so the tolerance is relative. In the
    "scores" problems the tolerance is 0.25. Scores that were rounded to `dtype` once, but not summed in `dtype`, leave
    at least 0.98 of the weight on the right keys. Scores summed in `dtype` leave only half of the weight there.
    """
    error = (got.to("cpu", torch.float64)[:, 0] - expected[:, None]).abs().amax(dim=1)
    limit = tolerances.attention_floor(dtype, 0.0, DEPTH, KEYS) * expected
    limit[3:] = 0.25
    right = (error <= limit).all(dim=1).tolist()  # a comparison with NaN is False
    return [name for name, fits in zip(PROBLEMS, right) if not fits]


def report_traits(context: Context, attend: Attend, upcast: Attend) -> None:
    """Record for each dtype that `attend` supports: which scores beyond float16's range the kernel handles, and whether
    it accumulates in half precision. Record also whether `upcast`, which gets the same values in float32, corrects
    wrong results."""
    beyond: dict[str, dict[str, bool]] = {}
    halves: dict[str, list[str]] = {}
    context.traits.update(right_beyond_fp16=beyond, accumulates_in_half=halves)
    for dtype in DTYPES:
        given, name = problems(dtype), short_name(dtype)
        got = attend(given.q, given.k, given.v)
        if got is None:
            continue
        found = wrong(got, given.expected, dtype)
        beyond[name] = {scores: scores not in found for scores in PROBLEMS[:2]}
        halves[name] = [sums for sums in ("output", "scores") if sums in found]
        if found:
            wide = upcast(*(values.to(torch.float32) for values in (given.q, given.k, given.v)))
            if wide is not None and not wrong(wide, given.expected, torch.float32):
                note_upcast(context, dtype)


def note_upcast(context: Context, dtype: torch.dtype) -> None:
    """Record that upcasting to float32 corrects a result that is wrong in `dtype`."""
    known = context.traits.setdefault("needs_upcast", [])
    if short_name(dtype) not in known:
        known.append(short_name(dtype))
