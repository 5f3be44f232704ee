"""Describes why a TLS connection failed, without the error's own message, which may contain a URL with secrets."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class TlsFault:
    """`message`: what is wrong, about "the server". `hint`: how to fix it. `untrusted`: whether a certificate of an
    authority may be missing on this machine. `temporary`: whether the connection broke, so that another may succeed."""

    message: str
    hint: str
    untrusted: bool = False
    temporary: bool = False


_CLOCK = "set this machine's clock if it is wrong; otherwise the server needs a new certificate"
_NAME = "use a name of the server that its certificate contains"
# The codes X509_V_ERR_* of openssl/x509_vfy.h.
_CERTIFICATES = {
    9: TlsFault("the server's certificate is not valid yet", _CLOCK),
    10: TlsFault("the server's certificate has expired", _CLOCK),
    62: TlsFault("the server's certificate is for a different host name", _NAME),
    64: TlsFault("the server's certificate is for a different IP address", _NAME),
}
_UNTRUSTED_CODES = (2, 18, 19, 20, 21, 24, 27)
_UNTRUSTED = TlsFault(
    "this machine does not trust the server's certificate",
    "set REQUESTS_CA_BUNDLE to the file of its CA certificate",
    untrusted=True,
)
_NOT_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_PLAIN = TlsFault("the server does not use TLS on this port", "name the port for https")
_NO_COMMON = "the server may require a client certificate, or a TLS version or cipher that this machine does not allow"
_BROKEN = TlsFault("the connection broke", "check the network, and run the same command again", temporary=True)


def tls_fault(error: BaseException) -> TlsFault:
    """Describe an SSLError of ssl, urllib3 or requests."""
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return _certificate_fault(getattr(cause, "verify_code", 0), getattr(cause, "verify_message", ""))
        if isinstance(cause, ssl.SSLError):
            reason = getattr(cause, "reason", None) or ""  # Python sets none in errors that it makes itself
            if reason in _NOT_TLS:
                return _PLAIN
            if "HANDSHAKE_FAILURE" in reason or "PROTOCOL" in reason or "CERTIFICATE" in reason or "VERSION" in reason:
                return TlsFault(f"the TLS handshake failed ({reason.lower().replace('_', ' ')})", _NO_COMMON)
    return _BROKEN


def _certificate_fault(code: int, message: str) -> TlsFault:
    if code in _CERTIFICATES:
        return _CERTIFICATES[code]
    if code in _UNTRUSTED_CODES:
        return _UNTRUSTED
    why = f" ({message})" if message else ""
    return TlsFault(f"this machine does not accept the server's certificate{why}", _UNTRUSTED.hint, untrusted=True)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it wraps, the outer ones first."""
    waiting, seen = [error], set[int]()
    while waiting:
        found = waiting.pop(0)
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            inner = (*found.args, getattr(found, "reason", None), found.__cause__, found.__context__)
            waiting += [item for item in inner if isinstance(item, BaseException)]
