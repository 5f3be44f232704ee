"""Looks up the digest to which the tag of a base image points in its registry. Needs no engine."""

from __future__ import annotations

from envbuild.registry.oci_types import Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import NetworkError, ProfileError
from envbuild.util.thread_safe_cache import thread_safe_cache


@thread_safe_cache
def image_of_tag(tag: str) -> str:
    """Return NAME@sha256:... for NAME:TAG: the digest of the manifest, or of the index of an image for several
    platforms. Profiles that are locked together get the same digest.

    Raises NetworkError if the registry does not answer, ProfileError if it does not have the tag, Refusal if its answer
    is invalid.
    """
    reference = Reference.parse(tag)
    try:
        found = Repository(reference).manifest(reference.target)
    except NetworkError as error:
        raise NetworkError(
            f"the tag of the base image {tag} cannot be looked up in its registry", hint=registry_hint(error)
        ) from error
    if found is None:
        raise ProfileError(
            f"the registry {reference.host} has no base image {tag}",
            hint=f"check the name and the tag; if the image is private: docker login {reference.host}",
        )
    return f"{tag.rpartition(':')[0]}@{found.digest}"


def registry_hint(error: NetworkError) -> str:
    """What the registry of a base image reports, and what the user can do."""
    return f"{error.message}\n{error.hint}" if error.hint else error.message
