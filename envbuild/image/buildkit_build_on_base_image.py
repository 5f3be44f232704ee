"""Builds the image of a lock that names a base image, with BuildKit. envbuild does not read that base image, so it
cannot write the layers itself, as it does for all other images (oci/)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence

from envbuild.image import build_context_folders, buildx, debian_base_tar, dockerfile_renderer
from envbuild.image.buildx import BuildOrder
from envbuild.image.docker_engine import Image
from envbuild.image.extension_wheel_build import BuiltWheel
from envbuild.image.oci import disk_space_needs
from envbuild.lock.lock_file import Lock
from envbuild.util.errors import EngineError
from envbuild.util.strict_and_canonical_json import canonical_digest


def buildkit_recipe(lock: Lock, text: str) -> str:
    """Return the sha256 of everything that determines an image, except the wheels compiled from source: lock,
    Dockerfile, installers."""
    tools = [tool.read_text(encoding="utf-8") for tool in dockerfile_renderer.TOOLS]
    uv = importlib.metadata.version("uv")
    return canonical_digest([lock.id, text, tools, uv, debian_base_tar.base_recipe() if lock.suite else None])


def build_on_image(
    order: BuildOrder, tag: str, extensions: Sequence[BuiltWheel] = (), *, no_cache: bool = False
) -> Image:
    """Build an image under a tag.

    All its parts must be in the stores and its extensions compiled. Raises EngineError, BuildError or DiskError.
    """
    engine, lock = order.engine, order.lock
    disk_space_needs.require_platform(engine, lock)
    build_context_folders.fill_context(lock, order.profile, {one.name: one.path for one in extensions})
    options = ["--tag", tag, "--load", *(["--no-cache"] if no_cache else [])]

    def ready() -> None:
        disk_space_needs.require_disk_space(engine, lock)

    metadata = buildx.build(order, options, ready)
    image_id = metadata.get("containerimage.config.digest")
    image = engine.find(tag)
    if image is None or image.id != image_id:
        raise EngineError(
            f"{tag} is not the image that was just built ({image_id}): another process moved the tag, or this buildx "
            "does not report image ids, or the builder belongs to another engine, which keeps the image",
            hint="run the same command again; use buildx 0.10 or newer, and a --builder with the driver "
            "docker-container, remote or kubernetes",
        )
    return image
