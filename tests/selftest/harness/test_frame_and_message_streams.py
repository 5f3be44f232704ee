"""Streams of frames and messages: only whole ones are accepted."""

import os
from typing import Any

import pytest

pytest.importorskip("torch")

from envbuild.selftest.harness.frame_and_message_streams import ANNOUNCE, RESULT, FrameWriter, Unpacker, pack
from selftest.reading import NONCE, read


def frames(*documents: dict[str, Any]) -> bytes:
    out, into = os.pipe()
    writer = FrameWriter(into, NONCE)
    for document in documents:
        writer(document)
    os.close(into)
    with os.fdopen(out, "rb") as file:
        return file.read()


START = {"kind": "start", "probes": ["a"]}
PROBE = {"kind": "probe", "probe": "a", "detail": "one\ntwo \u2028 \udc80"}
END = {"kind": "end", "probes": 1}


def test_frames_are_read_back() -> None:
    assert read(frames(START, PROBE, END)) == [START, PROBE, END]


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: lines[:1] + lines[2:],
        lambda lines: [*lines[:2], lines[1], lines[2]],
        lambda lines: [lines[0], lines[2], lines[1]],
        lambda lines: [lines[0], lines[1][:-5], lines[2]],
        lambda lines: [lines[0], lines[1].replace(b"one", b"two"), lines[2]],
        lambda lines: [lines[0].replace(NONCE.encode(), b"f" * 32), *lines[1:]],
        lambda lines: lines[:2],
    ],
    ids=["missing", "doubled", "swapped", "cut", "changed", "foreign", "no end"],
)
def test_frames_that_were_tampered_with_are_seen(change: Any) -> None:
    lines = frames(START, PROBE, END).splitlines()
    with pytest.raises(AssertionError):
        read(b"\n".join(change(lines)) + b"\n")


def test_a_number_that_json_has_not_is_refused() -> None:
    with pytest.raises(ValueError):
        frames({"kind": "probe", "error": float("nan")})


MESSAGES = [(ANNOUNCE, b"step"), (ANNOUNCE, b""), (RESULT, b"x" * 100_000)]
STREAM = b"".join(pack(kind, payload) for kind, payload in MESSAGES)


@pytest.mark.parametrize("size", [1, 7, 4096, len(STREAM)])
def test_messages_come_through_in_any_pieces(size: int) -> None:
    unpacker = Unpacker()
    pieces = [STREAM[i : i + size] for i in range(0, len(STREAM), size)]
    assert [message for piece in pieces for message in unpacker.feed(piece)] == MESSAGES
    assert not unpacker.cut


def test_a_cut_message_is_seen() -> None:
    unpacker = Unpacker()
    assert unpacker.feed(STREAM[:-1]) == MESSAGES[:-1]
    assert unpacker.cut


@pytest.mark.parametrize("at", [0, 1, 5, 9])
def test_after_a_broken_message_nothing_is_believed(at: int) -> None:
    broken = bytearray(pack(ANNOUNCE, b"step"))
    broken[at] ^= 0xFF
    unpacker = Unpacker()
    assert unpacker.feed(bytes(broken) + STREAM) == []
    assert unpacker.feed(STREAM) == [] and unpacker.cut
