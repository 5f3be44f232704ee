"""An image into a registry, and whether it is there: by a tag of its own id."""

from __future__ import annotations

from collections.abc import Callable

from envbuild.image import zstd_push
from envbuild.image.docker_engine import Engine, Image
from envbuild.registry.image_reference_grammar import REGISTRY
from envbuild.registry.oci_types import Manifest, Reference
from envbuild.registry.registry_client import Repository
from envbuild.util.errors import CheckFailed, UsageError


def parse_repository(text: str) -> Reference:
    """Raises UsageError for what names an image of it, or nothing."""
    try:
        reference = Reference.parse(text)
    except UsageError as error:
        hint = f"write {REGISTRY[1]}"
        raise UsageError(f"{text[:200]!r} does not name a repository of a registry", hint=hint) from error
    if reference.tag or reference.digest:
        raise UsageError(f"{text} has a tag", hint=f"name the repository: {reference.repository}; tags are made")
    return reference


def pushed(
    engine: Engine, place: Repository, image: Image, on_line: Callable[[str], None], zstd: bool = False
) -> tuple[Manifest, bool]:
    """The image in a registry, and whether it was there, however its layers are packed: under a tag of its own id, for
    one cannot push by digest. `zstd`: we pack its layers and send them; else the engine does. Nothing is believed but
    the manifest. Raises CheckFailed where that is another's, NetworkError, DiskError."""
    tag, found = _tag(image), there(place, image)
    name = place.reference.repository
    if found is not None:
        engine.remove(f"{name}:{tag}")  # of one that was killed just after it had pushed
        return found, True
    if zstd:
        zstd_push.push_zstd(engine, place, image, tag, on_line)
    else:
        _by_the_engine(engine, name, image, tag, on_line)
    found = there(place, image)
    if found is None:
        raise CheckFailed(f"{name}:{tag} is not the image that was just pushed", hint="did somebody move the tag?")
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
    """The image's manifest, where its tag names that."""
    found = place.manifest(_tag(image))
    return found if found is not None and not found.is_index and found.config == image.id else None
