"""memory: data written to nearly all of the device's memory is read back unchanged.

Each pattern is written to all of the memory before any of it is read. Each pattern is also written inverted, so that
constants set every bit to 0 and to 1. Addresses and random words differ between positions, which detects cells that
respond to several addresses. A walking bit differs from all other bits of its word, which detects cells that take the
value of their neighbours. These are the patterns of cuda_memtest and of DCGM's memory test.
"""

from __future__ import annotations

import functools
import time
from typing import Callable

import torch

from envbuild.selftest.harness.probe_context import Context
from envbuild.selftest.nvidia.gpu_telemetry import DRAIN
from envbuild.selftest.probes.hardware.burn import devices

HELD = 0.9  # share of the free memory that is used
CHUNK, CHUNK_CPU, CHUNKS_CPU = 256 << 20, 256 << 10, 4  # bytes
TEMPORARIES = 3  # number of chunks reserved for temporary tensors of patterns and comparisons
WORD = 8  # bytes
BITS = 8 * WORD

# Multiplying by odd numbers gives every position a different word. The numbers are 2^64 divided by the golden ratio,
# and a constant of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)
MIXER = 0xBF58476D1CE4E5B9 - (1 << 64)

Pattern = Callable[[torch.Tensor], torch.Tensor]  # maps positions (int64, may be overwritten) to words


def constant(places: torch.Tensor, word: int) -> torch.Tensor:
    return places.fill_(word)


def address_words(places: torch.Tensor) -> torch.Tensor:
    return places


def random(places: torch.Tensor) -> torch.Tensor:
    """Return a different word for every position; about half of its bits differ from those of the next word."""
    words = places.mul_(STRIDE)
    return words.bitwise_xor_((words >> 29).bitwise_and_((1 << BITS - 29) - 1)).mul_(MIXER)


def walking(places: torch.Tensor, turn: int) -> torch.Tensor:
    """Return words with a single set bit; over 64 turns the bit is at each position of each word."""
    return torch.bitwise_left_shift(torch.ones_like(places), places.add_(turn).remainder_(BITS))


def inverse(places: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    return pattern(places).bitwise_not_()


BY_PLACE: dict[str, Pattern] = {"addresses": address_words, "random": random}
REPEATED: dict[str, Pattern] = {  # with these patterns, every chunk contains the same words
    "zeros": functools.partial(constant, word=0),
    "0x55": functools.partial(constant, word=0x5555555555555555),
    **{f"walking bit {turn}": functools.partial(walking, turn=turn) for turn in range(BITS)},
}


def memory(context: Context) -> None:
    """memory: 90% of each GPU's free memory keeps walking bits, addresses, random words and their inverses."""
    for device in devices(context):
        count = CHUNKS_CPU if context.on_cpu else chunks_to_write(torch.cuda.mem_get_info(device)[0])
        words = (CHUNK_CPU if context.on_cpu else CHUNK) // WORD
        chunks = [torch.empty(words, dtype=torch.int64, device=device) for _ in range(count)]
        context.traits[str(device)] = {"bytes": count * words * WORD}
        for name, pattern in {**REPEATED, **BY_PLACE}.items():
            for title, words_of_chunk in (
                (name, pattern),
                (f"{name}, inverted", functools.partial(inverse, pattern=pattern)),
            ):
                context.step(f"{title} in {count * words * WORD >> 20} MiB of {device}")
                begin = time.perf_counter()
                wrong = _walk(context, title, words_of_chunk, chunks, name in REPEATED)
                seconds = time.perf_counter() - begin
                context.figure(f"words of {title} on {device}", torch.int64, (count * words,), wrong, 0.0, seconds)
        del chunks


def chunks_to_write(free: int) -> int:
    """Return the number of chunks, at least 1, that fit into the share HELD of `free` bytes together with the temporary
    tensors of a comparison."""
    return max(1, (int(HELD * free) - TEMPORARIES * CHUNK) // CHUNK)


def words_of(pattern: Pattern, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` words of a pattern, for the positions from `first` on."""
    return pattern(torch.arange(first, first + count, device=device))


def differing_words(got: torch.Tensor, expected: torch.Tensor, first: int) -> tuple[int, str]:
    """Count the differing words and describe the first of them. `first`: the position of the first word of `got`."""
    differs = got != expected
    count = int(differs.sum())
    if not count:
        return 0, ""
    at = int(differs.to(torch.uint8).argmax())  # nonzero() could take more memory than is left
    return count, f"word {first + at} is {_hex(int(got[at]))}, should be {_hex(int(expected[at]))}"


def _walk(context: Context, name: str, pattern: Pattern, chunks: list[torch.Tensor], repeated: bool) -> int:
    """Write all chunks, then read all of them; return the number of wrong words."""
    words, device = chunks[0].numel(), chunks[0].device
    same = words_of(pattern, 0, words, device) if repeated else None
    total = 0
    for write in (True, False):
        for index, chunk in enumerate(chunks):
            expected = same if same is not None else words_of(pattern, index * words, words, device)
            if write:
                chunk.copy_(expected)
                continue
            count, said = differing_words(chunk, expected, index * words)
            if count and not total:
                context.fail("mismatch", f"{device}: {name}: {said}: {DRAIN}")
            total += count
    return total


def _hex(word: int) -> str:
    return f"{word % (1 << 64):#018x}"
