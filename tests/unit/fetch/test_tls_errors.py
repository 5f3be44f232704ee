"""Each cause of a failed TLS connection has its own message: the connections are real, to a server on this machine."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socketserver
import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from envbuild.doctor import network_reachability_reader
from envbuild.fetch import file_download_and_range_reads, index_config, index_pages
from envbuild.fetch.file_download_and_range_reads import RemoteFile
from envbuild.registry import registry_http_and_auth
from envbuild.registry.registry_http_and_auth import HostUnreachable
from envbuild.util.errors import NetworkError
from unit.served import served
from unit.support import quick_pip

DAY = datetime.timedelta(days=1)


def certificate(file: Path, begin: int = -1, end: int = 1, address: str = "127.0.0.1") -> Path:
    """Write a self-signed certificate, valid from `begin` to `end` in days from now, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + begin * DAY)
        .not_valid_after(now + end * DAY)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*form))
    return file


def error_of(tls: ssl.SSLContext | None, authority: Path | None) -> requests.exceptions.SSLError:
    """The error of a request to a server with this TLS context; without one it answers by HTTP."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                if tls:
                    tls.wrap_socket(self.request, server_side=True).recv(1)
                else:
                    self.request.recv(1 << 16)
                    self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    session = registry_http_and_auth.registry_session(str(authority) if authority else None, tries=1)
    with served(server), pytest.raises(requests.exceptions.SSLError) as caught:
        session.get(f"https://127.0.0.1:{server.server_address[1]}/v2/?secret=1", timeout=30)
    return caught.value


@contextlib.contextmanager
def raising(error: Exception) -> Iterator[SimpleNamespace]:
    """A session whose requests fail."""

    def fail(*arguments: object, **options: object) -> None:
        raise error

    yield SimpleNamespace(get=fail, request=fail)


def context(file: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(file)
    return made


def fault(error: requests.exceptions.SSLError) -> tuple[str, str]:
    found = registry_http_and_auth.unreachable("r.example", error)
    assert type(found) is NetworkError
    assert network_reachability_reader._words(error) in found.message
    return found.message, found.hint or ""


def test_the_folder_of_certificates_for_docker_hub(tmp_path: Path) -> None:
    """Docker Hub has another host than its name docker.io."""
    error = error_of(context(certificate(tmp_path / "a.pem")), None)
    found = registry_http_and_auth.unreachable("docker.io", error)
    assert "put its CA certificate into /etc/docker/certs.d/registry-1.docker.io/ca.crt, or" in str(found.hint)


def test_an_unknown_authority(tmp_path: Path) -> None:
    message, hint = fault(error_of(context(certificate(tmp_path / "a.pem")), None))
    assert message == "no TLS connection to r.example: this machine does not trust the server's certificate"
    assert "/etc/docker/certs.d/r.example/ca.crt" in hint


@pytest.mark.parametrize(
    ("begin", "end", "address", "message"),
    [
        (-2, -1, "127.0.0.1", "has expired"),
        (1, 2, "127.0.0.1", "is not valid yet"),
        (-1, 1, "127.0.0.2", "is for a different IP address"),
    ],
)
def test_a_trusted_certificate_that_is_invalid_here(
    tmp_path: Path, begin: int, end: int, address: str, message: str
) -> None:
    file = certificate(tmp_path / "a.pem", begin, end, address)
    found, hint = fault(error_of(context(file), file))
    assert found == f"no TLS connection to r.example: the server's certificate {message}"
    assert "ca.crt" not in hint


def test_http_on_the_port(tmp_path: Path) -> None:
    message, hint = fault(error_of(None, None))
    assert message == "no TLS connection to r.example: the server does not use TLS on this port"
    assert hint == "name the port for https"


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_no_common_version(tmp_path: Path) -> None:
    file = certificate(tmp_path / "a.pem")
    old = context(file)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.set_ciphers("ALL:@SECLEVEL=0")
    message, hint = fault(error_of(old, file))
    assert message.startswith("no TLS connection to r.example: the TLS handshake failed (")
    assert "version" in hint


def test_a_connection_that_breaks_may_be_tried_again() -> None:
    error = requests.exceptions.SSLError(ssl.SSLEOFError(8, "EOF occurred in violation of protocol"))
    found = registry_http_and_auth.unreachable("r.example", error)
    assert isinstance(found, HostUnreachable)
    assert found.message == "no TLS connection to r.example: the connection broke"


def test_a_package_index_and_a_file_say_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick_pip(monkeypatch)
    error = error_of(None, None)
    session: Any
    with raising(error) as session:
        remote = RemoteFile("https://127.0.0.1:1/a.whl", "a.whl")
        for read in (file_download_and_range_reads.head, partial(fetch_file, file=tmp_path / "a")):
            with pytest.raises(NetworkError, match=r"^a\.whl cannot be fetched: the server does not use TLS") as caught:
                read(session, remote)
            assert caught.value.hint == "name the port for https"
    monkeypatch.setattr(index_config, "shared_session", lambda: session)
    with pytest.raises(NetworkError, match=r"index 127.0.0.1:1 did not answer for a: the server does not use TLS"):
        index_pages._page("https://127.0.0.1:1/simple/a/", "a")


def fetch_file(session: requests.Session, remote: RemoteFile, file: Path) -> None:
    file_download_and_range_reads.fetch_file(session, remote, file, lambda count: None, limit=1)
