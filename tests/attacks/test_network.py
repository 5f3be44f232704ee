"""A registry or index that never ends its answer, or that wants the credentials of another registry."""

from __future__ import annotations

import base64
import contextlib
import datetime
import importlib
import io
import ipaddress
import socket
import socketserver
import ssl
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from requests.adapters import BaseAdapter
from unit.registries import Registry, docker_login, serving
from unit.served import served
from unit.site import new_key
from unit.support import configure, envbuild

from envbuild.fetch import file_download_and_range_reads, index_config, wheel_resolution_and_download
from envbuild.fetch.file_download_and_range_reads import RemoteFile
from envbuild.registry import registry_http_and_auth
from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import NetworkError

SECRET = "correct horse battery staple"
LIMITS = "network:\n  deadline: 2\n  rate: 1000\n"  # each single byte arrives in time, the whole answer does not
LONG = 40  # seconds; the server would go on for ten minutes
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 600\r\n\r\n"
CHUNKED = HEAD.replace(b"Content-Length: 600", b"Transfer-Encoding: chunked")
DRIPS = {
    "head": (b"HTTP/1.1 200 OK\r\nX: ", b" "),
    "body": (HEAD, b" "),
    "chunks": (CHUNKED, b"1\r\n \r\n"),
    "size of a chunk": (CHUNKED, b"0"),
}
"""Part of the answer that is sent slowly -> (what is sent at once, what is then sent each second)."""


@contextlib.contextmanager
def sending(
    at_once: bytes,
    piece: bytes,
    pause: float,
    count: int,
    seen: list[bytes] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Iterator[str]:
    """Start a server, and return its host:port. The server answers `at_once`, then `count` pieces, one piece after each
    pause. `seen` gets the first line of each connection's request."""

    class Handler(socketserver.BaseRequestHandler):
        def setup(self) -> None:
            if tls:
                self.request = tls.wrap_socket(self.request, server_side=True)

        def handle(self) -> None:
            received = b""
            while b"\r\n\r\n" not in received and (part := self.request.recv(1 << 16)):
                received += part
                if received.startswith(b"\x16"):  # a TLS handshake: this server does not use TLS
                    return
            if seen is not None:
                seen.append(received.partition(b"\r\n")[0])
            with contextlib.suppress(OSError):
                self.request.sendall(at_once)
                for _ in range(count):
                    time.sleep(pause)
                    self.request.sendall(piece)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    with served(server):
        yield f"127.0.0.1:{server.server_address[1]}"


def dripping(at_once: bytes, seen: list[bytes] | None = None) -> contextlib.AbstractContextManager[str]:
    return sending(at_once, b" ", 1, 600, seen)


@pytest.mark.attack("registry", "one byte a second, for ever", "exit 7 after the deadline of the request")
@pytest.mark.parametrize("drips", DRIPS)
def test_a_registry_that_drips_is_given_up(project: Path, drips: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(LIMITS)
    Path("team.pub").write_bytes(new_key(monkeypatch).pem)  # without a key, no registry is asked
    at_once, piece = DRIPS[drips]
    with sending(at_once, piece, 1, 600) as host:
        begin = time.monotonic()
        done = envbuild("verify", f"{host}/team/h20:verified", "--key", "team.pub", "--json")
        assert time.monotonic() - begin < LONG
    assert done.code == NetworkError.code
    assert done.document["error"]["message"] == (
        "127.0.0.1 answers too slowly (deadline 2 s, minimum rate 1000 bytes/s)"
    )
    assert "network.deadline" in done.document["error"]["hint"]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate for 127.0.0.1 with its key, in one PEM file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("authority") / "server.pem"
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*form))
    return file


@pytest.mark.attack("registry", "one byte a second over TLS, for ever", "exit 7 after the deadline of the request")
@pytest.mark.parametrize("drips", DRIPS)
def test_a_registry_that_drips_over_tls_is_given_up(authority: Path, drips: str) -> None:
    configure(LIMITS)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(authority)
    at_once, piece = DRIPS[drips]
    with sending(at_once, piece, 1, 600, tls=tls) as host:
        session = registry_http_and_auth.registry_session(str(authority))
        begin = time.monotonic()
        with pytest.raises(NetworkError, match="too slowly"):
            session.get(f"https://{host}/", timeout=registry_http_and_auth.TIMEOUT)
        assert time.monotonic() - begin < LONG


