"""Removes credentials from URLs before they are shown. Pure."""

from __future__ import annotations

import re
import urllib.parse

IN_TEXT = re.compile(r"\b[a-zA-Z][a-zA-Z0-9+.-]{0,30}://[^\s`\"<>]*[^\s`\"<>).,;:']")
"""Matches a URL in a sentence, without punctuation that follows the URL."""


_PATH_IN_TEXT = re.compile(r"\burl: (/[^\s?#]*)[?#]\S*")
"""Matches a path with a query as in the errors of urllib3: `Max retries exceeded with url: /path?query (Caused by ...`.
The query may be a signature that grants access."""


def validate_url(text: str) -> str:
    """Return the URL if urllib can parse it; otherwise raise ValueError. A regular expression alone would accept
    `https://a[b/c`."""
    try:
        urllib.parse.urlsplit(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a valid URL: {error}") from None
    return text


def redact_url(address: str) -> str:
    """Remove user, password, query and fragment from a URL. If it is ambiguous at which @ a password ends, `***`
    replaces everything after the scheme."""
    scheme, separator, rest = address.partition("://")
    if not separator:
        scheme, rest = "", address
    middle = re.split(r"[/?#]", rest, maxsplit=1)[0] if separator else rest
    later = rest.count("@", len(middle))  # an @ in the path, or after a / ? or # in a password
    if separator and not later:
        rest = host(rest)
    elif later and re.search("[:@]", middle):
        password = later == 1 and "@" not in middle and not re.fullmatch(r"[^:]*:[0-9]+", middle)
        rest = host(rest) if password else "***"
    elif not separator and re.match("[^/@]*:[^/]*@", rest):  # the address of a proxy may have no scheme
        rest = host(rest)
    return scheme + separator + re.split(r"[?#]", rest, maxsplit=1)[0]


def struck(text: str) -> str:
    """Return the text with each URL in it redacted by `redact_url`, and without the query of a path in an error of
    urllib3."""
    return _PATH_IN_TEXT.sub(r"url: \1", IN_TEXT.sub(lambda found: redact_url(found[0]), text))


def host(place: str) -> str:
    """Return `host:port` from `user:password@host:port`. More of the URL may follow the port."""
    return place.rpartition("@")[2]
