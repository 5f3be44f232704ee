"""Lists a package's files on the configured indexes and find-links, by the simple API as HTML (PEP 503) or JSON (PEP
691).

As in uv, only the first index that has the package is used, unless uv is configured to search all indexes.
"""

from __future__ import annotations

import datetime
import json
import os
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import requests
from packaging.utils import parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

from envbuild.fetch import index_config, tls_errors
from envbuild.util import http_deadlines, url_redaction
from envbuild.util.errors import NetworkError
from envbuild.util.thread_safe_cache import thread_safe_cache

MAX_BYTES = 64 << 20  # the largest page of a single package is a few MB
_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"


@dataclass(frozen=True)
class Listed:
    """A file listed by an index, or in a folder of find-links. `sha256`, `uploaded`: None if the index does not provide
    them. `address`: its absolute URL, empty for a relative URL and for a file in a folder."""

    file: str
    sha256: str | None = None
    requires_python: str = ""
    uploaded: datetime.datetime | None = None
    yanked: bool = False
    address: str = ""

    @property
    def parsed(self) -> tuple[str, Version] | None:
        """Name and version; None for a file that is neither a wheel nor an sdist."""
        return _parsed(self.file)


@lru_cache(maxsize=1 << 18)  # a package may have thousands of files, whose names are read several times
def _parsed(file: str) -> tuple[str, Version] | None:
    try:
        found = (parse_wheel_filename if file.endswith(".whl") else parse_sdist_filename)(file)
    except ValueError:  # the errors of packaging, and Python's for a number of more than 4300 digits
        return None
    return found[0], found[1]


@thread_safe_cache
def listed_files(name: str) -> tuple[Listed, ...]:
    """The files of a package (its normalised name), yanked ones included. An index that answers with a status from 400
    to 499 counts as one without the package. Raises NetworkError if an index does not answer."""
    found: list[Listed] = []
    for address in index_config.indexes():
        page = _page(f"{address.rstrip('/')}/{name}/", name)
        found += page
        if page and index_config.first_only():
            break
    for place in index_config.links():
        found += _links(place, name)
    return tuple(item for item in found if item.parsed and item.parsed[0] == name)


def listed_at(address: str, name: str) -> tuple[Listed, ...]:
    """The files of a package on one page of links, or in one folder; empty if the answer has a status from 400 to 499.
    Raises NetworkError for any other failure to fetch the page."""
    return tuple(item for item in _links(address, name) if item.parsed and item.parsed[0] == name)


def _links(place: str, name: str) -> Iterable[Listed]:
    folder = _local(place)
    if folder and folder.is_dir():
        return [Listed(file.name) for file in folder.iterdir()]
    return _page(place, name)


def _local(place: str) -> Path | None:
    parts = urllib.parse.urlsplit(place)
    if parts.scheme in ("", "file"):
        path = urllib.request.url2pathname(parts.path) if parts.scheme else place
        return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises an error for an unknown ~user
    return None


def _page(address: str, name: str) -> list[Listed]:
    local = _local(address)
    if local:
        file = local / "index.html" if local.is_dir() else local
        return list(_html(file.read_text(encoding="utf-8", errors="replace"))) if file.is_file() else []
    shown = url_redaction.host(urllib.parse.urlsplit(address).netloc)
    try:
        session = index_config.shared_session()
        with session.get(address, headers={"Accept": _ACCEPT}, timeout=60, stream=True) as answer:
            if 400 <= answer.status_code < 500:  # no such package, or no access to it
                return []
            answer.raise_for_status()
            raw = http_deadlines.body(answer, MAX_BYTES)
    except (requests.RequestException, OSError) as error:
        fault = tls_errors.tls_fault(error) if isinstance(error, requests.exceptions.SSLError) else None
        why = fault.message if fault else type(error).__name__
        hint = fault.hint if fault else None
        raise NetworkError(f"the package index {shown} did not answer for {name}: {why}", hint=hint) from error
    if len(raw) > MAX_BYTES:
        raise NetworkError(f"the package index {shown} has a page of more than {MAX_BYTES} bytes for {name}")
    text = raw.decode("utf-8", "replace")
    if "json" not in answer.headers.get("Content-Type", ""):
        return list(_html(text))
    return _files_of_json(text, name, shown)


def _files_of_json(text: str, name: str, shown: str) -> list[Listed]:
    """The files in a JSON page. `shown`: the index, for the error."""
    try:
        return list(_json(json.loads(text)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NetworkError(f"invalid JSON for {name} from the package index {shown}") from error


def _json(page: dict[str, Any]) -> Iterator[Listed]:
    for item in page["files"]:
        sha256 = item.get("hashes", {}).get("sha256")
        yield Listed(
            str(item["filename"]), sha256, str(item.get("requires-python") or ""),
            _date(item.get("upload-time")), bool(item.get("yanked")), _absolute(str(item.get("url") or "")),
        )  # fmt: skip


def _date(text: Any) -> datetime.datetime | None:
    try:
        found = datetime.datetime.fromisoformat(text)
    except (ValueError, TypeError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs))


def _html(text: str) -> Iterator[Listed]:
    parser = _Anchors()
    try:
        parser.feed(text)
    except (ValueError, AssertionError):  # a character reference of 5000 digits; <![x
        raise NetworkError("a page of a package index or of find-links is not valid HTML") from None
    for anchor in parser.found:
        address, _, fragment = (anchor.get("href") or "").partition("#")
        try:
            file = urllib.parse.unquote(urllib.parse.urlsplit(address).path).rpartition("/")[2]
        except ValueError:  # such as http://[x
            continue
        sha256 = urllib.parse.parse_qs(fragment).get("sha256", [None])[0]
        yield Listed(
            file, sha256, anchor.get("data-requires-python") or "", None, "data-yanked" in anchor, _absolute(address)
        )


def _absolute(address: str) -> str:
    """The URL if it is absolute, as urllib reads it: without spaces and control characters at its start."""
    parts = urllib.parse.urlsplit(address)
    return parts.geturl() if parts.scheme in ("http", "https") and parts.netloc else ""
