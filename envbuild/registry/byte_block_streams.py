"""Adapters for iterators of byte blocks: a file object, a request body of known size, and blocks of equal size."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator, Iterable, Iterator


class Blocks(io.RawIOBase):
    """A file object that reads from byte blocks. An empty block ends the file."""

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


class SizedStream:
    """Blocks of a known total size, for the body of a request. Each iteration calls `blocks`, so that a request can be
    sent again. Close it after use."""

    def __init__(self, blocks: Callable[[], Generator[bytes, None, None]], size: int) -> None:
        self._blocks, self._size = blocks, size
        self._open: Generator[bytes, None, None] | None = None

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[bytes]:
        self.close()
        self._open = self._blocks()
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


def of_equal_size(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the content of the blocks in parts of `size` bytes; only the last one may be smaller."""
    rest = bytearray()
    for block in blocks:
        rest += block
        while len(rest) >= size:
            yield bytes(rest[:size])
            del rest[:size]
    if rest:
        yield bytes(rest)
