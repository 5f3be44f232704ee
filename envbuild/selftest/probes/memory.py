"""memory: what is written to the device's memory is read again, from nearly all of it."""

from __future__ import annotations

import time

import torch

from envbuild.selftest.context import Context
from envbuild.selftest.probes.burn import devices
from envbuild.selftest.telemetry import DRAIN

HELD = 0.9  # of the free memory
CHUNK, CHUNK_CPU, CHUNKS_CPU = 256 << 20, 8 << 20, 4  # bytes
TEMPORARIES = 3  # chunks, of room for what a comparison makes
WORD = 8  # bytes

# Every bit both ways, beside equal and unequal neighbours; and each word by its place, which shows cells that answer to
# several addresses. 0x9E3779B97F4A7C15 is odd, so no two places have the same word.
STEP = 0x9E3779B97F4A7C15 - (1 << 64)
CONSTANT = {"zeros": 0, "ones": -1, "0x55": 0x5555555555555555, "0xAA": -0x5555555555555556}
PLACES = ("places", "places inverted")


def memory(context: Context) -> None:
    """memory: patterns written to 90% of each GPU's free memory come back, every bit both ways and by its place."""
    for device in devices(context):
        count = CHUNKS_CPU if context.on_cpu else chunks_within(torch.cuda.mem_get_info(device)[0])
        words = (CHUNK_CPU if context.on_cpu else CHUNK) // WORD
        chunks = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(count)]
        context.traits[str(device)] = {"bytes": count * words * WORD}
        for name in (*CONSTANT, *PLACES):
            context.step(f"{name} in {count * words * WORD >> 20} MiB of {device}")
            begin = time.perf_counter()
            wrong = _walk(context, name, chunks)
            seconds = time.perf_counter() - begin
            context.figure(f"words of {name} on {device}", torch.int64, (count * words,), wrong, 0.0, seconds)
        del chunks


def chunks_within(free: int) -> int:
    """How many are written in as many free bytes, while there is room for what a comparison makes on the way."""
    return max(1, (int(HELD * free) - TEMPORARIES * CHUNK) // CHUNK)


def _walk(context: Context, name: str, chunks: list[torch.Tensor]) -> int:
    """Write all, then read all: how many words are wrong."""
    for index, chunk in enumerate(chunks):
        chunk.copy_(_places(name, index, chunk)) if name in PLACES else chunk.fill_(CONSTANT[name])
    total = 0
    for index, chunk in enumerate(chunks):
        expected = _places(name, index, chunk) if name in PLACES else CONSTANT[name]
        differs = chunk != expected
        count = int(differs.sum())
        if count and not total:
            at = int(differs.to(torch.uint8).argmax())  # nonzero() could take more memory than is left
            wanted = int(expected[at]) if isinstance(expected, torch.Tensor) else expected
            context.fail(
                "mismatch",
                f"{chunk.device}: {name}: word {index * chunk.numel() + at} is {_hex(int(chunk[at]))}, should be "
                f"{_hex(wanted)}: {DRAIN}",
            )
        total += count
    return total


def _places(name: str, index: int, chunk: torch.Tensor) -> torch.Tensor:
    """Each word by its place among all chunks, modulo 2^64."""
    first = index * chunk.numel()
    values = torch.arange(first, first + chunk.numel(), device=chunk.device).mul_(STEP)
    return values.bitwise_not_() if name == PLACES[1] else values


def _hex(word: int) -> str:
    return f"{word % (1 << 64):#018x}"
