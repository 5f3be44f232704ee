"""A small registry in this process, with faults on request; it records which credentials were used."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import requests

from envbuild.registry import oci_types, registry_http_and_auth
from unit.served import served


@dataclass
class Registry:
    """`lies`: path -> (status, headers, body) of a response that is sent instead of the right one. `referrers`: whether
    the registry has the referrers API."""

    user: str = ""
    password: str = ""
    bearer: str = ""  # the realm of a token service; then `token` grants access
    token: str = "t0ken"
    referrers: bool = False
    lies: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    refuse: str = ""  # a pattern of requests to refuse, such as "PUT /v2/.*/manifests/verified"
    # Pattern of a request, status, headers: the next request that matches the first of these is answered so.
    failures: list[tuple[str, int, dict[str, str]]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # the next request that matches is carried out, but not answered
    cut: int = 0  # this many uploads end half-way: the connection is closed
    parts: bool = True  # whether it accepts a blob in parts
    cut_parts: list[int] = field(default_factory=list)  # for each of the next parts: bytes until the connection ends
    sent: list[tuple[str, int]] = field(default_factory=list)  # digest of a blob, bytes of it that were sent
    ranges: bool = True  # whether it answers a range request with only the requested rest of a blob
    part_limit: int | None = None  # most bytes of a blob in a response, whose Content-Length is that of these bytes
    content_range: str | None = None  # Content-Range header of a range response, instead of the right one
    cut_blobs: list[int] = field(default_factory=list)  # for each of the next blobs: bytes until the connection ends
    sessions: dict[str, bytearray] = field(default_factory=dict)  # uploads in parts
    states: dict[str, int] = field(default_factory=dict)  # upload -> number in the only URL that may continue it
    mounts: dict[str, dict[str, bytes]] = field(default_factory=dict)  # other repository -> digest -> blob
    lengths: list[str | None] = field(default_factory=list)  # Content-Length of uploads
    blobs: dict[str, bytes] = field(default_factory=dict)
    manifests: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    tag_page: int | None = 2  # tags in one response of the list of tags; None: it does not list tags
    tag_limit: int | None = None  # the largest number of tags that a request may ask for
    tag_pages: list[str | None] = field(default_factory=list)  # the number of tags in each request for them
    on_request: Callable[[str], None] | None = None  # called with each request before it is answered
    requests: list[tuple[str, str]] = field(default_factory=list)  # request line, Authorization
    port: int = 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def written(self) -> list[str]:
        return [line for line, _ in self.requests if line.startswith(("PUT", "POST"))]

    def put(self, media_type: str, document: Mapping[str, Any], *targets: str) -> str:
        raw = json.dumps(document).encode()
        digest = oci_types.digest_of(raw)
        for target in (digest, *targets):
            self.manifests[target] = (media_type, raw)
        return digest

    def add_blob(self, raw: bytes) -> str:
        self.blobs[oci_types.digest_of(raw)] = raw
        return oci_types.digest_of(raw)


class _Handler(BaseHTTPRequestHandler):
    registry: Registry
    lost = False
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _handle(self) -> None:
        registry = self.registry
        length = int(self.headers.get("Content-Length", 0))
        if self.command == "PUT" and "/uploads/" in self.path:
            registry.lengths.append(self.headers.get("Content-Length"))
            if registry.cut:
                registry.cut -= 1
                self.rfile.read(length // 2)
                self.close_connection = True
                return None
        if self.command == "PATCH" and registry.cut_parts:
            count = registry.cut_parts.pop(0)
            registry.requests.append((f"PATCH, {count} of {length} bytes", ""))
            registry.sessions[self.path.partition("?")[0]] += self.rfile.read(count)
            self.close_connection = True
            return None
        raw = self.rfile.read(length)
        path, _, query = self.path.partition("?")
        registry.requests.append((f"{self.command} {path}", self.headers.get("Authorization", "")))
        if path in registry.lies:
            return self._answer(*registry.lies[path])
        if path == "/token":
            return self._answer(200, {}, json.dumps({"token": registry.token}).encode())
        if not self._known():
            basic = f'Bearer realm="{registry.bearer}",service="s"' if registry.bearer else 'Basic realm="r"'
            return self._answer(401, {"WWW-Authenticate": basic}, b"{}")
        if registry.failures and re.fullmatch(registry.failures[0][0], f"{self.command} {path}"):
            _, code, headers = registry.failures.pop(0)
            return self._answer(code, headers, b"{}")
        self.lost = bool(registry.lost) and re.fullmatch(registry.lost[0], f"{self.command} {path}") is not None
        if self.lost:
            registry.lost.pop(0)
        if registry.refuse and re.fullmatch(registry.refuse, f"{self.command} {path}"):
            return self._answer(500, {}, b'{"errors": [{"code": "NO", "message": "not now"}]}')
        kind, _, target = path.removeprefix("/v2/").rpartition("/")
        kind = kind.rpartition("/")[2]
        if registry.on_request:
            registry.on_request(f"{self.command} {path}")
        return {"manifests": self._manifest, "tags": self._tags, "blobs": self._blob, "uploads": self._upload,
                "referrers": self._referrers}.get(kind, self._missing)(target, query, raw)  # fmt: skip

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = _handle

    def _known(self) -> bool:
        registry, shown = self.registry, self.headers.get("Authorization")
        if registry.bearer:
            return shown == f"Bearer {registry.token}"
        basic = base64.b64encode(f"{registry.user}:{registry.password}".encode()).decode()
        return not registry.user or shown == f"Basic {basic}"

    def _manifest(self, target: str, query: str, raw: bytes) -> None:
        registry = self.registry
        if self.command == "PUT":
            digest = oci_types.digest_of(raw)
            for name in (digest, target):
                registry.manifests[name] = (self.headers["Content-Type"], raw)
            subject = json.loads(raw).get("subject")
            more = {"OCI-Subject": subject["digest"]} if subject and registry.referrers else {}
            return self._answer(201, more, b"")
        if target not in registry.manifests:
            return self._missing(target, query, raw)
        media_type, content = registry.manifests[target]
        headers = {"Content-Type": media_type, "Docker-Content-Digest": oci_types.digest_of(content)}
        return self._answer(200, headers, content)

    def _tags(self, target: str, query: str, raw: bytes) -> None:
        registry, parameters = self.registry, dict(urllib.parse.parse_qsl(query))
        if registry.tag_page is None:
            return self._answer(405, {}, b"{}")
        registry.tag_pages.append(parameters.get("n"))
        if registry.tag_limit is not None and int(parameters.get("n", 0)) > registry.tag_limit:
            return self._answer(400, {}, b"{}")
        tags = sorted(name for name in registry.manifests if not name.startswith("sha256:"))
        tags = [name for name in tags if name > parameters.get("last", "")]
        page, rest = tags[: registry.tag_page], tags[registry.tag_page :]
        link = f'</v2/other/tags/list?n={registry.tag_page}&last={page[-1]}>; rel="next"' if rest else ""
        return self._answer(200, {"Link": link} if link else {}, json.dumps({"tags": page or None}).encode())

    def _blob(self, target: str, query: str, raw: bytes) -> None:
        if target not in self.registry.blobs:
            return self._missing(target, query, raw)
        content, ranges = self.registry.blobs[target], self.headers.get("Range", "")
        code, headers = 200, {}
        if ranges and self.registry.ranges:
            start = int(ranges.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self._answer(416, {}, b"{}")
            code, headers = 206, {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
            if self.registry.content_range is not None:
                headers = {"Content-Range": self.registry.content_range}
            content = content[start:]
        if self.command == "GET":
            content = content[: self.registry.part_limit]
        if self.command == "GET" and self.registry.cut_blobs:
            self.close_connection = True
            headers = {**headers, "Content-Length": str(len(content))}
            content = content[: self.registry.cut_blobs.pop(0)]
        self.registry.sent.append((target, len(content)))
        return self._answer(code, headers, content)

    def _upload(self, target: str, query: str, raw: bytes) -> None:
        registry, path = self.registry, self.path.partition("?")[0]
        if self.command == "POST":
            parameters = dict(urllib.parse.parse_qsl(query))
            digest = parameters.get("mount", "")
            if digest in registry.mounts.get(parameters.get("from", ""), ()):
                registry.blobs[digest] = registry.mounts[parameters["from"]][digest]
                return self._answer(201, {}, b"")
            place = f"{path}{len(registry.states)}"
            registry.sessions[place] = bytearray()
            return self._answer(202, {"Location": self._continued(place)}, b"")
        content = registry.sessions.get(path)
        if content is None:
            return self._missing(target, query, raw)
        state = dict(urllib.parse.parse_qsl(query)).get("state")
        if self.command != "GET" and path in registry.states and state != str(registry.states[path]):
            return self._answer(409, {}, b"{}")
        if self.command == "PATCH":
            if not registry.parts:
                return self._answer(405, {}, b"{}")
            first, _, last = self.headers["Content-Range"].partition("-")
            if int(first) != len(content) or int(last) != len(content) + len(raw) - 1:
                return self._answer(416, {}, b"{}")
            content += raw
        if self.command in ("PATCH", "GET"):
            code = 202 if self.command == "PATCH" else 204
            held = f"0-{max(0, len(content) - 1)}"
            return self._answer(code, {"Location": self._continued(path), "Range": held}, b"")
        digest = query.rpartition("digest=")[2].replace("%3A", ":")
        whole = bytes(content) + raw
        assert hashlib.sha256(whole).hexdigest() == digest.removeprefix("sha256:")
        registry.blobs[digest] = whole
        del registry.sessions[path]
        return self._answer(201, {}, b"")

    def _continued(self, path: str) -> str:
        """Return the URL that continues an upload from now on; the previous URL is not valid any more."""
        self.registry.states[path] = self.registry.states.get(path, 0) + 1
        return f"{path}?state={self.registry.states[path]}"

    def _referrers(self, target: str, query: str, raw: bytes) -> None:
        if not self.registry.referrers:
            return self._missing(target, query, raw)
        found = []
        for digest, (media_type, content) in self.registry.manifests.items():
            document = json.loads(content)
            if digest.startswith("sha256:") and document.get("subject", {}).get("digest") == target:
                listed = {"artifactType": document["artifactType"], "annotations": document["annotations"]}
                found.append({**oci_types.descriptor(media_type, content), **listed})
        body = json.dumps({"schemaVersion": 2, "mediaType": oci_types.INDEX, "manifests": found}).encode()
        return self._answer(200, {"Content-Type": oci_types.INDEX}, body)

    def _missing(self, target: str, query: str, raw: bytes) -> None:
        self._answer(404, {}, b"{}")

    def _answer(self, code: int, headers: Mapping[str, str], content: bytes) -> None:
        if self.lost:
            self.close_connection = True
            return
        self.send_response(code)
        for key, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextlib.contextmanager
def serving(registry: Registry) -> Iterator[Registry]:
    """Serve the registry; if it was served before, at the same port."""
    server = ThreadingHTTPServer(("127.0.0.1", registry.port), type("Handler", (_Handler,), {"registry": registry}))
    registry.port = server.server_port
    with served(server), _closed_sessions():
        yield registry


@contextlib.contextmanager
def _closed_sessions() -> Iterator[None]:
    """Close the connections that the context opened to registries. `entry.main` stops the search for garbage, so in
    these tests hundreds of them would stay open."""
    made: list[requests.Session] = []
    make = registry_http_and_auth.registry_session

    def session(*arguments: Any, **options: Any) -> requests.Session:
        made.append(make(*arguments, **options))
        return made[-1]

    with mock.patch.object(registry_http_and_auth, "registry_session", session):
        try:
            yield
        finally:
            for one in made:
                one.close()


def docker_login(folder: Path, monkeypatch: pytest.MonkeyPatch, **logins: str) -> None:
    """Write docker's config.json. `logins`: host -> "user:password", passed as **{host: ...} because a host may contain
    a colon."""
    folder.mkdir(parents=True, exist_ok=True)
    auths = {host: {"auth": base64.b64encode(secret.encode()).decode()} for host, secret in logins.items()}
    (folder / "config.json").write_text(json.dumps({"auths": auths}), encoding="utf-8")
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
