"""Access to a registry: docker's credentials, tokens, and the hosts that may receive them.

A registry may redirect to other hosts for a token or a blob. Credentials are sent only to the registry's own host and
port, and to a token service that is in the same domain or named in the settings. They are sent over TLS if the registry
uses TLS.
"""

from __future__ import annotations

import base64
import contextlib
import email.utils
import ipaddress
import re
import time
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import docker.auth
import docker.errors
import requests
from urllib3.util.retry import Retry

from envbuild.fetch import tls_errors
from envbuild.registry import oci_types, tls_context
from envbuild.util import http_deadlines, network_settings, strict_and_canonical_json, url_redaction
from envbuild.util.errors import EnvbuildError, NetworkError
from envbuild.util.http_deadlines import Adapter
from envbuild.util.network_settings import Network
from envbuild.util.untrusted_input_errors import Refusal

if TYPE_CHECKING:
    from publicsuffixlist import PublicSuffixList

TIMEOUT = (15, 120)  # seconds: to connect, and between two reads of a response
_TOKEN_BYTES = 1 << 20
_SHORT_BODY = 9999  # bytes
_REDIRECTS = 5

Send = Callable[..., requests.Response]


class TemporaryFailure(NetworkError):
    """A request failed in a way that may pass. `retry_after`: the seconds to wait that the server requests."""

    def __init__(self, message: str, *, hint: str | None = None, retry_after: float = 0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class HostUnreachable(TemporaryFailure):
    """A host does not answer, or the connection to it broke."""


class TokenRefused(NetworkError):
    """The token service of a registry refuses access."""


class _Adapter(Adapter):
    """Trusts the certificate authorities of the system, of `authority`, and those configured for requests."""

    def __init__(self, authority: str | None, limits: Network | None, **options: Any) -> None:
        self._authority = authority
        super().__init__(limits, **options)

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:
        """Set the pool's TLS context, and prevent urllib3 from reading the authorities again for every connection."""
        super().cert_verify(conn, url, verify, cert)  # type: ignore[no-untyped-call]
        configured = conn.ca_certs or conn.ca_cert_dir
        if conn.cert_reqs != "CERT_REQUIRED" or not configured:
            return
        try:
            conn.conn_kw["ssl_context"] = tls_context.trusting(*filter(None, (self._authority, configured)))
        except OSError as error:
            raise requests.exceptions.SSLError(error) from None
        if conn.proxy is None:  # a proxy with TLS has a context of its own, for which urllib3 reads them
            conn.ca_certs = conn.ca_cert_dir = None


def registry_session(authority: str | None, tries: int = 4, limits: Network | None = None) -> requests.Session:
    """A session with proxies from the environment, but without netrc. `authority`: a file with additional trusted
    certificates; `tries`: attempts per request; `limits`: None for the configured limits."""
    made = requests.Session()
    made.auth = _nobody
    made.headers["Accept-Encoding"] = "identity"
    again = Retry(total=tries - 1, backoff_factor=0.5, status_forcelist=(429, 502, 503, 504), raise_on_status=False,
                  redirect=False, respect_retry_after_header=False)  # fmt: skip
    for scheme in ("http://", "https://"):
        made.mount(scheme, _Adapter(authority, limits, max_retries=again))
    return made


def _nobody(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Disables netrc: only explicitly set headers carry credentials."""
    return request


@cache
def _docker_logins() -> docker.auth.AuthConfig:
    return docker.auth.load_config()


def login(host: str) -> dict[str, str]:
    """The credentials for a host from docker's config.json or its credential helper, keys in lower case; empty if none.

    Raises NetworkError if they cannot be read, for example if a helper fails.
    """
    try:
        found = docker.auth.resolve_authconfig(_docker_logins(), None if host == "docker.io" else host)
    except (docker.errors.DockerException, OSError, ValueError) as error:
        text = f"docker's credentials for {host} cannot be read"
        raise NetworkError(text, hint=f"{type(error).__name__}; docker login {host}") from None
    return {key.lower(): value for key, value in (found or {}).items() if isinstance(value, str)}


def logins() -> list[str]:
    """The registries in docker's config.json: those with a login, or with their own credential helper. Empty if the
    file cannot be read."""
    try:
        known = _docker_logins()
    except (docker.errors.DockerException, OSError, ValueError):
        return []
    return sorted({*(known.auths or {}), *(known.cred_helpers or {})})


class Access:
    """Sends requests to one registry with docker's login for it. `base`: the registry's scheme, host and port."""

    def __init__(self, host: str, base: str, http: requests.Session) -> None:
        self.host, self.base, self._http = host, base, http
        self._proofs: dict[str, str] = {}  # scope -> value of the Authorization header

    def send(self, method: str, url: str, scope: str, **options: Any) -> requests.Response:
        """Send a request, and return the response, whatever its status. Redirects of GET and HEAD are followed. After a
        401, the request is sent once more with credentials, if there are any. Raises NetworkError or Refusal."""
        answer = self._follow(method, url, scope, **options)
        if answer.status_code == 401:  # no token yet, or it has expired
            proof = self._proof(answer.headers.get("WWW-Authenticate", ""), scope)
            if proof:
                finish(answer)
                self._proofs[scope] = proof
                answer = self._follow(method, url, scope, **options)
        return answer

    def abort(self) -> None:
        """End all requests in other threads now; no more requests are possible."""
        http_deadlines.abort(self._http)

    def connection_error(self, url: str, error: requests.RequestException) -> NetworkError:
        """The error for a failed request to a URL of the registry, or of another host that the registry names."""
        host = self.host if _origin(url) == _origin(self.base) else url_redaction.host(urlsplit(url).netloc)
        return unreachable(host, error, self.host)

    def _follow(self, method: str, url: str, scope: str, **options: Any) -> requests.Response:
        for _ in range(_REDIRECTS + 1):
            answer = self._one(method, url, scope, **options)
            if answer.status_code not in (301, 302, 303, 307, 308) or method not in ("GET", "HEAD"):
                return answer
            finish(answer)
            url = self.moved(url, answer)
        raise Refusal("redirect", f"{self.host} redirects more than {_REDIRECTS} times")

    def moved(self, url: str, answer: requests.Response) -> str:
        """The URL in the Location header of a response to a request to `url`. Raises Refusal as `inside` does."""
        try:
            there = urljoin(url, answer.headers.get("Location", ""))
        except ValueError:
            raise Refusal("redirect", f"{self.host} redirects to an invalid URL") from None
        return self.inside(there)

    def inside(self, url: str) -> str:
        """The URL as requests will send it. Raises Refusal if it is invalid or does not use https. http is allowed only
        for a host of this machine, if the registry uses http too.

        The URL is checked both as given and in the form in which it is sent, because parsers differ: in
        `https://a\\@b` urlsplit finds host b, and requests connects to a.
        """
        try:
            self._require_https(url)
            prepared = requests.Request("GET", url).prepare().url or ""
            self._require_https(prepared)
        except ValueError:  # unclosed brackets, or a port that is not a number
            raise Refusal("redirect", f"{self.host} redirects to an invalid URL") from None
        return prepared

    def _require_https(self, url: str) -> None:
        scheme, host, _ = _origin(url)
        plain = scheme == "http" and urlsplit(self.base).scheme == "http" and is_local(host or "")
        if scheme != "https" and not plain:
            raise Refusal("insecure", f"{self.host} redirects to {scheme or 'no scheme'}, which is not https")

    def _one(self, method: str, url: str, scope: str, **options: Any) -> requests.Response:
        headers = dict(options.pop("headers", {}))
        if _origin(url) == _origin(self.base) and scope in self._proofs:
            headers["Authorization"] = self._proofs[scope]
        try:
            return self._http.request(
                method, url, headers=headers, allow_redirects=False, stream=True, timeout=TIMEOUT, **options
            )
        except requests.RequestException as error:
            raise self.connection_error(url, error) from None
        except ValueError:  # requests parses the Location of a response even if it does not follow it
            raise Refusal("redirect", f"{self.host} redirects to an invalid URL") from None

    def _proof(self, challenge: str, scope: str) -> str | None:
        kind, _, rest = challenge.partition(" ")
        known = login(self.host)
        if kind.lower() == "basic":
            return _basic(known)
        if kind.lower() != "bearer":
            return None
        parameters = dict(re.findall(r'([a-z_]+)="([^"]*)"', rest[:4000]))
        return f"Bearer {self._token(parameters, known, parameters.get('scope') or scope)}"

    def _trusts(self, realm: str) -> bool:
        """Whether a token service may receive the registry's credentials."""
        named = network_settings.configured_limits().token_services.get(self.host)
        return related(self.base, realm) or (named is not None and _origin(realm) == _origin(f"https://{named}"))

    def _token(self, parameters: dict[str, str], known: dict[str, str], scope: str) -> str:
        realm = self.inside(parameters.get("realm", ""))
        mine = known if self._trusts(realm) else {}
        fields = {"service": parameters.get("service", ""), "scope": scope}
        authorization = _basic(mine)
        try:
            if "identitytoken" in mine:
                fields |= {
                    "grant_type": "refresh_token",
                    "refresh_token": mine["identitytoken"],
                    "client_id": "envbuild",
                }
                answer = self._http.post(realm, data=fields, allow_redirects=False, stream=True, timeout=TIMEOUT)
            else:
                headers = {"Authorization": authorization} if authorization else {}
                answer = self._http.get(
                    realm, params=fields, headers=headers, allow_redirects=False, stream=True, timeout=TIMEOUT
                )
            raw = whole_body(answer, _TOKEN_BYTES, "the token")
        except requests.RequestException as error:
            raise self.connection_error(realm, error) from None
        except ValueError:
            raise Refusal("redirect", f"the token service of {self.host} redirects to an invalid URL") from None
        if is_temporary(answer.status_code):
            text = f"the token service of {self.host} answered {answer.status_code}"
            raise TemporaryFailure(text, hint="run the same command again later", retry_after=retry_after(answer))
        if answer.status_code != 200:
            text = f"{self.host} denied access: its token service answered {answer.status_code}"
            elsewhere = (
                f"; its token service {urlsplit(realm).hostname} does not receive the credentials of {self.host}"
            )
            raise TokenRefused(text + (elsewhere if known and not mine else ""), hint=f"docker login {self.host}")
        found = strict_and_canonical_json.parse(raw, "the token", _TOKEN_BYTES)
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[!-~]{1,100000}", token):
            raise NetworkError(f"the token service of {self.host} returned no token")
        return token


def _basic(known: dict[str, str]) -> str | None:
    if not known.get("username"):
        return None
    return "Basic " + base64.b64encode(f"{known['username']}:{known.get('password', '')}".encode()).decode()


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"https": 443, "http": 80}.get(parts.scheme)


def is_local(host: str) -> bool:
    """Whether a host name or IP address means this machine, where http is allowed too."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def related(registry: str, service: str) -> bool:
    """Whether the URL of a token service belongs to that of its registry. Either both have the same scheme, host and
    port; or the service uses https on port 443 of the same registrable domain, like auth.docker.io for
    registry-1.docker.io."""
    if _origin(registry) == _origin(service):
        return True
    domains = {_domain(urlsplit(url).hostname or "") for url in (registry, service)}
    return len(domains) == 1 and None not in domains and _origin(service)[::2] == ("https", 443)


@cache
def _public_suffixes() -> PublicSuffixList:
    """The list in the package publicsuffixlist. It is cached because reading it takes tens of milliseconds."""
    from publicsuffixlist import PublicSuffixList

    return PublicSuffixList()


def _domain(host: str) -> str | None:
    """The registrable domain: a.co.uk for www.a.co.uk; None for an IP address, a public suffix and a name without a
    dot."""
    return None if _is_address(host) else _public_suffixes().privatesuffix(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False


def is_temporary(status: int) -> bool:
    """Whether a request with this status may succeed later."""
    return status in (408, 429) or (status >= 500 and status != 501)


def retry_after(answer: requests.Response) -> float:
    """The seconds to wait that a response requests by its header Retry-After, a number or a date; 0 without a valid
    one."""
    value = answer.headers.get("Retry-After", "").strip()[:100]
    if re.fullmatch("[0-9]{1,9}", value, re.ASCII):
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        return max(0.0, date.timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def whole_body(answer: requests.Response, limit: int, what: str) -> bytes:
    """The whole body of a response. Raises Refusal beyond `limit` bytes, requests' errors if it is incomplete."""
    found = http_deadlines.body(answer, limit)
    if len(found) > limit:
        raise Refusal("too-large", f"{what} is larger than {limit} bytes")
    return found


def finish(answer: requests.Response) -> None:
    """End a response whose body is not needed. The connection can be used again only if the whole body was read. So a
    body that is empty (after HEAD or with 204) or short is read; otherwise the connection is closed."""
    length = answer.headers.get("Content-Length", "")
    if answer.request.method == "HEAD" or answer.status_code == 204 or re.fullmatch("[0-9]{1,4}", length):
        with contextlib.suppress(requests.RequestException, EnvbuildError):
            whole_body(answer, _SHORT_BODY, "the body")
    answer.close()


def unreachable(host: str, error: requests.RequestException, registry: str | None = None) -> NetworkError:
    """The error for a failed request, in our own words: requests' messages may contain URLs with secrets. `registry`:
    the registry that names the host, if it is a different one."""
    if isinstance(error, requests.exceptions.SSLError):
        fault = tls_errors.tls_fault(error)
        folder = f"/etc/docker/certs.d/{oci_types.server_of(registry or host)}"
        authority = f"put its CA certificate into {folder}/ca.crt, or {fault.hint}"
        kind = HostUnreachable if fault.temporary else NetworkError
        text = f"no TLS connection to {host}: {fault.message}"
        return kind(text, hint=authority if fault.untrusted else fault.hint)
    hint = "check the name and the network"
    if host == "docker.io":
        hint = "a name without a registry means docker.io: write REGISTRY/NAME"
    return HostUnreachable(f"{host} does not answer: {type(error).__name__}", hint=hint)
