"""Two archives of a layer: what differs, and whether the order of their files matters."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from envbuild.registry import layer_archive_comparison, oci_types
from envbuild.registry.oci_types import Manifest
from envbuild.util.untrusted_input_errors import Refusal
from unit.saved import layer, tar

NAMES = "the registry's image", "what the lock gives"


class Blobs:
    """Blobs by digest, in memory."""

    def __init__(self, *blobs: bytes) -> None:
        self._blobs: Mapping[str, bytes] = {oci_types.digest_of(blob): blob for blob in blobs}

    def manifest(self, target: str) -> Manifest | None:
        return None

    def blob(self, digest: str, limit: int = 0) -> bytes:
        return self._blobs[digest]

    def blocks(self, digest: str) -> Iterator[bytes]:
        yield self._blobs[digest]

    def referrers(self, digest: str) -> list[dict[str, Any]]:
        return []


def compared(there: bytes, here: bytes, stored: bytes | None = None) -> str | None:
    """Return the difference between two tars. `stored`: the blob of `there`, if the blob is not the tar itself."""
    blob = there if stored is None else stored
    digests = [oci_types.digest_of(one) for one in (blob, there, here)]
    return layer_archive_comparison.difference(
        (Blobs(blob), digests[0], digests[1]), (Blobs(here), digests[2], digests[2]), NAMES
    )


B = layer(a="1", b="2", c="3")


def test_the_same_layer_is_the_same() -> None:
    assert compared(B, B) is None
    assert compared(B, tar([("c", "3"), ("a", "1"), ("b", "2")]), gzip.compress(B)) is None


@pytest.mark.parametrize("stored", [gzip.compress(B)[:-1], B + bytes(512), b"x" * 2000])
def test_a_layer_that_does_not_match_its_digests_is_refused(stored: bytes) -> None:
    with pytest.raises(Refusal):
        compared(B, tar([("c", "3"), ("a", "1"), ("b", "2")]), stored)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        (layer(a="1", b="9", c="3"), "/b differs in content"),
        (layer(a="1", b="run", c="3"), "/b differs in mode, size, content"),
        (layer(a="1", c="3"), "/b is only in the registry's image"),
        (layer(a="1", b="2"), "/c is only in the registry's image"),
        (layer(), "/a is only in the registry's image"),
    ],
)
def test_the_first_file_that_differs_is_named(here: bytes, expected: str) -> None:
    assert compared(B, here) == expected


FOLDERS = [("torch/a", "1"), ("torch/" + 120 * "b", "2"), ("torch.dist-info/c", "3")]
BY_FOLDER, BY_PATH = tar(FOLDERS), tar(reversed(FOLDERS))


def test_another_order_of_the_same_is_the_same() -> None:
    """In a tar, a file with a long name has an extra header before its own header; the two headers move together."""
    assert BY_FOLDER != BY_PATH
    assert compared(BY_FOLDER, BY_PATH) is None
    assert compared(BY_PATH, BY_FOLDER) is None


@pytest.mark.parametrize(
    ("there", "here", "expected"),
    [
        ([("a", "1"), ("b", "2")], [("b", "9"), ("a", "1")], "/b differs in content"),
        ([("a", "1"), ("b", "2")], [("b", "2"), ("a", "1"), ("c", "3")], "/c is only in what the lock gives"),
        ([("a", "1"), ("a", "2")], [("a", "2"), ("a", "1")], "/a differs in content"),
        ([("a", "1"), ("a", "1")], [("a", "1")], "/a is only in the registry's image"),
        ([(".a", "1")], [("a", "1")], "/.a is only in the registry's image"),
        ([("./a", "1"), ("a", "1")], [("a", "1"), ("./a", "1")], "which matters: /a occurs more than once"),
        ([("d/x", "1"), ("d", "")], [("d", ""), ("d/x", "1")], "which matters: /d/x comes before its folder"),
        ([("a/b/c", "1"), ("a", "")], [("a", ""), ("a/b/c", "1")], "which matters: /a/b/c comes before its folder"),
        ([("a", ""), ("a/b/c", "1")], [("a/b/c", "1"), ("a", "")], "which matters: /a comes after the files in it"),
        ([("a", "1"), (".wh.a", "")], [(".wh.a", ""), ("a", "1")], "which matters: /.wh.a is a whiteout"),
        (
            [("d/.wh..wh..opq", ""), ("a", "")],
            [("a", ""), ("d/.wh..wh..opq", "")],
            "which matters: /d/.wh..wh..opq is a whiteout",
        ),
        ([("a", "1"), ("b", "-> a"), ("c", "")], [("c", ""), ("a", "1"), ("b", "-> a")], "matters: /b is a hard link"),
        ([("a", "1"), ("b", "-> a")], [("b", "1"), ("a", "-> b")], "/a differs in kind, link, size, content"),
        ([("./a", "1"), ("b", "")], [("b", ""), ("a", "1")], "the same files, but the archives differ"),
    ],
)
def test_an_order_that_may_count_is_a_difference(
    there: list[tuple[str, str]], here: list[tuple[str, str]], expected: str
) -> None:
    assert expected in str(compared(tar(there), tar(here)))


def heads(raw: bytes, **fields: bytes) -> bytes:
    """Return the tar with some fields of its first header overwritten, and the header's checksum corrected."""
    at = {"prefix": 345, "magic": 257, "group_name": 297, "kind": 156}
    head = bytearray(raw[:512])
    for name, value in fields.items():
        head[at[name] : at[name] + len(value)] = value
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + raw[512:]


ORDERED, SWAPPED = tar([("a", "1"), ("b", "2")]), tar([("b", "2"), ("a", "1")])


@pytest.mark.parametrize(
    "there",
    [
        SWAPPED[:-1] + b"x",  # after the end
        SWAPPED + bytes(512),
        heads(SWAPPED, group_name=b"wheel"),
        heads(SWAPPED, magic=b"ustar  \0"),  # other readers than tarfile read different fields
        tar([("b", "2"), ("a", "1")], uname="root"),
    ],
)
def test_an_archive_that_another_reader_might_read_differently_is_refused(there: bytes) -> None:
    """tarfile does not expose every difference, so entries count as equal only if their bytes are."""
    assert compared(there, ORDERED) == "the same files, but the archives differ"
    assert compared(SWAPPED, ORDERED) is None


def test_attributes_for_all_later_entries_are_refused() -> None:
    """With such attributes, the order of entries matters; such attributes are refused in our layers too."""

    def packed(names: str, headers: dict[str, str]) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(name))
        return buffer.getvalue()

    there = packed("ba", {"comment": "x"})
    for here in (packed("ab", {"comment": "x"}), packed("ab", {})[:-1024]):  # with the attributes, and without them
        assert compared(there, here) == "the same files, but the archives differ"


def test_attributes_and_devices_are_compared() -> None:
    able = tar([("a", "1")], pax_headers={"SCHILY.xattr.security.capability": "all"})
    assert compared(able, tar([("a", "1")])) == "/a differs in attributes"
    one, two = (tar([("a", "")], type=tarfile.CHRTYPE, devminor=minor) for minor in (1, 2))
    assert compared(one, two) == "/a differs in device"