@pytest.mark.attack("registry", "a token service that sends one byte a second", "exit 7 after the deadline")
@pytest.mark.parametrize("at_once", [b"HTTP/1.1 200 OK\r\nX: ", HEAD], ids=["head", "body"])
def test_a_token_service_that_drips_is_given_up(at_once: bytes) -> None:
    configure(LIMITS)
    with dripping(at_once) as host, serving(Registry(bearer=f"http://{host}/token")) as registry:
        place = Repository(Reference.parse(f"{registry.host}/team/h20"))
        begin = time.monotonic()
        with pytest.raises(NetworkError, match="too slowly"):
            place.manifest("v1")
        assert time.monotonic() - begin < LONG


@pytest.mark.attack(
    "registry", "a layer at full speed at first, then one byte a second", "exit 7: speed saves no time up"
)
def test_a_blob_that_starts_fast_and_then_drips_is_given_up() -> None:
    configure(LIMITS)
    head = HEAD.replace(b"600", b"10000600") + bytes(10_000_000)
    with dripping(head) as host:
        place = Repository(Reference.parse(f"{host}/team/h20"))
        begin = time.monotonic()
        with pytest.raises(NetworkError, match="too slowly"):
            list(place.blocks(f"sha256:{'0' * 64}"))
        assert time.monotonic() - begin < LONG


@pytest.mark.attack("mirror or index", "one byte a second, for ever", "exit 7 after the deadline, no second try")
@pytest.mark.parametrize("at_once", [b"HTTP/1.1 200 OK\r\nX: ", HEAD], ids=["head", "body"])
def test_an_index_that_drips_is_given_up(tmp_path: Path, at_once: bytes) -> None:
    configure(LIMITS)
    seen: list[bytes] = []
    with dripping(at_once, seen) as host:
        begin = time.monotonic()
        with pytest.raises(NetworkError, match="too slowly"):
            file_download_and_range_reads.fetch_file(
                index_config.index_session(),
                RemoteFile(f"http://{host}/a.whl", "a.whl"),
                tmp_path / "a",
                lambda count: None,
                limit=9999,
            )
        assert time.monotonic() - begin < LONG
    assert seen == [b"GET /a.whl HTTP/1.1"]


@pytest.mark.attack("mirror or index", "one byte a second, for ever, to uv as it resolves", "exit 7 after a limit")
def test_an_index_that_drips_while_uv_resolves_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel_resolution_and_download, "_SECONDS", 5.0)
    with dripping(HEAD.replace(b"application/json", b"text/html")) as host:
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{host}/simple")
        monkeypatch.setenv("PIP_TRUSTED_HOST", host)
        begin = time.monotonic()
        with pytest.raises(NetworkError, match="no answer from the indexes after 5 s"):
            wheel_resolution_and_download.offered(["alpha"], "3.11", "2.36")
        assert time.monotonic() - begin < LONG


@pytest.mark.attack("registry", "one byte a second, for ever, through a SOCKS proxy", "exit 7 after the deadline")
def test_a_registry_that_drips_behind_a_socks_proxy_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """PySocks, which requests needs for such a proxy, is not installed here, so the test replaces it by a plain
    connection."""

    def connected(destination: tuple[str, int], *arguments: Any, **options: Any) -> socket.socket:
        assert destination == ("registry.example", 80)
        return socket.create_connection((options["proxy_addr"], options["proxy_port"]), options["timeout"])

    pysocks = SimpleNamespace(PROXY_TYPE_SOCKS4=1, PROXY_TYPE_SOCKS5=2, ProxyError=OSError, create_connection=connected)
    monkeypatch.setitem(sys.modules, "socks", pysocks)
    monkeypatch.delitem(sys.modules, "urllib3.contrib.socks", raising=False)
    manager = importlib.import_module("urllib3.contrib.socks").SOCKSProxyManager
    monkeypatch.setattr("requests.adapters.SOCKSProxyManager", manager)
    configure(LIMITS)
    with dripping(HEAD) as host:
        session = registry_http_and_auth.registry_session(None)
        begin = time.monotonic()
        for _ in range(2):
            with pytest.raises(NetworkError, match=r"registry\.example answers too slowly"):
                session.get("http://registry.example/", proxies={"http": f"socks5h://{host}"}, timeout=20)
        assert time.monotonic() - begin < LONG


