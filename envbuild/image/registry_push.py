"""Pushes an image to a registry, and checks whether it is there, under a tag that contains its image id."""

from __future__ import annotations

from collections.abc import Callable

from envbuild.image import zstd_push
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
            f"{text} has a tag", hint=f"name only the repository: {reference.repository}; envbuild creates the tags"
        )
    return reference


def pushed(
    engine: Engine, place: Repository, image: Image, on_line: Callable[[str], None], zstd: bool = False
) -> tuple[Manifest, bool]:
    """Push an image unless the registry has it, with any compression. Return its manifest and whether it was there
    already.

    The image gets a tag with its id, since a push by digest is not possible. With `zstd`, envbuild compresses and
    uploads the layers; otherwise the engine does. Only the manifest in the registry counts as success. Raises
    CheckFailed if that is of a different image, NetworkError, DiskError.
    """
    tag, found = _tag(image), there(place, image)
    name = place.reference.repository
    if found is not None:
        engine.remove(f"{name}:{tag}")  # left if an earlier run was killed just after its push
        return found, True
    if zstd:
        zstd_push.push_zstd(engine, place, image, tag, on_line)
    else:
        _by_the_engine(engine, name, image, tag, on_line)
    found = there(place, image)
    if found is None:
        raise CheckFailed(
            f"{name}:{tag} is not the image that was just pushed",
            hint="another process may have moved the tag: push again",
        )
    return found, False


def _by_the_engine(engine: Engine, name: str, image: Image, tag: str, on_line: Callable[[str], None]) -> None:
    engine.tag(image, name, tag)
    try:
        engine.push(name, tag, on_line)
    finally:
        engine.remove(f"{name}:{tag}")


def _tag(image: Image) -> str:
    return f"id-{image.id.removeprefix('sha256:')}"


def there(place: Repository, image: Image) -> Manifest | None:
    """Return the image's manifest, if its tag refers to that image."""
    found = place.manifest(_tag(image))
    return found if found is not None and not found.is_index and found.config == image.id else None
