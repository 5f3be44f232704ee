"""transfer: data copied between host and GPU, and between GPUs, arrives bit for bit; the speed is reported."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Callable

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.probes.hardware.burn import devices
from envbuild.selftest.probes.hardware.memory import WORD, differing_words, random, words_of

SIZE, SIZE_CPU = 32 << 20, 8 << 20  # bytes
# (number of bytes, offset in the source, offset in the target): odd lengths, and offsets that are not aligned for wide
# accesses (except the last one).
PIECES = ((1, 1, 3), (4099, 7, 1), (65537, 2, 13), ((1 << 20) + 5, 3, 4096))
REPEATS = 3  # number of copies; the fastest one counts


def transfer(context: Context) -> None:
    """transfer: data copied between host and GPU, pinned or not, and between GPUs, arrives without a wrong bit."""
    found = devices(context)
    rates: dict[str, float] = {}
    context.traits["GB/s"] = rates
    for device in found if context.at_least("standard") else found[:1]:
        _there_and_back(context, device, rates)
        _pieces(context, device)
    if context.on_cpu or not context.at_least("standard"):
        return
    if len(found) < 2:
        context.traits["left_out"] = "copies between GPUs: one GPU is visible"
    for source, target in itertools.permutations(found, 2):
        _between(context, source, target, rates)


def _there_and_back(context: Context, device: torch.device, rates: dict[str, float]) -> None:
    """Check each direction separately, because an error of the way back could cancel an error of the way there."""
    words = (SIZE_CPU if context.on_cpu else SIZE) // WORD
    there = words_of(random, 0, words, device)
    for kind in ("pageable",) if context.on_cpu else ("pinned", "pageable"):
        # Host and device each compute the words, so that a wrong copy cannot change the expected data.
        here, back = words_of(random, 0, words, torch.device("cpu")), torch.zeros(words, dtype=torch.int64)
        if kind == "pinned":
            here, back = here.pin_memory(), back.pin_memory()
        arrived = torch.zeros_like(there)
        _copy(context, f"{kind} host to {device}", here, arrived, there, rates)
        _copy(context, f"{device} to {kind} host", there, back, here, rates)


def _between(context: Context, source: torch.device, target: torch.device, rates: dict[str, float]) -> None:
    given, expected = (words_of(random, 0, SIZE // WORD, device) for device in (source, target))
    direct = torch.cuda.can_device_access_peer(source, target)
    context.traits.setdefault("peer_access", {})[f"{source} to {target}"] = direct
    _copy(context, f"{source} to {target}", given, torch.zeros_like(expected), expected, rates)


def _copy(
    context: Context,
    name: str,
    source: torch.Tensor,
    target: torch.Tensor,
    expected: torch.Tensor,
    rates: dict[str, float],
) -> None:
    """Copy and compare with the expected data, which is on the target's device."""
    with context.step(f"{source.numel() * WORD >> 20} MiB from {name}") as step:
        target.copy_(source, non_blocking=True)
    wrong, said = differing_words(target, expected, 0)
    context.figure(f"words from {name}", torch.int64, target.shape, wrong, 0.0, step.seconds)
    if wrong:
        context.fail("mismatch", f"{name}: {said} ({wrong} of {target.numel()} words wrong)")
    seconds = _fastest(lambda: target.copy_(source, non_blocking=True), [source.device, target.device])
    rates[name] = source.numel() * WORD / seconds / 1e9


def _fastest(work: Callable[[], object], used: Sequence[torch.device]) -> float:
    """Return the seconds of the fastest of several calls."""
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        work()
        for device in used:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-9)


def _pieces(context: Context, device: torch.device) -> None:
    """Copy bytes to the device and back, at the offsets in PIECES. The bytes around them must not change there."""
    for count, at, to in PIECES:
        with context.step(f"{count} bytes from {at} to {to} on {device}") as step:
            source = words_of(random, 0, (at + count) // WORD + 1, torch.device("cpu")).view(torch.uint8)
            there = torch.zeros(to + count + 9, dtype=torch.uint8, device=device)
            there[to : to + count].copy_(source[at : at + count])
            back = torch.zeros_like(source)
            back[at : at + count].copy_(there[to : to + count])
        whole = there.cpu()
        around = int(torch.count_nonzero(whole[:to])) + int(torch.count_nonzero(whole[to + count :]))
        arrived = int((whole[to : to + count] != source[at : at + count]).sum())
        returned = int((back[at : at + count] != source[at : at + count]).sum())
        wrong = around + arrived + returned
        context.figure(f"{count} bytes at odd places on {device}", torch.uint8, (count,), wrong, 0.0, step.seconds)
        if wrong:
            said = f"{arrived} of {count} bytes arrived wrong, {returned} came back wrong, {around} around them changed"
            context.fail("mismatch", f"{device}: {count} bytes from {at} to {to}: {said}")
