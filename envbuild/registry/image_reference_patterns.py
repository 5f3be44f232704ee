"""Patterns for image references: hosts, repositories, tags and digests. Pure."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from envbuild.util.errors import UsageError

_WORD = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
NAME = rf"{_WORD}(?:/{_WORD})*"
PORT = r"(?:[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_LABEL, _IPV6, _PORT = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?", r"\[[0-9a-fA-F:]+\]", rf":{PORT}"
_LABELS = rf"{_LABEL}(?:\.{_LABEL})*"
HOST = rf"(?:{_LABELS}|{_IPV6})(?:{_PORT})?"
TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_HOST_FIRST = r"[^/]*[.:\[][^/]*/"
# As in docker, the part before the first slash is a host if it contains one of .:[ or is localhost. Anything after the
# name, such as a tag, is refused.
REGISTRY = (
    rf"(?=.{{1,300}}\Z)(?:(?={_HOST_FIRST}){HOST}/|(?!{_HOST_FIRST})){NAME}",
    "HOST/REPOSITORY, without http:// or https://, without a tag, and without _ in HOST",
)
# The same rule without lookahead, which pydantic lacks. A first part without any of .:[ is in lower case.
_DOTTED, _PLAIN = rf"{_LABEL}(?:\.{_LABEL})+", r"[a-z0-9]+(?:(?:_|__|-+)[a-z0-9]+)*"
REPOSITORY = rf"(?:(?:{_DOTTED}|{_LABELS}{_PORT}|{_IPV6}(?:{_PORT})?|{_PLAIN})/{NAME}|{_WORD})"
_DIGEST = r"@sha256:[0-9a-f]{64}"
# Allowed references to a base image. A profile has BY_DIGEST_OR_TAG. A lock and a Dockerfile have BY_DIGEST. A lock may
# have, in a separate field, the tag that pointed to the image, BY_TAG.
BY_DIGEST = rf"{REPOSITORY}(?::{TAG})?{_DIGEST}"
BY_TAG = rf"{REPOSITORY}:{TAG}"
BY_DIGEST_OR_TAG = rf"{REPOSITORY}(?:{_DIGEST}|:{TAG}(?:{_DIGEST})?)"
# Allowed references to a job's image: a name with a digest, or only an image id.
_IMAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/\[\]-]{0,300}@)?sha256:[0-9a-f]{64}")


def has_valid_address(host: str) -> bool:
    """Whether urllib can parse a HOST[:PORT]. The pattern HOST alone also matches invalid IPv6 addresses."""
    try:
        urlsplit(f"//{host}")
        return True
    except ValueError:
        return False


def require_digest(image: str) -> None:
    """Raise UsageError for an image that is not pinned by digest: any other name may later refer to an image other than
    the verified one."""
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"the image must be pinned by digest: {image[:200]!r}")
