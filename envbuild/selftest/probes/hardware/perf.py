"""perf.gemm and perf.memory: the GPU's speed compared with its datasheet.

Only the speed is checked, against the profile's minimum; the computed values are not.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from typing import Callable

import torch

from envbuild.selftest.harness.probe_context import Context, dtype_name
from envbuild.selftest.harness.probe_outcome_and_figures import Figure, Skip

SIDE, SIDE_CPU = 8192, 1024  # rows and columns of the factors
COPIED, COPIED_CPU = 1 << 30, 64 << 20  # bytes; on a GPU far more than its caches hold
SECONDS, SECONDS_CPU = 0.25, 0.1  # duration of one measurement, which is the median of PARTS equal parts
PARTS = 5

# For each product name in the job document: the dtype, whether TF32 is used, and the lowest compute capability.
PRODUCTS = {
    "fp16": (torch.float16, False, (7, 0)),
    "bf16": (torch.bfloat16, False, (8, 0)),
    "tf32": (torch.float32, True, (8, 0)),
    "fp32": (torch.float32, False, (0, 0)),
}
SLOW = "the GPU is throttled, shared or of a different model"


def perf_gemm(context: Context) -> None:
    """perf.gemm: TFLOP/s of large products in each precision, not below the profile's share of the datasheet."""
    _measure(context, "gemm", "TFLOP/s", _products)


def perf_memory(context: Context) -> None:
    """perf.memory: GB/s of a copy within the GPU's memory, not below the profile's share of the datasheet."""
    _measure(context, "memory", "GB/s", _copy)


def _measure(
    context: Context, kind: str, unit: str, measure: Callable[[Context, torch.device], Mapping[str, float]]
) -> None:
    """Measure every device, then compare with the datasheets.

    Without a datasheet, or without a minimum in the profile, the probe is skipped and reports its measurements.
    """
    cards = ["cpu"] if context.on_cpu else [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    names = ["the CPU" if context.on_cpu else torch.cuda.get_device_name(card) for card in cards]
    found = [measure(context, torch.device(card)) for card in cards]
    context.traits[unit] = [dict(figures, card=name) for name, figures in zip(names, found)]
    measured = ", ".join(f"{name} {value:.4g} {unit}" for name, value in found[0].items())
    if kind not in context.job.floors:
        raise Skip(f"no minimum set in the profile; measured: {measured}")
    sheets = [context.job.datasheets.get(name, {}) for name in names]
    judged = [
        reaches_minimum(context, f"{kind} of {card}", unit, figures, sheet)
        for card, figures, sheet in zip(cards, found, sheets)
    ]
    if not any(judged):
        raise Skip(f"no datasheet figure with a source for {names[0]}; measured: {measured}")


def reaches_minimum(
    context: Context, case: str, unit: str, figures: Mapping[str, float], sheet: Mapping[str, float]
) -> bool:
    """Compare the measurements with the datasheet; return False if the datasheet contains none of them.

    In the figure, `error` is the required minimum and `bound` the measured value. The figure is therefore within its
    bound if the GPU is fast enough.
    """
    floor = context.job.floors[case.split()[0]]
    known = [name for name in figures if name in sheet]
    for name in known:
        reached, promised = figures[name], sheet[name]
        dtype = PRODUCTS[name][0] if name in PRODUCTS else torch.uint8
        title = f"{case}, {name}: required {unit} against measured {unit}"
        context.figures.append(Figure(title, dtype_name(dtype), (), floor * promised, reached, None, 0.0))
        if not reached >= floor * promised:
            context.fail(
                "bound",
                f"{case}: {name} {reached:.4g} of {promised:.4g} {unit}, {reached / promised:.0%}; the profile "
                f"requires {floor:.0%}: {SLOW}",
            )
    return bool(known)


def _products(context: Context, device: torch.device) -> dict[str, float]:
    """Return the TFLOP/s of each product, by its name in the job document."""
    side = SIDE_CPU if context.on_cpu else SIDE
    capability = (0, 0) if context.on_cpu else torch.cuda.get_device_capability(device)
    found = {}
    for name, (dtype, tf32, least) in PRODUCTS.items():
        if capability < least:
            continue
        torch.backends.cuda.matmul.allow_tf32 = tf32
        a = (torch.rand((side, side), device=device) - 0.5).to(dtype)
        b = (torch.rand((side, side), device=device) - 0.5).to(dtype)
        out = torch.empty_like(a)
        context.step(f"mm {name} {side}x{side}x{side} on {device}")
        found[name] = 2 * side**3 / seconds(device, functools.partial(torch.mm, a, b, out=out)) / 1e12
    return found


def _copy(context: Context, device: torch.device) -> dict[str, float]:
    """Return the GB/s of a copy, counting both reads and writes, by its name in the job document."""
    size = COPIED_CPU if context.on_cpu else COPIED
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    context.step(f"copy of {size >> 20} MiB on {device}")
    return {"copy": 2 * size / seconds(device, lambda: target.copy_(source)) / 1e9}


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of one call: the median of PARTS parts of many calls each, after a warm-up."""
    length = (SECONDS_CPU if device.type == "cpu" else SECONDS) / PARTS
    _timed(device, work, 1)  # the first call also selects an algorithm, so it is not measured
    warm = 0.0
    while warm < length:
        warm += max(_timed(device, work, 1), 1e-6)
    once = max(_timed(device, work, 2) / 2, 1e-6)
    count = max(1, int(length / once))
    parts = sorted(_timed(device, work, count) / count for _ in range(PARTS))
    return parts[PARTS // 2]


def _timed(device: torch.device, work: Callable[[], object], count: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin
