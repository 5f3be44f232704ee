"""The images in the engine, and their tags there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from envbuild.image import registry_push
from envbuild.image.docker_engine import Engine, Image
from envbuild.image.oci import lock_image_lookup_and_recipe
from envbuild.lock.lock_file import Lock
from envbuild.pipeline import image_steps, selftest_steps
from envbuild.pipeline.model import BuiltImage, Recipe
from envbuild.pipeline.step_context import StepContext
from envbuild.profile.loaded_profile import LoadedProfile
from envbuild.registry.oci_types import Manifest
from envbuild.registry.registry_client import Repository


class EngineImages:
    """Implements ImageStore with the engine of a context."""

    registry: str | None = None

    def __init__(self, context: StepContext) -> None:
        self._context = context

    @property
    def engine(self) -> Engine:
        return self._context.engine

    def find(self, lock: Lock) -> Image | None:
        return lock_image_lookup_and_recipe.existing_image(self.engine, lock)

    def holds(self, image: Image) -> bool:
        return True  # `find` returns only images that the engine has

    def provide(self, recipe: Recipe, *, no_cache: bool = False) -> BuiltImage:
        """Runs those of the steps "extensions", "build", "load" and "audit" that are needed."""
        return image_steps.find_or_build_image(self._context, recipe, no_cache=no_cache)

    def push(self, place: Repository, image: Image, on_line: Callable[[str], None]) -> Manifest:
        return registry_push.push_from_engine(self.engine, place, image, on_line)[0]

    def tags(self, loaded: LoadedProfile, image: Image) -> tuple[str, ...]:
        return selftest_steps.tags_of(self._context, loaded, image)

    def mark_verified(self, loaded: LoadedProfile, image: Image) -> tuple[str, ...]:
        return (self._context.step("tag", selftest_steps.tag_verified, self._context, loaded, image),)

    def withdraw_verified(self, loaded: LoadedProfile, image: Image, tags: Sequence[str]) -> tuple[str, ...]:
        return selftest_steps.withdraw_verified(self._context, loaded, image, tags)
