"""memory: how much of the free memory it takes."""

import pytest

pytest.importorskip("torch")

from envbuild.selftest.probes import memory


@pytest.mark.parametrize("free", [2 << 30, 24 << 30, 80 << 30])
def test_what_a_comparison_makes_has_room(free: int) -> None:
    held = memory.chunks_within(free) * memory.CHUNK
    assert held + memory.TEMPORARIES * memory.CHUNK <= memory.HELD * free < held + 4 * memory.CHUNK


def test_where_next_to_nothing_is_free_one_chunk_is_tried() -> None:
    assert memory.chunks_within(0) == 1
