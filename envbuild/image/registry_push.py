"""Pushes an image to a registry under a tag that contains the image id, and checks whether the registry has the
image."""

from __future__ import annotations

from collections.abc import Callable

from envbuild.image.docker_engine import Engine, Image
from envbuild.registry.image_reference_patterns import REGISTRY
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import CheckFailed, UsageError


def parse_repository(text: str) -> Reference:
    """Parse the name of a repository. Raises UsageError if the text is invalid or has a tag or digest."""
    try:
        reference = Reference.parse(text)
    except UsageError as error:
        hint = f"write {REGISTRY[1]}"
        raise UsageError(f"{text[:200]!r} is not a repository in a registry", hint=hint) from error
    if reference.tag or reference.digest:
        raise UsageError(
            f"{text} has a tag or a digest",
            hint=f"name only the repository: {reference.repository}; envbuild creates the tags",
        )
    return reference


def push_once(place: Repository, image_id: str, send: Callable[[str], None]) -> tuple[Manifest, bool]:
    """Push an image unless the registry has it, no matter how it is compressed there. Return its manifest, and whether
    the registry had it already.

    `send` pushes the image under a tag with the image's id, since a push by digest is not possible. The push has
    succeeded only if the registry then serves the image under that tag. Raises CheckFailed otherwise, and what `send`
    raises.
    """
    found = find_pushed(place, image_id)
    if found is not None:
        return found, True
    send(id_tag(image_id))
    found = find_pushed(place, image_id)
    if found is None:
        raise CheckFailed(
            f"{place.reference.repository}:{id_tag(image_id)} is not the image that was just pushed",
            hint="another process may have moved the tag: push again",
        )
    return found, False


def push_from_engine(
    engine: Engine, place: Repository, image: Image, on_line: Callable[[str], None]
) -> tuple[Manifest, bool]:
    """Let the engine push an image, as `push_once` does. Raises CheckFailed, NetworkError, EngineError."""

    name = place.reference.repository

    def send(tag: str) -> None:
        engine.tag(image, name, tag)
        engine.push(name, tag, on_line)

    try:
        return push_once(place, image.id, send)
    finally:
        engine.remove(f"{name}:{id_tag(image.id)}")  # removes the tag of an earlier, killed run too


def id_tag(image_id: str) -> str:
    """The tag under which an image is pushed for a cluster."""
    return f"id-{image_id.removeprefix('sha256:')}"


def find_pushed(place: Repository, image_id: str) -> Manifest | None:
    """Return the image's manifest, if its tag refers to that image."""
    found = place.manifest(id_tag(image_id))
    return found if found is not None and not found.is_index and found.config == image_id else None
