"""burn: products under check for as long as the job says, on all GPUs at once: what goes wrong only now and then.

The factors hold {-1, 0, 1}, so each product is exact. It is checked by Freivalds' way: C r = A (B r) for vectors r of
{-1, 1}. One wrong element is always found, several in a row with a chance of one half or more for each vector, and
another vector is taken every time. A (B r) is computed once, on the host, in integers and without a product.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from envbuild.selftest import inputs
from envbuild.selftest.context import Context
from envbuild.selftest.reference import one_thread
from envbuild.selftest.telemetry import DRAIN

SIDE, SIDE_CPU = 16384, 768
SECONDS_CPU = 1
VECTORS = 4
ROWS, ROWS_HOST = 1024, 16  # of a matrix in wider numbers at a time; so few stay in a processor's cache
SHIFTS = 3, 5  # from one row to the next: rows are windows of one sequence, which is made sooner than a whole matrix


@dataclass(frozen=True)
class Problem:
    """Factors (n, n) of int8 and vectors (VECTORS, n), with `expected` (VECTORS, n): A (B r) for each r."""

    a: torch.Tensor
    b: torch.Tensor
    vectors: torch.Tensor
    expected: torch.Tensor


@dataclass(frozen=True)
class Stove:
    """A device with the factors, the vectors and what is expected of them in its memory, ready to multiply."""

    device: torch.device
    a: torch.Tensor
    b: torch.Tensor
    vectors: torch.Tensor
    expected: torch.Tensor

    def burn(self, turn: int) -> torch.Tensor:
        """Multiply once; by how much each row leaves what is expected, (n), as float32 on the device. Does not wait."""
        product = torch.mm(self.a, self.b)
        vector = self.vectors[turn % VECTORS]
        sums = [(rows.to(torch.float32) * vector).sum(dim=1) for rows in _rows(product, ROWS)]
        return torch.cat(sums) - self.expected[turn % VECTORS]


def problem(side: int) -> Problem:
    """Factors from counters, about one in four elements not zero. |C| stays far below 2048, an integer of float16."""
    a, b = (_windows(inputs.ternary((side * (shift + 1),), seed=shift), side, shift) for shift in SHIFTS)
    vectors = torch.stack([inputs.signs(side, seed=70 + index) for index in range(VECTORS)]).to(torch.int32)
    expected = torch.stack([_times(a, _times(b, vector)) for vector in vectors])
    return Problem(a, b, vectors, expected)


def _windows(sequence: torch.Tensor, side: int, shift: int) -> torch.Tensor:
    return sequence.to(torch.int8).as_strided((side, side), (shift, 1)).contiguous()


def _times(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    """matrix (n, n) of int8 times vector (n), in integers, some rows at a time."""
    with one_thread():
        parts = [rows.to(torch.int32).mul_(vector).sum(dim=1, dtype=torch.int32) for rows in _rows(matrix, ROWS_HOST)]
    return torch.cat(parts)


def _rows(matrix: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for start in range(0, matrix.shape[0], count):
        yield matrix[start : start + count]


def burn(context: Context) -> None:
    """burn: exact products of 16384 x 16384 on all GPUs, every one checked, for the seconds the profile gives."""
    side, dtype = (SIDE_CPU, torch.float32) if context.on_cpu else (SIDE, torch.float16)
    seconds = SECONDS_CPU if context.on_cpu else context.job.burn_seconds
    context.step(f"factors {side}x{side} and their sums on the host")
    given = problem(side)
    stoves = [
        Stove(device, *(part.to(device, dtype) for part in (given.a, given.b)), *_floats(given, device))
        for device in devices(context)
    ]
    context.step(f"products {side}x{side}x{side} for {seconds} s on {len(stoves)} devices")
    begin, turn, worst = time.perf_counter(), 0, 0.0
    while worst == 0 and time.perf_counter() - begin < seconds:
        for stove, residue in [(stove, stove.burn(turn)) for stove in stoves]:  # all at work before one is waited for
            wrong = (~(residue == 0)).nonzero().flatten().tolist()  # so that NaN is wrong
            if wrong:
                worst = float(residue[wrong[0]])
                context.fail(
                    "mismatch",
                    f"{stove.device}: product {turn} has {len(wrong)} wrong rows of {side}, the first is {wrong[0]}: "
                    f"{DRAIN}",
                )
        turn += 1
    spent = time.perf_counter() - begin
    context.figure("residue of Freivalds' check", dtype, (side, side, side), abs(worst), 0.0, spent)
    context.traits.update(products=turn, tflops=2 * side**3 * turn * len(stoves) / spent / 1e12)


def devices(context: Context) -> Sequence[torch.device]:
    """All that are visible."""
    if context.on_cpu:
        return [torch.device("cpu")]
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _floats(given: Problem, device: torch.device) -> Iterator[torch.Tensor]:
    """float32 holds them: no sum reaches 2^24."""
    yield from (part.to(device, torch.float32) for part in (given.vectors, given.expected))