@pytest.mark.attack("registry", "an upload that it does not read", "exit 7 after the deadline")
def test_an_upload_that_the_registry_does_not_read_is_aborted() -> None:
    configure(LIMITS)
    with sending(b"", b"", 600, 1) as host:
        session = registry_http_and_auth.registry_session(None)
        begin = time.monotonic()
        with pytest.raises(NetworkError, match="too slowly"):
            session.put(f"http://{host}/x", data=bytes(1 << 26))
        assert time.monotonic() - begin < LONG


@pytest.mark.legitimate(
    "registry", "a slow answer, above the minimum rate, longer than the deadline", "read to its end"
)
def test_a_slow_answer_above_the_minimum_rate_is_read() -> None:
    configure("network:\n  deadline: 5\n  rate: 100\n")
    with sending(HEAD.replace(b"600", b"18000"), bytes(1000), 0.4, 18) as host:
        answer = registry_http_and_auth.registry_session(None).get(
            f"http://{host}/", stream=True, timeout=registry_http_and_auth.TIMEOUT
        )
        assert registry_http_and_auth.whole_body(answer, 1 << 20, "the answer") == bytes(18_000)


class Sent(BaseAdapter):
    """Answers for every host: the registry asks for a token of `realm`. Keeps (URL, Authorization) of each request."""

    def __init__(self, realm: str) -> None:
        super().__init__()
        self.realm = realm
        self.requests: list[tuple[str, str]] = []

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        self.requests.append((str(request.url).partition("?")[0], request.headers.get("Authorization", "")))
        answer = requests.Response()
        answer.request, answer.url, answer.status_code = request, str(request.url), 401
        answer.raw = io.BytesIO(b'{"token": "t0ken"}')
        if self.requests[-1][0].endswith("/token"):
            answer.status_code = 200
        elif request.headers.get("Authorization"):
            answer.status_code = 404
        answer.headers["WWW-Authenticate"] = f'Bearer realm="{self.realm}"'
        return answer

    def close(self) -> None:
        pass


def shown(registry: str, realm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the credentials that the token service at `realm` receives from a user who is logged in at `registry`."""
    docker_login(tmp_path, monkeypatch, **{registry: f"me:{SECRET}"})
    session, sent = registry_http_and_auth.registry_session(None), Sent(realm)
    session.mount("https://", sent)
    registry_http_and_auth.Access(registry, f"https://{registry}", session).send(
        "GET", f"https://{registry}/v2/a/manifests/b", "pull"
    )
    (found,) = [proof for url, proof in sent.requests if url.endswith("/token")]
    return found


BASIC = f"Basic {base64.b64encode(f'me:{SECRET}'.encode()).decode()}"


@pytest.mark.attack("registry", "a token service on a foreign host", "asked without credentials")
@pytest.mark.parametrize(
    ("registry", "realm"),
    [
        ("a.co.uk", "https://b.co.uk/token"),
        ("a.github.io", "https://b.github.io/token"),
        ("registry.example.com", "https://registry.example.com:8443/token"),
        ("registry.example.com:5000", "https://registry.example.com:5001/token"),
        ("registry.example.com", "https://registry.example.com.evil.example/token"),
        ("registry.example.com", "https://evil.example\\@registry.example.com/token"),
        ("10.0.0.1:5000", "https://10.0.0.1/token"),
        ("localhost:5000", "https://localhost/token"),
    ],
)
def test_credentials_do_not_go_to_a_foreign_token_service(
    registry: str, realm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(registry, realm, tmp_path, monkeypatch) == ""


@pytest.mark.legitimate(
    "registry", "a token service of its domain, or one that the settings name", "gets the credentials"
)
@pytest.mark.parametrize(
    ("registry", "realm"),
    [
        ("registry.a.co.uk", "https://auth.a.co.uk/token"),
        ("registry.example.com:5050", "https://gitlab.example.com/token"),
        ("registry.example.com:5000", "https://registry.example.com:5000/token"),
        ("10.0.0.1:5000", "https://10.0.0.1:5000/token"),
        ("r.example", "https://login.elsewhere.example:8443/token"),
    ],
)
def test_credentials_go_to_the_registrys_own_token_service(
    registry: str, realm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure("network:\n  token_services: {r.example: login.elsewhere.example:8443}\n")
    assert shown(registry, realm, tmp_path, monkeypatch) == BASIC
