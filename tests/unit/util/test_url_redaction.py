"""The visible part of a URL: never a password, and no host other than its own."""

from __future__ import annotations

import pytest

from envbuild.util import url_redaction


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://u:p@host:80/x?y#z", "https://host:80/x"),
        ("https://u:p@x@host/a", "https://host/a"),
        ("https://mirror.example/cuda@12/x.tar", "https://mirror.example/cuda@12/x.tar"),
        ("http://mirror.example:8080/x", "http://mirror.example:8080/x"),
        ("file:///a/b@c", "file:///a/b@c"),
        ("https://u:pa#ss@host/x", "https://host/x"),
        ("https://u:pa/ss@host/x", "https://host/x"),
        ("https://u:pa?ss@host/x", "https://host/x"),
        ("https://u:p@ss/w@host/x", "https://***"),
        ("https://u:p@host/cuda@12/x", "https://***"),
        ("https://u:12/34@host/x", "https://***"),
        ("https://u:p@host/x?next=https://other/y", "https://host/x"),
        ("https://u:a://b@host/x", "https://host/x"),
        ("u:p@proxy.example:3128", "proxy.example:3128"),
        ("git@host:team/x", "git@host:team/x"),
    ],
)
def test_no_password_and_the_right_host(address: str, shown: str) -> None:
    assert url_redaction.redact_url(address) == shown


@pytest.mark.parametrize(
    ("text", "struck"),
    [
        ("for url (http://me:x)y@h:9/s/?t=1), twice", "for url (http://h:9/s/), twice"),
        ("at `https://u:p@h/a.whl`.", "at `https://h/a.whl`."),
        ("from file:///a/b and http://h/x: gone", "from file:///a/b and http://h/x: gone"),
        ("no address: a//b, c:/d", "no address: a//b, c:/d"),
        ("retries exceeded with url: /b/x?Signature=s3cr3t (Caused by", "retries exceeded with url: /b/x (Caused by"),
        ("with url: /x#s3cr3t", "with url: /x"),
        ("GET HTTPS://u:p@h/x", "GET HTTPS://h/x"),
        ("GET https://u:p@h/x?next=https://o/y: gone", "GET https://h/x: gone"),
        ("with url: /b/x (Caused by", "with url: /b/x (Caused by"),
    ],
)
def test_no_password_of_any_address_in_a_text(text: str, struck: str) -> None:
    assert url_redaction.struck(text) == struck
