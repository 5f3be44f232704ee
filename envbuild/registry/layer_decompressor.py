"""Decompresses a layer's blob to a tar. The blob may be uncompressed, or gzip or zstd with several members."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from envbuild.registry.byte_block_streams import Blocks

_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPED = b"\x2a\x4d\x18"  # after a byte from 0x50 to 0x5f: a zstd frame without content
_SLICE = 1 << 10  # bytes per decompression step: 4 bytes of zstd may expand to 128 KiB, so a step yields up to 32 MiB
# Largest window of a zstd frame, in bytes: zstd's own default limit.
_WINDOW = 1 << 27


class Unpacked(Blocks):
    """The tar as a file object, hashed while it is read. Reading raises ValueError, EOFError or zlib.error if the blob
    is invalid or truncated. `watch` gets every part of the tar that is read."""

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
    import zstandard  # imported only here and where layers are compressed: few commands need it

    unpacker = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    try:
        yield from _parts(blocks, unpacker.decompressobj)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


def _parts(blocks: Iterator[bytes], begun: Callable[[], Any]) -> Iterator[bytes]:
    """Decompress all gzip members (parallel gzip writes several) or zstd frames. Raises EOFError if the last is
    truncated."""
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
