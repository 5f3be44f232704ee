"""A layer's blob as the tar that it holds: as it is, or packed with gzip or zstd, in several pieces too."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from envbuild.registry.block_iterator_file import Blocks

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPED = b"\x2a\x4d\x18"  # behind one byte from 0x50 on: a frame of zstd that holds nothing of the content
_SLICE = 1 << 10  # bytes that are unpacked at once: 4 of zstd may stand for 128 KiB, so 32 MiB may come of it
# Bytes of memory that a frame of zstd may ask for: what zstd itself takes unless it is told otherwise.
_WINDOW = 1 << 27


class Unpacked(Blocks):
    """The tar as a file object, hashed as it is read. Reading raises ValueError, EOFError or zlib.error for what cannot
    be unpacked or is cut off. `watch` is told all that is read."""

    def __init__(self, blocks: Iterator[bytes], watch: Callable[[bytes], object] = lambda block: None) -> None:
        super().__init__(_unpacked(blocks))
        self._seen = hashlib.sha256()
        self._watch = watch

    @property
    def digest(self) -> str:
        return f"sha256:{self._seen.hexdigest()}"

    def read(self, size: int = -1) -> bytes:
        result = super().read(size)
        self._seen.update(result)
        self._watch(result)
        return result


def _unpacked(blocks: Iterator[bytes]) -> Iterator[bytes]:
    head = b""
    while len(head) < len(_ZSTD) and (block := next(blocks, b"")):
        head += block
    whole = itertools.chain([head], blocks)
    if head.startswith(_GZIP):
        return _parts(whole, lambda: zlib.decompressobj(wbits=31))
    if head.startswith(_ZSTD) or (head[1:4] == _SKIPPED and head[0] & 0xF0 == 0x50):
        return _frames(whole)
    return whole


def _frames(blocks: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard  # here and in packing alone: few commands need it

    unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    try:
        yield from _parts(blocks, unpacker.decompressobj)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _parts(blocks: Iterator[bytes], begun: Callable[[], Any]) -> Iterator[bytes]:
    """Of members of gzip, as parallel gzip writes several, or frames of zstd. Raises EOFError where the last is cut."""
    part = begun()
    for block in blocks:
        for at in range(0, len(block), _SLICE):
            piece = block[at : at + _SLICE]
            while piece:
                if part.eof:
                    part = begun()
                if found := part.decompress(piece):
                    yield found
                piece = part.unused_data
    if not part.eof:
        raise EOFError("it is cut off")
