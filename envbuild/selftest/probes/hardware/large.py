"""large: tensors of more than 2^31 elements, whose indices exceed 32-bit integers, are computed to their last element.

The tensors use one byte per element to save memory. The values repeat with a prime period, so a wrong index that is off
by a power of two reads a different value.
"""

from __future__ import annotations

import torch

from envbuild.selftest.harness import host_memory
from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.harness.probe_outcome_and_figures import Skip
from envbuild.selftest.numerics import hashed_inputs

ROWS, COLUMNS = 65599, 32771  # 2149744829 elements: 2^31 + 2261181
PERIOD = 251  # a prime: the period of the values
COPIES = 3  # memory that must be free, as a multiple of the tensor's size
PART = PERIOD << 14  # elements compared at a time
LOOKUPS = 1000


def large(context: Context) -> None:
    """large: sums, copies, gathers and writes over more than 2^31 elements reach every one of them."""
    if context.on_cpu and not context.at_least("full"):
        raise Skip("on the CPU it runs at level full only, because it takes 6 GB and some seconds")
    needed, free = COPIES * ROWS * COLUMNS, available(context)
    if free < needed:
        raise Skip(f"needs {needed >> 20} MiB of memory, {free >> 20} MiB are free")
    device, count = context.device, ROWS * COLUMNS
    with context.step(f"x of {count} bytes") as step:
        x = _pattern(count, device)
    _report(context, "x", step.seconds, _wrong(x, 0))
    with context.step("x + 1") as step:
        after = x + 1
    _report(context, "x + 1", step.seconds, _wrong(after, 1))
    del after
    # the dtype is uint8, which sums modulo 256: for a wider dtype torch would first copy x into it
    with context.step("sums of columns") as step:
        sums = x.view(ROWS, COLUMNS).sum(dim=0, dtype=torch.uint8)
    _report(context, "sums of columns", step.seconds, int((sums.cpu() != column_sums()).sum()))
    where = probed_indices(count).to(device)
    expected = (where % PERIOD).to(torch.uint8)
    with context.step("gather of single elements") as step:
        taken = x[where]
    _report(context, "gather of single elements", step.seconds, int((taken != expected).sum()))
    with context.step("gather of rows") as step:
        rows = where // COLUMNS
        lines = x.view(ROWS, COLUMNS)[rows]
    starts = rows[:, None] * COLUMNS + torch.arange(COLUMNS, device=device)
    _report(context, "gather of rows", step.seconds, int((lines != (starts % PERIOD).to(torch.uint8)).sum()))
    with context.step("scatter") as step:
        x[where] = PERIOD
    written = sum(int((part == PERIOD).sum()) for part in torch.split(x, PART))
    _report(context, "scatter", step.seconds, abs(written - len(where)) + int((x[where] != PERIOD).sum()))
    with context.step("max") as step:
        x[-1] = PERIOD + 1
        at = int(x.argmax())
    _report(context, "index of the maximum", step.seconds, abs(at - (count - 1)))


def available(context: Context) -> int:
    """Return the free memory in bytes: of the GPU, or of the host if the CPU is tested."""
    if not context.on_cpu:
        return int(torch.cuda.mem_get_info(context.device)[0])
    return host_memory.available_bytes()


def column_sums() -> torch.Tensor:
    """Return the sum of each column: (row COLUMNS + column) modulo 251, summed over all rows modulo 256. (COLUMNS),
    uint8, on the host."""
    rows = torch.bincount(torch.arange(ROWS) * COLUMNS % PERIOD, minlength=PERIOD)
    residues = torch.arange(PERIOD)
    sums = torch.stack([(rows * ((residues + column) % PERIOD)).sum() for column in range(PERIOD)]) % 256
    return sums[torch.arange(COLUMNS) % PERIOD].to(torch.uint8)


def probed_indices(count: int) -> torch.Tensor:
    """Return distinct indices around 2^31 (if the tensor is that long), at both ends, and spread over the whole tensor;
    int64 on the host."""
    edges = torch.arange(-3, 4)
    chosen = torch.cat((edges % count, (1 << 31) + edges, (hashed_inputs.hashes(LOOKUPS, 801) >> 1) * count >> 31))
    different: torch.Tensor = torch.unique(chosen[chosen < count])
    return different


def _pattern(count: int, device: torch.device) -> torch.Tensor:
    """Return a tensor whose elements are their index modulo 251."""
    once = torch.arange(PERIOD, dtype=torch.uint8, device=device)
    return once.repeat(-(-count // PERIOD))[:count]


def _wrong(x: torch.Tensor, more: int) -> int:
    """Return the number of elements that differ from (their index modulo 251) + `more`."""
    expected = _pattern(PART, x.device) + more
    return sum(int((part != expected[: len(part)]).sum()) for part in torch.split(x, PART))


def _report(context: Context, case: str, seconds: float, wrong: int) -> None:
    context.figure(f"{case}: wrong", torch.uint8, (ROWS, COLUMNS), wrong, 0.0, seconds)
    if wrong:
        context.fail("mismatch", f"{case} over {ROWS * COLUMNS} elements: error {wrong}, should be 0")
