"""Addresses as people write them: with a user and a password, which nobody else is shown. Pure."""

from __future__ import annotations

import re
import urllib.parse


def checked(text: str) -> str:
    """One that can be taken apart, which a pattern alone does not say of `https://a[b/c`. Raises ValueError."""
    try:
        urllib.parse.urlsplit(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no address: {error}") from None
    return text


def shown(address: str) -> str:
    """Without user, password, query and fragment. Nothing at all of one whose password may end behind a / ? or #."""
    scheme, separator, rest = address.rpartition("://")
    middle = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if separator and ":" in middle and "@" in rest and "@" not in middle:
        return f"{scheme}://***"
    path = re.split(r"[?#]", rest[len(middle) :], maxsplit=1)[0]
    return f"{scheme}{separator}{host(middle) if separator else middle}{path}"


def host(place: str) -> str:
    """`host:port` of an address's middle part, `user:password@host:port`; the rest of an address may follow."""
    return place.rpartition("@")[2]
