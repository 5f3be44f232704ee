"""Measures how a GPU sums fp8 products: which places of a row share one chain of additions, and how many bits a chain
keeps.

A row of A has a large value first, its negative last and a small value somewhere between; all elements of B are one. If
the small product is added to the large one in a sum of few bits, the small product is lost, and the row's result is 0.
If the chain with the large product was added to a float32 sum before, the small product is kept, and is the result. One
row for each place of the small value gives a map of the chains, without a model of the hardware.

`python -m gpu_plan.fp8_chains` prints one JSON document per line, for each shape, dtype of the result and setting.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch

# Products of 2^16 and 1: float32 can represent their sum, but a chain of 13 fraction bits (tensor cores of Ada and
# Hopper, arXiv 2511.10909) cannot.
LARGE = 256.0
SHAPES = ((272, 1040, 304), (256, 4096, 256), (1024, 2048, 16))  # the first shape is the one of the probe gemm.fp8
_NEXT = 40  # a place in a different tensor core instruction than place 0: an instruction adds at most 32 products

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A product of two fp8 matrices, (m, k) times (k, n)."""


def measure(multiply: Multiply, shape: tuple[int, int, int]) -> dict[str, Any]:
    """Return the map of the chains of this product.

    "lost": ranges [first, last] of tried places whose product was lost; "interval": [least, most] products that a chain
    sums before it is added to a float32 sum, None if no product was kept (as with chains longer than half of k) or none
    was lost; "bits": the fraction bits that a chain keeps of a product in the same instruction as the large product,
    and of one in a different instruction; "unexpected": results that are neither 0 nor the small product.
    """
    m, k, _ = shape
    spacing = max(1, -(-(k - 2) // m))
    places = list(range(1, k - 1, spacing))
    results = _results(multiply, shape, [(place, 1.0) for place in places])
    lost = [place for place, result in zip(places, results, strict=True) if result == 0]
    kept = [place for place, result in zip(places, results, strict=True) if result == 1]
    return {
        "shape": list(shape),
        "interval": [max(place for place in lost if place < kept[0]) + 1, kept[0]]
        if kept and lost[:1] == [1]
        else None,
        "lost": _ranges(lost, spacing),
        "unexpected": len(places) - len(lost) - len(kept),
        "bits": {name: _bits(multiply, shape, place) for name, place in (("same", 1), ("another", _NEXT))},
    }


def _bits(multiply: Multiply, shape: tuple[int, int, int], place: int) -> int | None:
    """Return the largest number of fraction bits, relative to the large product, with which a product at `place` was
    kept; None if it was never kept."""
    small = [2.0**-bits * LARGE for bits in range(15)]  # down to 2^-6, the least normal number of e4m3
    results = _results(multiply, shape, [(place, value) for value in small], factor=LARGE)
    kept = [bits for bits, value in enumerate(small) if results[bits] == value * LARGE]
    return max(kept, default=None)


def _results(
    multiply: Multiply, shape: tuple[int, int, int], rows: list[tuple[int, float]], factor: float = 1.0
) -> list[float]:
    """Return one element of each row's result if a row has this value, multiplied by `factor`, at this place."""
    m, k, n = shape
    a, b = torch.zeros(m, k), torch.ones(k, n)
    a[:, 0], a[:, -1] = LARGE, -LARGE
    b[0], b[-1] = LARGE, LARGE
    for row, (place, value) in enumerate(rows):
        a[row, place] = value
        b[place] = factor
    got = multiply(a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn))
    return [float(value) for value in got[: len(rows), 0].tolist()]


def _ranges(places: list[int], spacing: int) -> list[list[int]]:
    found: list[list[int]] = []
    for place in places:
        if found and place - found[-1][1] == spacing:
            found[-1][1] = place
        else:
            found.append([place, place])
    return found


def scaled_mm(out: torch.dtype, fast: bool) -> Multiply:
    """torch's own fp8 product on the GPU, with scales of 1."""
    one = torch.ones((), device="cuda")
    scaled: Any = torch._scaled_mm

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        column_major = b.t().contiguous().cuda().t()  # as _scaled_mm requires
        result: torch.Tensor = scaled(
            a.cuda(), column_major, scale_a=one, scale_b=one, out_dtype=out, use_fast_accum=fast
        )
        return result.float().cpu()

    return multiply


def main() -> None:
    for shape in SHAPES:
        for out in (torch.bfloat16, torch.float32):
            for fast in (False, True):
                measured: dict[str, Any] = {"out": str(out).replace("torch.", ""), "fast": fast}
                try:
                    measured.update(measure(scaled_mm(out, fast), shape))
                except RuntimeError as error:  # the GPU has no such kernel
                    measured["refused"] = str(error).splitlines()[0][:200]
                print(json.dumps(measured), flush=True)


if __name__ == "__main__":
    main()
