"""How an attention kernel behaves in half precision, recorded as traits, never as a failure.

One batch contains five problems, whose right answers are known without a reference:

- unscaled: q = k = 40 and V = 1. The scores exceed float16's range until they are scaled.
- scaled: q = k = 256 and V = 1. The scores exceed float16's range even after scaling: the result is right only if they
  are kept in float32.
- output: equal scores, and in each column of V one value so large that adding up to 16 ones to it in float16 does not
  change it. Each column has the large value at a different key, because the kernel's order of keys is unknown.
- scores, first and last: every second key has ones in addition to one such large value, the others have only the large
  value. Their scores differ by the ones, so that the former have nearly all of the weight. V is 1 there and else 0.

For bfloat16 the large value is smaller, so that as many ones are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Optional

import torch

from envbuild.selftest.harness.probe_context import Context, short_name
from envbuild.selftest.numerics import tolerances

DTYPES = (torch.float16, torch.bfloat16)
QUERIES, KEYS, DEPTH = 64, 4096, 64
BLOCK = 16  # products that a tensor core adds at a time; its accumulator is rounded after each such block
PROBLEMS = ("unscaled", "scaled", "output", "scores", "scores")

# Takes q, k and v and returns the output; None if no kernel supports them.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Optional[torch.Tensor]]


@dataclass(frozen=True)
class Problems:
    """q, k and v of (len(PROBLEMS), 1, QUERIES or KEYS, DEPTH), and the expected output of (len(PROBLEMS), DEPTH)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    expected: torch.Tensor


def problems(dtype: torch.dtype) -> Problems:
    """The problems, exact in `dtype`; the expected output is in float64."""
    large = 2 * BLOCK / torch.finfo(dtype).eps  # the spacing of numbers there is twice the ones of a block
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
    """The problems whose output (len(PROBLEMS), 1, QUERIES, DEPTH), computed in `dtype`, differs from the expected one.

    Where the scores are equal, every term is positive and the tolerance is relative. Scores that were rounded to
    `dtype` once, but not summed in it, leave at least 0.98 of the weight on the right keys; scores summed in it leave
    half.
    """
    error = (got.to("cpu", torch.float64)[:, 0] - expected[:, None]).abs().amax(dim=1)
    limit = tolerances.attention_floor(dtype, 0.0, DEPTH, KEYS) * expected
    limit[3:] = 0.25
    right = (error <= limit).all(dim=1).tolist()  # False for NaN
    return [name for name, fits in zip(PROBLEMS, right) if not fits]


def report_traits(context: Context, attend: Attend, upcast: Attend) -> None:
    """Record for each dtype that `attend` supports: which scores beyond float16's range it handles, whether it
    accumulates in half precision, and whether `upcast`, which gets the same values in float32, fixes wrong results."""
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
    """Record that upcasting to float32 fixes a result that is wrong in `dtype`."""
    known = context.traits.setdefault("needs_upcast", [])
    if short_name(dtype) not in known:
        known.append(short_name(dtype))
