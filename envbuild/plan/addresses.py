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
    """Without user, password, query and fragment; a password with a slash in it does not show either."""
    scheme, separator, rest = re.split(r"[?#]", address, maxsplit=1)[0].rpartition("://")
    return f"{scheme}{separator}{host(rest) if separator else rest}"


def host(place: str) -> str:
    """`host:port` of an address's middle part, `user:password@host:port`; the rest of an address may follow."""
    return place.rpartition("@")[2]
