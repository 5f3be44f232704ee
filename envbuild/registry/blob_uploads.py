"""Uploads blobs and manifests to a registry. Failures that may pass are retried, and a large blob is resumed at the
offset that the registry reports.

A request is retried after a failed or broken connection, and after the statuses 408, 429 and 5xx (not 501). The fourth
failure ends the upload of a blob or a manifest with its error. Progress resets the count: whenever the registry has at
least 1 MiB more of the blob than at the last reset (or at the start), failures are counted from 0 again. The pauses
after the first three failures are 0.5, 2 and 8 seconds, or longer if the registry requests it (Retry-After). The upload
also ends with the error if the registry requests a pause of more than 60 seconds, or if the pauses would take more than
10 minutes in total. In addition, http_deadlines limits each request.

Other statuses from 400 to 499 are final. Two of them concern only the state of an upload, and count as failures that
may pass: after 416 the upload is resumed, and after 404 (the upload has expired) the blob is sent from its beginning.
If the registry refuses the first part of a blob with one of the statuses _NO_PARTS, the blob is sent in one request.
"""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Callable, Generator
from urllib.parse import urlencode, urlsplit

import requests

from envbuild.registry import registry_http_and_auth
from envbuild.registry.byte_block_streams import SizedStream, of_equal_size
from envbuild.registry.oci_types import Manifest
from envbuild.registry.registry_http_and_auth import TemporaryFailure
from envbuild.util.errors import NetworkError

_LOG = logging.getLogger(__name__)
_PART = 32 << 20  # bytes of a blob in one request; some registries accept no less than 5 MiB
_BLOCK = 1 << 20  # bytes; so much progress resets the count of failures
PAUSES: tuple[float, ...] = (0.5, 2, 8)  # seconds, after each failure that is retried
LONGEST_PAUSE = 60  # seconds
_ALL_PAUSES = 600  # seconds, for one blob or manifest
_NO_PARTS = (400, 404, 405, 411, 413, 415, 501)
_BINARY = {"Content-Type": "application/octet-stream"}

Blocks = Callable[[], Generator[bytes, None, None]]
Require = Callable[[requests.Response, tuple[int, ...], str], None]


class _UploadLost(TemporaryFailure):
    """The registry does not have the upload any more, or not the bytes that were sent. The blob must be sent from its
    beginning."""


class _WrongOffset(TemporaryFailure):
    """The registry refuses a part of a blob because the part does not begin where the registry expects it."""


class _Retries:
    """The failures and pauses of the upload of one blob or manifest."""

    def __init__(self, sleep: Callable[[float], object] | None) -> None:
        self._sleep = sleep or time.sleep
        self._pauses, self._counted_from, self._paused = iter(PAUSES), 0, 0.0

    def note_offset(self, offset: int) -> None:
        """Note how many bytes of the blob the registry has."""
        if offset - self._counted_from >= _BLOCK:
            self._pauses, self._counted_from = iter(PAUSES), offset

    def pause(self, error: TemporaryFailure) -> None:
        """Sleep before a retry. Raises `error` instead if no more retries are allowed."""
        pause = next(self._pauses, None)
        if pause is None:
            raise error
        pause = max(pause, error.retry_after)
        if pause > LONGEST_PAUSE or self._paused + pause > _ALL_PAUSES:
            raise error
        self._paused += pause
        _LOG.info("%s; trying again in %.1f s", error.message, pause)
        self._sleep(pause)


