"""memory: how much of the free memory it uses, and the patterns that it writes."""

import pytest

pytest.importorskip("torch")

import torch

from envbuild.selftest.probes.hardware import memory


@pytest.mark.parametrize("free", [2 << 30, 24 << 30, 80 << 30])
def test_temporaries_of_a_comparison_fit_into_memory(free: int) -> None:
    held = memory.chunks_to_write(free) * memory.CHUNK
    assert held + memory.TEMPORARIES * memory.CHUNK <= memory.HELD * free < held + 4 * memory.CHUNK


def test_where_next_to_nothing_is_free_one_chunk_is_tried() -> None:
    assert memory.chunks_to_write(0) == 1


@pytest.mark.parametrize("name", memory.BY_PLACE)
def test_no_two_places_have_the_same_word(name: str) -> None:
    words = memory.words_of(memory.BY_PLACE[name], 1 << 33, 100_000, torch.device("cpu"))
    assert len(words.unique()) == 100_000


def test_a_walking_bit_is_alone_and_comes_to_each_bit_of_each_word() -> None:
    host = torch.device("cpu")
    turns = [words for name, words in memory.REPEATED.items() if name.startswith("walking")]
    seen = torch.stack([memory.words_of(pattern, 0, memory.BITS, host) for pattern in turns])
    bits = [1 << bit if bit < 63 else -(1 << 63) for bit in range(memory.BITS)]
    assert all(sorted(column) == sorted(bits) for column in seen.t().tolist())


def test_chunks_that_repeat_begin_where_the_walking_bit_does() -> None:
    for size in (memory.CHUNK, memory.CHUNK_CPU):
        assert size // memory.WORD % memory.BITS == 0
