"""Uploads that fail for a while: what is retried and for how long, and what is final."""

from __future__ import annotations

import contextlib
import email.utils
import random
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from envbuild.registry import blob_uploads, oci_types
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.registry.registry_http_and_auth import TokenRefused
from envbuild.util.errors import NetworkError
from unit.registries import Registry, docker_login, serving

PAUSES = (1, 2, 3)
BLOB = random.Random(1).randbytes(55_000)  # six parts
DIGEST = oci_types.digest_of(BLOB)
PART = "PATCH .*"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_uploads, "_PART", 10_000)
    monkeypatch.setattr(blob_uploads, "_BLOCK", 4_000)
    monkeypatch.setattr(blob_uploads, "PAUSES", PAUSES)


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry()) as found:
        yield found


class Sender:
    """Uploads BLOB. `pauses`: the seconds of each pause; `on_pause`: called in each; `reads`: how often the blob was
    read from its beginning."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.pauses: list[float] = []
        self.on_pause: Callable[[int], object] = lambda number: None
        self.on_part: Callable[[int], object] = lambda number: None
        self.reads = 0

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.on_pause(len(self.pauses))

    def blocks(self) -> Generator[bytes, None, None]:
        self.reads += 1
        for number, start in enumerate(range(0, len(BLOB), 10_000)):
            self.on_part(number)
            yield BLOB[start : start + 10_000]

    def send(self, size: int = len(BLOB)) -> None:
        place = Repository(Reference.parse(f"{self.registry.host}/team/h20"))
        assert place.put_blocks(DIGEST, size, self.blocks, None, self.sleep)
        assert self.registry.blobs == {DIGEST: BLOB}

    def count(self, method: str) -> int:
        return sum(line.startswith(method) for line, _ in self.registry.requests)


@pytest.fixture
def sender(registry: Registry) -> Sender:
    return Sender(registry)


@pytest.mark.parametrize("back", [1, 2, 3, None])
def test_a_registry_that_refuses_connections_for_a_while_is_waited_for(back: int | None) -> None:
    """The upload of a part is interrupted, and then no connection is possible until the registry answers again, in the
    pause with this number."""
    registry = Registry()
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as later:
        sender = Sender(stack.enter_context(serving(registry)))

        def pause(number: int) -> None:
            if number == 1:
                stack.close()
            if number == back:
                later.enter_context(serving(registry))

        sender.on_part = lambda number: registry.cut_parts.append(4_000) if number == 2 else None
        sender.on_pause = pause
        if back is None:
            with pytest.raises(NetworkError, match="does not answer"):
                sender.send()
        else:
            sender.send()
            assert sender.reads == 1 and sender.count("GET") == 1, "it was resumed where the registry had it"
            assert sender.count("PATCH, 4000 of 10000 bytes") == 1 and sender.count("PATCH /") == 6
    assert sender.pauses == [*PAUSES[:back]]


def test_failures_with_less_than_a_block_between_them_are_in_a_row(sender: Sender) -> None:
    sender.registry.cut_parts = [3_000, 3_000, 0, 3_000]  # the block is complete after the second
    sender.send()
    assert sender.pauses == [1, 2, 1, 2]
    assert sender.reads == 1


def test_failures_without_a_block_between_them_end_the_upload(sender: Sender) -> None:
    sender.registry.cut_parts = [1_000, 1_000, 1_000, 999, 0]
    with pytest.raises(NetworkError, match="does not answer"):
        sender.send()
    assert sender.pauses == [*PAUSES]
    assert sender.registry.cut_parts == [0]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("request_", ["HEAD .*", "POST .*", PART, "PUT .*"])
def test_a_status_that_may_pass_is_retried(sender: Sender, status: int, request_: str) -> None:
    sender.registry.failures = [(request_, status, {})] * 3
    sender.send()
    assert sender.pauses == [*PAUSES] and sender.registry.failures == []
    assert sender.reads == 1


@pytest.mark.parametrize("request_", ["HEAD .*", "POST .*", PART, "PUT .*", "GET .*"])
@pytest.mark.parametrize("status", [400, 401, 403, 409, 422, 501])
def test_other_statuses_are_final(sender: Sender, status: int, request_: str) -> None:
    begin: list[tuple[str, int, dict[str, str]]] = [] if request_ != "GET .*" else [(PART, 503, {})]
    if request_ == PART:  # before the first part, some of these mean that the registry accepts no parts
        sender.on_part = lambda number: sender.registry.failures.append((PART, status, {})) if number == 1 else None
    else:
        sender.registry.failures = [*begin, (request_, status, {})]
    with pytest.raises(NetworkError, match=str(status)):
        sender.send()
    assert sender.pauses == [1] * len(begin)
    assert sender.registry.blobs == {}


@pytest.mark.parametrize("value", ["7", " 7 ", "date"])
def test_the_registry_states_how_long_to_wait(sender: Sender, value: str) -> None:
    if value == "date":
        value = email.utils.formatdate(time.time() + 40, usegmt=True)
    sender.registry.failures = [(PART, 429, {"Retry-After": value})]
    sender.send()
    (pause,) = sender.pauses
    assert pause == 7 or 20 < pause <= 40


@pytest.mark.parametrize("value", ["0", "-5", "soon", "1e9", "Mon, 01 Jan 2001 00:00:00 GMT", "9" * 99, "Mon, 99"])
def test_a_pause_is_never_shorter_than_ours(sender: Sender, value: str) -> None:
    sender.registry.failures = [(PART, 503, {"Retry-After": value})]
    sender.send()
    assert sender.pauses == [1]


def test_a_long_pause_is_left_to_the_user(sender: Sender) -> None:
    sender.registry.failures = [(PART, 429, {"Retry-After": "61"})]
    with pytest.raises(NetworkError, match="429") as caught:
        sender.send()
    assert caught.value.hint == "the registry asks to wait 61 s"
    assert sender.pauses == []


def test_all_pauses_of_a_blob_are_bounded(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blob_uploads, "_ALL_PAUSES", 100)
    sender.registry.failures = [(PART, 429, {"Retry-After": "30"})]
    sender.on_part = lambda number: sender.registry.failures.append((PART, 429, {"Retry-After": "30"}))
    with pytest.raises(NetworkError, match="429"):
        sender.send()
    assert sender.pauses == [30] * 3


@pytest.mark.parametrize("moment", [0, 1, 5])
def test_a_blob_whose_upload_has_expired_is_sent_from_its_beginning(sender: Sender, moment: int) -> None:
    def expire(number: int) -> None:
        if number == moment and sender.reads == 1:
            sender.registry.sessions.clear()
            # before the first part, 404 means that the registry accepts no parts
            sender.registry.cut_parts = [0] if moment == 0 else []

    sender.on_part = expire
    sender.send()
    assert sender.reads == 2 and sender.count("POST") == 2
    assert sender.pauses == ([1, 2] if moment == 0 else [1])


def test_an_upload_that_expires_before_its_end_is_sent_again(sender: Sender) -> None:
    sender.registry.failures = [("PUT .*", 503, {})]
    sender.on_pause = lambda number: sender.registry.sessions.clear()
    sender.send()
    assert sender.reads == 2 and sender.pauses == [1, 2]


def test_an_upload_that_always_expires_is_an_error(sender: Sender) -> None:
    """The parts that are sent again and again do not count as progress."""
    sender.on_part = lambda number: sender.registry.sessions.clear() if number == 3 else None
    with pytest.raises(NetworkError, match="404"):
        sender.send()
    assert sender.pauses == [*PAUSES]
    assert sender.reads == 4


@pytest.mark.parametrize("lost", [[PART], [PART, "GET .*"], ["POST .*"], ["PUT .*"], ["PUT .*", "HEAD .*"]])
def test_a_response_that_is_lost_sends_nothing_twice(sender: Sender, lost: list[str]) -> None:
    sender.registry.lost = list(lost)
    sender.send()
    assert sender.registry.lost == []
    assert sender.pauses == [*PAUSES[: len(lost)]]
    assert sender.reads == 1 and sender.count(PART[:5]) == 6 and sender.count("PUT") == 1


def test_a_part_that_the_registry_expects_elsewhere_is_resumed(sender: Sender) -> None:
    """A proxy may report a failure while the registry still processes the part."""
    sender.registry.failures = [("PATCH .*", 416, {})]
    sender.send()
    assert sender.reads == 1 and sender.count("GET") == 1 and sender.pauses == [1]


@pytest.mark.parametrize("status", [429, 503])
def test_a_token_service_that_fails_for_a_while_is_asked_again(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    registry = sender.registry
    registry.bearer = f"http://{registry.host}/token"
    docker_login(tmp_path, monkeypatch, **{registry.host: "me:secret"})
    registry.lies["/token"] = (status, {}, b"{}")
    sender.on_pause = lambda number: registry.lies.clear()
    sender.send()
    assert sender.pauses == [1]
    registry.lies["/token"] = (403, {}, b"{}")
    with pytest.raises(TokenRefused):
        Sender(registry).send()


def test_a_whole_blob_is_sent_from_its_beginning_again(sender: Sender) -> None:
    sender.registry.parts = False
    sender.registry.cut = 2
    sender.send()
    assert sender.pauses == [1, 2]
    assert sender.reads == 4, "once for the first part, three times for the whole"


def test_a_streamed_blob_is_sent_from_its_beginning_after_a_new_token(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = sender.registry
    registry.parts, registry.bearer = False, f"http://{registry.host}/token"
    docker_login(tmp_path, monkeypatch, **{registry.host: "me:secret"})
    sender.on_part = lambda number: setattr(registry, "token", "new") if sender.reads == 2 else None
    sender.send()
    assert (sender.pauses, sender.reads) == ([], 3)


def test_the_manifest_is_retried_too(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    registry.failures = [("PUT .*", 503, {}), ("PUT .*", 429, {"Retry-After": "5"})]
    manifest = Manifest(b'{"mediaType": "x"}', oci_types.MANIFEST)
    Repository(Reference.parse(f"{registry.host}/team/h20")).put_manifest("v1", manifest)
    assert registry.manifests["v1"] == (oci_types.MANIFEST, manifest.raw)
    assert pauses == [1, 5]
    registry.failures = [("PUT .*", 403, {})]
    with pytest.raises(NetworkError, match="403"):
        Repository(Reference.parse(f"{registry.host}/team/h20")).put_manifest("v1", manifest)
    assert pauses == [1, 5]


def test_an_interruption_in_a_pause_ends_the_upload(sender: Sender) -> None:
    def interrupt(number: int) -> Any:
        raise KeyboardInterrupt

    sender.registry.failures = [(PART, 503, {})]
    sender.on_pause = interrupt
    with pytest.raises(KeyboardInterrupt):
        sender.send()
    assert sender.count("GET") == 0
