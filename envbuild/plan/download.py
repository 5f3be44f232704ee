"""One file from its address, http(s) or file, as pip is set up here: certificate, proxies, netrc, credentials."""

from __future__ import annotations

import shutil
import threading
import urllib.parse
from collections.abc import Callable
from pathlib import Path

import requests

from envbuild.errors import HashMismatch, NetworkError, printable
from envbuild.plan import index

_TRIES = 3  # of a file whose answer began well; before that, the session tries again by itself


def size(session: requests.Session, address: str, name: str) -> int:
    """Bytes of the file at `address`, by asking for its head. Raises NetworkError, calling it `name`."""
    local = _local(address, name)
    if local:
        return local.stat().st_size
    length = _ask(session, "HEAD", address, name).headers.get("Content-Length", "")
    if not length.isdigit():
        raise NetworkError(f"the index does not say how long {name} is")
    return int(length)


def fetch(
    session: requests.Session,
    address: str,
    name: str,
    file: Path,
    progress: Callable[[int], None],
    *,
    limit: int,
    stop: threading.Event | None = None,
) -> None:
    """Write what is at `address` into `file`; `progress` is told the bytes that came. `stop` ends it early. What breaks
    off is begun anew, three times at most.

    Raises NetworkError, calling it `name`; HashMismatch for more than `limit` bytes, of which no more are written.
    """
    local = _local(address, name)
    if local:
        _within(limit, local.stat().st_size, name)
        shutil.copyfile(local, file)
        progress(file.stat().st_size)
        return
    for left in reversed(range(_TRIES)):
        came = 0
        try:
            with _ask(session, "GET", address, name) as answer, file.open("wb") as stream:
                for block in answer.iter_content(1 << 20):
                    if stop and stop.is_set():
                        return
                    _within(limit, came + len(block), name)
                    stream.write(block)
                    came += len(block)
                    progress(len(block))
                return
        except requests.RequestException as error:
            if not left:
                raise NetworkError(f"{name} broke off, {_TRIES} times: {type(error).__name__}") from error
            progress(-came)


def _within(limit: int, size: int, name: str) -> None:
    if size > limit:
        raise HashMismatch(
            f"{name} is not the file that was asked for: it is longer than {limit} bytes",
            hint="a mirror serves another file under this name",
        )


def _ask(session: requests.Session, method: str, address: str, name: str) -> requests.Response:
    try:
        # requests takes netrc where no credentials are given, and drops them when it is sent to another host
        given = index.credentials().get(urllib.parse.urlsplit(address).netloc)
        whole = {"Accept-Encoding": "identity"}
        answer = session.request(
            method, address, stream=True, timeout=60, headers=whole, auth=given, allow_redirects=True
        )
        answer.raise_for_status()
    except requests.RequestException as error:
        raise NetworkError(f"{name} cannot be fetched: {_reason(error)}") from error
    return answer


def _reason(error: requests.RequestException) -> str:
    """What the server answered, else what kind of error it was: its own words may hold a password."""
    if error.response is None:
        return type(error).__name__
    return f"{error.response.status_code} {printable(error.response.reason or '')[:100]}".strip()


def _local(address: str, name: str) -> Path | None:
    """The path that a file: address means."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "file":
        return None
    path = Path(urllib.parse.unquote(parts.path))
    if not path.is_file():
        raise NetworkError(f"{name} cannot be fetched: there is no file {path}")
    return path
