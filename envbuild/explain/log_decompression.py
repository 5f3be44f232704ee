"""Decompresses logs compressed with gzip, and detects files that are not text. The input may be hostile."""

from __future__ import annotations

import codecs
import zlib
from typing import BinaryIO

UNPACKED = 2 << 30
"""Limit on the decompressed size of a log, in bytes."""

_BLOCK = 1 << 14  # if a block is damaged, the data before the damage in this block is lost too
_MARK, _OF_GZIP = b"\x1f\x8b", 31
# _ODD: control characters that are rare in text; backspaces are not among them, because progress bars contain them.
# _FEW: the largest share of _ODD in text; of random bytes, 9% are in _ODD. _SOME: the smallest share of bytes other
# than NUL in text; in UTF-16, every second byte of an ASCII text is NUL.
_ODD = bytes({*range(32), 127} - {0, *b"\a\b\t\n\v\f\r\x1b"})
_FEW, _SOME = 0.04, 0.3
_KINDS = {
    b"\x7fELF": "a program, a library or a core dump; gdb -batch -ex bt PROGRAM CORE prints the backtrace of one",
    b"PK\x03\x04": "a zip archive; unpack it first",
    b"\xfd7zXZ": "packed with xz; pipe it: xz -dc FILE | envbuild explain -",
    b"BZh": "packed with bzip2; pipe it: bzip2 -dc FILE | envbuild explain -",
    b"\x28\xb5\x2f\xfd": "packed with zstd; pipe it: zstd -dc FILE | envbuild explain -",
    b"%PDF": "a PDF; copy its text",
    b"\x89PNG": "a picture; copy its text",
}


class LogSource:
    """A stream that is not compressed. `fault`: why reading stopped before the end of the stream; else None."""

    fault: str | None = None

    def __init__(self, begin: bytes, stream: BinaryIO) -> None:
        self._begin, self._stream = begin, stream

    def read(self, size: int) -> bytes:
        """Returns at most `size` bytes; no bytes at the end of the stream."""
        piece, self._begin = self._begin[:size], self._begin[size:]
        return piece + self._stream.read(size - len(piece)) if len(piece) < size else piece


class _Unpacked(LogSource):
    """A gzip stream, which is decompressed as far as possible, since a file that is incomplete or still being written
    has no end marker."""

    def __init__(self, begin: bytes, stream: BinaryIO) -> None:
        super().__init__(begin, stream)
        self._packed, self._total, self._open = b"", 0, False
        self._zip = zlib.decompressobj(_OF_GZIP)

    def read(self, size: int) -> bytes:
        parts: list[bytes] = []
        wanted = min(size, UNPACKED - self._total)
        while wanted and self.fault is None and (piece := self._piece(wanted)):
            parts.append(piece)
            wanted -= len(piece)
            self._total += len(piece)
        if self._total >= UNPACKED:
            self.fault = f"it unpacks to more than {UNPACKED >> 30} GiB: the rest was not read"
        return b"".join(parts)

    def _piece(self, size: int) -> bytes:
        while True:
            try:
                piece = self._zip.decompress(self._packed, size)
            except zlib.error:
                self.fault = "its compressed data is damaged: the rest was not read"
                return b""
            self._open = (self._open or bool(self._packed)) and not self._zip.eof
            self._packed = self._zip.unconsumed_tail or self._zip.unused_data
            if self._zip.eof:  # concatenated gzip files are one log
                self._zip = zlib.decompressobj(_OF_GZIP)
            if piece:
                return piece
            if not self._packed:
                self._packed = super().read(_BLOCK)
                if not self._packed:
                    self.fault = (
                        "its compressed data is incomplete: it was cut off, or is still being written"
                        if self._open
                        else None
                    )
                    return b""


def open_log(stream: BinaryIO) -> LogSource:
    """Returns a reader of the stream. The stream is decompressed if its first bytes are those of gzip; the file's name
    does not matter."""
    begin = stream.read(len(_MARK))
    return (_Unpacked if begin == _MARK else LogSource)(begin, stream)


def foreign(begin: bytes) -> str | None:
    """Returns the kind of a file that is not text, from its first bytes or from control characters that logs do not
    contain. Returns None for text."""
    known = next((kind for mark, kind in _KINDS.items() if begin.startswith(mark)), None)
    if known or begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return known
    text = begin.replace(b"\0", b"")
    odd = len(text) - len(text.translate(None, _ODD))
    hollow = len(begin) > 1 and len(text) < _SOME * len(begin)
    return "binary data, not a log" if hollow or odd > _FEW * len(text) else None
