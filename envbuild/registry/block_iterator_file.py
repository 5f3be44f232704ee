"""A read-once file object over an iterator of byte blocks."""

from __future__ import annotations

import io
from collections.abc import Iterator


class Blocks(io.RawIOBase):
    """A file object over byte blocks. An empty block ends it."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._buffer = bytearray()

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the end; negative: all remaining bytes."""
        while (size < 0 or len(self._buffer) < size) and (block := self._more()):
            self._buffer += block
        end = len(self._buffer) if size < 0 else size
        result = bytes(self._buffer[:end])
        del self._buffer[:end]
        return result

    def _more(self) -> bytes:
        return next(self._blocks, b"")
