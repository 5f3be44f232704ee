"""Downloads one http(s) or file URL, with pip's configuration: certificate, proxies, netrc, credentials."""

from __future__ import annotations

import functools
import io
import threading
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import requests

from envbuild.fetch import index_config, tls_errors
from envbuild.util import http_deadlines, yaml_and_project_paths
from envbuild.util.errors import HashMismatch, NetworkError, printable

_TAIL = 1 << 16  # bytes at the end of a file, where a zip archive has its directory
_LARGEST_PART = 1 << 26  # bytes per read: torch's directory has 1.6 MB
_TRIES = 3  # attempts per file if a response breaks off; the session itself retries failed requests


@dataclass(frozen=True)
class Head:
    """Size of a remote file. `ranges`: whether the server announces range requests."""

    bytes: int
    ranges: bool


@dataclass(frozen=True)
class RemoteFile:
    """A file of an index or a website. `address`: its http(s) or file URL; `name`: its name in errors."""

    address: str
    name: str


def head(session: requests.Session, remote: RemoteFile) -> Head:
    """Request the size and range support of a remote file with HEAD; a file: URL needs no request. Raises
    NetworkError."""
    local = _local(remote)
    if local:
        return Head(local.stat().st_size, ranges=True)
    with _ask(session, "HEAD", remote) as answer:
        http_deadlines.body(answer, 0)  # the body is empty; a connection is used again only after the end of the body
        headers = answer.headers
    length = headers.get("Content-Length", "")
    if not length.isdigit():
        raise NetworkError(f"the index does not report the size of {remote.name}")
    return Head(int(length), ranges="bytes" in headers.get("Accept-Ranges", ""))


def open_remote_file(session: requests.Session, remote: RemoteFile, size: int) -> IO[bytes]:
    """Open a remote file of `size` bytes; only the parts that are read are downloaded."""
    local = _local(remote)
    return local.open("rb") if local else cast("IO[bytes]", RangeReader(session, remote, size))


class RangeIgnored(NetworkError):
    """The server ignores a range request. The error is not an OSError, because zipfile would replace an OSError."""


def fetch_file(
    session: requests.Session,
    remote: RemoteFile,
    file: Path,
    progress: Callable[[int], None],
    *,
    limit: int,
    stop: threading.Event | None = None,
) -> None:
    """Download a remote file into `file`. `progress` gets the number of new bytes; the number is negative if an
    interrupted download starts again, which happens twice at most. If `stop` is set, a download by HTTP ends early,
    without an error; `file` is then incomplete.

    Raises NetworkError; HashMismatch if the file is longer than `limit` bytes. Nothing beyond the limit is written.
    """
    local = _local(remote)
    if local:
        _copy(local, file, remote.name, progress, limit)
        return
    for left in reversed(range(_TRIES)):
        came = 0
        try:
            with _ask(session, "GET", remote) as answer, file.open("wb") as stream:
                for block in answer.iter_content(1 << 20):
                    if stop and stop.is_set():
                        return
                    _within(limit, came + len(block), remote.name)
                    stream.write(block)
                    came += len(block)
                    progress(len(block))
                return
        except requests.RequestException as error:
            if not left:
                raise NetworkError(
                    f"the download of {remote.name} was interrupted {_TRIES} times: {_reason(error)}"
                ) from error
            progress(-came)


def _copy(local: Path, file: Path, name: str, progress: Callable[[int], None], limit: int) -> None:
    """Copy a local file. Raises HashMismatch beyond `limit` bytes, also for a file that reports a smaller size than it
    has, as files below /proc do."""
    _within(limit, local.stat().st_size, name)
    came = 0
    with yaml_and_project_paths.open_regular(local) as source, file.open("wb") as target:
        while block := source.read(1 << 20):
            came += len(block)
            _within(limit, came, name)
            target.write(block)
            progress(len(block))


def _within(limit: int, size: int, name: str) -> None:
    if size > limit:
        raise HashMismatch(
            f"{name} is refused: the file is longer than {limit} bytes, the limit for it",
            hint="a mirror may serve a different file under this name",
        )


def _ask(
    session: requests.Session, method: str, remote: RemoteFile, headers: Mapping[str, str] | None = None
) -> requests.Response:
    try:
        # If `auth` is None, requests uses netrc. On a redirect to another host, requests drops the credentials.
        given = index_config.credentials().get(urllib.parse.urlsplit(remote.address).netloc)
        whole = {"Accept-Encoding": "identity", **(headers or {})}
        answer = session.request(
            method, remote.address, stream=True, timeout=60, headers=whole, auth=given, allow_redirects=True
        )
        answer.raise_for_status()
    except requests.RequestException as error:
        raise NetworkError(f"{remote.name} cannot be fetched: {_reason(error)}", hint=_hint(error)) from error
    return answer


def _reason(error: requests.RequestException) -> str:
    """The response's status, or the kind of the error; the error's own message may contain a password."""
    if isinstance(error, requests.exceptions.SSLError):
        return tls_errors.tls_fault(error).message
    if error.response is None:
        return type(error).__name__
    return f"{error.response.status_code} {printable(error.response.reason or '')[:100]}".strip()


def _hint(error: requests.RequestException) -> str | None:
    return tls_errors.tls_fault(error).hint if isinstance(error, requests.exceptions.SSLError) else None


def _local(remote: RemoteFile) -> Path | None:
    """The path of a file: URL; None for other URLs. Raises NetworkError if the file does not exist."""
    parts = urllib.parse.urlsplit(remote.address)
    if parts.scheme != "file":
        return None
    path = Path(urllib.parse.unquote(parts.path))
    if not path.is_file():
        raise NetworkError(f"{remote.name} cannot be fetched: file not found: {path}")
    return path


class RangeReader(io.RawIOBase):
    """A remote file, read by HTTP range requests of at least `_TAIL` bytes; the last response is cached.

    Raises RangeIgnored if the server does not send the requested range, NetworkError if it does not answer, or if one
    read requests more than `_LARGEST_PART` bytes.
    """

    def __init__(self, session: requests.Session, remote: RemoteFile, size: int) -> None:
        self._ask = functools.partial(_ask, session, "GET", remote)
        self._name, self._size, self._at = remote.name, size, 0
        self._begin, self._held = size, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        end = min(self._size, self._at + len(view))
        if not self._begin <= self._at <= end <= self._begin + len(self._held):
            self._begin = max(0, min(self._at, self._size - _TAIL))
            self._held = self._fetched(self._begin, max(end, min(self._size, self._begin + _TAIL)))
        found = self._held[self._at - self._begin : end - self._begin]
        view[: len(found)] = found
        self._at += len(found)
        return len(found)

    def _fetched(self, begin: int, end: int) -> bytes:
        if begin >= end:
            return b""
        if end - begin > _LARGEST_PART:
            raise NetworkError(f"invalid file from the index, one part of it claims {end - begin} bytes: {self._name}")
        with self._ask({"Range": f"bytes={begin}-{end - 1}"}) as answer:
            if answer.status_code != requests.codes.partial_content:
                raise RangeIgnored("the server sends the whole file")
            try:
                found = http_deadlines.body(answer, end - begin)
            except requests.RequestException as error:  # zipfile would report this OSError as an invalid archive
                raise NetworkError(f"{self._name} cannot be fetched: {_reason(error)}") from error
        if len(found) != end - begin:
            raise RangeIgnored("the server sends a different range")
        return found
