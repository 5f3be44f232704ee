"""Hostile layers are refused with an error that names the layer."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator

import pytest

from envbuild.registry import image_content_reader, oci_types
from envbuild.util.untrusted_input_errors import Malformed, Refusal


class Layer:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def blocks(self, digest: str) -> Iterator[bytes]:
        yield self.raw


def read(raw: bytes) -> int:
    digest = oci_types.digest_of(raw)
    return len(list(image_content_reader.entries(Layer(raw), digest, digest)))


def test_extended_headers_in_a_row_are_refused() -> None:
    head = tarfile.TarInfo("x")
    head.type, head.size = tarfile.GNUTYPE_LONGNAME, 2
    raw = (head.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(512, b"\0")) * 2000 + tarfile.TarInfo("f").tobuf() + bytes(1024)
    with pytest.raises(Malformed, match="cannot be unpacked"):
        read(raw)


def test_the_number_of_files_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in "abc":
            archive.addfile(tarfile.TarInfo(name))
    monkeypatch.setattr(image_content_reader, "_MOST", 3)
    assert read(stream.getvalue()) == 3
    monkeypatch.setattr(image_content_reader, "_MOST", 2)
    with pytest.raises(Refusal, match="more than 2 files"):
        read(stream.getvalue())
