"""Archives that are almost valid: layers of images, and bundles."""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Iterable

import zstandard
from hypothesis import strategies as st

from fuzz.strategies import BYTES, TEXTS, Draw, spoiled

_BLOCK = tarfile.BLOCKSIZE
_TYPES = tuple(bytes([kind]) for kind in b"01234567LKxgSVMDN\0\xff")
_PAX = (
    "path",
    "size",
    "mtime",
    "uid",
    "linkpath",
    "hdrcharset",
    "comment",
    "GNU.sparse.map",
    "GNU.sparse.size",
    "GNU.sparse.numblocks",
    "GNU.sparse.offset",
    "GNU.sparse.major",
    "GNU.sparse.minor",
    "GNU.sparse.name",
    "GNU.sparse.realsize",
    "SCHILY.xattr.x",
)
_VALUES = ("0", "1", "-1", "1,2", "0,1,2", "x", "9" * 30, "1e99", "BINARY", "opt/venv/x", *TEXTS[:30])
_NAMES = (
    "opt/venv/lib/python3.11/site-packages/torch/x.py",
    "./opt/venv/.wh.lib",
    "opt/.wh..wh..opq",
    "etc/ld.so.preload",
    "usr/lib/libcublas.so.12",
    "../../x",
    "/",
    "",
    "x" * 150,
    "x/" * 90 + "x",
    "opt/venv/lib/python3.11/site-packages/torch-1.0.dist-info/METADATA",
)
_PIECES = (
    b"\x80" + b"\xff" * 11,
    b"\xff" * 12,
    b"-0000001",
    b"77777777777\0",
    b"ustar\x0000",
    b"ustar  \0",
    b"8 size=x\n",
    b"0 x=y\n",
    b"22 GNU.sparse.major=1\n",
    b"\x80" + b"\0" * 7 + b"\xff" * 4,
    *BYTES,
)


def summed(raw: bytes) -> bytes:
    """Correct the checksum of each tar header, so that readers accept changed headers."""
    whole = bytearray(raw)
    for at in range(0, len(whole) - _BLOCK + 1, _BLOCK):
        head = whole[at : at + _BLOCK]
        if head[257:262] == b"ustar":
            head[148:156] = b" " * 8
            whole[at + 148 : at + 156] = f"{sum(head):06o}\0 ".encode()
    return bytes(whole)


@st.composite
def tars(draw: Draw, members: tuple[tuple[str, bytes], ...] = ()) -> bytes:
    """Draw these members and a few odd ones; now and then headers, or any bytes, are changed."""
    buffer = io.BytesIO()
    form = draw(st.sampled_from((tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)))
    odd = draw(st.lists(st.tuples(st.sampled_from((*_NAMES, *TEXTS)), st.binary(max_size=20)), max_size=3))
    with tarfile.open(fileobj=buffer, mode="w", format=form, encoding="utf-8", errors="replace") as archive:
        for name, content in (*members, *odd):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            if (name, content) in odd:
                info.type = draw(st.sampled_from((tarfile.REGTYPE, *_TYPES)))
                info.linkname = draw(st.sampled_from(_NAMES))
                if form == tarfile.PAX_FORMAT:
                    info.pax_headers = draw(
                        st.dictionaries(st.sampled_from(_PAX), st.sampled_from(_VALUES), max_size=3)
                    )
            archive.addfile(info, io.BytesIO(content))
    raw = buffer.getvalue()
    if draw(st.booleans()):
        raw = draw(spoiled(st.just(raw[: 16 * _BLOCK]), _PIECES))
    return summed(raw)


_FILES = tuple((n, tarfile.REGTYPE) for n in _NAMES if n not in ("", "/", "../../x") and ".wh." not in n)
_BESIDE = (
    ("opt", tarfile.DIRTYPE),
    ("opt/venv/lib", tarfile.SYMTYPE),
    ("x", tarfile.DIRTYPE),
    ("etc/hard", tarfile.LNKTYPE),
    ("opt/venv/.wh.lib", tarfile.REGTYPE),
    ("etc/ld.so.preload", tarfile.SYMTYPE),  # a second time
)


def _listed(files: Iterable[tuple[str, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, kind in files:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "usr" if kind in (tarfile.SYMTYPE, tarfile.LNKTYPE) else ""
            content = name[:9].encode() if kind == tarfile.REGTYPE else b""
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@st.composite
def reordered(draw: Draw) -> tuple[bytes, bytes]:
    """Draw files in two orders, now and then with folders, links and whiteouts; every second time, the second order is
    also changed somewhere."""
    files = [*draw(st.lists(st.sampled_from(_BESIDE), max_size=2, unique=True)), *draw(st.permutations(_FILES))]
    if draw(st.booleans()):
        files = draw(st.permutations(files))
    at = draw(st.integers(0, len(files)))
    ours, raw = _listed(files), _listed(files[:at] + files[at:][::-1])
    return ours, summed(draw(spoiled(st.just(raw), _PIECES))) if draw(st.booleans()) else raw


@st.composite
def layers(draw: Draw) -> bytes:
    """Draw a layer blob: uncompressed, compressed in one or several pieces, with trailing data, or truncated."""
    raw = draw(tars())
    form = draw(st.integers(0, 7))
    if form == 0:
        return raw
    if form > 5:
        frames = zstandard.compress(raw[:600]) + zstandard.compress(raw[600:])
        return frames if form == 6 else draw(spoiled(st.just(frames), BYTES))
    packed = zlib.compress(raw, 1, wbits=31)
    if form == 1:
        half = len(raw) // 2
        packed = zlib.compress(raw[:half], 1, wbits=31) + zlib.compress(raw[half:], 1, wbits=31)
    if form == 2:
        return packed + draw(st.binary(max_size=20))
    return draw(spoiled(st.just(packed), BYTES)) if form == 3 else packed
