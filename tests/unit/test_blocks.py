from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator

import pytest

from envbuild.attest.layers import _Unpacked
from envbuild.blocks import Blocks

TEXT = bytes(range(256)) * 40


def plain() -> Blocks:
    return Blocks(iter([TEXT[:3], TEXT[3:5000], TEXT[5000:]]))


def unpacked() -> Blocks:
    return _Unpacked(iter([TEXT[:3], TEXT[3:5000], TEXT[5000:]]))


def inflated() -> Blocks:
    """Two members, as parallel gzip writes them, torn anywhere."""

    def torn(raw: bytes) -> Iterator[bytes]:
        yield from (raw[begin : begin + 7] for begin in range(0, len(raw), 7))

    return _Unpacked(torn(gzip.compress(TEXT[:5000]) + gzip.compress(TEXT[5000:])))


@pytest.mark.parametrize("made", [plain, unpacked, inflated])
def test_all_of_it_comes_however_it_is_read(made: Callable[[], Blocks]) -> None:
    assert made().read() == made().read(-1) == made().read(1 << 20) == TEXT
    stream = made()
    parts = [stream.read(size) for size in (1, 0, 4, 5000)]
    assert [len(part) for part in parts] == [1, 0, 4, 5000]
    assert b"".join([*parts, stream.read(), stream.read(9)]) == TEXT
