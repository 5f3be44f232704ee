"""Removes credentials from URLs before they are shown. Pure."""

from __future__ import annotations

import re
import urllib.parse

IN_TEXT = re.compile(r"\b[a-z][a-z0-9+.-]{0,30}://[^\s`\"<>]*[^\s`\"<>).,;:']")
"""Matches a URL in a sentence, without the punctuation after it."""


def validate_url(text: str) -> str:
    """Return the URL if urllib can parse it; a pattern alone accepts `https://a[b/c`. Raises ValueError."""
    try:
        urllib.parse.urlsplit(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not a valid URL: {error}") from None
    return text


def redact_url(address: str) -> str:
    """The URL without user, password, query and fragment; `***` if it is ambiguous at which @ a password ends."""
    scheme, separator, rest = address.rpartition("://")
    middle = re.split(r"[/?#]", rest, maxsplit=1)[0] if separator else rest
    later = rest.count("@", len(middle))  # part of the path, or of a password with / ? or # in it
    if separator and not later:
        rest = host(rest)
    elif later and re.search("[:@]", middle):
        password = later == 1 and "@" not in middle and not re.fullmatch(r"[^:]*:[0-9]+", middle)
        rest = host(rest) if password else "***"
    return scheme + separator + re.split(r"[?#]", rest, maxsplit=1)[0]


def struck(text: str) -> str:
    """The text with every URL redacted by `redact_url`."""
    return IN_TEXT.sub(lambda found: redact_url(found[0]), text)


def host(place: str) -> str:
    """`host:port` from `user:password@host:port`, the middle part of a URL; the rest of the URL may follow."""
    return place.rpartition("@")[2]
