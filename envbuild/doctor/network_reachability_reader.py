"""Checks that the configured indexes, registries and proxies are reachable.

No other host is contacted. Each of these hosts is contacted only once, with short time-outs. Nothing is raised if a
host does not answer.
"""

from __future__ import annotations

import contextlib
import email.utils
import math
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests

from envbuild.doctor.machine_readings import Answer, Authorities, EngineReading, Proxy, clean, short_address
from envbuild.doctor.parallel_tasks_with_time_limit import run_in_parallel
from envbuild.fetch import index_config, tls_errors
from envbuild.registry import registry_http_and_auth
from envbuild.util import url_redaction
from envbuild.util.errors import SettingsError
from envbuild.util.network_settings import Network

TIMEOUT = (1.5, 2.5)  # seconds: to connect, and to receive the response's head, which a busy machine sends late
PLACE_SECONDS = 2.5  # for one host: the DNS look-up, the connection and the response's head
MAX_PLACES = 32
_LIMITS = Network()  # the defaults, because the site's settings may be wrong


def index_answers(end: float) -> tuple[Answer, ...]:
    """Requests, in parallel, every index, page and folder that pip and uv take packages from. `end`: the value of
    time.monotonic() at which to stop."""
    try:
        sources = index_config.package_sources()
    except SettingsError as error:
        return (Answer("the configured indexes", fault=clean(error.message)),)
    return _each(_index, sources, end)


def _index(address: str) -> Answer:
    parts = urlsplit(address)
    if parts.scheme in ("", "file"):
        folder = Path(url2pathname(parts.path) if parts.scheme else address).expanduser()
        return Answer(short_address(address), fault=None if folder.exists() else "folder not found")
    return _ask(lambda: index_config.index_session(1, _LIMITS), address)


def mirrors(engine: EngineReading, end: float) -> tuple[Answer, ...]:
    """Requests each mirror that the engine's configuration names for the default registry. `end`: the value of
    time.monotonic() at which to stop."""
    return _each(_registry, list(engine.mirrors), end)


def registries() -> tuple[Answer, ...]:
    """Requests the registries that docker is logged in to or has a credential helper for."""
    return _each(_registry, registry_http_and_auth.logins())


def _registry(place: str) -> Answer:
    host = url_redaction.host(urlsplit(place).netloc) if "://" in place else place.partition("/")[0]
    file = Path("/etc/docker/certs.d") / host / "ca.crt"
    authority = str(file) if file.is_file() else None
    name = urlsplit(f"//{host}").hostname or ""
    # as docker does: plain http for this machine, and for a mirror whose address begins with http://
    plain = place.startswith("http://") or name in ("localhost", "127.0.0.1", "::1")
    return _ask(
        lambda: registry_http_and_auth.registry_session(authority, 1, _LIMITS),
        f"{'http' if plain else 'https'}://{host}/v2/",
    )


def _each(function: Callable[[str], Answer], places: list[str], end: float = math.inf) -> tuple[Answer, ...]:
    wanted = list(dict.fromkeys(places))[:MAX_PLACES]
    seconds = min(PLACE_SECONDS, end - time.monotonic())
    answers = run_in_parallel([partial(function, place) for place in wanted], seconds)
    return tuple(
        answer or Answer(short_address(place), fault="no answer in time")
        for place, answer in zip(wanted, answers, strict=True)
    )


def _ask(session: Callable[[], requests.Session], address: str) -> Answer:
    """Requests an address, but reads only the head of the response, because the page of an index may have 50 MB."""
    try:
        with session() as http, http.get(address, stream=True, timeout=TIMEOUT) as answer:
            return Answer(short_address(address), answer.status_code, ahead=_ahead(answer))
    except (requests.RequestException, OSError, ValueError) as error:
        return Answer(short_address(address), fault=_words(error))


def _words(error: Exception) -> str:
    """Describes an error of the library requests without its message, which may contain addresses with secrets."""
    if isinstance(error, requests.exceptions.SSLError):
        return tls_errors.tls_fault(error).message
    if isinstance(error, requests.exceptions.ProxyError):
        return "the proxy refused the connection"
    if isinstance(error, requests.exceptions.Timeout):
        return "no answer in time"
    return f"no answer ({type(error).__name__})"


def _ahead(answer: requests.Response) -> float | None:
    """Returns by how many seconds this machine's clock is ahead of the server's; None if the response has no valid
    Date.

    The server's time is the response's Date plus the Age that a cache may have added, accurate to a second or two.
    """
    date = answer.headers.get("Date", "")
    age = answer.headers.get("Age", "0")
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        there = email.utils.parsedate_to_datetime(date).timestamp() + (int(age) if age.isdigit() else 0)
        return round(time.time() - there, 1)
    return None


def proxies() -> tuple[Proxy, ...]:
    """Tests the proxies in the environment variables: opens a connection to each, and sends nothing."""
    found: dict[str, list[str]] = {}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        for variable in (name, name.upper()):
            if os.environ.get(variable):
                found.setdefault(os.environ[variable], []).append(variable)
    calls = [partial(_proxy, address, tuple(names)) for address, names in found.items()]
    late = "no answer in time"
    return tuple(
        proxy or Proxy(tuple(names), short_address(address), late)
        for proxy, (address, names) in zip(run_in_parallel(calls, PLACE_SECONDS), found.items(), strict=True)
    )


def _proxy(address: str, variables: tuple[str, ...]) -> Proxy:
    return Proxy(variables, short_address(address), _silent(address))


def _silent(address: str) -> str | None:
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        port = parts.port or {"https": 443, "http": 80, "socks5": 1080, "socks5h": 1080}.get(parts.scheme)
    except ValueError:
        return "invalid address"
    if not parts.hostname or port is None:
        return "invalid address"
    try:
        socket.create_connection((parts.hostname, port), timeout=TIMEOUT[0]).close()
    except OSError as error:
        return f"nothing answers there ({clean(error.strerror or type(error).__name__)})"
    return None


_TRUST = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


def authorities() -> Iterator[Authorities]:
    """Reads the certificate files that environment variables and pip's configuration name."""
    named = {name: os.environ.get(name) for name in _TRUST} | {"pip's cert": index_config.certificate()}
    for variable, value in named.items():
        several = variable == "SSL_CERT_DIR"  # a list of folders, separated like those in PATH
        for path in filter(None, value.split(os.pathsep) if several and value else [value]):
            yield _authorities(variable, path)


def _authorities(variable: str, path: str) -> Authorities:
    if Path(path).is_dir():
        return Authorities(variable, clean(path))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(path)
    except (OSError, ssl.SSLError):
        missing = not Path(path).exists()
        return Authorities(variable, clean(path), fault="does not exist" if missing else "contains no certificate")
    ends = [str(certificate.get("notAfter")) for certificate in context.get_ca_certs()]
    expired = sum(ssl.cert_time_to_seconds(end) < time.time() for end in ends)
    return Authorities(variable, clean(path), len(ends), expired)
