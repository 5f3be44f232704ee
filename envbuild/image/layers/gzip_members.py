"""Writes gzip files of many members. Pure: the same content gives the same bytes with the same version of zlib.

Every reader of gzip accepts several members. All members but the last have the same uncompressed size. They are
compressed in parallel, and the bytes do not depend on the number of processors.
"""

from __future__ import annotations

import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from envbuild.registry.byte_block_streams import of_equal_size

HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
"""The header of a member: deflate, no name, no time, unknown system."""
_LEVEL = 1
"""For the first 64 MB of a Debian base (AMD EPYC) this takes 0.3 of the time of level 6, and gives 8% more bytes. isal
takes 0.1 of the time, but does not promise the same bytes on every processor."""
COMPRESSOR = f"zlib {zlib.ZLIB_RUNTIME_VERSION}, level {_LEVEL}"
"""Another version or level gives other bytes, so it is part of the key of each layer that is compressed here."""
MEMBER_BYTES = 4 << 20
_MEMORY_LEVEL = 8  # zlib's default
_THREADS = 8  # at most 2 * 8 members wait in memory


def trailer(crc: int, size: int) -> bytes:
    """Return the end of a member. `crc`, `size`: those of its content, the size in bytes."""
    return struct.pack("<II", crc, size & 0xFFFFFFFF)


def compress(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the members of a gzip file with the content of the blocks. How the content is divided into blocks does not
    matter."""
    waiting: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for content in of_equal_size(blocks, MEMBER_BYTES):
            waiting.append(pool.submit(_member, content))
            if len(waiting) == 2 * _THREADS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _member(content: bytes) -> bytes:
    compressor = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY_LEVEL, zlib.Z_DEFAULT_STRATEGY)
    packed = compressor.compress(content) + compressor.flush()
    return HEADER + packed + trailer(zlib.crc32(content), len(content))
