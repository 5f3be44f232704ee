"""The interface of the places that can hold the images of a workflow: the engine, or the registry of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from envbuild.image.docker_engine import Engine, Image
from envbuild.lock.lock_file import Lock
from envbuild.pipeline.model import BuiltImage, Recipe
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry.oci_types import Manifest
from envbuild.registry.registry_client import Repository


class ImageStore(Protocol):
    """Holds the images of a workflow, and knows how their contents are audited."""

    @property
    def engine(self) -> Engine:
        """The engine. Raises EngineError if none answers."""
        ...

    @property
    def registry(self) -> str | None:
        """The repository that holds the images; None if the engine holds them."""
        ...

    def find(self, lock: Lock) -> Image | None:
        """Return the audited image of a lock, or None."""
        ...

    def holds(self, image: Image) -> bool:
        """Whether the store has an image that `find` returned, so that no layer must be sent. False, with a note, if
        the registry does not answer."""
        ...

    def provide(self, recipe: Recipe, *, no_cache: bool = False) -> BuiltImage:
        """Return the image of a recipe: an existing one, or a new one, which is audited. Runs the steps that are
        needed. `no_cache`: write its layers again."""
        ...

    def push(self, place: Repository, image: Image, on_line: Callable[[str], None]) -> Manifest:
        """Return the manifest of an image in a repository from which the nodes of a cluster pull it. Pushes the image
        if necessary and possible."""
        ...

    def tags(self, loaded: LoadedProfile, image: Image) -> tuple[str, ...]:
        """Return the tags of a profile's image."""
        ...

    def mark_verified(self, loaded: LoadedProfile, image: Image) -> tuple[str, ...]:
        """Set the tag `verified`, if the store has one, and return the tags that were set."""
        ...

    def withdraw_verified(self, loaded: LoadedProfile, image: Image, tags: Sequence[str]) -> tuple[str, ...]:
        """Remove the tag `verified` from an image whose latest self-test did not pass. Return those of its `tags` that
        remain."""
        ...
