from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator

import pytest
import zstandard

from envbuild.registry.byte_block_streams import Blocks
from envbuild.registry.layer_decompressor import Unpacked

TEXT = bytes(range(256)) * 40


def plain() -> Blocks:
    return Blocks(iter([TEXT[:3], TEXT[3:5000], TEXT[5000:]]))


def unpacked() -> Blocks:
    return Unpacked(iter([TEXT[:3], TEXT[3:5000], TEXT[5000:]]))


def torn(raw: bytes, size: int = 7) -> Iterator[bytes]:
    yield from (raw[begin : begin + size] for begin in range(0, len(raw), size))


def inflated() -> Blocks:
    """Return the data as two gzip members, as parallel gzip writes them, split into blocks anywhere."""
    return Unpacked(torn(gzip.compress(TEXT[:5000]) + gzip.compress(TEXT[5000:])))


SKIPPED = b"\x5a\x2a\x4d\x18\x03\0\0\0abc"


def framed() -> Blocks:
    """Return the data as zstd frames with skippable frames between them, split into blocks anywhere."""
    return Unpacked(torn(SKIPPED + zstandard.compress(TEXT[:5000]) + zstandard.compress(TEXT[5000:]) + SKIPPED, 3))


@pytest.mark.parametrize("made", [plain, unpacked, inflated, framed])
def test_the_whole_content_comes_with_every_way_of_reading(made: Callable[[], Blocks]) -> None:
    assert made().read() == made().read(-1) == made().read(1 << 20) == TEXT
    stream = made()
    parts = [stream.read(size) for size in (1, 0, 4, 5000)]
    assert [len(part) for part in parts] == [1, 0, 4, 5000]
    assert b"".join([*parts, stream.read(), stream.read(9)]) == TEXT


@pytest.mark.parametrize("packed", [gzip.compress(TEXT), zstandard.compress(TEXT)], ids=["gzip", "zstd"])
def test_truncated_data_is_not_the_end(packed: bytes) -> None:
    """All of the content was there; only the checksum of the last member or frame was missing."""
    for whole in (packed, packed + packed):
        assert Unpacked(torn(whole)).read() in (TEXT, TEXT + TEXT)
        with pytest.raises(EOFError):
            Unpacked(torn(whole[:-1])).read()


def test_a_frame_that_claims_a_large_size_gets_no_memory() -> None:
    """The frame claims a window of 1 GiB, or a content of a TiB; every zstd can read windows up to 128 MiB."""
    window, content = b"\x00\xa0", b"\xe0" + (1 << 40).to_bytes(8, "little")
    for head in (window, content):
        with pytest.raises(ValueError, match="too much memory"):
            Unpacked(iter([b"\x28\xb5\x2f\xfd" + head + b"\x01\0\0"])).read()
    assert Unpacked(iter([b"\x28\xb5\x2f\xfd\x00\x88\x01\0\0"])).read() == b""


def test_a_bomb_is_unpacked_in_pieces() -> None:
    """A GiB in 32 KiB of zstd: reading a few bytes of it must use at most 32 MiB."""
    maker = zstandard.ZstdCompressor().compressobj()
    bomb = b"".join(maker.compress(bytes(1 << 24)) for _ in range(64)) + maker.flush()
    stream = Unpacked(iter([bomb]))
    assert stream.read(3) == b"\0\0\0"
    assert len(bomb) < 1 << 16 and len(stream._buffer) <= 32 << 20
