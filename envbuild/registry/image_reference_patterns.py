"""Patterns for image references: hosts, repositories, and images pinned by digest. Pure."""

from __future__ import annotations

import re

from envbuild.util.errors import UsageError

_WORD = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
NAME = rf"{_WORD}(?:/{_WORD})*"
HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
# As in docker, a first part without any of .:[ is not a host, unless it is localhost. Anything after the name, such as
# a tag, is refused.
REGISTRY = (
    rf"(?=.{{1,300}}\Z)(?:(?:localhost|(?=[^/]*[.:\[]){HOST})/)?{NAME}",
    "HOST/REPOSITORY, without http:// or https:// and without a tag",
)
# Allowed references to a base image in a profile, a lock and a Dockerfile.
BY_DIGEST = r"[a-zA-Z0-9][a-zA-Z0-9._:/-]*@sha256:[0-9a-f]{64}"
# Allowed references to a job's image. In addition, they may be only an image id, or have a registry's IPv6 address.
_IMAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/\[\]-]{0,300}@)?sha256:[0-9a-f]{64}")


def require_digest(image: str) -> None:
    """Raises UsageError for an image that is not pinned by digest: any other name may later refer to another image than
    the verified one."""
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"the image must be pinned by digest: {image[:200]!r}")
