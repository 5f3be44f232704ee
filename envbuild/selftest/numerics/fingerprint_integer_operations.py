"""Operations on integers, some stored in floating-point dtypes. Each has exactly one correct result, which does not
depend on the device, the dtype or the order of summation."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Callable

import torch
import torch.nn.functional as F

from envbuild.selftest.harness.probe_context import short_name
from envbuild.selftest.numerics import hashed_inputs
from envbuild.selftest.numerics.reference_products import product

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ROWS, INNER, COLUMNS = 67, 129, 83  # sums of 129 products of {-1, 0, 1} are below 2^8, so bfloat16 represents them
COUNT, KEYS, WIDE = 2048, 97, 16
MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class IntegerOp:
    """An operation for which `run(*given)` must equal `expected`.

    `expected` is computed on the host, with Python integers or reference_products.product.
    """

    name: str
    run: Callable[..., torch.Tensor]
    given: tuple[torch.Tensor, ...]
    expected: torch.Tensor


def integer_operations() -> tuple[IntegerOp, ...]:
    """Return linear layers on {-1, 0, 1} in each dtype, and operations that add, sort, look up and shift integers."""
    keys, values = hashed_inputs.hashes(COUNT, 24) % KEYS, hashed_inputs.hashes(COUNT, 25)
    table = hashed_inputs.ternary((KEYS, WIDE), 26)
    listed, numbers, rows = keys.tolist(), values.tolist(), table.tolist()
    order = sorted(range(COUNT), key=listed.__getitem__)
    sums = [sum(value for key, value in zip(listed, numbers) if key == wanted) for wanted in range(KEYS)]
    mixed = [(value ^ (value >> 7)) * 0x2545F491 & MASK for value in numbers]
    return (
        *map(_linear, DTYPES),
        IntegerOp("cumsum", lambda x: torch.cumsum(x, dim=0), (values,), torch.tensor(list(accumulate(numbers)))),
        IntegerOp("sort", lambda x: torch.sort(x, stable=True)[1], (keys,), torch.tensor(order)),
        IntegerOp("embedding", F.embedding, (keys, table), torch.tensor([rows[key] for key in listed])),
        IntegerOp("index_add", _sums, (keys, values), torch.tensor(sums)),
        IntegerOp("bits", lambda x: (x ^ (x >> 7)) * 0x2545F491 & MASK, (values,), torch.tensor(mixed)),
    )


def _linear(dtype: torch.dtype) -> IntegerOp:
    shapes = ((ROWS, INNER), (COLUMNS, INNER), (COLUMNS,))
    x, w, b = (hashed_inputs.ternary(shape, seed) for seed, shape in enumerate(shapes, start=21))
    expected = product(x.to(torch.int16), w.t().to(torch.int16)) + b.to(torch.int16)
    return IntegerOp(f"linear.{short_name(dtype)}", F.linear, tuple(part.to(dtype) for part in (x, w, b)), expected)


def _sums(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(KEYS, dtype=values.dtype, device=values.device).index_add(0, keys, values)
