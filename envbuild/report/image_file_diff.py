"""Compares two images of the engine file by file. Only layers that differ are read."""

from __future__ import annotations

from collections.abc import Callable

from envbuild.image import engine_image_to_oci_layout
from envbuild.image.docker_engine import Engine, Image
from envbuild.registry import layer_archive_comparison
from envbuild.report.profile_and_image_diff import Pair
from envbuild.util.errors import UsageError

_NAMES = "the second image", "the first"


def changed_layers(engine: Engine, a: Image, b: Image, say: Callable[[str], None]) -> tuple[Pair, ...]:
    """Return each layer of `b` that differs from the layer of `a` at the same position, and the first difference of
    their files. Needs space for both images in a temporary folder.

    Raises UsageError if the images have different numbers of layers, EngineError, DiskError, or Refusal for a layer
    that cannot be read.
    """
    if len(a.layers) != len(b.layers):
        raise UsageError(
            f"--files needs images with equally many layers: the first has {len(a.layers)}, the second {len(b.layers)}",
            hint="without --files, only versions and layers are compared",
        )
    differing = [index for index, (one, two) in enumerate(zip(a.layers, b.layers, strict=True)) if one != two]
    if not differing:
        return ()
    found = []
    with engine_image_to_oci_layout.saved(engine, a) as first, engine_image_to_oci_layout.saved(engine, b) as second:
        for index in differing:
            one, two = a.layers[index], b.layers[index]
            say(f"reading layer {index + 1} of {len(b.layers)}")
            found.append(
                Pair(index + 1, layer_archive_comparison.difference((second, two, two), (first, one, one), _NAMES))
            )
    return tuple(found)
