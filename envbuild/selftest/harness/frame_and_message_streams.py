"""Formats of the self-test's two streams: frames, which the self-test writes to its output, and messages, which a
probe's process sends to the harness (the parent process of all probes).

A frame is one line: `ENVBUILD <nonce> <seq> <crc32 of the JSON> <JSON>`. The number seq counts the frames from 0. The
reader can detect a frame that is missing, duplicated, truncated or from a different run. A message consists of a kind,
a length, a checksum and a payload.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from typing import Any

MARK = "ENVBUILD"

ANNOUNCE = b"A"  # the name of the step that begins, as text
ENVIRONMENT = b"E"  # the environment document as far as it is known, as JSON
FINGERPRINT = b"F"  # the fingerprint document, as JSON
NOTE = b"N"  # a fault, as text; sent at once, because the process may die before it can send its result
RESULT = b"R"  # the probe's result, as JSON; the last message
_KINDS = (ANNOUNCE, ENVIRONMENT, FINGERPRINT, NOTE, RESULT)
DOCUMENTS = {ENVIRONMENT: "environment", FINGERPRINT: "fingerprint"}  # kind of a message -> kind of its frame
_HEADER = struct.Struct(">cII")
_MESSAGE_LIMIT = 32 << 20

Message = tuple[bytes, bytes]


def encode_document(document: Mapping[str, Any]) -> bytes:
    """Encode a document as strict JSON in one line of ASCII. Raises ValueError if it contains NaN or infinity."""
    return json.dumps(document, allow_nan=False, separators=(",", ":")).encode("ascii")


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class FrameWriter:
    """Writes documents as the numbered frames of one run."""

    def __init__(self, fd: int, nonce: str) -> None:
        self._fd = fd
        self._nonce = nonce
        self._seq = 0

    def __call__(self, document: Mapping[str, Any]) -> None:
        body = encode_document(document)
        head = f"{MARK} {self._nonce} {self._seq} {zlib.crc32(body):08x} "
        write_all(self._fd, head.encode("ascii") + body + b"\n")
        self._seq += 1


def pack(kind: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(kind, len(payload), zlib.crc32(payload)) + payload


class Unpacker:
    """Splits a byte stream into messages. Everything from the first invalid message on is discarded."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._broken = False

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        found: list[Message] = []
        while not self._broken and len(self._buffer) >= _HEADER.size:
            kind, length, crc = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + length
            if kind not in _KINDS or length > _MESSAGE_LIMIT:
                self._broken = True
            elif len(self._buffer) < end:
                break
            else:
                payload = bytes(self._buffer[_HEADER.size : end])
                self._broken = zlib.crc32(payload) != crc
                if not self._broken:
                    found.append((kind, payload))
                    del self._buffer[:end]
        if self._broken:
            self._buffer = self._buffer[:1]  # bytes after an invalid message are not trusted; one is kept for `cut`
        return found

    @property
    def cut(self) -> bool:
        """Whether the stream ends with an incomplete or invalid message."""
        return bool(self._buffer)
