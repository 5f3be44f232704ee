"""The grammar of image references: hosts, repositories, and images that are named by their digest. Pure."""

from __future__ import annotations

import re

from envbuild.util.errors import UsageError

_WORD = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
NAME = rf"{_WORD}(?:/{_WORD})*"
HOST = r"(?:[a-zA-Z0-9](?:[a-zA-Z0-9.-]*[a-zA-Z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?"
# A first part without any of .:[ is no host, as docker has it; what comes after the name, a tag say, is refused.
REGISTRY = (
    rf"(?=.{{1,300}}\Z)(?:(?:localhost|(?=[^/]*[.:\[]){HOST})/)?{NAME}",
    "HOST/REPOSITORY, without http:// or https:// and without a tag",
)
# What a profile, a lock and a Dockerfile may call a base image.
BY_DIGEST = r"[a-zA-Z0-9][a-zA-Z0-9._:/-]*@sha256:[0-9a-f]{64}"
# What a job may call its image: also by an id alone, and on a registry whose address is an IPv6 one.
_IMAGE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/\[\]-]{0,300}@)?sha256:[0-9a-f]{64}")


def require_digest(image: str) -> None:
    """Raises UsageError for an image that is not named by its digest: any other name may move under the proof."""
    if not _IMAGE.fullmatch(image):
        raise UsageError(f"{image[:200]!r} names no image by its digest")