class Uploads:
    """The uploads to one repository. `send`: sends a request without retries; `url`: of the repository; `moved`:
    returns the URL in a response's Location header; `require`: raises NetworkError for a response without one of the
    statuses, and TemporaryFailure if the request may be retried."""

    def __init__(
        self,
        send: Callable[..., requests.Response],
        url: str,
        moved: Callable[[str, requests.Response], str],
        require: Require,
    ) -> None:
        self._send, self._url, self._moved, self._require = send, url, moved, require

    def put_blob(
        self,
        digest: str,
        size: int,
        blocks: Blocks,
        mount_from: str | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> bool:
        """Upload a blob of any size unless it exists. Return whether it was sent.

        `blocks` is called each time that a blob of more than 32 MiB is sent from its beginning; a smaller blob is kept
        in memory for retries. `mount_from`: the name of another repository of this registry, which may have the blob.
        `sleep`: waits before a retry, and may raise an error to stop; by default time.sleep. Raises NetworkError,
        Refusal, and what `blocks` and `sleep` raise.
        """
        retries, sent, parts = _Retries(sleep), False, size > _PART
        small = b""
        while True:
            try:
                if self._has(digest):
                    return sent
                where = self._begin(digest, mount_from)
                if where is None:
                    return False
                sent = True
                if parts:
                    parts = self._put_parts(where, digest, size, blocks, retries)
                    if parts:
                        return True
                    where = self._begin(digest, None) or where
                if size > _PART:
                    with contextlib.closing(SizedStream(blocks, size)) as stream:
                        self._finish(where, digest, stream)
                else:
                    if not small:
                        with contextlib.closing(blocks()) as stream:
                            small = b"".join(stream)
                    self._finish(where, digest, small)
                return True
            except TemporaryFailure as error:
                retries.pause(error)

    def put_manifest(self, target: str, manifest: Manifest) -> requests.Response:
        """Upload a manifest under a tag or its own digest. Return the response. Raises NetworkError, Refusal."""
        retries, headers = _Retries(None), {"Content-Type": manifest.media_type}
        while True:
            try:
                answer = self._send("PUT", f"{self._url}/manifests/{target}", data=manifest.raw, headers=headers)
                self._require(answer, (201,), f"does not accept the manifest {target}")
                registry_http_and_auth.finish(answer)
                return answer
            except TemporaryFailure as error:
                retries.pause(error)

    def _has(self, digest: str) -> bool:
        answer = self._send("HEAD", f"{self._url}/blobs/{digest}")
        self._require(answer, (200, 404), f"does not return blobs/{digest}")
        registry_http_and_auth.finish(answer)
        return answer.status_code == 200

    def _begin(self, digest: str, mount_from: str | None) -> str | None:
        """Begin an upload and return its URL; None if the blob was mounted from the other repository instead."""
        query = f"?{urlencode({'mount': digest, 'from': mount_from})}" if mount_from else ""
        answer = self._send("POST", f"{self._url}/blobs/uploads/{query}", data=b"")
        mounted = mount_from is not None and answer.status_code == 201
        if not mounted:
            self._require(answer, (202,), "accepts no upload")
        registry_http_and_auth.finish(answer)
        if mounted:
            return None
        return self._moved(answer.url, answer)

    def _put_parts(self, where: str, digest: str, size: int, blocks: Blocks, retries: _Retries) -> bool:
        """Send a blob in parts. Return False if the registry accepts no parts."""
        start = 0
        with contextlib.closing(blocks()) as stream:
            for part in of_equal_size(stream, _PART):
                following = self._put_part(where, start, part, retries)
                if following is None:
                    return False
                where, start = following, start + len(part)
        failed = False
        while True:  # end the upload; the registry may have done so although its response did not arrive
            try:
                if failed and self._has(digest):
                    return True
                if failed:
                    where, held = self._offset(where)
                    if held != size:
                        raise _UploadLost(f"the registry has {held} of the {size} bytes that were sent")
                self._finish(where, digest, b"")
                return True
            except _UploadLost:
                raise
            except TemporaryFailure as error:
                retries.pause(error)
                failed = True

    def _put_part(self, where: str, start: int, part: bytes, retries: _Retries) -> str | None:
        """Send a part of a blob, which begins at `start`. Return the URL for the next part; None if the registry
        accepts no parts."""
        failed = False
        while True:
            try:
                if failed:
                    where, held = self._offset(where)
                    if not start <= held <= start + len(part):
                        raise _UploadLost("the registry lost a part of an upload", hint="run the same command again")
                    retries.note_offset(held)
                    start, part = held, part[held - start :]
                    if not part:
                        return where
                headers = {**_BINARY, "Content-Range": f"{start}-{start + len(part) - 1}"}
                answer = self._send("PATCH", where, data=part, headers=headers)
                if start == 0 and answer.status_code in _NO_PARTS:
                    registry_http_and_auth.finish(answer)
                    return None
                self._require_upload(answer, (202, 204), "does not accept a part of a blob")
                registry_http_and_auth.finish(answer)
                retries.note_offset(start + len(part))
                return self._moved(answer.url, answer)
            except _UploadLost:
                raise
            except TemporaryFailure as error:
                retries.pause(error)
                failed = True

    def _offset(self, where: str) -> tuple[str, int]:
        """Return the URL to resume an upload, and the number of bytes of the blob that the registry has."""
        answer = self._send("GET", where)
        self._require_upload(answer, (204,), "cannot resume an interrupted upload")
        registry_http_and_auth.finish(answer)
        match = re.fullmatch(r"(?:bytes=)?0-([0-9]{1,18})", answer.headers.get("Range", ""))
        # a registry also answers 0-0 if it has received no byte
        held = int(match[1]) + 1 if match and match[1] != "0" else 0
        return self._moved(answer.url, answer), held

    def _finish(self, where: str, digest: str, content: bytes | SizedStream) -> None:
        where += ("&" if urlsplit(where).query else "?") + urlencode({"digest": digest})
        answer = self._send("PUT", where, data=content, headers=_BINARY)
        self._require_upload(answer, (201,), f"does not accept the blob {digest}")
        registry_http_and_auth.finish(answer)

    def _require_upload(self, answer: requests.Response, codes: tuple[int, ...], what: str) -> None:
        """Like `require`, but raise _UploadLost or _WrongOffset for a status that concerns only this upload."""
        try:
            self._require(answer, codes, what)
        except TemporaryFailure:
            raise
        except NetworkError as error:
            kind = {404: _UploadLost, 416: _WrongOffset}.get(answer.status_code)
            if kind is None:
                raise
            raise kind(error.message, hint=error.hint) from None
